"""Generation in worker processes under Ray, which are filled with weights, and replaced when they are lost."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from mrlm_pl.engines.base import Engine, LearnerPlace, Sample, SampleRequest
from mrlm_pl.engines.local.engine import InProcessEngine
from mrlm_pl.engines.ray.cluster import RayCluster, WorkerLostError
from mrlm_pl.engines.ray.gpus import room_for_workers, visible_gpus
from mrlm_pl.engines.ray.settings import PoolDeadlines, PoolResources, WeightTransfer
from mrlm_pl.engines.ray.spreading import Spreading
from mrlm_pl.engines.routing import sample_in_parts
from mrlm_pl.engines.transfer.broadcast import Invitation, WeightSender
from mrlm_pl.engines.transfer.manifest import WeightSnapshot
from mrlm_pl.errors import ConfigurationError, EngineError
from mrlm_pl.policy.architecture import Architecture
from mrlm_pl.policy.sharding import all_tensors, is_split, whole
from mrlm_pl.settings import NonNegativeInt, PositiveInt

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 5.0


@dataclass(eq=False)
class Worker:
    """A worker process, its models and their weights."""

    place: int
    name: str
    actor: Any
    about: dict[str, Any]  # its answer to ``describe``
    built: dict[str, Architecture] = field(default_factory=dict)  # by model
    serves: dict[str, tuple[dict[str, int], int]] = field(default_factory=dict)  # checksums and version, by model


@dataclass
class _Served:
    architecture: Architecture
    version: int = 0
    answer: Any = None  # of the workers' last switch
    snapshot: WeightSnapshot = field(default_factory=WeightSnapshot)


class RayPool(Engine):
    """Generates in worker processes under Ray, each with an engine and the weights of all policies.

    A request goes to the worker with its session's cache, else to the least busy one. :meth:`load` sends the changed
    tensors to all workers while they generate, and each switches between two calls; when it returns, every worker has
    the new weights. A worker that dies, does not answer or fails to load weights is replaced and filled with the
    current ones, and its requests are sent again; their seeds reproduce the tokens.

    Ray starts with the first :meth:`load`. The learner's memory holds a copy of the trained weights, to fill workers
    at any time. Several threads may use the pool.

    Args:
        workers: number of worker processes.
        engine: makes the engine of a worker, which computes there rather than on servers.
        address: ``HOST:PORT`` of a Ray cluster, ``auto`` for this machine's; None starts Ray on this machine, one for
            all pools of this process, and ends it with the last of them or the process.
        resources: resources reserved for each worker and for the learner.
        transfer: transfer of the weights.
        deadlines: deadlines of starting, calls and transfers.
        replacements: maximum number of replaced workers before the run ends.

    Attributes:
        name: the pool's name in samples.
        workers: current workers.
        replaced: number of replaced workers.
        learner: devices of the learner; None: those of the first weights.

    Raises:
        ConfigurationError: a number is out of its range.
    """

    name = "ray_pool"

    def __init__(
        self,
        workers: PositiveInt = 1,
        engine: Callable[[], Engine] = InProcessEngine,
        address: str | None = None,
        resources: PoolResources = PoolResources(),  # noqa: B008 (frozen)
        transfer: WeightTransfer = WeightTransfer(),  # noqa: B008 (frozen)
        deadlines: PoolDeadlines = PoolDeadlines(),  # noqa: B008 (frozen)
        replacements: NonNegativeInt = 8,
    ) -> None:
        self.count, self._make_engine, self._address = workers, engine, address
        self.resources, self.transfer, self.deadlines, self.replacements = resources, transfer, deadlines, replacements
        self.workers: list[Worker] = []
        self.replaced, self.closed = 0, False
        self.learner: LearnerPlace | None = None
        self.updating = threading.RLock()  # held to change workers or their weights
        self.cluster: Any = None
        self._sender: Any = None
        self._served: dict[str, _Served] = {}
        self._group: tuple[tuple[Worker, ...], Invitation] | None = None  # while it works
        self._gpus: list[str | None] = []
        self._repairs: dict[Worker, Future[None]] = {}
        self._beside: LearnerPlace | None = None
        self._repairing = ThreadPoolExecutor(1, thread_name_prefix="mrlm-ray-pool")
        self._spreading = Spreading(workers)

    # Weights.

    def load(self, policy: str, weights: Any, version: int) -> None:
        """Make the module's current weights those of ``policy`` in all workers; returns when all serve with them.

        Args:
            policy: name of the policy in requests.
            weights: a ``transformers`` model.
            version: version of the weights, reported in samples.

        Raises:
            EngineError: ``weights`` is another object, too many workers were lost, or the cluster is gone.
            ConfigurationError: the workers' engine samples from servers, a worker was given a GPU of the learner, or
                there are too few.
        """
        if not isinstance(weights, PreTrainedModel):
            raise EngineError(f"policy {policy!r}: a pool loads a transformers model, not a {type(weights).__name__}")
        with self.updating:
            self._check_open()
            served, architecture = self._served.get(policy), Architecture.of(weights)
            self._open(weights)
            if served is None or served.architecture != architecture:
                served = self._served[policy] = _Served(architecture)
            tensors = {name: whole(tensor) for name, tensor in all_tensors(weights).items()}
            served.snapshot.take(tensors, passing=is_split(weights))
            served.version = version
            for worker, reason in self._update(policy, self.workers).items():
                self._replace(worker, reason)

    @property
    def takes_chunks(self) -> bool:
        """True if the workers' engine takes ``offset`` and ``chunk_tokens``; valid after the first :meth:`load`."""
        return bool(self.workers) and self.workers[0].about["takes_chunks"]

    def window(self, policy: str) -> int | None:
        """Return the longest context of the workers' engine in tokens; None while the policy is not loaded."""
        return self._said(policy).get("window")

    def reports_logprobs(self, policy: str) -> bool:
        """Return the answer of the workers' engine; True while the policy is not loaded."""
        return bool(self._said(policy).get("reports_logprobs", True))

    def precision(self, policy: str) -> str | None:
        """Return the answer of the workers' engine; None while the policy is not loaded."""
        return self._said(policy).get("precision")

    def _said(self, policy: str) -> dict[str, Any]:
        """Return the workers' answer to the last switch to weights of the policy; empty before the first."""
        return (self._served[policy].answer if policy in self._served else None) or {}

    def _update(self, model: str, workers: Sequence[Worker]) -> dict[Worker, str]:
        """Bring workers to the current weights of a model; return the reasons of lost ones."""
        served = self._served[model]
        new = [worker for worker in workers if worker.built.get(model) is not served.architecture]
        lost = self._on_all(new, "build its model", "build", model, served.architecture)
        for worker in new:
            worker.built[model], worker.serves[model] = served.architecture, ({}, -1)
        current = served.snapshot.checksums(), served.version
        behind = [worker for worker in workers if worker not in lost and worker.serves[model][0] != current[0]]
        lost |= self._send(model, behind)
        ready = [worker for worker in workers if worker not in lost and worker.serves[model] != current]
        lost |= self._on_all(ready, "switch to new weights", "switch", model, served.version)
        for worker in ready:
            worker.serves[model] = current
        return lost

    def _on_all(
        self, workers: Sequence[Worker], does: str, method: str, model: str, argument: Any
    ) -> dict[Worker, str]:
        """Call a method of all these workers concurrently; return the reasons of lost ones."""
        calls = {worker: self.call(worker, does, method, model, argument) for worker in workers}
        lost: dict[Worker, str] = {}
        for worker, future in calls.items():
            try:
                self._served[model].answer = future.result() or self._served[model].answer  # only a switch has one
            except WorkerLostError as error:
                lost[worker] = str(error)
        return lost

    def _send(self, model: str, workers: Sequence[Worker]) -> dict[Worker, str]:
        """Send missing tensors to the workers' staging memory, at most twice; return the reasons of lost workers."""
        failed = self._send_once(model, workers)
        retried = [worker for worker, error in failed.items() if not isinstance(error, WorkerLostError)]
        lost = {worker: error for worker, error in failed.items() if worker not in retried}
        return {worker: str(error) for worker, error in (lost | self._send_once(model, retried)).items()}

    def _send_once(self, model: str, workers: Sequence[Worker]) -> dict[Worker, EngineError]:
        if not workers:
            return {}
        snapshot, does = self._served[model].snapshot, "receive weights"
        manifest = snapshot.missing([worker.serves[model][0] for worker in workers], self.transfer.bucket_bytes)
        if self._group is None or self._group[0] != tuple(workers):
            self._group = tuple(workers), self._sender.invite(len(workers))
        invitation = self._group[1]
        calls = {
            worker: self.cluster.call(
                worker.actor, worker.name, does, math.inf, "stage", model, invitation, rank, manifest
            )
            for rank, worker in enumerate(workers, 1)
        }

        def check() -> None:
            for worker, future in calls.items():
                if future.done() and future.exception() is not None:
                    raise EngineError(f"{worker.name} cannot receive weights")

        failed: dict[Worker, EngineError] = {}
        try:
            self._sender.send(invitation, manifest, snapshot.__getitem__, check)
        except EngineError as error:
            self._group = None
            logger.warning("sending weights of %r failed: %s", model, error)
        for worker, future in calls.items():
            try:
                # A receiver ends within the deadlines, or with the group.
                if not wait([future], 3 * self.deadlines.transfer).done:
                    raise WorkerLostError(f"{worker.name} did not {does} in time after the last bucket")
                future.result()
            except EngineError as error:
                logger.warning("weights of %r did not reach %s: %s", model, worker.name, error)
                failed[worker] = error
                self._group = None
        return failed

    # Requests.

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one sample per request, in order; see :meth:`Engine.sample`. Their engine is ``ray_pool/WORKER``.

        Raises:
            EngineError: a worker's engine failed, too many workers were lost, or the cluster is gone.
        """
        if not self.workers:
            raise EngineError("the pool has no weights; call load() first" if not self.closed else "the pool is closed")
        places = self._spreading.place(requests)
        try:
            return await sample_in_parts(
                requests, places, lambda place, worker_requests: self.ask(place, "generate", "sample", worker_requests)
            )
        finally:
            self._spreading.done(places)

    def release(self, session_prefix: str) -> None:
        """Drop caches, in the background; see :meth:`Engine.release`. A closed pool has none."""
        for place in () if self.closed else self._spreading.release(session_prefix):
            self.call(self.workers[place], "answer", "release", session_prefix)

    # Workers.

    def call(self, worker: Worker, does: str, method: str, *arguments: Any) -> Future[Any]:
        """Return the future of a worker's answer; see :meth:`~mrlm_pl.engines.ray.cluster.RayCluster.call`."""
        return self.cluster.call(worker.actor, worker.name, does, self.deadlines.sample, method, *arguments)

    async def ask(self, place: int, does: str, method: str, *arguments: Any) -> Any:
        """Return the answer of the worker at a place; a lost one is replaced and its successor is asked.

        Raises:
            EngineError: the pool is closed, too many workers were lost, or the cluster is gone.
            Exception: the worker's own error.
        """
        while True:
            self._check_open()
            worker = self.workers[place]
            try:
                return await asyncio.wrap_future(self.call(worker, does, method, *arguments))
            except WorkerLostError as error:
                self._check_open()
                if worker not in self._repairs:
                    self._repairs[worker] = self._repairing.submit(self._replace_if_current, worker, str(error))
                # A caller that is cancelled must not cancel the repair for the others.
                await asyncio.shield(asyncio.wrap_future(self._repairs[worker]))

    def meet_learner(self, place: LearnerPlace) -> None:
        """Receive the learner's devices, before its weights are first used."""
        self.learner = place

    def describe(self) -> list[dict[str, Any]]:
        """Return ``pid``, ``host``, ``device`` and ``gpus`` (ids) of each worker."""
        return [worker.about for worker in self.workers]

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError("the pool is closed; make a new one")

    def _open(self, weights: PreTrainedModel) -> None:
        """Start Ray, the workers and the sender if they are not running."""
        if self.cluster is not None:
            self.cluster.check()  # workers may still answer for a while after the head has died
            return
        if self.learner is None:
            self.learner = LearnerPlace.of(next(weights.parameters()).device)
        self.cluster = RayCluster(self._address, self.deadlines.start, self.deadlines.silence)
        try:
            resources = self._reserved = self._to_reserve()
            self.cluster.reserve(
                resources.bundles(self.count, self.cluster.host), resources.strategy, self.deadlines.start
            )
            transport = self.transfer.between(self.learner, self.resources)
            self._sender = WeightSender(self.cluster.host, self.deadlines.transfer, transport, self.learner.gpu)
            actors = [self._actor(place) for place in range(self.count)]
            self.workers = [self._start_worker(place, actor) for place, actor in enumerate(actors)]
        except BaseException as error:  # also an interrupt: no worker is left behind
            self._end()
            if isinstance(error, WorkerLostError):
                raise EngineError(f"{error}; check the load of its machine, or raise deadlines.start") from error
            raise

    def _to_reserve(self) -> PoolResources:
        """Return the resources to reserve; in a Ray of this process, which has no GPUs, assign the workers' GPUs."""
        resources = self.resources
        self._gpus = [None if resources.gpus else ""] * self.count
        if not self.cluster.started_here:
            return resources
        if resources.gpus:
            assert self.learner is not None
            room = room_for_workers(visible_gpus(), self.learner, resources.share_learner_gpus)
            self._gpus = [",".join(ids) for ids in self.cluster.take_gpus(self.count, resources.gpus, room)]
        return replace(resources, gpus=0.0, learner_gpus=0.0)

    def _actor(self, place: int) -> Any:
        from mrlm_pl.engines.ray.workers import PoolWorker

        # The devices are not those of the worker; a worker that replaces another computes like the rest.
        self._beside = self._beside or LearnerPlace(precision=self.learner.precision if self.learner else "32-true")
        arguments = (self._gpus[place], self._make_engine, f"{self.name}/{place}", self._beside)
        return self.cluster.actor(PoolWorker, place, arguments, self._reserved.worker)

    def _start_worker(self, place: int, actor: Any) -> Worker:
        name = f"worker {place} of the pool on {self.cluster.address}"
        about = self.cluster.call(actor, name, "start", self.deadlines.start, "describe").result()
        worker = Worker(place, name, actor, about)
        beside_learner = self.resources.gpus and about["host"] == socket.gethostname()
        if beside_learner and not self.resources.share_learner_gpus:
            assert self.learner is not None
            shared = set(about["gpus"]).intersection(self.learner.ids(visible_gpus()))
            if shared:
                raise ConfigurationError(
                    f"{name} was given GPU {min(shared)} of {about['host']}, on which the learner computes; let Ray "
                    "keep it free (resources.learner_gpus, and the learner's CUDA_VISIBLE_DEVICES another if Ray keeps "
                    "that one), or allow it with `resources.share_learner_gpus: true`"
                )
        return worker

    def _replace(self, lost: Worker, reason: str) -> None:
        """Replace a lost worker by a new one with the current weights of all models.

        Raises:
            EngineError: too many workers were replaced, or the cluster is gone.
        """
        while True:
            self.cluster.kill(lost.actor)
            self.replaced += 1
            if self.replaced > self.replacements:
                raise EngineError(
                    f"{lost.name}: {reason}; {self.replacements} workers have been replaced, which is the bound; find "
                    "the cause (memory?), raise replacements, and continue with `--ckpt_path last`"
                )
            logger.warning("%s is replaced: %s", lost.name, reason)
            new, actor = lost, self._actor(lost.place)
            try:
                new = self._start_worker(lost.place, actor)
                for model in self._served:
                    for failure in self._update(model, [new]).values():
                        raise WorkerLostError(failure)
            except BaseException as error:  # as in `_open`
                self.cluster.kill(actor)  # a late worker keeps its reserved resources
                if not isinstance(error, WorkerLostError):
                    raise
                lost, reason = new, str(error)
            else:
                self.workers[lost.place] = new
                return

    def _replace_if_current(self, lost: Worker, reason: str) -> None:
        with self.updating:
            if not self.closed and self.workers[lost.place] is lost:
                self._replace(lost, reason)

    def close(self) -> None:
        """End the workers, and with the last pool a Ray that was started here; may be called twice."""
        self.closed = True  # first, so that no call asks for a repair any more
        self._repairing.shutdown(wait=False)
        with self.updating:
            workers, self.workers = self.workers, []
            if self.cluster is not None:
                self.cluster.end([worker.actor for worker in workers], _CLOSE_SECONDS)
                self._end()

    def _end(self) -> None:
        cluster, self.cluster, self.workers = self.cluster, None, []
        self._served.clear()
        if self._sender is not None:
            self._sender.close()
        cluster.close()
