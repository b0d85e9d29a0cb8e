"""Generation in worker processes that Ray places on this machine or on a cluster."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mrlm_pl.engines.base import Engine, Sample, SampleRequest
from mrlm_pl.engines.in_process import InProcessEngine
from mrlm_pl.engines.parts import sampled_in_parts
from mrlm_pl.engines.pool_claims import check_claims
from mrlm_pl.engines.pool_settings import PoolDeadlines, PoolResources, WeightTransfer
from mrlm_pl.engines.ray_cluster import CHECK_SECONDS, RayCluster, WorkerLostError
from mrlm_pl.engines.spreading import Spreading
from mrlm_pl.engines.weight_snapshot import Snapshot
from mrlm_pl.engines.weight_sync import Invitation, WeightSender
from mrlm_pl.errors import ConfigurationError, EngineError

logger = logging.getLogger(__name__)

_SEND_ATTEMPTS = 2
_CLOSE_SECONDS = 5.0


@dataclass(eq=False)
class _Worker:
    place: int
    name: str
    actor: Any
    about: dict[str, Any]  # what it says of itself
    models: dict[str, int] = field(default_factory=dict)  # number of the skeleton that it has built, by policy
    held: dict[str, dict[str, int]] = field(default_factory=dict)  # checksums of the tensors that it has, by policy
    versions: dict[str, int] = field(default_factory=dict)


@dataclass
class _Served:
    skeleton: Any
    number: int
    structure: Any
    version: int = 0
    answer: dict[str, Any] = field(default_factory=dict)  # of the workers that switched to it
    snapshot: Snapshot = field(default_factory=Snapshot)


class RayPool(Engine):
    """Generates in worker processes under Ray, each with an engine and the weights of all policies.

    A request goes to the worker that has its session's cache, else to the least busy one. :meth:`load` sends what has
    changed to all workers at once, while they go on generating, and lets each switch between two calls; when it
    returns, every worker has the new weights. A worker that dies, does not answer or cannot take the weights is
    replaced and filled with the current ones, and its requests are sent again; they hold their seeds, so the tokens
    are the same.

    Ray starts with the first :meth:`load`. To fill a worker at any time, the pool keeps a copy of the trained weights
    in the learner's memory.

    Args:
        workers: worker processes.
        address: ``HOST:PORT`` of a Ray cluster, ``auto`` for the one that this machine belongs to; None starts Ray on
            this machine, and ends it with the pool or this process.
        engine: makes the engine of a worker.
        resources: what is reserved for each worker and for the learner.
        transfer: how weights are sent.
        deadlines: how long things may take.
        replacements: how many workers may be replaced before the run ends.
        calls: calls of :meth:`sample` that a worker's engine is given at the same time; the others wait their turn.
            None: as many as the engine says, one in process and all that a server may have under way.

    Raises:
        ConfigurationError: a number is out of its range.
    """

    name = "ray_pool"

    def __init__(
        self,
        workers: int = 1,
        address: str | None = None,
        engine: Callable[[], Engine] = InProcessEngine,
        resources: PoolResources = PoolResources(),  # noqa: B008 (frozen)
        transfer: WeightTransfer = WeightTransfer(),  # noqa: B008 (frozen)
        deadlines: PoolDeadlines = PoolDeadlines(),  # noqa: B008 (frozen)
        replacements: int = 8,
        calls: int | None = None,
    ) -> None:
        for name, value, least in (("workers", workers, 1), ("replacements", replacements, 0), ("calls", calls, 1)):
            if value is not None and value < least:
                raise ConfigurationError(f"{name} is {value}; it must be {least} or above")
        self.workers, self.address, self.resources, self.deadlines = workers, address, resources, deadlines
        self.transfer, self.replacements, self._make_engine, self._calls = transfer, replacements, engine, calls
        self.replaced = 0
        self._cluster: Any = None
        self._pool: list[_Worker] = []
        self._served: dict[str, _Served] = {}
        self._spreading = Spreading(workers)
        self._updating = threading.RLock()  # whoever changes workers or their weights
        self._repairs: dict[_Worker, Future[None]] = {}
        self._repairing = ThreadPoolExecutor(1, thread_name_prefix="mrlm-ray-pool")
        self._numbers = itertools.count()
        self._group: tuple[tuple[_Worker, ...], Invitation] | None = None
        self._closed = False

    # Weights.

    def load(self, policy: str, weights: Any, version: int) -> None:
        """Make the module's current weights those of ``policy`` in all workers; returns when all serve with them.

        Args:
            policy: the name that requests use.
            weights: a module that the workers' engine can load.
            version: number stored in every sample made from now on.

        Raises:
            EngineError: ``weights`` cannot be sent, too many workers were lost, or the cluster is.
            ConfigurationError: the engine cannot be one of so many workers; see :meth:`Engine.join_pool`.
        """
        from mrlm_pl.engines.skeleton import Skeleton, structure

        if not isinstance(weights, nn.Module):
            raise EngineError(f"policy {policy!r}: a pool loads a torch module, not a {type(weights).__name__}")
        with self._updating:
            if self._closed:
                raise EngineError("the pool is closed; make a new one")
            served, shape = self._served.get(policy), structure(weights)
            self._open()
            if served is None or served.structure != shape:
                served = self._served[policy] = _Served(Skeleton(weights), next(self._numbers), shape)
            served.snapshot.take(served.skeleton.tensors(weights), served.skeleton.passing)
            served.version = version
            for worker, reason in self._update(policy, self._pool).items():
                self._replace(worker, reason)

    @property
    def takes_pieces(self) -> bool:
        """Whether the workers' engine takes ``offset`` and ``piece``; known after the first :meth:`load`."""
        return bool(self._pool) and self._pool[0].about["takes_pieces"]

    def window(self, policy: str) -> int | None:
        """How many tokens a row of the policy can have, as the workers' engine says; None while it is not loaded."""
        return self._said(policy).get("window")

    def reports_logprobs(self, policy: str) -> bool:
        """What the workers' engine says; True while the policy is not loaded."""
        return bool(self._said(policy).get("reports_logprobs", True))

    def _said(self, policy: str) -> dict[str, Any]:
        return self._served[policy].answer if policy in self._served else {}

    def _update(self, policy: str, workers: Sequence[_Worker]) -> dict[_Worker, str]:
        """Bring workers to the current weights of a policy; why those that could not be are lost."""
        served = self._served[policy]
        new = [worker for worker in workers if worker.models.get(policy) != served.number]
        lost = self._on_all(new, "build its model", "build", lambda _: (policy, served.skeleton.data))
        for worker in new:
            worker.models[policy], worker.held[policy] = served.number, {}
        current = served.snapshot.checksums()
        behind = [worker for worker in workers if worker not in lost and worker.held[policy] != current]
        lost |= self._send(policy, behind)
        ready = [
            worker
            for worker in workers
            if worker not in lost and (worker in behind or worker.versions.get(policy) != served.version)
        ]
        lost |= self._on_all(ready, "switch to new weights", "switch", lambda _: (policy, served.version))
        for worker in ready:
            worker.held[policy], worker.versions[policy] = current, served.version
        return lost

    def _on_all(
        self, workers: Sequence[_Worker], does: str, method: str, arguments: Callable[[_Worker], tuple[Any, ...]]
    ) -> dict[_Worker, str]:
        """Call a method of all these workers at once; why those that could not are lost."""
        asked = {worker: self._cluster.call(worker.actor, method, *arguments(worker)) for worker in workers}
        lost: dict[_Worker, str] = {}
        for worker, future in asked.items():
            try:
                found = self._cluster.wait(future, self.deadlines.sample, worker.name, does)
            except WorkerLostError as error:
                lost[worker] = str(error)
            else:
                if method == "switch":
                    self._served[arguments(worker)[0]].answer = found
        return lost

    def _send(self, policy: str, workers: Sequence[_Worker]) -> dict[_Worker, str]:
        """Send what workers miss into their staging memory; why those that do not have it are lost."""
        lost: dict[_Worker, str] = {}
        waiting = list(workers)
        for _ in range(_SEND_ATTEMPTS):
            if not waiting:
                break
            failed = self._send_once(policy, waiting)
            lost |= {worker: str(error) for worker, error in failed.items() if isinstance(error, WorkerLostError)}
            for worker, error in failed.items():
                logger.warning("weights of %r did not reach %s: %s", policy, worker.name, error)
            waiting = [worker for worker in failed if worker not in lost]
        return lost | {worker: str(failed[worker]) for worker in waiting}

    def _send_once(self, policy: str, workers: Sequence[_Worker]) -> dict[_Worker, Exception]:
        snapshot, seconds = self._served[policy].snapshot, self.deadlines.transfer
        manifest = snapshot.missing([worker.held[policy] for worker in workers], self.transfer.bucket_bytes)
        invitation = self._invitation(tuple(workers))
        asked = {
            worker: self._cluster.call(worker.actor, "stage", policy, invitation, rank, manifest)
            for rank, worker in enumerate(workers, 1)
        }
        looked = time.monotonic()

        def check() -> None:
            nonlocal looked
            if time.monotonic() - looked > 0.1:
                looked = time.monotonic()
                for worker, future in asked.items():
                    if future.done() and future.exception() is not None:
                        raise EngineError(f"{worker.name} cannot take part")

        failed: dict[_Worker, Exception] = {}
        try:
            self._sender.send(invitation, manifest, snapshot.__getitem__, check)
        except EngineError as error:
            self._group = None
            logger.warning("sending weights of %r is broken off: %s", policy, error)
        for worker, future in asked.items():
            try:
                # What they wait for ends within the deadline, or with the group.
                self._cluster.wait(future, 3 * seconds, worker.name, "receive weights")
            except EngineError as error:
                failed[worker] = error
                self._group = None
        return failed

    def _invitation(self, workers: tuple[_Worker, ...]) -> Invitation:
        """To the group of these workers, the one before if it was theirs and works."""
        if self._group is not None and self._group[0] == workers:
            invitation = self._sender.invite_again(self._group[1])
        else:
            invitation = self._sender.invite(len(workers))
        self._group = workers, invitation
        return invitation

    # Workers.

    def _open(self) -> None:
        """Start what is not started yet."""
        if self._cluster is not None:
            self._cluster.check()  # calls may still be answered for a while after the head has died
            return
        own = self.resources
        cpus = own.worker["CPU"] * self.workers + own.learner_cpus
        self._cluster = RayCluster(self.address, cpus, self.deadlines.start, self.deadlines.silence)
        try:
            self._cluster.reserve(own.bundles(self.workers, self._cluster.host), own.strategy, self.deadlines.start)
            transport = self.transfer.between(own)
            self._sender = WeightSender(
                self._cluster.host, self.transfer.bucket_bytes, self.deadlines.transfer, transport
            )
            actors = [self._actor(place) for place in range(self.workers)]
            self._pool = [self._started(place, actor) for place, actor in enumerate(actors)]
            check_claims({worker.name: worker.about["claims"] for worker in self._pool})
        except BaseException as error:
            cluster, self._cluster, self._pool = self._cluster, None, []
            cluster.close()
            if isinstance(error, WorkerLostError):
                raise EngineError(f"{error}; look at the load of its machine, or raise deadlines.start") from error
            raise

    def _actor(self, place: int) -> Any:
        from mrlm_pl.engines.ray_worker import PoolWorker

        arguments = (self._make_engine, f"{self.name}/{place}", place, self.workers, self._calls)
        return self._cluster.actor(PoolWorker, place, arguments, 10_000, self.resources.worker)

    def _started(self, place: int, actor: Any) -> _Worker:
        name = f"worker {place} of the pool on {self._cluster.address}"
        found = self._cluster.wait(self._cluster.call(actor, "describe"), self.deadlines.start, name, "start")
        return _Worker(place, name, actor, found)

    def _replace(self, lost: _Worker, reason: str) -> None:
        """Put a new worker with the current weights of all policies in the place of one that is lost.

        Raises:
            EngineError: too many were replaced, or the cluster is gone.
        """
        while True:
            self._cluster.kill(lost.actor)
            self.replaced += 1
            if self.replaced > self.replacements:
                raise EngineError(
                    f"{lost.name}: {reason}; {self.replacements} workers have been replaced, which is the bound; look "
                    "for the cause (memory?), raise replacements, and go on with `--ckpt_path last`"
                )
            logger.warning("%s is replaced: %s", lost.name, reason)
            new = lost
            try:
                new = self._started(lost.place, self._actor(lost.place))
                beside = [worker for worker in self._pool if worker.place != new.place]
                check_claims({worker.name: worker.about["claims"] for worker in (*beside, new)})
                failed = [self._update(policy, [new]) for policy in self._served]
            except WorkerLostError as error:
                lost, reason = new, str(error)
                continue
            reasons = [text for item in failed for text in item.values()]
            if not reasons:
                self._pool[lost.place] = new
                return
            lost, reason = new, reasons[0]

    def _replace_if_current(self, lost: _Worker, reason: str) -> None:
        with self._updating:
            if not self._closed and self._pool[lost.place] is lost:
                self._replace(lost, reason)

    # Requests.

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """One sample per request, in order; see :meth:`Engine.sample`. Their engine is ``ray_pool/WORKER``.

        Raises:
            EngineError: what a worker's engine raises; or too many workers were lost, or the cluster is.
        """
        if not requests:
            return []
        if not self._pool:
            raise EngineError(
                "the pool has no weights; call load() first" if not self._closed else "the pool is closed"
            )
        places = self._spreading.place(requests)
        try:
            return await sampled_in_parts(requests, places, self._ask)
        finally:
            self._spreading.done(places)

    async def _ask(self, place: int, requests: list[SampleRequest]) -> list[Sample]:
        """The samples of a place, from as many workers after each other as it takes."""
        while True:
            worker = self._pool[place]
            try:
                return await self._answer(worker, requests)
            except WorkerLostError as error:
                if worker not in self._repairs:
                    repair = self._repairing.submit(self._replace_if_current, worker, str(error))
                    self._repairs[worker] = repair
                # Of all who wait for this worker none must take the repair along when it is cancelled.
                await asyncio.shield(asyncio.wrap_future(self._repairs[worker]))

    async def _answer(self, worker: _Worker, requests: list[SampleRequest]) -> list[Sample]:
        future = asyncio.wrap_future(self._cluster.call(worker.actor, "sample", requests))
        deadline = time.monotonic() + self.deadlines.sample
        while not (await asyncio.wait({future}, timeout=CHECK_SECONDS))[0]:
            await asyncio.to_thread(self._cluster.check)
            if time.monotonic() > deadline:
                raise WorkerLostError(f"{worker.name} did not answer within {self.deadlines.sample:g} s")
        try:
            return future.result()
        except Exception as error:
            found = await asyncio.to_thread(self._cluster.translated, error, worker.name, "generate")
            raise found from error

    def describe(self) -> list[dict[str, Any]]:
        """``pid``, ``host``, ``device``, ``takes_pieces`` and ``claims`` (what it has to itself) of each worker."""
        return [worker.about for worker in self._pool]

    @property
    def stats(self) -> list[Any]:
        """What the engine of each worker has counted since the worker was started; see :attr:`Engine.stats`.

        Raises:
            WorkerLostError: a worker does not answer.
        """
        asked = [(worker, self._cluster.call(worker.actor, "stats")) for worker in self._pool]
        return [self._cluster.wait(item, self.deadlines.start, worker.name, "answer") for worker, item in asked]

    def release(self, session_prefix: str) -> None:
        """Forget caches, in the background; see :meth:`Engine.release`."""
        for place in self._spreading.release(session_prefix):
            self._cluster.call(self._pool[place].actor, "release", session_prefix)

    def close(self) -> None:
        """End the workers, and Ray if it was started here; may be called twice."""
        with self._updating:
            self._closed = True
            pool, self._pool = self._pool, []
            if self._cluster is None:
                return
            self._cluster.end([worker.actor for worker in pool], _CLOSE_SECONDS)
            self._sender.close()
            self._cluster.close()
            self._served.clear()
            self._cluster = None
        self._repairing.shutdown(wait=False)
