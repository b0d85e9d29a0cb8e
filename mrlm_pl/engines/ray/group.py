"""The workers of a pool: placed by Ray, filled with weights, called, and replaced when they are lost."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import PreTrainedModel

from mrlm_pl.engines.base import LearnerPlace
from mrlm_pl.engines.ray.cluster import RayCluster, WorkerLostError
from mrlm_pl.engines.ray.gpus import GpuTeller, room_for_workers, visible_gpus, wrong_reservation
from mrlm_pl.engines.ray.settings import PoolDeadlines, PoolResources, WeightTransfer
from mrlm_pl.engines.transfer.broadcast import Invitation, WeightSender
from mrlm_pl.engines.transfer.manifest import WeightSnapshot
from mrlm_pl.errors import ConfigurationError, EngineError
from mrlm_pl.policy.architecture import Architecture
from mrlm_pl.policy.sharding import all_tensors, is_split, whole, world_size
from mrlm_pl.settings import ChecksArguments, NonNegativeInt, PositiveInt

logger = logging.getLogger(__name__)

ReadModel = Callable[[], PreTrainedModel]
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
    read: ReadModel | None = None  # reads the weights again if no snapshot is kept
    checksums: dict[str, int] = field(default_factory=dict)


class WorkerGroup(ChecksArguments, ABC):
    """Worker processes under Ray with the weights of models; several threads may use it.

    Ray starts with the first :meth:`fill`. A lost worker is replaced and filled with the current weights.

    Args:
        workers: worker processes.
        address: ``HOST:PORT`` of a Ray cluster, ``auto`` for this machine's; None starts Ray on this machine, one for
            all pools of this process, and ends it with the last of them or the process.
        resources: resources reserved for each worker and for the learner.
        transfer: transfer of the weights.
        deadlines: deadlines of starting, calls and transfers.
        replacements: maximum number of replaced workers before the run ends.

    Attributes:
        kind: the pool's name in messages.
        workers: current workers.
        replaced: number of replaced workers.
        learner: devices of the learner; None: those of the first weights.

    Raises:
        ConfigurationError: a number is out of its range.
    """

    kind: str

    def __init__(
        self,
        workers: PositiveInt = 1,
        address: str | None = None,
        resources: PoolResources = PoolResources(),  # noqa: B008 (frozen)
        transfer: WeightTransfer = WeightTransfer(),  # noqa: B008 (frozen)
        deadlines: PoolDeadlines = PoolDeadlines(),  # noqa: B008 (frozen)
        replacements: NonNegativeInt = 8,
    ) -> None:
        self.count, self._address = workers, address
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
        self._repairing = ThreadPoolExecutor(1, thread_name_prefix="mrlm-ray-pool")

    @abstractmethod
    def _worker(self, place: int, gpus: str | None) -> tuple[type, tuple[Any, ...]]:
        """Return the class of a worker and the arguments of its constructor.

        Args:
            place: index of the worker.
            gpus: the worker's ``CUDA_VISIBLE_DEVICES``; None leaves them to Ray.
        """

    # Weights.

    def fill(self, model: str, weights: PreTrainedModel, version: int, read: ReadModel | None = None) -> None:
        """Make the module's current weights those of ``model`` in all workers; returns when all serve with them.

        Args:
            model: name of the model in the workers.
            weights: a ``transformers`` model.
            version: version of the weights.
            read: reads the same weights again for replaced workers; None keeps a copy of the trained weights and
                refers to the others.

        Raises:
            EngineError: too many workers were lost, or the cluster is gone.
            ConfigurationError: see :func:`~mrlm_pl.engines.ray.gpus.wrong_reservation`.
        """
        with self.updating:
            self._check_open()
            served, architecture = self._served.get(model), Architecture.of(weights)
            self._open(weights)
            if served is None or served.architecture != architecture:
                served = self._served[model] = _Served(architecture, read=read)
            self._take(served, weights)
            served.version = version
            for worker, reason in self._update(model, self.workers).items():
                self._replace(worker, reason)

    def _take(self, served: _Served, weights: PreTrainedModel) -> None:
        tensors = {name: whole(tensor) for name, tensor in all_tensors(weights).items()}
        served.snapshot.take(tensors, passing=is_split(weights))
        served.checksums = served.snapshot.checksums()

    def _read_again(self, model: str) -> None:
        """Take a snapshot of weights that are not kept."""
        served = self._served[model]
        if served.read is None or served.snapshot.checksums():
            return
        before = served.checksums
        self._take(served, served.read())
        if served.checksums != before:
            changed = sorted(name for name, value in before.items() if served.checksums.get(name) != value)
            served.snapshot, served.checksums = WeightSnapshot(), before
            raise EngineError(
                f"a new worker of {self.kind} needs the weights of {model!r} again, but {changed[0]!r} has changed "
                "since the run began; restore the files of the model and continue with `--ckpt_path last`"
            )

    def _update(self, model: str, workers: Sequence[Worker]) -> dict[Worker, str]:
        """Bring workers to the current weights of a model; return the reasons of lost ones."""
        served = self._served[model]
        new = [worker for worker in workers if worker.built.get(model) is not served.architecture]
        lost = self._on_all(new, "build its model", "build", model, served.architecture)
        for worker in new:
            worker.built[model], worker.serves[model] = served.architecture, ({}, -1)
        current = served.checksums, served.version
        behind = [worker for worker in workers if worker not in lost and worker.serves[model][0] != served.checksums]
        lost |= self._send(model, behind)
        if served.read is not None:
            served.snapshot = WeightSnapshot()
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
        self._read_again(model)
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

    # Workers.

    def call(self, worker: Worker, does: str, method: str, *arguments: Any) -> Future[Any]:
        """Return the future of a worker's answer; see :meth:`~mrlm_pl.engines.ray.cluster.RayCluster.call`."""
        return self.cluster.call(worker.actor, worker.name, does, self.deadlines.sample, method, *arguments)

    async def ask(self, place: int, does: str, method: str, *arguments: Any) -> Any:
        """Return the answer of the worker at a place; a lost one is replaced and its successor is asked.

        Raises:
            EngineError: the group is closed, too many workers were lost, or the cluster is gone.
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
        """Return ``pid``, ``host``, ``device``, ``gpus`` (ids) and ``claims`` of each worker."""
        return [worker.about for worker in self.workers]

    def _check_open(self) -> None:
        if self.closed:
            raise EngineError(f"{self.kind} is closed; make a new one")

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
            self._check_reservation(self.learner)
            transport = self.transfer.between(self.learner, self.resources)
            self._sender = WeightSender(self.cluster.host, self.deadlines.transfer, transport, self.learner.gpu)
            actors = [self._actor(place) for place in range(self.count)]
            self.workers = [self._start_worker(place, actor) for place, actor in enumerate(actors)]
            check_claims({worker.name: worker.about["claims"] for worker in self.workers})
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

    def _check_reservation(self, learner: LearnerPlace) -> None:
        """Validate that Ray keeps free the GPUs that the learner computes on.

        Raises:
            ConfigurationError: Ray keeps other GPUs free.
        """
        resources = self.resources
        if self.cluster.started_here or not resources.learner_gpus:
            return
        teller = self.cluster.actor(GpuTeller, self.count, (), 1, {"GPU": resources.learner_gpus})
        who = "the learner's reservation"
        reserved = self.cluster.call(teller, who, "answer", self.deadlines.start, "gpus").result()
        self.cluster.kill(teller)
        wrong = wrong_reservation(reserved, learner.ids(visible_gpus()))
        if wrong is not None:
            raise ConfigurationError(f"Ray at {self.cluster.address}: {wrong}")

    def _actor(self, place: int) -> Any:
        cls, arguments = self._worker(place, self._gpus[place])
        return self.cluster.actor(cls, place, arguments, 10_000, self._reserved.worker)

    def _start_worker(self, place: int, actor: Any) -> Worker:
        name = f"worker {place} of {self.kind} on {self.cluster.address}"
        about = self.cluster.call(actor, name, "start", self.deadlines.start, "describe").result()
        worker = Worker(place, name, actor, about)
        beside_learner = self.resources.gpus and about["host"] == socket.gethostname()
        if beside_learner and not self.resources.share_learner_gpus:
            assert self.learner is not None
            shared = set(about["gpus"]).intersection(self.learner.ids(visible_gpus()))
            if shared:
                raise ConfigurationError(
                    f"{name} was given GPU {min(shared)} of {about['host']}, on which the learner computes; keep it "
                    "free with resources.learner_gpus, or allow it with `resources.share_learner_gpus: true`"
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
                beside = [worker for worker in self.workers if worker.place != new.place]
                check_claims({worker.name: worker.about["claims"] for worker in (*beside, new)})
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


def check_claims(claims: Mapping[str, Sequence[str]]) -> None:
    """Validate that workers claim different resources.

    Args:
        claims: claims of each worker, from :meth:`~mrlm_pl.engines.base.Engine.join_pool`.

    Raises:
        ConfigurationError: two workers claim the same resource, or pools of other processes have the same claims.
    """
    owners: dict[str, str] = {}
    for worker, claims_of_worker in claims.items():
        for claim in claims_of_worker:
            if (owner := owners.setdefault(claim, worker)) != worker:
                raise ConfigurationError(
                    f"{owner} and {worker} would share {claim}; give each its own (as many urls as workers), "
                    "or place them on machines of their own (data.engine.resources.strategy: STRICT_SPREAD)"
                )
    if owners and world_size() > 1:
        raise ConfigurationError(
            f"each of {world_size()} processes has a pool, and they would share {next(iter(owners))}; set "
            "trainer.devices to 1 or use another engine"
        )
