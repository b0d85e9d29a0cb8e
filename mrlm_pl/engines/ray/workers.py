"""A worker process of a pool: models whose weights arrive while it computes, and an engine for them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.engines.base import Engine, LearnerPlace, Sample, SampleRequest
from mrlm_pl.engines.ray.gpus import visible_gpus
from mrlm_pl.engines.transfer.broadcast import Invitation, WeightReceiver, check_fit, install
from mrlm_pl.engines.transfer.manifest import Manifest
from mrlm_pl.errors import ConfigurationError, EngineError
from mrlm_pl.policy.architecture import Architecture
from mrlm_pl.policy.sharding import all_tensors


class PoolWorker:
    """An engine in a worker process, filled by the learner.

    New weights are collected while a call runs. :meth:`switch` waits for it, holds back further ones, changes all
    weights, and releases them: a call uses the old weights or the new ones.

    Args:
        gpus: ids of the GPUs that this process may see, for ``CUDA_VISIBLE_DEVICES``; None leaves it unchanged.
        make_engine: makes the engine.
        name: name of the worker, and of the engine in samples.
        learner: the precision of the run.
    """

    def __init__(self, gpus: str | None, make_engine: Callable[[], Engine], name: str, learner: LearnerPlace) -> None:
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # before this process uses CUDA
        self._make_engine, self._name, self._learner = make_engine, name, learner
        self._engine: Any = None
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._receiver = WeightReceiver()
        self._models: dict[str, Any] = {}
        self._built: dict[str, Any] = {}
        self._staged: dict[str, dict[str, Tensor]] = {}
        self._in_use = asyncio.Lock()

    async def describe(self) -> dict[str, Any]:
        """Make the engine; return process id, host, device and GPUs of the worker, and whether it ``takes_chunks``.

        Raises:
            ConfigurationError: the engine samples from servers.
            Exception: the engine cannot be made.
        """
        self._engine = self._make_engine()  # not in the constructor, whose errors Ray hides
        if urls := self._engine.servers(""):
            raise ConfigurationError(
                f"data.engine.engine samples from {', '.join(urls)}, which several workers would give their weights; "
                "leave the pool out: OpenAICompatible takes several urls"
            )
        self._engine.meet_learner(self._learner)
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "device": str(self._device),
            "gpus": list(visible_gpus()) if os.environ.get("CUDA_VISIBLE_DEVICES") else [],
            "takes_chunks": self._engine.takes_chunks,
        }

    async def build(self, policy: str, architecture: Architecture) -> None:
        """Build the model of a policy, uninitialized; the current one serves until :meth:`switch`."""
        self._built[policy] = await asyncio.to_thread(architecture.build, self._device)

    async def stage(self, policy: str, invitation: Invitation, rank: int, manifest: Manifest) -> None:
        """Collect weights of a policy.

        Raises:
            EngineError: see :meth:`~mrlm_pl.engines.transfer.broadcast.WeightReceiver.receive`.
        """
        self._staged.pop(policy, None)
        self._staged[policy] = await asyncio.to_thread(self._receiver.receive, invitation, rank, manifest)

    async def switch(self, policy: str, version: int) -> dict[str, Any]:
        """Serve with the collected weights, if there are any.

        Returns the policy's ``window``, ``reports_logprobs`` and ``precision``.

        Raises:
            EngineError: the weights do not fit the model, which keeps the old ones.
            Exception: the engine cannot use the model; no call is answered from then on.
        """
        model = self._built.get(policy) or self._models[policy]
        targets = all_tensors(model)
        staged = self._staged.pop(policy, {})
        check_fit(staged, targets)
        absent = sorted(targets.keys() - staged.keys()) if policy in self._built else []
        if absent:
            raise EngineError(f"policy {policy!r}: weight {absent[0]!r} of {self._name} has not been sent")
        await self._in_use.acquire()
        await asyncio.to_thread(install, staged, targets)
        await asyncio.to_thread(self._engine.load, policy, model, version)
        self._models[policy] = model
        self._built.pop(policy, None)
        # Not in a `finally`: a worker between two versions must not answer; it will be replaced.
        self._in_use.release()
        return {
            "window": self._engine.window(policy),
            "reports_logprobs": self._engine.reports_logprobs(policy),
            "precision": self._engine.precision(policy),
        }

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one sample per request, one call after the other; see :meth:`~mrlm_pl.engines.base.Engine.sample`."""
        async with self._in_use:
            samples = await self._engine.sample(requests)
        return [replace(sample, engine=self._name) for sample in samples]

    async def close(self) -> None:
        """Close the engine before the worker ends."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    async def release(self, session_prefix: str) -> None:
        """Drop caches."""
        self._engine.release(session_prefix)
