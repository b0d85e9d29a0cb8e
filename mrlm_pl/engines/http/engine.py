"""An engine whose policies are on an OpenAI-compatible server: vLLM, SGLang, or ``transformers serve``."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from transformers import PreTrainedModel

from mrlm_pl.concurrency.backoff import Backoff
from mrlm_pl.concurrency.calls import together
from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.engines.base import Engine, Sample, SampleRequest
from mrlm_pl.engines.http.dialects import Call, Drawn, ended_by_stop, read_reply
from mrlm_pl.engines.http.probes import (
    WEIGHT_PROBE,
    ServerFacts,
    check_server,
    check_weights,
    checked_folder,
    common_facts,
    is_same,
    marks_of,
    only_model,
)
from mrlm_pl.engines.http.replicas import (
    PassingError,
    RefusalError,
    Replica,
    Replicas,
    Terms,
    UnreachableError,
    naming,
)
from mrlm_pl.engines.http.text_dialect import dialect_of
from mrlm_pl.engines.routing import check_servers
from mrlm_pl.engines.transfer.manifest import checksum
from mrlm_pl.errors import ConfigurationError, EngineError, RemoteError, RemoteTimeoutError
from mrlm_pl.policy.pretrained import write_version

logger = logging.getLogger(__name__)

STALE, IN_SUCCESSION = 0.1, 3
"""Least difference of a stale server's log-probabilities from the model's, in nats, and updates that show it."""
# One alone may be the rounding of a server in bf16, which differs from update to update.


@dataclass
class _Served:
    """A policy's version, and for a trained policy also the label and the folder of its weights.

    The checksums are those of weights that every server has been seen to hold. ``apart`` has, by URL, how far a
    server's log-probabilities were from the model's after each update, in nats; infinity first after a warning.
    """

    version: int
    label: str = ""
    folder: str = ""
    checksums: tuple[int, ...] = ()
    apart: dict[str, list[float]] = field(default_factory=dict)


class OpenAICompatible(Engine):
    """Samples from servers over HTTP with token ids in both directions; no text is encoded.

    A frozen policy is the server's model. The weights of a trained one are written to ``weights_folder``, and the
    servers load them from there (vLLM in its development mode: ``/collective_rpc`` with ``reload_weights``; SGLang:
    ``/update_weights_from_disk``; ``transformers serve``: the request names the folder). New weights are loaded between
    two requests: :meth:`load` waits for the running ones, so that every sample has one version; turns are sampled
    whole. A server that was unreachable, or was started again while idle, gets the current weights before its next
    request.

    ``transformers serve`` has no token ids and no log-probabilities; see
    :class:`~mrlm_pl.engines.http.text_dialect.TransformersDialect`. It evaluates policies and serves frozen ones;
    training rejects it.

    Args:
        url: URL of a server, ``http://HOST:PORT``, or URLs of several with the same model; the least busy one is asked.
        dialect: kind of the server.
        model: the server's name of the model. None: the policy's name if the server has a model of that name, else its
            only model; for ``transformers``, the tokenizer's folder.
        tokenizer: folder or hub id of the served model; required for ``transformers``, and for it alone.
        weights_folder: folder of the weights of trained policies, at the same path for the servers.
        api_key_env: name of the environment variable with the servers' key.
        terms: deadlines, retries and the number of concurrent requests.

    Raises:
        ConfigurationError: an option is missing or out of its range.
    """

    def __init__(
        self,
        url: str | list[str],
        dialect: Literal["vllm", "sglang", "transformers"] = "vllm",
        model: str | None = None,
        tokenizer: str | None = None,
        weights_folder: str | None = None,
        api_key_env: str | None = None,
        terms: Terms = Terms(),  # noqa: B008 (frozen)
    ) -> None:
        self.dialect = dialect_of(dialect, tokenizer)
        self.name = f"openai/{dialect}"
        self._replicas = Replicas([url] if isinstance(url, str) else url, api_key_env, terms, self._prepare)
        self._model = model
        self._folder = None if weights_folder is None else Path(weights_folder)
        self._policies: dict[str, _Served] = {}
        self._facts: dict[str, ServerFacts] = {}  # by URL
        self._loop = EventLoopThread()
        self._end = weakref.finalize(self, _end, self._loop, self._replicas)  # at the latest at the end of the process
        self._places = asyncio.Semaphore(terms.concurrency)
        self._open, self._under_way = asyncio.Event(), set[asyncio.Task[Sample]]()
        self._open.set()
        self._cuts_warned = False

    def reports_logprobs(self, policy: str) -> bool:
        """Return whether samples have token ids and log-probabilities; those of ``transformers serve`` do not."""
        return self.dialect.reports_logprobs

    def servers(self, policy: str) -> Sequence[str]:
        """Return the URLs of the servers, unless requests name the weights; see :meth:`Engine.servers`."""
        return () if self.dialect.names_folders else [replica.url for replica in self._replicas.all]

    def precision(self, policy: str) -> str | None:
        """Return ``unknown``: servers do not report it; see :meth:`Engine.precision`."""
        return "unknown"

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one :class:`~mrlm_pl.engines.base.Sample` per request, in order, from concurrent requests.

        Generation stops at the server's context window with finish reason ``length``.

        Raises:
            EngineError: a context is empty or does not fit, or the server rejects a request.
            ConfigurationError: the server cannot sample from this distribution.
            RemoteError: no server answers within the bounds of ``terms``.
        """
        return await asyncio.wrap_future(self._open_loop().submit(together(map(self._sample, requests))))

    async def _sample(self, request: SampleRequest) -> Sample:
        async with self._places:
            await self._open.wait()
            drawing = asyncio.create_task(self._sample_one(request))
            self._under_way.add(drawing)
            drawing.add_done_callback(self._under_way.discard)
            return await drawing

    async def _sample_one(self, request: SampleRequest) -> Sample:
        facts = await self._server_facts(request.policy)
        limit = request.limit(facts.window)
        self._check_distribution(request, facts)
        served = self._policies.get(request.policy, _Served(0))
        model = self._model_of(facts.models, request.policy)
        body = self.dialect.body(request, model, limit, request.seed % 2**self.dialect.seed_bits)

        def read(reply: Any, replica: Replica) -> Sample:
            self._check_distribution(request, self._facts[replica.url])  # those of a server that begins late
            drawn = read_reply(self.dialect, reply, request)
            if len(drawn.token_ids) > limit:
                raise RemoteError(f"the server sampled {len(drawn.token_ids)} tokens, and {limit} were asked for")
            if served.folder and drawn.version not in ("", served.label):
                replica.ready = False
                raise PassingError(
                    f"the server sampled with weights {drawn.version!r}, not {served.label!r}; was it started again?"
                )
            stopped = ended_by_stop(drawn, request)
            return Sample(drawn.token_ids, drawn.logprobs, "stop" if stopped else "length", served.version, self.name)

        return await self._replicas.ask(self.dialect.path, body, f"policy {request.policy!r}", read)

    def _check_distribution(self, request: SampleRequest, facts: ServerFacts) -> None:
        """Reject temperatures other than that of the server's log-probabilities."""
        sampling = request.sampling
        if sampling.temperature not in (0.0, 1.0) and not facts.scaled:
            raise ConfigurationError(
                f"sampling.temperature is {sampling.temperature:g}, and {self._replicas.targets} gives the "
                f"log-probabilities of temperature 1; {self.dialect.scaling}, or sample at temperature 1"
            )
        if (sampling.top_p < 1 or sampling.top_k > 0) and not facts.cut and not self._cuts_warned:
            self._cuts_warned = True
            logger.warning(
                "%s gives log-probabilities from before top-p and top-k; training takes those of the learner",
                self._replicas.targets,
            )

    def load(self, policy: str, weights: Any, version: int) -> None:
        """Send trained weights to the servers; note only the version of frozen ones. Check the servers.

        Args:
            policy: name of the policy in requests.
            weights: a ``transformers`` causal LM; trained if a parameter requires a gradient.
            version: version of the weights, reported in samples.

        Raises:
            ConfigurationError: the weights are trained and there is no ``weights_folder``; a server cannot serve.
            EngineError: the weights cannot be written, or are not a module.
            RemoteError: no server answers.
        """
        if not isinstance(weights, PreTrainedModel):
            raise EngineError(f"policy {policy!r}: a transformers model is loaded, not a {type(weights).__name__}")
        trained = any(parameter.requires_grad for parameter in weights.parameters())
        before = self._policies.get(policy)
        if before is not None and not trained:
            before.version = version
            return
        served = _Served(version, f"{policy}-{version}", apart={} if before is None else before.apart)
        checksums: tuple[int, ...] = ()
        if trained:
            check_servers(self, [*self._trained, policy])
            folder = checked_folder(policy, self._folder, self._replicas.targets)
            checksums = tuple(checksum(value) for value in weights.state_dict().values())
            if before is not None and (before.version, before.checksums) == (version, checksums):
                return  # another part of the same evaluation
            served.folder = str(write_version(folder, policy, weights, version, self.dialect.save))
        self._open_loop().submit(self._take_over(policy, served)).result()
        if self.dialect.reports_logprobs:
            for url, probe in self._open_loop().submit(self._probes(policy)).result().items():
                apart = served.apart.setdefault(url, [])
                apart.append(check_weights(probe, weights, url, policy))
                if min(apart[-IN_SUCCESSION:]) > apart[0] + STALE:
                    logger.warning(
                        "policy %r: the log-probabilities of %s are %.2g nats from the model's, and were %.2g with the "
                        "first weights; it seems to keep some old ones, as vLLM does on a CPU with tied embeddings; "
                        "update the server, or train a model without tied embeddings",
                        *(policy, url, apart[-1], apart[0]),
                    )
                    apart[0] = math.inf
        served.checksums = checksums

    def check(self, policy: str) -> None:
        """Check that the servers can sample for a policy, as :meth:`load` does.

        Raises:
            ConfigurationError: a server cannot sample for the policy.
            RemoteError: no server answers.
        """
        facts = self._open_loop().submit(self._server_facts(policy)).result()
        self._model_of(facts.models, policy)

    async def _take_over(self, policy: str, served: _Served) -> None:
        """Switch to new weights between two requests."""
        self._open.clear()
        try:
            patience = self._replicas.terms.patience_seconds
            if self._under_way and (unfinished := (await asyncio.wait(self._under_way, timeout=patience))[1]):
                raise RemoteTimeoutError(
                    f"new weights of policy {policy!r} waited {patience:g} s for {len(unfinished)} running requests at "
                    f"{self._replicas.targets}; lower sampling.max_tokens or raise patience_seconds"
                )
            self._policies[policy] = served
            if served.folder:
                for replica in self._replicas.all:
                    replica.ready, replica.holds = False, []
            await self._ready_anywhere(policy)
        finally:
            self._open.set()

    async def _ready_anywhere(self, policy: str) -> None:
        """Prepare all reachable servers, at least one."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(self._replicas.terms.patience_seconds, first=0.2, longest=5.0)
        answered = 0
        while True:
            awake = [item for item in self._replicas.all if item.rests_until <= loop.time()] or self._replicas.all
            results = await asyncio.gather(*map(self._replicas.make_ready, awake), return_exceptions=True)
            final = [item for item in results if not isinstance(item, (PassingError, RemoteError, type(None)))]
            if final:
                raise final[0]
            if None in results:
                for item in filter(None, results):
                    logger.warning("not used until it answers: %s", item)
                return
            answered += not all(isinstance(item, UnreachableError) for item in results)
            if answered > self._replicas.terms.retries or not await backoff.pause():
                break
        remedy = "check the URL"
        if self._trained:
            remedy += " and whether the server reads weights_folder under the same path"
        raise RemoteError(f"policy {policy!r}: no server is ready: {results[0]}; start one, or {remedy}")

    async def _probes(self, policy: str) -> dict[str, Drawn]:
        """Return the samples for :func:`check_weights`, by the URL of each server that answers."""
        facts, probes = await self._server_facts(policy), {}
        model = self._model_of(facts.models, policy)
        body = self.dialect.body(WEIGHT_PROBE, model, WEIGHT_PROBE.sampling.max_tokens, 0)
        for replica in self._replicas.all:
            if replica.ready:
                try:
                    reply = await self._replicas.once(replica, self.dialect.path, body, f"policy {policy!r}")
                    with naming(replica.url):
                        probes[replica.url] = read_reply(self.dialect, reply, WEIGHT_PROBE)
                except (PassingError, RemoteError) as error:  # a busy server; the next weights are compared again
                    logger.warning("the weights of %s were not compared: %s", replica.url, error)
        return probes

    async def _server_facts(self, policy: str) -> ServerFacts:
        """Return the facts that hold for all servers that were checked."""
        if not self._facts:
            await self._ready_anywhere(policy)
        return common_facts(self._facts.values())

    @property
    def _trained(self) -> dict[str, _Served]:
        """The policies whose weights are handed to the servers."""
        return {name: served for name, served in self._policies.items() if served.folder}

    async def _prepare(self, replica: Replica) -> None:
        """Check the abilities of a server, if it may be another one than before, and give it the current weights."""
        handed = self._trained
        folders = [served.folder for served in handed.values()]
        ask = functools.partial(self._replicas.once, replica, whom="the check of the server")
        if replica.checked and replica.holds == folders:  # it was idle, and may have been started again
            facts = self._facts[replica.url]
            replica.checked = await is_same(ask, facts, self.dialect, self._model_of(facts.models))
            if replica.checked:
                return
        replica.holds = []  # until the last call below has succeeded
        if not replica.checked:
            for policy in handed:  # an earlier client may have died in the middle of an update
                await self._call(replica, policy, self.dialect.wake())
            self._note_facts(replica, await check_server(ask, replica.url, self.dialect, self._model_of))
        for policy, served in handed.items():
            await self._call(replica, policy, self.dialect.update(served.folder, served.label))
        facts = self._facts[replica.url]
        if handed and facts.marks:
            marks = await marks_of(ask, self.dialect, self._model_of(facts.models))
            self._facts[replica.url] = replace(facts, marks=marks)
        replica.holds = folders

    def _note_facts(self, replica: Replica, facts: ServerFacts) -> None:
        before = self._facts.get(replica.url) or next(iter(self._facts.values()), facts)
        other = facts.greedy != () and not self._trained and not set(facts.greedy) & set(before.greedy)
        if other or (facts.models != before.models and not self._model):
            what = "weights (no greedy sample is the same" if other else f"models ({facts.models}, not {before.models}"
            than = "before" if before.url == replica.url else before.url
            raise ConfigurationError(f"{replica.url} has other {what}) than {than}; start all servers with one model")
        self._facts[replica.url], replica.checked = facts, True

    async def _call(self, replica: Replica, policy: str, calls: Sequence[Call]) -> None:
        for path, body in calls:
            try:
                self.dialect.updated(await self._replicas.once(replica, path, body, f"policy {policy!r}"))
            except RefusalError as error:
                raise ConfigurationError(
                    f"{error}; the weights were not loaded, and the server may be paused: start it again"
                    f"{self.dialect.updating}"
                ) from error

    def _model_of(self, models: tuple[str, ...], policy: str = "") -> str:
        """Return the model's name in requests for a policy; without one, that of any of the server's models."""
        folders = {name: served.folder for name, served in self._trained.items()}
        if self.dialect.names_folders and folders and policy in ("", *folders):
            return folders.get(policy) or next(iter(folders.values()))
        return self._model or only_model(models, policy, self._replicas.targets)

    def window(self, policy: str) -> int | None:
        """Return the context window in tokens; None before the first request, and if the server does not say."""
        return common_facts(self._facts.values()).window if self._facts else None

    def close(self) -> None:
        """Close the connections, not the servers; may be called twice."""
        self._end()

    def _open_loop(self) -> EventLoopThread:
        if not self._end.alive:
            raise EngineError("the engine is closed; make a new one")
        return self._loop


def _end(loop: EventLoopThread, replicas: Replicas) -> None:
    loop.submit(replicas.close()).result()
    loop.close()
