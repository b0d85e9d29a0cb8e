"""A worker process of a pool: models whose weights arrive while it computes, and an engine for them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import local_torch_dtype

from mrlm_pl.engines.base import Engine, LearnerPlace, Sample, SampleRequest
from mrlm_pl.engines.ray.gpus import visible_gpus
from mrlm_pl.engines.transfer.broadcast import Invitation, WeightReceiver, check_fit, install
from mrlm_pl.engines.transfer.manifest import Manifest
from mrlm_pl.errors import EngineError
from mrlm_pl.policy.architecture import Architecture
from mrlm_pl.policy.forward.packing import ForwardPass
from mrlm_pl.policy.forward.passes import pass_logprobs
from mrlm_pl.policy.sharding import all_tensors


class FilledWorker:
    """Models in a worker process, filled by the learner.

    New weights are collected while calls run. :meth:`switch` waits for the running calls, holds back further ones,
    changes all weights, and releases them: a call uses the old weights or the new ones.

    Args:
        gpus: ids of the GPUs that this process may see, for ``CUDA_VISIBLE_DEVICES``; None leaves it unchanged.
        name: name of the worker.
    """

    _calls = 1  # at the same time

    def __init__(self, gpus: str | None, name: str) -> None:
        if gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus  # before this process uses CUDA
        self._name = name
        self.claims: Sequence[str] = ()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._receiver = WeightReceiver()
        self._models: dict[str, Any] = {}
        self._built: dict[str, Any] = {}
        self._staged: dict[str, dict[str, Tensor]] = {}
        self._inside, self._switching = 0, False
        self._changed = asyncio.Condition()

    async def close(self) -> None:
        """Free the worker's resources before it ends."""

    def use(self, policy: str, model: Any, version: int) -> Any:
        """Serve with a model from now on; return the result of :meth:`switch`. By default models need no engine."""

    async def describe(self) -> dict[str, Any]:
        """Return process id, host, device, GPUs and claims of the worker, once it is up."""
        return {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "device": str(self._device),
            "claims": list(self.claims),
            "gpus": list(visible_gpus()) if os.environ.get("CUDA_VISIBLE_DEVICES") else [],
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

    async def switch(self, policy: str, version: int) -> Any:
        """Serve with the collected weights, if there are any; return the result of :meth:`use`.

        Raises:
            EngineError: the weights do not fit the model, which keeps the old ones.
            Exception: the model cannot be used; no call is answered from then on.
        """
        model = self._built.get(policy) or self._models[policy]
        targets = all_tensors(model)
        staged = self._staged.pop(policy, {})
        check_fit(staged, targets)
        absent = sorted(targets.keys() - staged.keys()) if policy in self._built else []
        if absent:
            raise EngineError(f"policy {policy!r}: weight {absent[0]!r} of {self._name} has not been sent")
        async with self._changed:
            await self._changed.wait_for(lambda: not self._switching)
            self._switching = True
            await self._changed.wait_for(lambda: self._inside == 0)
        await asyncio.to_thread(install, staged, targets)
        answer = await asyncio.to_thread(self.use, policy, model, version)
        # Not in a `finally`: a worker between two versions must not answer; it will be replaced.
        self._models[policy] = model
        self._built.pop(policy, None)
        async with self._changed:
            self._switching = False
            self._changed.notify_all()
        return answer

    @asynccontextmanager
    async def call(self) -> AsyncIterator[None]:
        """Keep the weights within the context; entered as soon as a call may run."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._switching and self._inside < self._calls)
            self._inside += 1
        try:
            yield
        finally:
            async with self._changed:
                self._inside -= 1
                self._changed.notify_all()


class PoolWorker(FilledWorker):
    """An engine in a worker process.

    Args:
        gpus, name: see :class:`FilledWorker`; the name is that of the engine in samples.
        make_engine: makes the engine.
        place: number of the worker in the pool.
        places: number of workers of the pool.
        calls: concurrent calls of :meth:`sample`; None: the engine's own number.
        learner: the precision of the run.
    """

    def __init__(
        self,
        gpus: str | None,
        make_engine: Callable[[], Engine],
        name: str,
        place: int,
        places: int,
        calls: int | None,
        learner: LearnerPlace,
    ) -> None:
        super().__init__(gpus, name)
        self._learner, self._make_engine = learner, make_engine
        self._place, self._places, self._calls_asked = place, places, calls
        self._engine: Any = None

    async def describe(self) -> dict[str, Any]:
        """Make the engine; return :meth:`FilledWorker.describe` and ``takes_pieces``.

        Raises:
            Exception: the engine cannot be made, or not for this worker.
        """
        self._engine = self._make_engine()  # not in the constructor, whose errors Ray hides
        self._engine.meet_learner(self._learner)
        self.claims = self._engine.join_pool(self._place, self._places)
        self._calls = self._calls_asked or self._engine.calls_at_once
        return await super().describe() | {"takes_pieces": self._engine.takes_pieces}

    def use(self, policy: str, model: Any, version: int) -> dict[str, Any]:
        """Load the model into the engine; return the policy's ``window``, ``reports_logprobs`` and ``precision``."""
        self._engine.load(policy, model, version)
        return {
            "window": self._engine.window(policy),
            "reports_logprobs": self._engine.reports_logprobs(policy),
            "precision": self._engine.precision(policy),
        }

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one sample per request; see :meth:`~mrlm_pl.engines.base.Engine.sample`."""
        async with self.call():
            samples = await self._engine.sample(requests)
        return [replace(sample, engine=self._name) for sample in samples]

    async def close(self) -> None:
        """Close the engine."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    async def release(self, session_prefix: str) -> None:
        """Drop caches."""
        self._engine.release(session_prefix)


@dataclass(frozen=True)
class Precision:
    """The precision of the learner's computations.

    Args:
        autocast: dtype of autocast, or None.
        default: torch's default dtype.
    """

    autocast: torch.dtype | None
    default: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Precision:
        """Return the precision of this thread on a device."""
        casts = torch.is_autocast_enabled(device.type)
        return cls(torch.get_autocast_dtype(device.type) if casts else None, torch.get_default_dtype())

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Compute with this precision on a device; the default dtype is that of the whole process."""
        casts = torch.autocast(device.type, self.autocast, enabled=self.autocast is not None)
        with local_torch_dtype(self.default), casts:
            yield


class ReferenceWorker(FilledWorker):
    """Frozen models in a worker process, for one forward pass at a time."""

    async def logprobs(self, model: str, planned: ForwardPass, precision: Precision) -> Tensor:
        """Return the log-probability [n] of each action token of a pass, on the CPU."""
        async with self.call():
            return await asyncio.to_thread(self._logprobs, self._models[model], planned, precision)

    @torch.no_grad()
    def _logprobs(self, model: Any, planned: ForwardPass, precision: Precision) -> Tensor:
        with precision.on(self._device):
            return pass_logprobs(model, planned.to(self._device)).cpu()
