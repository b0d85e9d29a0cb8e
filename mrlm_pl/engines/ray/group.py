"""The workers of a pool: placed by Ray, filled with weights, asked, and replaced when they are lost."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from mrlm_pl.engines.learner_place import LearnerPlace
from mrlm_pl.engines.ray.cluster import RayCluster, WorkerLostError
from mrlm_pl.engines.ray.gpus import GpuTeller, room_for_workers, shared_gpu, visible_gpus, wrong_reservation
from mrlm_pl.engines.ray.settings import PoolDeadlines, PoolResources, WeightTransfer
from mrlm_pl.engines.transfer.broadcast import Invitation, WeightSender
from mrlm_pl.engines.transfer.manifest import Snapshot
from mrlm_pl.errors import ConfigurationError, EngineError
from mrlm_pl.policy.architecture import Architecture
from mrlm_pl.policy.sharding import all_tensors, is_split, whole
from mrlm_pl.settings import at_least

logger = logging.getLogger(__name__)

ReadModel = Callable[[], PreTrainedModel]
_SEND_ATTEMPTS = 2
_CLOSE_SECONDS = 5.0


@dataclass(eq=False)
class Worker:
    """A worker process, and what it has."""

    place: int
    name: str
    actor: Any
    about: dict[str, Any]  # its answer to ``describe``
    models: dict[str, int] = field(default_factory=dict)  # number of the architecture that it has built, by policy
    held: dict[str, dict[str, int]] = field(default_factory=dict)  # checksums of the tensors that it has, by policy
    versions: dict[str, int] = field(default_factory=dict)


@dataclass
class _Served:
    architecture: Architecture
    number: int
    version: int = 0
    answer: Any = None  # of the workers that switched to it
    snapshot: Snapshot = field(default_factory=Snapshot)
    read: ReadModel | None = None  # gives the weights again where no snapshot is kept
    checksums: dict[str, int] = field(default_factory=dict)


class WorkerGroup:
    """Worker processes under Ray with the weights of some models; several threads may use it.

    Ray starts with the first :meth:`load`. A worker that is lost is replaced and filled with the current weights.

    Args:
        kind: the pool's name in messages.
        make: the class of a worker, a :class:`~mrlm_pl.engines.ray.workers.FilledWorker`, and the arguments of its
            constructor, from its place and its GPUs (see there).
        workers, address, resources, transfer, deadlines, replacements: see :class:`~mrlm_pl.engines.RayPool`.

    Attributes:
        workers: those that there are now.
        replaced: how many were replaced.
        learner: where the learner computes; None: where the first weights are.

    Raises:
        ConfigurationError: a number is out of its range.
    """

    def __init__(
        self,
        kind: str,
        make: Callable[[int, str | None], tuple[type, tuple[Any, ...]]],
        workers: int,
        address: str | None,
        resources: PoolResources,
        transfer: WeightTransfer,
        deadlines: PoolDeadlines,
        replacements: int,
    ) -> None:
        at_least(1, "", workers=workers)
        at_least(0, "", replacements=replacements)
        self.kind, self._make, self.count, self._address = kind, make, workers, address
        self.resources, self.transfer, self.deadlines, self.replacements = resources, transfer, deadlines, replacements
        self.workers: list[Worker] = []
        self.replaced, self.closed = 0, False
        self.learner: LearnerPlace | None = None
        self.updating = threading.RLock()  # whoever changes workers or their weights
        self.cluster: Any = None
        self._sender: Any = None
        self._served: dict[str, _Served] = {}
        self._numbers = itertools.count()
        self._group: tuple[tuple[Worker, ...], Invitation] | None = None
        self._gpus: list[str | None] = []
        self._repairs: dict[Worker, Future[None]] = {}
        self._repairing = ThreadPoolExecutor(1, thread_name_prefix="mrlm-ray-pool")

    # Weights.

    def load(self, model: str, weights: PreTrainedModel, version: int, read: ReadModel | None = None) -> None:
        """Make the module's current weights those of ``model`` in all workers; returns when all serve with them.

        Args:
            model: name of the model in the workers.
            weights: the module.
            version: number of the weights.
            read: gives the same weights again, for workers that take the place of others; None keeps a copy of those
                that are trained, and the others where they are.

        Raises:
            EngineError: ``weights`` cannot be sent, too many workers were lost, or the cluster is.
            ConfigurationError: see :func:`~mrlm_pl.engines.ray.gpus.wrong_reservation`.
        """
        with self.updating:
            if self.closed:
                raise EngineError(f"{self.kind} is closed; make a new one")
            served, architecture = self._served.get(model), Architecture.of(weights)
            self._open(weights)
            if served is None or served.architecture != architecture:
                served = self._served[model] = _Served(architecture, next(self._numbers), read=read)
            self._take(served, weights)
            served.version = version
            for worker, reason in self._update(model, self.workers).items():
                self._replace(worker, reason)

    def answer(self, model: str) -> Any:
        """Return the workers' answer to their switch to the weights of a model; None before the first."""
        return self._served[model].answer if model in self._served else None

    def __contains__(self, model: str) -> bool:
        return model in self._served  # its weights have reached all workers

    def _take(self, served: _Served, weights: PreTrainedModel) -> None:
        tensors = {name: whole(tensor) for name, tensor in all_tensors(weights).items()}
        served.snapshot.take(tensors, passing=is_split(weights))
        served.checksums = served.snapshot.checksums()

    def _read_again(self, model: str) -> None:
        """Make a snapshot of weights that are not kept."""
        served = self._served[model]
        if served.read is None or served.snapshot.checksums():
            return
        before = served.checksums
        self._take(served, served.read())
        if served.checksums != before:
            changed = sorted(name for name, value in before.items() if served.checksums.get(name) != value)
            served.snapshot, served.checksums = Snapshot(), before
            raise EngineError(
                f"a new worker of {self.kind} needs the weights of {model!r} again, but {changed[0]!r} is another "
                "than when the run began; put back the files of the model and go on with `--ckpt_path last`"
            )

    def _update(self, model: str, workers: Sequence[Worker]) -> dict[Worker, str]:
        """Bring workers to the current weights of a model; why those that could not be are lost."""
        served = self._served[model]
        new = [worker for worker in workers if worker.models.get(model) != served.number]
        lost = self._on_all(new, "build its model", "build", model, served.architecture)
        for worker in new:
            worker.models[model], worker.held[model] = served.number, {}
        current = served.checksums
        behind = [worker for worker in workers if worker not in lost and worker.held[model] != current]
        lost |= self._send(model, behind)
        if served.read is not None:
            served.snapshot = Snapshot()
        ready = [
            worker
            for worker in workers
            if worker not in lost and (worker in behind or worker.versions.get(model) != served.version)
        ]
        lost |= self._on_all(ready, "switch to new weights", "switch", model, served.version)
        for worker in ready:
            worker.held[model], worker.versions[model] = current, served.version
        return lost

    def _on_all(
        self, workers: Sequence[Worker], does: str, method: str, model: str, argument: Any
    ) -> dict[Worker, str]:
        """Call a method of all these workers at once; why those that could not are lost."""
        asked = {worker: self.call(worker, does, method, model, argument) for worker in workers}
        lost: dict[Worker, str] = {}
        for worker, future in asked.items():
            try:
                found = future.result()
            except WorkerLostError as error:
                lost[worker] = str(error)
            else:
                if method == "switch":
                    self._served[model].answer = found
        return lost

    def _send(self, model: str, workers: Sequence[Worker]) -> dict[Worker, str]:
        """Send what workers miss into their staging memory; why those that do not have it are lost."""
        lost: dict[Worker, str] = {}
        waiting = list(workers)
        for _ in range(_SEND_ATTEMPTS):
            if not waiting:
                break
            failed = self._send_once(model, waiting)
            lost |= {worker: str(error) for worker, error in failed.items() if isinstance(error, WorkerLostError)}
            for worker, error in failed.items():
                logger.warning("weights of %r did not reach %s: %s", model, worker.name, error)
            waiting = [worker for worker in failed if worker not in lost]
        return lost | {worker: str(failed[worker]) for worker in waiting}

    def _send_once(self, model: str, workers: Sequence[Worker]) -> dict[Worker, Exception]:
        self._read_again(model)
        snapshot, does = self._served[model].snapshot, "receive weights"
        manifest = snapshot.missing([worker.held[model] for worker in workers], self.transfer.bucket_bytes)
        invitation = self._invitation(tuple(workers))
        asked = {
            worker: self.cluster.call(
                worker.actor, worker.name, does, math.inf, "stage", model, invitation, rank, manifest
            )
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

        failed: dict[Worker, Exception] = {}
        try:
            self._sender.send(invitation, manifest, snapshot.__getitem__, check)
        except EngineError as error:
            self._group = None
            logger.warning("sending weights of %r is broken off: %s", model, error)
        for worker, future in asked.items():
            try:
                # What they wait for ends within the deadline, or with the group.
                if not wait([future], 3 * self.deadlines.transfer).done:
                    raise WorkerLostError(f"{worker.name} did not {does} in time after the last bucket")
                future.result()
            except EngineError as error:
                failed[worker] = error
                self._group = None
        return failed

    def _invitation(self, workers: tuple[Worker, ...]) -> Invitation:
        """To the group of these workers, the one before if it was theirs and works."""
        if self._group is None or self._group[0] != workers:
            self._group = workers, self._sender.invite(len(workers))
        return self._group[1]

    # Workers.

    def call(self, worker: Worker, does: str, method: str, *arguments: Any) -> Future[Any]:
        """Return the future of a worker's answer; see :meth:`~mrlm_pl.engines.ray.cluster.RayCluster.call`."""
        return self.cluster.call(worker.actor, worker.name, does, self.deadlines.sample, method, *arguments)

    async def ask(self, place: int, does: str, method: str, *arguments: Any) -> Any:
        """Return the answer of the worker at a place; a lost one is replaced and its successor is asked.

        Raises:
            EngineError: too many workers were lost, or the cluster is.
            Exception: the worker's own error.
        """
        while True:
            worker = self.workers[place]
            try:
                return await asyncio.wrap_future(self.call(worker, does, method, *arguments))
            except WorkerLostError as error:
                if worker not in self._repairs:
                    self._repairs[worker] = self._repairing.submit(self._replace_if_current, worker, str(error))
                # A caller that is cancelled must not cancel the repair for the others.
                await asyncio.shield(asyncio.wrap_future(self._repairs[worker]))

    def _open(self, weights: PreTrainedModel) -> None:
        """Start Ray, the workers and the sender, unless they run."""
        if self.cluster is not None:
            self.cluster.check()  # calls may still be answered for a while after the head has died
            return
        if self.learner is None:
            self.learner = LearnerPlace.of(next(weights.parameters()).device)
        self.cluster = RayCluster(self._address, self.deadlines.start, self.deadlines.silence)
        try:
            own = self._to_reserve()
            self.cluster.reserve(own.bundles(self.count, self.cluster.host), own.strategy, self.deadlines.start)
            self._check_reservation(self.learner)
            self._sender = WeightSender(
                self.cluster.host,
                self.transfer.bucket_bytes,
                self.deadlines.transfer,
                self.transfer.between(self.learner, self.resources),
            )
            actors = [self._actor(place) for place in range(self.count)]
            self.workers = [self._started(place, actor) for place, actor in enumerate(actors)]
            check_claims({worker.name: worker.about["claims"] for worker in self.workers})
        except BaseException as error:
            cluster, self.cluster, self.workers = self.cluster, None, []
            sender, self._sender = self._sender, None
            if sender is not None:
                sender.close()
            cluster.close()
            if isinstance(error, WorkerLostError):
                raise EngineError(f"{error}; look at the load of its machine, or raise deadlines.start") from error
            raise

    def _to_reserve(self) -> PoolResources:
        """Return the resources to reserve; in a Ray of this process, choose the workers' GPUs."""
        own = self.resources
        self._gpus = [None if own.gpus else ""] * self.count
        if not self.cluster.started_here:
            return own
        if own.gpus:
            assert self.learner is not None
            room = room_for_workers(visible_gpus(), self.learner, own.share_learner_gpus)
            self._gpus = [",".join(ids) for ids in self.cluster.take_gpus(self.count, own.gpus, room)]
        return own.in_own_ray()

    def _check_reservation(self, learner: LearnerPlace) -> None:
        """Check that the GPUs that Ray keeps free for the learner are those that it computes on.

        Raises:
            ConfigurationError: they are not.
        """
        own = self.resources
        if self.cluster.started_here or not own.learner_gpus:
            return
        teller = self.cluster.actor(GpuTeller, self.count, (), 1, {"GPU": own.learner_gpus})
        who = "what was reserved for the learner"
        reserved = self.cluster.call(teller, who, "answer", self.deadlines.start, "gpus").result()
        self.cluster.kill(teller)
        wrong = wrong_reservation(reserved, learner, visible_gpus())
        if wrong is not None:
            raise ConfigurationError(f"Ray at {self.cluster.address}: {wrong}")

    def _actor(self, place: int) -> Any:
        cls, arguments = self._make(place, self._gpus[place])
        asked = self.resources.in_own_ray() if self.cluster.started_here else self.resources
        return self.cluster.actor(cls, place, arguments, 10_000, asked.worker)

    def _started(self, place: int, actor: Any) -> Worker:
        name = f"worker {place} of {self.kind} on {self.cluster.address}"
        about = self.cluster.call(actor, name, "start", self.deadlines.start, "describe").result()
        worker = Worker(place, name, actor, about)
        if self.resources.gpus and not self.resources.share_learner_gpus:
            assert self.learner is not None
            both = shared_gpu(about, socket.gethostname(), self.learner, visible_gpus())
            if both is not None:
                raise ConfigurationError(
                    f"{name} was given GPU {both} of {about['host']}, on which the learner computes; keep it free with "
                    "resources.learner_gpus, or allow it with `resources.share_learner_gpus: true`"
                )
        return worker

    def _replace(self, lost: Worker, reason: str) -> None:
        """Put a new worker with the current weights of all models in the place of one that is lost.

        Raises:
            EngineError: too many were replaced, or the cluster is gone.
        """
        while True:
            self.cluster.kill(lost.actor)
            self.replaced += 1
            if self.replaced > self.replacements:
                raise EngineError(
                    f"{lost.name}: {reason}; {self.replacements} workers have been replaced, which is the bound; look "
                    "for the cause (memory?), raise replacements, and go on with `--ckpt_path last`"
                )
            logger.warning("%s is replaced: %s", lost.name, reason)
            new, actor = lost, self._actor(lost.place)
            try:
                new = self._started(lost.place, actor)
                beside = [worker for worker in self.workers if worker.place != new.place]
                check_claims({worker.name: worker.about["claims"] for worker in (*beside, new)})
                failed = [self._update(model, [new]) for model in self._served]
            except WorkerLostError as error:
                self.cluster.kill(actor)  # one that has not started in time keeps what is reserved for it
                lost, reason = new, str(error)
                continue
            except BaseException:
                self.cluster.kill(actor)
                raise
            reasons = [text for item in failed for text in item.values()]
            if not reasons:
                self.workers[lost.place] = new
                return
            lost, reason = new, reasons[0]

    def _replace_if_current(self, lost: Worker, reason: str) -> None:
        with self.updating:
            if not self.closed and self.workers[lost.place] is lost:
                self._replace(lost, reason)

    def close(self) -> None:
        """End the workers, and Ray if it was started here and nobody else uses it; may be called twice."""
        self._repairing.shutdown(wait=False)
        with self.updating:
            self.closed = True
            workers, self.workers = self.workers, []
            if self.cluster is None:
                return
            self.cluster.end([worker.actor for worker in workers], _CLOSE_SECONDS)
            self._sender.close()
            self.cluster.close()
            self._served.clear()
            self.cluster = None


class OfWorkers:
    """Common part of an engine and a reference that work through a group of workers."""

    _group: WorkerGroup

    @property
    def replaced(self) -> int:
        """Number of workers that were replaced."""
        return self._group.replaced

    def meet_learner(self, place: LearnerPlace) -> None:
        """Take note of where the learner computes, before its weights are first used."""
        self._group.learner = place

    def describe(self) -> list[dict[str, Any]]:
        """Return ``pid``, ``host``, ``device`` and ``gpus`` (ids) of each worker, and what its engine says."""
        return [worker.about for worker in self._group.workers]

    def close(self) -> None:
        """End the workers, and Ray if it was started here and nobody else uses it; may be called twice."""
        self._group.close()


def check_claims(claims: Mapping[str, Sequence[str]]) -> None:
    """Check that no two workers claim the same.

    Args:
        claims: the answer of each worker's engine to :meth:`~mrlm_pl.engines.base.Engine.join_pool`, by its name.

    Raises:
        ConfigurationError: two of them have something in common, or other processes have pools with the same.
    """
    owners: dict[str, str] = {}
    for worker, own in claims.items():
        for claim in own:
            if claim in owners:
                raise ConfigurationError(
                    f"{owners[claim]} and {worker} would share {claim}; give each its own (as many urls as workers), "
                    "or place them on machines of their own (data.engine.resources.strategy: STRICT_SPREAD)"
                )
            owners[claim] = worker
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = torch.distributed.get_world_size() if distributed else 1
    if owners and ranks > 1:
        raise ConfigurationError(
            f"each of {ranks} processes has a pool, and they would share {next(iter(owners))}; set trainer.devices to "
            "1 or use another engine"
        )
