"""``mrlm serve``: host environments, policies and a verifier over gRPC."""

from __future__ import annotations

import asyncio
import errno
import gc
import hashlib
import json
import logging
import re
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Literal

from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from mrlm_pl.cli.parsing.environment_option import environment_config, environment_parser, read
from mrlm_pl.cli.parsing.parser import CommandParser, check_needed
from mrlm_pl.environment import Environment
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.model_folders import check_hub_model, policy_folder
from mrlm_pl.runs.plugins import class_path, find_environment
from mrlm_pl.runs.records.configuration_file import read_yaml_file
from mrlm_pl.sandbox import Sandbox
from mrlm_pl.serving.cluster import SEPARATOR, ControllerServer, Membership
from mrlm_pl.serving.environments.hosted import Offer
from mrlm_pl.serving.environments.service import Limits
from mrlm_pl.serving.metrics import serve_metrics
from mrlm_pl.serving.server import Endpoint, EnvironmentServer
from mrlm_pl.serving.transport.connection import LARGEST_MESSAGE_MB, Address
from mrlm_pl.serving.transport.security import Identity, read_token
from mrlm_pl.serving.verifiers.service import VerifierService
from mrlm_pl.settings import between, check_address

logger = logging.getLogger(__name__)

YOUNG_OBJECTS, YOUNG_COLLECTIONS = 20_000, 20
"""Thresholds of the garbage collector. With lower ones it would promote the objects of a step and then scan those of
thousands of sessions again and again, each time with a pause of a tenth of a second."""

MOST_PROCESSES = 1024

_ENVIRONMENTS = ("environments", "environment", "settings")
NEEDED = {
    **dict.fromkeys(("policies_int8", "policies_precision"), ("policies",)),
    **dict.fromkeys((f"verifier_{name}" for name in ("max_tokens", "batch", "batch_tokens", "queue")), ("verifier",)),
    "verifier_precision": ("verifier",),
    "device": ("policies", "verifier"),
    "advertise": ("join",),
    **dict.fromkeys(("allow_settings", "threads", "processes", "queue", "openenv_port", "join"), _ENVIRONMENTS),
    **dict.fromkeys(("max_sessions", "lease_seconds", "step_seconds"), (*_ENVIRONMENTS, "controller")),
}
"""Options that need at least one of others, by name."""


def run(arguments: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT and return exit status 0.

    Raises:
        ConfigurationError: a mistake in the options, the settings of an environment, or the port is taken.
    """
    parser = serve_parser()
    options = read(parser, arguments)
    logging.basicConfig(level=logging.INFO, format="mrlm: %(message)s", stream=sys.stderr)
    identity = Identity(options.tls_certificate, options.tls_key, options.tls_authority)
    endpoint = Endpoint(options.host, int(options.port), read_token(options.token_file), identity)
    limits = Limits(options.lease_seconds, options.step_seconds, options.max_sessions, options.message_mb)
    between(0, MOST_PROCESSES).check(processes=options.processes)
    between(1, LARGEST_MESSAGE_MB).check(message_mb=options.message_mb)
    _check_roles(options, parser)
    _check_port(endpoint)
    server = (
        ControllerServer(endpoint, limits, options.token_file)
        if options.controller
        else _environment_server(options, endpoint, limits)
    )
    asyncio.run(_serve(server, options, identity))
    return 0


def _check_roles(options: Any, parser: CommandParser) -> None:
    """Validate the options of controllers and workers, and that every option has an effect.

    Raises:
        ConfigurationError: options exclude each other, one does nothing, or an address is wrong.
    """
    if options.controller and any(options[name] for name in (*_ENVIRONMENTS, "policies", "verifier")):
        raise ConfigurationError(
            "controller: it hosts nothing; leave out environments, settings, policies and verifier, and "
            "start workers with `mrlm serve --environments ... --join HOST:PORT`"
        )
    check_needed(options, parser, NEEDED)
    if options.join and not options.advertise and options.host in ("0.0.0.0", "::", "[::]"):
        remedy = "name an address of this machine with `--advertise HOST:PORT`, and its port with `--port`"
        raise ConfigurationError(f"host: clients cannot reach a worker at {options.host!r}; {remedy}")
    for name in ("join", "advertise"):
        if getattr(options, name):
            check_address(getattr(options, name), f"{name}: ")


def _check_port(endpoint: Endpoint) -> None:
    """Validate that the port is free before a model is read; gRPC reports other faults.

    Raises:
        ConfigurationError: the port is taken, or the host has no address.
    """
    try:
        addresses = socket.getaddrinfo(endpoint.host.strip("[]"), endpoint.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = addresses[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        raise ConfigurationError(f"host: {endpoint.host!r} is no address of this machine ({error.strerror})") from error
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            listen_address = f"{endpoint.host}:{endpoint.port}"
            raise ConfigurationError(f"port: cannot listen on {listen_address}: it is taken; use another") from error


def _environment_server(options: Any, endpoint: Endpoint, limits: Limits) -> EnvironmentServer:
    settings = read_settings(options.settings) if options.settings else {}
    if options.environment is not None:
        config = environment_config(serve_parser(), options)
        settings[config["class_path"]] = config.get("init_args") or {}
    names = [name.strip() for name in options.environments.split(",") if name.strip()]
    if names and options.environment is not None:
        names.append(config["class_path"])
    if not (names or settings) and not options.policies and not options.verifier:
        raise ConfigurationError("environments: name at least one, as in `--environments math,code`")
    factories = hosted_environments(names, settings, allow_settings=options.allow_settings)
    for name, factory in factories.items():
        environment = factory({})  # a mistake in its settings ends the command
        for sandbox in (value for value in vars(environment).values() if isinstance(value, Sandbox)):
            _ = sandbox.isolation  # so does a machine that cannot run programs; a weak one logs a warning
        environment.close()
        logger.info("environment %s: agents %s", name, ", ".join(environment.agents))
    hashes = {name: factory.hashes for name, factory in factories.items()}
    offer = Offer(factories, options.processes, options.step_seconds, hashes)
    policies = _policy_service(options) if options.policies else None
    verifier = _verifier_service(options) if options.verifier else None
    return EnvironmentServer(offer, endpoint, limits, options.threads, options.queue, policies, verifier)


def _policy_service(options: Any) -> Any:
    """Return the service of policies with its models loaded, which needs torch."""
    import torch

    from mrlm_pl.engines import InProcessEngine
    from mrlm_pl.engines.transfer.manifest import weights_digest
    from mrlm_pl.runs.seated_model import loaded_policy
    from mrlm_pl.serving.policies.service import PolicyService
    from mrlm_pl.serving.transport.environment_pb2 import PolicyDescription

    dtype = torch.bfloat16 if options.policies_precision == "bf16-mixed" else None
    engine = InProcessEngine(dtype)
    descriptions = []
    quantization = {"trained": False, "int8": "weights"} if options.policies_int8 else {}
    for name, model in options.policies.items():
        policy = loaded_policy({"model": model, **quantization}, options.device)
        weights = weights_digest(policy.network.state_dict(), options.policies_precision)
        vocabulary = policy.vocabulary_digest
        descriptions.append(PolicyDescription(name=name, model=model, vocabulary=vocabulary, weights=weights))
        engine.load(name, policy.model, 0)
        logger.info("policy %s: %s on %s", name, model, options.device)
    return PolicyService(engine, descriptions)


def _verifier_service(options: Any) -> VerifierService:
    """Return the service of a reward model that is loaded and has scored a text."""
    from mrlm_pl.policy.forward.devices import usable_device
    from mrlm_pl.reward_models.model import Precision, RewardModel

    folder = policy_folder(options.verifier, "verifier")
    check_hub_model(folder, "verifier")
    device = usable_device(options.device)
    precision: Precision = options.verifier_precision or ("64" if device.type == "cpu" else "32")
    max_tokens = options.verifier_max_tokens
    scorer = RewardModel(folder, str(device), max_tokens, options.verifier_batch_tokens, precision)
    scorer.score_texts(["1 + 1 = ?"], ["2"])  # a mistake ends the command before the port is open
    logger.info("verifier: %s on %s, precision %s", folder, device, precision)
    return VerifierService(scorer, folder, options.verifier_batch, options.verifier_queue)


def serve_parser() -> CommandParser:
    """Return the parser of the command."""
    parser = environment_parser("serve", "Host environments, policies and a verifier over gRPC.")
    parser.usage = "mrlm serve [--environments NAME,NAME] [--environment NAME [--environment.ARGUMENT VALUE]] [options]"
    add = parser.add_argument
    switch: dict[str, Any] = {"type": bool, "nargs": "?", "const": True, "default": False}
    add("--environments", type=str, default="", help="Names or paths of environments, separated by commas.")
    add("--settings", type=str, help="YAML file with arguments by environment. Alone, it hosts them all.")
    add("--policies", type=dict[str, str], default={}, help="Models to generate with, by name: '{judge: MODEL}'.")
    add("--policies_int8", **switch, help="Hold the linear layers of the policies in int8.")
    text = "Precision of the policies' generation."
    add("--policies_precision", type=Literal["32-true", "bf16-mixed"], default="32-true", help=text)
    add("--verifier", type=str, help="Reward model that scores texts: a run, a policy folder or a hub id.")
    add("--verifier_max_tokens", type=PositiveInt | None, help="Tokens kept from a text's end. Default: the window.")
    add("--verifier_batch", type=PositiveInt, default=64, help="Maximum number of texts in a batch.")
    add("--verifier_batch_tokens", type=PositiveInt, default=4096, help="Maximum tokens of a forward pass, padded.")
    add("--verifier_queue", type=PositiveInt, default=4096, help="Maximum length of the queue of texts.")
    add("--verifier_precision", type=Literal["64", "32", "bf16", "int8"] | None, help="Default: 64 on a CPU, else 32.")
    add("--device", type=str, default="cpu", help="Device of policies and verifier, as torch names it.")
    add("--controller", **switch, help="Host nothing, but place sessions on workers that join.")
    add("--join", type=str, help="HOST:PORT of the controller to join as a worker.")
    add("--advertise", type=str, help="HOST:PORT at which clients reach this worker. Default: where it listens.")
    add("--allow_settings", **switch, help="Let clients set arguments in client_settings.")
    add("--host", type=str, default="127.0.0.1", help="Address to listen on.")
    add("--port", type=NonNegativeInt, default=50051, help="Port to listen on; 0 takes and prints a free one.")
    add("--token_file", type=str, help="File with the token of valid calls. Default: MRLM_TOKEN.")
    add("--tls_certificate", type=str, help="PEM file of the server's certificate.")
    add("--tls_key", type=str, help="PEM file of its key.")
    add("--tls_authority", type=str, help="PEM file of the clients' authorities; requires client certificates.")
    add("--threads", type=PositiveInt, default=8, help="Threads that call environments.")
    add("--processes", type=NonNegativeInt, default=0, help="Host processes, for environments with long computations.")
    add("--queue", type=PositiveInt, default=10_000, help="Maximum length of the queue of calls.")
    add("--max_sessions", type=PositiveInt, default=20_000, help="Maximum number of live sessions.")
    add("--lease_seconds", type=PositiveFloat, default=120.0, help="Idle time after which a session ends.")
    add("--step_seconds", type=PositiveFloat, default=60.0, help="Deadline of one call of an environment.")
    add("--message_mb", type=PositiveInt, default=16, help="Maximum size of a message, in MiB.")
    add("--grace_seconds", type=PositiveFloat, default=30.0, help="Time for live sessions to end after SIGTERM.")
    add("--openenv_port", type=NonNegativeInt | None, help="Port for OpenEnv's clients; 0 takes and prints a free one.")
    add("--metrics_port", type=NonNegativeInt, default=0, help="Port of metrics for Prometheus; 0: none.")
    return parser


def read_settings(path: str) -> dict[str, dict[str, Any]]:
    """Return the arguments of environments, by name.

    Raises:
        ConfigurationError: the file is missing, or is not a mapping of mappings.
    """
    content = read_yaml_file(path, f"settings: {path!r}")
    if not isinstance(content, dict) or not all(isinstance(value, dict) or value is None for value in content.values()):
        raise ConfigurationError(f"settings: {path!r} must map names of environments to their arguments")
    return {str(name): value or {} for name, value in content.items()}


def hosted_environments(
    names: Sequence[str], settings: Mapping[str, Mapping[str, Any]], *, allow_settings: bool
) -> dict[str, HostedClass]:
    """Return the factory of each environment, by the environment's own name.

    Args:
        names: names of environments, as :func:`find_environment` takes them.
        settings: arguments of environments by name; without ``names``, all of these environments are hosted.
        allow_settings: whether clients may set arguments.

    Raises:
        ConfigurationError: an environment does not exist or cannot be hosted, or two have one name.
    """
    hosted: dict[str, HostedClass] = {}
    arguments: dict[type[Environment], Mapping[str, Any]] = {}
    for name, values in settings.items():
        if (cls := find_environment(name)) in arguments:
            raise ConfigurationError(f"settings: {name!r} has settings already, as {cls.name!r}; name it once")
        arguments[cls] = values
    for name in dict.fromkeys(names or settings):
        cls = find_environment(name)
        if cls.whole_prompts:
            fault = f"environments: {cls.name!r} cannot be hosted: its observations are whole conversations"
            remedy = "run it where the policies are, with `mrlm fit` or `mrlm gateway`, and its programs anywhere"
            raise ConfigurationError(f"{fault}; {remedy}")
        if cls.name in hosted:
            raise ConfigurationError(f"environments: {name!r} is hosted already as {cls.name!r}; name it once")
        hosted[cls.name] = HostedClass(cls, arguments.pop(cls, {}), allow_settings)
    for cls in arguments:
        logger.info("environment %s has settings, but is not among --environments: not hosted", cls.name)
    return hosted


@dataclass(frozen=True)
class HostedClass:
    """Makes an environment of a class; its arguments are checked like those of a configuration file.

    Args:
        cls: class of the environment.
        settings: arguments of the class.
        allow_settings: whether clients may set arguments.
    """

    cls: type[Environment]
    settings: Mapping[str, Any]
    allow_settings: bool

    @property
    def hashes(self) -> str:
        """Hashes of the class and each of its arguments, as words NAME=HASH; files count by their paths."""
        config = json.loads(json.dumps(self._read({}).as_dict(), default=str))["environment"]  # keys may be numbers
        values = {"class_path": config["class_path"], **config.get("init_args", {})}
        texts = {name: json.dumps(value, sort_keys=True).encode() for name, value in values.items()}
        return " ".join(f"{name}={hashlib.sha256(text).hexdigest()[:8]}" for name, text in texts.items())

    def __call__(self, overrides: Mapping[str, Any]) -> Environment:
        """Return an environment with a client's settings.

        Raises:
            ConfigurationError: a setting is wrong, or clients may not set it.
        """
        environment: Environment = environment_parser("serve", "").instantiate(self._read(overrides)).environment
        return environment

    def _read(self, overrides: Mapping[str, Any]) -> Any:
        cls = self.cls
        allowed = cls.client_settings if self.allow_settings else ()
        if refused := sorted(set(overrides) - set(allowed)):
            restriction = f"clients may set {', '.join(allowed) or 'nothing'} of {cls.name!r}"
            refusal = "this server takes none from clients without --allow_settings"
            fault = restriction if self.allow_settings else refusal
            raise ConfigurationError(f"settings {refused}: {fault}; put them into the file of the server's --settings")
        arguments = json.dumps({"class_path": class_path(cls), "init_args": {**self.settings, **overrides}})
        try:
            return environment_parser("serve", "").read(["--environment", arguments], {"environment": Environment})
        except ConfigurationError as error:
            fault = re.sub(r"^environment(\.|: )|; give it as `--environment\..*", "", str(error))
            place = "" if overrides else ", in the file of --settings"
            raise ConfigurationError(f"settings of {cls.name!r}{place}: {fault}") from error


async def _serve(server: EnvironmentServer, options: Any, identity: Identity) -> None:
    if options.metrics_port:
        serve_metrics(server, options.metrics_port)
    stopping = asyncio.Event()
    host = server.endpoint.host
    ends: list[asyncio.Future[Any]] = [asyncio.ensure_future(stopping.wait())]
    openenv_line = ""
    async with AsyncExitStack() as stack:
        await server.start()
        stack.push_async_callback(server.stop)
        if options.openenv_port is not None:
            from mrlm_pl.serving.openenv import OpenEnvServer

            openenv = OpenEnvServer(server, int(options.openenv_port))
            await openenv.start()
            stack.push_async_callback(openenv.stop)
            names = ", ".join(f"/{name}" for name in server.offer.factories)
            openenv_line = f"\nOpenEnv on http://{host}:{openenv.port} with {names}"
        if options.join:
            server.service.sessions.prefix = f"{secrets.token_hex(6)}{SEPARATOR}"
            controller = Address(options.join, options.token_file, identity, options.message_mb)
            membership = Membership(server, controller, options.advertise or f"{host}:{server.port}")
            joining = asyncio.ensure_future(membership.run())
            stack.callback(joining.cancel)
            ends.append(asyncio.shield(joining))  # it reports until the sessions have ended
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stopping.set)  # Ctrl-C and SIGHUP act as it does
        gc.collect()
        gc.freeze()
        gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS)
        print(f"serving on {host}:{server.port}{openenv_line}", flush=True)
        done, waiting = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in waiting:
            end.cancel()
        logger.info("going down: %d sessions are live", len(server.service.sessions))
        await server.drain(options.grace_seconds)
    for end in done:
        end.result()
