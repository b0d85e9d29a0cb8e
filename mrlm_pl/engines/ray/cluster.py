"""One pool's use of Ray: reserved resources, workers in them, and calls with deadlines."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import Any, Literal

from mrlm_pl.concurrency.calls import in_daemon
from mrlm_pl.concurrency.event_loop import EventLoopThread, mark_read
from mrlm_pl.engines.ray.connection import CHECK_SECONDS, STOP_SECONDS, RayConnection
from mrlm_pl.errors import EngineError, first_line

logger = logging.getLogger(__name__)

_CALLS = 10_000
"""Concurrent calls of a worker, which holds back those that it cannot answer yet."""

Strategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]


def answer_of(call: Future[Any]) -> asyncio.Future[Any]:
    """Return the answer of an actor, to await.

    The caller may stop waiting before the answer arrives: at the deadline, or when it is cancelled.
    """
    future = asyncio.wrap_future(call)
    future.add_done_callback(mark_read)
    return future


class RayCluster:
    """A pool's part of the Ray of this process.

    Args:
        address: ``HOST:PORT`` of a cluster, ``auto`` for this machine's, None to start one that the pools of this
            process share.
        seconds: deadline of starting or joining.
        silence: seconds without an answer of the head until the cluster counts as gone.

    Attributes:
        address: ``HOST:PORT`` of the head.
        host: address of this process for the workers.
        started_here: whether this process started Ray.
        loop: waits for answers.

    Raises:
        ConfigurationError: Ray is not installed, or another pool of this process uses another address.
        EngineError: there is no such cluster, or it does not answer in time.
    """

    def __init__(self, address: str | None, seconds: float = 120.0, silence: float = 10.0) -> None:
        self._connection: Any = RayConnection.shared(address, seconds)
        self._ray, self._silence = self._connection.ray, silence
        self.address, self.host = str(self._connection.address), str(self._connection.host)
        self.started_here: bool = self._connection.started_here
        self.loop = EventLoopThread()
        self._group: Any = None
        self._gpus: list[tuple[str, ...]] = []
        self._gpus_each = 0.0

    def reserve(self, bundles: Sequence[dict[str, float]], strategy: Strategy, seconds: float) -> None:
        """Reserve a bundle of resources for each worker, all or none.

        A Ray that was started here never grows, so missing resources are an immediate error. A cluster may grow.

        Raises:
            EngineError: the cluster lacks the resources, or does not have them in time.
        """
        amounts = [{name: amount for name, amount in bundle.items() if amount} for bundle in bundles]
        total = self._ray.cluster_resources()
        missing = _beyond(amounts, total)
        if missing and self.started_here:
            raise EngineError(
                f"Ray was started on this machine and lacks {missing}; ask for fewer or smaller workers, or name a "
                "larger cluster (address)"
            )
        if missing:
            logger.warning("Ray at %s lacks %s; waiting up to %g s for more machines", self.address, missing, seconds)
        self._group = self._ray.util.placement_group(amounts, strategy=strategy)
        if not self._group.wait(seconds):
            total = {name: amount for name, amount in self._ray.cluster_resources().items() if name in ("CPU", "GPU")}
            free = {name: self._ray.available_resources().get(name, 0.0) for name in total}
            raise EngineError(
                f"Ray at {self.address} could not reserve {amounts} ({strategy}) within {seconds:g} s; it has {total}, "
                f"of which {free} are free; ask for fewer or smaller workers, or add machines"
            )
        self._connection.note_children()

    def take_gpus(self, workers: int, each: float, room: Mapping[str, float]) -> list[tuple[str, ...]]:
        """Return the GPUs of each worker of a Ray that was started here; :meth:`close` gives them back.

        Raises:
            ConfigurationError: see :meth:`~mrlm_pl.engines.ray.gpus.GpuLedger.take`.
        """
        self._gpus, self._gpus_each = self._connection.gpus.take(workers, each, room), each
        return self._gpus

    def actor(self, cls: type, bundle: int, arguments: Sequence[Any], resources: dict[str, float]) -> Any:
        """Return a new actor of the class in a reserved bundle, without waiting for it.

        Raises:
            EngineError: the cluster is gone.
        """
        while self._connection.broken():  # Ray would wait silently for its head and then end this process
            self.check()
            time.sleep(CHECK_SECONDS / 4)
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placed = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        remote = self._ray.remote(cls).options(
            num_cpus=resources.get("CPU", 0),
            num_gpus=resources.get("GPU", 0),
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=_CALLS,
            scheduling_strategy=placed,
        )
        return remote.remote(*arguments)

    def kill(self, actor: Any) -> None:
        """Kill an actor without waiting for it."""
        if not self._connection.broken():
            self._ray.kill(actor, no_restart=True)

    def end(self, actors: Sequence[Any], seconds: float) -> None:
        """Close actors, within some seconds, and kill them."""
        if not self._connection.broken():
            wait([actor.close.remote().future() for actor in actors], timeout=seconds)
        for actor in actors:
            self.kill(actor)

    def call(self, actor: Any, who: str, does: str, seconds: float, method: str, *arguments: Any) -> Future[Any]:
        """Call a method of an actor; return the future of its answer.

        The future fails with a ``WorkerLostError`` where the actor is dead or late, with an ``EngineError`` where the
        cluster is gone, and else with the actor's own error.

        Args:
            actor: actor whose method is called.
            who: name of the actor in errors.
            does: name of the work in errors.
            seconds: deadline.
            method: name of the method.
            arguments: arguments of the method.
        """
        return self.loop.submit(self._answer(getattr(actor, method).remote(*arguments).future(), who, does, seconds))

    async def _answer(self, call: Future[Any], who: str, does: str, seconds: float) -> Any:
        future, deadline = answer_of(call), time.monotonic() + seconds
        while not (await asyncio.wait({future}, timeout=min(CHECK_SECONDS, seconds)))[0]:
            await asyncio.to_thread(self.check)
            if time.monotonic() > deadline:
                raise WorkerLostError(f"{who} did not {does} within {seconds:g} s")
        try:
            return future.result()
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else EngineError(f"{who}: {error}") from error
        except self._ray.exceptions.RayError as error:
            await asyncio.to_thread(self.check)
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise WorkerLostError(f"{who} is gone while it should {does} ({reason})") from error

    def check(self) -> None:
        """Check that the head of the cluster answers.

        Raises:
            EngineError: the head has been silent for too long.
        """
        self._connection.check(self._silence)

    def close(self) -> None:
        """Free the reserved resources, once; the last pool of a process also ends a Ray that was started here."""
        if self._group is not None and not self._connection.broken():
            wait([in_daemon(partial(self._ray.util.remove_placement_group, self._group))], STOP_SECONDS)  # it may hang
        self.loop.close()
        self._connection.gpus.give_back(self._gpus, self._gpus_each)
        self._connection.give_back()


class WorkerLostError(EngineError):
    """A worker is dead or does not answer; it can be replaced."""


def _beyond(bundles: Sequence[Mapping[str, float]], total: Mapping[str, float]) -> str:
    """Return the resources that the cluster lacks for the bundles, in words; empty if it has enough.

    >>> _beyond([{"CPU": 1.0, "GPU": 1.0}] * 2, {"CPU": 8.0, "GPU": 1.0})
    '2 GPU (there are 1)'
    """
    names = dict.fromkeys(name for bundle in bundles for name in bundle)
    amounts = {name: math.fsum(bundle.get(name, 0.0) for bundle in bundles) for name in names}
    return ", ".join(
        f"{amount:g} {name} (there are {total.get(name, 0.0):g})"
        for name, amount in amounts.items()
        if amount > total.get(name, 0.0)
    )
