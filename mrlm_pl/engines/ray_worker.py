"""What runs in a worker process of a pool: an engine, its models, and weights that arrive while it generates."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.engines.base import Engine, Sample, SampleRequest
from mrlm_pl.engines.skeleton import rebuild
from mrlm_pl.engines.weight_snapshot import Manifest
from mrlm_pl.engines.weight_sync import Invitation, Staged, WeightReceiver
from mrlm_pl.errors import EngineError


class PoolWorker:
    """An engine that is filled from afar.

    New weights are collected while :meth:`sample` goes on. :meth:`switch` lets the calls in hand end, holds back those
    that follow, changes all weights, and lets them go on: a call sees the old weights or the new ones.

    Args:
        make_engine: makes the engine.
        name: of the worker, which its samples bear.
        calls: how many calls of :meth:`sample` the engine is given at the same time.
    """

    def __init__(self, make_engine: Callable[[], Engine], name: str, calls: int) -> None:
        self._engine, self._name, self._calls = make_engine(), name, calls
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._receiver = WeightReceiver()
        self._models: dict[str, tuple[Any, dict[str, Tensor]]] = {}
        self._built: dict[str, tuple[Any, dict[str, Tensor]]] = {}
        self._staged: dict[str, Staged] = {}
        self._inside, self._switching = 0, False
        self._changed = asyncio.Condition()

    async def describe(self) -> dict[str, Any]:
        """Process id, host and device; the answer says that the worker is up."""
        return {"pid": os.getpid(), "host": socket.gethostname(), "device": str(self._device)}

    async def build(self, policy: str, skeleton: bytes) -> None:
        """Make the model of a policy, still without weights; the one that serves stays until :meth:`switch`."""
        self._built[policy] = await asyncio.to_thread(rebuild, skeleton, self._device)

    async def stage(self, policy: str, invitation: Invitation, rank: int, manifest: Manifest) -> None:
        """Collect weights of a policy.

        Raises:
            EngineError: see :meth:`~mrlm_pl.engines.weight_sync.WeightReceiver.receive`.
        """
        self._staged.pop(policy, None)
        self._staged[policy] = await asyncio.to_thread(self._receiver.receive, invitation, rank, manifest)

    async def switch(self, policy: str, version: int) -> int | None:
        """Serve with the weights that have been collected, if any were; the context window of the policy.

        Raises:
            EngineError: the weights are not those of the model; the old ones go on serving.
            Exception: the engine cannot load them; no call is answered from then on.
        """
        model, targets = self._built.get(policy) or self._models[policy]
        staged = self._staged.pop(policy, None) or Staged(Manifest((), 1), torch.empty(0, dtype=torch.uint8))
        staged.check(targets)
        absent = sorted(targets.keys() - staged.tensors.keys()) if policy in self._built else []
        if absent:
            raise EngineError(f"policy {policy!r}: weight {absent[0]!r} of {self._name} has not been sent")
        async with self._changed:
            await self._changed.wait_for(lambda: not self._switching)
            self._switching = True
            await self._changed.wait_for(lambda: self._inside == 0)
        await asyncio.to_thread(staged.install, targets)
        await asyncio.to_thread(self._engine.load, policy, model, version)
        # Not in a `finally`: a worker that is between two versions must not answer; it is going to be replaced.
        self._models[policy] = model, targets
        self._built.pop(policy, None)
        async with self._changed:
            self._switching = False
            self._changed.notify_all()
        return self._engine.window(policy)

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """One sample per request; see :meth:`~mrlm_pl.engines.base.Engine.sample`."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._switching and self._inside < self._calls)
            self._inside += 1
        try:
            samples = await self._engine.sample(requests)
        finally:
            async with self._changed:
                self._inside -= 1
                self._changed.notify_all()
        return [replace(sample, engine=self._name) for sample in samples]

    async def release(self, session_prefix: str) -> None:
        """Forget caches."""
        self._engine.release(session_prefix)
