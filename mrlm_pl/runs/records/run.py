"""A run as its folder records it: policies, seats, sampling and environments of its latest configuration."""

from __future__ import annotations

import csv
import importlib.util
import os
import pkgutil
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

from mrlm_pl.environment import Environment
from mrlm_pl.errors import ConfigurationError, tell
from mrlm_pl.learner.policies.seats import seated_policy
from mrlm_pl.model_folders import exported_policies, missing_folder, policy_folder
from mrlm_pl.runs.plugins import (
    environments_by_name,
    find_environment,
    import_environment,
    plugin_entry_points,
    plugin_functions,
)
from mrlm_pl.runs.records.configuration_file import read_yaml_file
from mrlm_pl.runs.state import precision_in, state_in

if TYPE_CHECKING:
    from mrlm_pl.runs.records.saved_weights import SavedWeights

MAX_TURNS = 64
"""Decisions of an episode where neither the caller nor a run says how many."""

SINGLE = "main"
"""Name of the policy when a model, rather than a run, is evaluated."""

SETTINGS_OF_TOKENS = ("model", "chat_template", "chat_template_kwargs")
"""The settings of a policy that decide its tokens."""

SAVED = "saved"
"""Key beside a policy's constructor arguments, of the checkpoint with its weights and the policy's name there."""

_CONFIGURATION_FILE = re.compile(r"config(?:-(\d+))?\.yaml")


@dataclass(frozen=True)
class RecordedEnvironment:
    """An environment of a run.

    Args:
        config: class and arguments of the environment, as ``{"class_path": ..., "init_args": {...}}``.
        name: name in the run, if ``data.names`` gives one; None is the environment's own.
    """

    config: Mapping[str, Any]
    name: str | None = None

    @property
    def class_name(self) -> str:
        """Return the name of its class without the path."""
        return re.split("[.:]", str(self.config["class_path"]))[-1]

    def risk(self, folder: Path) -> str | None:
        """Return the way its configuration would run a program on this machine, or None.

        This finds commands, programs in the run folder, functions of Python and of installed packages, and a sandbox
        without confinement. It does not find everything: a class may use its arguments in any way.

        Args:
            folder: run folder.
        """
        for value in _values(self.config):
            if isinstance(value, str) and _is_inside(value, folder):
                return f"{value!r} is a program in the run folder"
            if isinstance(value, str) and _is_installed_function(value):
                return f"{value!r} is a function of an installed package that would be called"
            settings = value if isinstance(value, Mapping) else {}
            arguments = settings.get("init_args")
            if isinstance(arguments, Mapping) and arguments.get("command"):
                name = str(settings.get("class_path")).rpartition(".")[2]
                return f"{name} starts the command {str(arguments['command'])!r}"
            if settings.get("level") == "limits":
                return "it plays with `sandbox.level: limits`, where programs of the model can do what you can"
        return None

    def check_unnamed(self, model: str) -> None:
        """Validate that it may be played without being named.

        Args:
            model: run folder, or a file in it.

        Raises:
            ConfigurationError: its configuration would run a program.
        """
        folder = Path(model)
        if risk := self.risk(_run_of(folder) or (folder if folder.is_dir() else folder.parent)):
            remedy = f"if you trust it, name the environment: `--environment {self.name or self.config['class_path']}`"
            raise ConfigurationError(f"environment: by the configuration of {model!r}, {risk}; {remedy}")


@dataclass(frozen=True)
class RecordedRun:
    """A run, or a plain model, which has a policy and nothing else.

    Args:
        policies: each policy, or its constructor arguments, in which ``saved`` is the place of its weights: the
            checkpoint, shared by all, and the policy's name there.
        seats: policy of each agent.
        sampling: sampling settings of the run in training, as arguments of :class:`~mrlm_pl.engines.Sampling`.
        validation_sampling: sampling settings in validation, in the same form.
        environments: the run's environments, in their order.
        max_turns: number of decisions after which its episodes were truncated; None for a model.
        task_settings: settings of individual environments (``data.task_settings``).
        precision: precision of the training, as Lightning names it.
    """

    policies: Mapping[str, Any]
    seats: Mapping[str, str] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    validation_sampling: Mapping[str, Any] = field(default_factory=dict)
    environments: Sequence[RecordedEnvironment] = ()
    max_turns: int | None = None
    task_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    precision: str = "32-true"

    def policy_of(self, agent: str, player: str | None = None) -> str:
        """Return the name of the policy that decides for an agent.

        Args:
            agent: agent of the environment.
            player: name of the run in an arena, which has no other seats.

        Raises:
            ConfigurationError: several policies could.
        """
        policy = seated_policy(agent, self.seats, self.policies)
        if policy is not None:
            return policy
        fault = f"agent {agent!r} has no seat among the policies {sorted(self.policies)}"
        if player is not None:
            raise ConfigurationError(f"player {player!r}: {fault}; give one policy, as in `{player}=RUN/policies/NAME`")
        raise ConfigurationError(f'{fault}; bind it with `--seats \'{{"{agent}": "POLICY"}}\'`')

    def environment_to_play(self, named: str | None, model: str) -> RecordedEnvironment | None:
        """Return the run's environment to play; None, with a warning if this is a run, for an environment of another.

        Args:
            named: name in the run, short name, class name or path; None stands for the run's only environment.
            model: name of the run, for messages.

        Raises:
            ConfigurationError: there is none to choose or there are several, or the run's environment would run a
                program and is not named.
        """
        candidates = list(self.environments) if named is None else self.matching_environments(named)
        if len(candidates) > 1:
            names = [environment.name or environment.class_name for environment in candidates]
            remedy = f"choose one with `--environment {names[0]}`"
            raise ConfigurationError(f"environment: the run {model!r} has {', '.join(names)}; {remedy}")
        if candidates and named is None:
            candidates[0].check_unnamed(model)
        if not candidates and named is None:
            kind = "a script's run or a run on files" if Path(model).exists() else "no run folder here"
            remedy = "give it as `--environment NAME`, in Python as `environment=NAME`"
            raise ConfigurationError(f"environment missing: {model!r} has none: it is a model, or {kind}; {remedy}")
        if not candidates and self.environments:
            find_environment(str(named))
            environment_names = ", ".join(
                environment.name or environment.class_name for environment in self.environments
            )
            fault = f"{named!r} is not an environment of {model!r}, which was trained in {environment_names}"
            tell(f"warning: {fault}; its settings are the defaults and its agents may be others")
        return candidates[0] if candidates else None

    def matching_environments(self, named: str) -> list[RecordedEnvironment]:
        """Return the run's environments of a name in the run, else of a short name, a class name or a path."""
        import_environment(named)
        classes = environments_by_name()
        class_name = classes[named].__name__ if named in classes else re.split("[.:]", named)[-1]
        by_name = [environment for environment in self.environments if environment.name == named]
        return by_name or [environment for environment in self.environments if environment.class_name == class_name]

    def eval_options(self, folder: Path) -> list[str]:
        """Return the options of ``mrlm eval`` that the run needs: its environment, a split of the data.

        The environment is named if there are several, or if it would run a program; the split is named for data without
        ``test``.
        """
        options: list[str] = []
        for environment in self.environments[:1]:
            if len(self.environments) > 1 or environment.risk(folder):
                options += ["--environment", environment.name or str(environment.config["class_path"])]
            data = (environment.config.get("init_args") or {}).get("data")
            if isinstance(data, Mapping) and "test" not in data:
                options += ["--split", "validation" if "validation" in data else "train"]
        return options

    def turn_limit(self, environment: str) -> int:
        """Return the decisions after which the run truncated episodes of an environment, by its name in the run."""
        return (self.task_settings.get(environment) or {}).get("max_turns") or self.max_turns or MAX_TURNS


def read_run(name: str, *, weights: bool = True, files: bool = False) -> RecordedRun:
    """Return the run or model of a run folder, a model folder or a hub id; no weights are read.

    The policies of a run that has not finished are those of its last checkpoint.

    Args:
        name: run folder, model folder or hub id, or a checkpoint in ``RUN/checkpoints`` of a run with a configuration.
        weights: whether the run must have weights; without this, the policies of a run that has none yet are the
            untrained ones.
        files: whether the name may be that of a run's configuration file, without weights.

    Raises:
        ConfigurationError: there is no such folder, the run has written neither policies nor a checkpoint yet, or its
            configuration cannot be read.
    """
    if missing := missing_folder(name):
        raise ConfigurationError(missing)
    run = _run_of(Path(name))
    folder = run or Path(name)
    if (folder / "config.json").is_file() or not (folder.is_dir() or (files and folder.is_file())):
        return RecordedRun({SINGLE: {"model": name}})
    exported = {path.name: path for path in exported_policies(folder, critics=False)}
    settings = _settings(folder)
    model, data = settings["model"], settings["data"]
    configured: Mapping[str, Any] = model.get("policies") or {}
    checkpoint = _checkpoint(folder, exported, configured, Path(name) if run else None) if weights else None
    if not exported and checkpoint is None and (weights or latest_configuration(folder) is None):
        # Without `weights` the policy reports what such a folder lacks, if one is needed.
        return RecordedRun({SINGLE: {"model": policy_folder(name, "model") if weights else name}})
    if checkpoint is not None:
        exported = {}
    policies: dict[str, dict[str, Any]] = {}
    for policy, values in (configured or ({} if exported else {SINGLE: {}})).items():
        saved = checkpoint is not None and values.get("trained", True)
        construction = () if policy in exported else ("revision", "random_init_seed", *(("lora",) if saved else ()))
        policies[policy] = {
            key: values[key] for key in (*SETTINGS_OF_TOKENS, *construction) if values.get(key) is not None
        }
        if saved:
            policies[policy][SAVED] = checkpoint, policy
    for policy, path in exported.items():
        policies.setdefault(policy, {})["model"] = str(path)
    sampling = data.get("sampling") or {}
    return RecordedRun(
        policies=policies,
        seats=model.get("seats") or {},
        sampling=sampling,
        validation_sampling=data.get("validation_sampling") or sampling,
        environments=environments_of(data),
        max_turns=data.get("max_turns"),
        task_settings=data.get("task_settings") or {},
        precision=precision_in(folder),
    )


def _run_of(checkpoint: Path) -> Path | None:
    """Return the run in whose folder ``checkpoints`` a checkpoint is; None of other files and folders."""
    run = checkpoint.absolute().parent.parent
    is_checkpoint = checkpoint.suffix == ".ckpt" and run.is_dir() and latest_configuration(run) is not None
    return run if is_checkpoint else None


def _checkpoint(
    folder: Path, exported: Mapping[str, Path], configured: Mapping[str, Any], named: Path | None
) -> SavedWeights | None:
    """Return the last checkpoint of a run that was not exported since, or not whole; None of one that has ended.

    Args:
        folder: run folder.
        exported: exported folders of its policies.
        configured: configured settings of its policies.
        named: checkpoint that the user named instead; None takes the last one.
    """
    from mrlm_pl.runs.folder import last_checkpoint  # torch
    from mrlm_pl.runs.records.saved_weights import SavedWeights

    if named is not None:
        return SavedWeights(named)
    last = last_checkpoint(folder)
    if last is None or latest_configuration(folder) is None:
        return None
    if exported and state_in(folder)[0] in ("finished", "unknown"):
        return None
    trained = [name for name, values in configured.items() if values.get("trained", True)] or list(exported)
    since = last.stat().st_mtime
    current = [name for name, path in exported.items() if (path / "config.json").stat().st_mtime >= since]
    return None if exported and set(trained) <= set(current) else SavedWeights(last)


def checkpoints_of(policies: Iterable[Any]) -> list[SavedWeights]:
    """Return the different checkpoints with the weights of policies, given as in :class:`RecordedRun`."""
    return list(dict.fromkeys(item[SAVED][0] for item in policies if isinstance(item, Mapping) and SAVED in item))


def latest_configuration(folder: Path) -> Path | None:
    """Return ``config.yaml`` of a run folder, or of a continued run the last ``config-N.yaml``; None without one.

    A file is returned as it is.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> for name in ("config.yaml", "config-2.yaml", "config-10.yaml"):
    ...     _ = (folder / name).write_text("")
    >>> latest_configuration(folder).name
    'config-10.yaml'
    """
    if folder.is_file():
        return folder
    matches = [(_CONFIGURATION_FILE.fullmatch(path.name), path) for path in folder.iterdir()]
    numbered = [(int(match.group(1) or 1), path) for match, path in matches if match]
    return max(numbered)[1] if numbered else None


def recorded_settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the arguments of each environment of a run by its name; empty without a configuration."""
    settings: dict[str, dict[str, Any]] = {}
    for environment in environments_of(_settings(folder)["data"]):
        arguments = dict(environment.config.get("init_args") or {})
        default_name = getattr(find_environment(str(environment.config["class_path"])), "name", None)
        settings[environment.name or default_name or arguments["name"]] = arguments  # that of a server's is an argument
    return settings


def recorded_configuration(folder: Path) -> Mapping[str, Any]:
    """Return the latest configuration of a run, or that of a file; empty without one.

    Raises:
        ConfigurationError: it cannot be read, or is none.
    """
    path = latest_configuration(folder) if folder.exists() else None
    configuration = (read_yaml_file(path, f"model: {str(path)!r}") if path else None) or {}
    if not isinstance(configuration, Mapping):
        raise ConfigurationError(f"model: {str(path)!r} is not a configuration of a run")
    return configuration


def recorded_iterations(folder: Path) -> int:
    """Return the number of iterations that the metrics of a run count; 0 without any that can be read."""
    with (
        suppress(FileNotFoundError, NotADirectoryError, ValueError, OverflowError, csv.Error),
        (folder / "metrics.csv").open(newline="", encoding="utf-8") as file,
    ):
        iterations = (row.get("progress/iteration") for row in csv.DictReader(file))
        return int(max((float(value) for value in iterations if value), default=0))
    return 0


class _Model(TypedDict, total=False):
    policies: dict[Any, dict[str, Any]] | None
    seats: dict[Any, str] | None


class _Environment(TypedDict):
    class_path: str


class _Data(TypedDict, total=False):
    environment: str | _Environment | list[str | _Environment | None] | None
    names: list[str | None] | None
    sampling: dict[str, Any] | None
    validation_sampling: dict[str, Any] | None
    max_turns: int | None
    task_settings: dict[Any, dict[str, Any] | None] | None


class _Settings(TypedDict):
    model: _Model
    data: _Data


def _settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the arguments of a run's algorithm and data module; empty without a configuration.

    Raises:
        ConfigurationError: it cannot be read, or one that is read here has another form.
    """
    config = recorded_configuration(folder)
    sections = {key: config.get(key) for key in ("model", "data")}
    settings = {
        key: section.get("init_args") or {} if isinstance(section, Mapping) else {} for key, section in sections.items()
    }
    try:
        msgspec.convert(settings, _Settings)
    except msgspec.ValidationError as error:
        path = latest_configuration(folder)
        raise ConfigurationError(f"model: {str(path)!r} is not a configuration of a run: {error}") from error
    return settings


def _values(value: Any) -> Iterator[Any]:
    """Yield a value and those in it."""
    yield value
    for item in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _values(item)


def _is_inside(name: str, folder: Path) -> bool:
    """Return True if a class or function, as a dotted path or ``FILE.py:NAME``, is of a file or package in a folder."""
    match = re.fullmatch(r"(.+\.py):\w+|([\w.]*\w)\.\w+", name)
    if not match:
        return False  # the short name of an installed class, or another value
    file = Path(match[1]).expanduser() if match[1] else Path(*match[2].split(".")).with_suffix(".py")
    return any(
        os.path.exists(path) and path.resolve().is_relative_to(folder.resolve())  # False for too long a name
        for path in (file, file.with_suffix(""))
    )


def _is_installed_function(name: str) -> bool:
    """Return True if a name could be called: a function of Python or an installed package, or a plugin's function.

    Classes of our packages and of plugins, and environments of any package, may be named. Modules of the user's own are
    not imported: a data file ``train.csv`` may be next to a program ``train.py``.
    """
    root = name.partition(".")[0]
    if name.isidentifier():
        return bool(plugin_functions(name))
    if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", name):
        return False
    ours = {"mrlm_pl", *(entry_point.value.partition(".")[0] for entry_point in plugin_entry_points())}
    if root not in {"__main__", *ours} and not is_installed(root):
        return False
    try:
        function = pkgutil.resolve_name(name)
    except Exception:  # it is not a path, or a module fails in any way; then the parser says so
        return False
    if not isinstance(function, type):
        return callable(function)
    return not issubclass(function, Environment) and function.__module__.partition(".")[0] not in ours


def is_installed(module: str) -> bool:
    """Return True if a module is of Python or of an installed package, and not of a folder of the user's."""
    spec = importlib.util.find_spec(module)
    if spec is None or module in sys.builtin_module_names:
        return spec is not None
    places = [Path(place) for place in (spec.origin, *(spec.submodule_search_locations or ())) if place]
    return module in sys.stdlib_module_names or any(
        {"site-packages", "dist-packages"} & set(place.parts) or place.is_relative_to(sysconfig.get_path("stdlib"))
        for place in places
    )


def environments_of(data: Mapping[str, Any]) -> tuple[RecordedEnvironment, ...]:
    """Return the environments in the settings of a run's data module."""
    environment = data.get("environment")
    configs = environment if isinstance(environment, list) else [environment]
    configs = [{"class_path": config} if isinstance(config, str) else config for config in configs if config]
    names = data.get("names") or [None] * len(configs)
    return tuple(RecordedEnvironment(config, name) for config, name in zip(configs, names, strict=False))
