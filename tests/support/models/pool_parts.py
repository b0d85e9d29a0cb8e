"""A stand-in for Ray: workers in this process that can be killed, each with an event loop in a thread."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Any

import pytest

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.engines.ray import pool as ray_pool
from mrlm_pl.engines.ray.cluster import WorkerLostError, answer_of
from mrlm_pl.engines.ray.gpus import GpuLedger
from mrlm_pl.errors import EngineError


def stand_in(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Return the cluster of all new pools."""
    cluster = FakeCluster()
    monkeypatch.setattr(ray_pool, "RayCluster", lambda *arguments: cluster)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # workers set it for their process, here this one
    return cluster


def sent_tensors(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return a list that collects the names of all tensors sent."""
    sent: list[list[str]] = []
    send = ray_pool.WeightSender.send

    def recording(self: Any, invitation: Any, manifest: Any, *rest: Any) -> Any:
        sent.append([item.name for item in manifest.tensors])
        return send(self, invitation, manifest, *rest)

    monkeypatch.setattr(ray_pool.WeightSender, "send", recording)
    return sent


CALLS = EventLoopThread()
"""The loop that waits for the answers of all workers."""


class DeadError(Exception):
    """The error of a killed worker's call."""


class FakeActor:
    """A worker in a thread."""

    def __init__(self, made: Any, place: int) -> None:
        self.worker, self.place, self.alive = made, place, True
        self.loop = EventLoopThread()
        self.calls: list[str] = []
        self.before: Callable[[str], None] = lambda method: None
        self.waiting: list[Future[Any]] = []

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.calls.append(method)
        self.before(method)
        if not self.alive:
            future.set_exception(DeadError())
            return future
        self.waiting.append(future)
        self.loop.submit(self._run(future, method, arguments))
        return future

    async def _run(self, future: Future[Any], method: str, arguments: Sequence[Any]) -> None:
        try:
            result = await getattr(self.worker, method)(*arguments)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(result)

    def kill(self) -> None:
        self.alive = False
        for future in self.waiting:
            if not future.done():
                future.set_exception(DeadError())


class FakeCluster:
    """The parts of :class:`~mrlm_pl.engines.ray.cluster.RayCluster` that a pool uses."""

    host, loop = "127.0.0.1", CALLS
    address = "here"

    def __init__(self, started_here: bool = True) -> None:
        self.started_here = started_here
        self.ledger = GpuLedger()
        self.actors: list[FakeActor] = []
        self.reserved: tuple[Any, ...] = ()
        self.gone = self.closed = False
        self.prepare: Callable[[FakeActor], None] = lambda actor: None

    def reserve(self, *reserved: Any) -> None:
        self.reserved = reserved

    def take_gpus(self, workers: int, each: float, room: Mapping[str, float]) -> list[tuple[str, ...]]:
        return self.ledger.take(workers, each, room)

    def actor(self, cls: type, bundle: int, arguments: Sequence[Any], resources: Any) -> FakeActor:
        actor = FakeActor(cls(*arguments), bundle)
        self.prepare(actor)
        self.actors.append(actor)
        return actor

    def kill(self, actor: FakeActor) -> None:
        actor.kill()

    def end(self, actors: Sequence[FakeActor], seconds: float) -> None:
        wait_for([actor.call("close") for actor in actors], timeout=seconds)
        for actor in actors:
            self.kill(actor)

    def call(self, actor: FakeActor, who: str, does: str, seconds: float, *call: Any) -> Future[Any]:
        return CALLS.submit(self._answer(actor.call(*call), who, does, seconds))

    async def _answer(self, asked: Future[Any], who: str, does: str, seconds: float) -> Any:
        future = answer_of(asked)
        if not (await asyncio.wait({future}, timeout=None if seconds == math.inf else seconds))[0]:
            raise WorkerLostError(f"{who} did not {does} within {seconds:g} s")
        try:
            return future.result()
        except DeadError as error:
            raise WorkerLostError(f"{who} is gone while it should {does}") from error

    def check(self) -> None:
        if self.gone:
            raise EngineError("the cluster is gone")

    def close(self) -> None:
        self.closed = True
        for actor in self.actors:
            actor.kill()
            actor.loop.close()

    def of(self, place: int) -> FakeActor:
        """Return the current worker of a place."""
        return [actor for actor in self.actors if actor.place == place][-1]
