"""Reference models in worker processes under Ray, on this machine or on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.concurrency.calls import together
from mrlm_pl.engines.base import LearnerPlace
from mrlm_pl.engines.ray.group import WorkerGroup
from mrlm_pl.engines.reference import Reference, TokenRows
from mrlm_pl.policy import Policy
from mrlm_pl.policy.forward.packing import ForwardPass
from mrlm_pl.policy.forward.passes import forward_passes, model_device

_DOES = "compute log-probabilities for the learner"


class RayReference(WorkerGroup, Reference):
    """Holds the reference models in worker processes under Ray, and computes log-probabilities there.

    The learner reads the initial weights with the first request, sends them to every worker, and keeps none; policies
    with the same initial weights share a reference. Rows are sent as the learner's forward passes, of at most the
    policy's ``max_forward_tokens`` (without a bound and with several workers, an even share each), to the next free
    worker. A worker that dies or does not answer is replaced, the weights are read again for it, and its pass is
    repeated.

    Args:
        workers: number of worker processes.
        options: options of :class:`~mrlm_pl.engines.ray.group.WorkerGroup`; the deadline ``sample`` is for a forward
            pass.

    Raises:
        ConfigurationError: a number is out of its range.
    """

    name, kind = "ray_reference", "the reference pool"

    def __init__(self, workers: int = 1, **options: Any) -> None:
        super().__init__(workers, **options)
        self._planners: dict[str, Any] = {}  # models on the meta device, to plan passes

    def _worker(self, place: int, gpus: str | None) -> tuple[type, tuple[Any, ...]]:
        from mrlm_pl.engines.ray.workers import ReferenceWorker

        return ReferenceWorker, (gpus, f"{self.name}/{place}")

    @torch.no_grad()
    def logprobs(self, policy: Policy, rows: TokenRows) -> Tensor:
        """See :meth:`Reference.logprobs`; the numbers are those of :meth:`Policy.reference_logprobs`.

        Raises:
            PolicyError: the initial weights cannot be read.
            EngineError: too many workers were lost, the cluster is gone, or the pool is closed.
        """
        from mrlm_pl.engines.ray.workers import Precision

        model = self._load(policy)
        passes = self._passes(self._planners[model], policy, rows)
        precision = Precision.now(model_device(policy.network))
        calls = [(model, forward_pass, precision) for forward_pass in passes]
        results = self.cluster.loop.submit(self._ask(calls)).result()
        dtype = results[0].dtype if results else torch.float32
        flat = torch.zeros(rows.token_ids.numel(), dtype=dtype)
        for forward_pass, values in zip(passes, results, strict=True):
            flat[forward_pass.destinations] = values
        return flat.view(rows.token_ids.shape)

    def _load(self, policy: Policy) -> str:
        """Load the policy's initial weights into the workers if necessary; return their name there."""
        weight = next(policy.network.parameters())
        dtype = weight.dtype  # the trainer may compute in one precision throughout
        self.learner = self.learner or LearnerPlace.of(weight.device)
        name = f"{policy.name_or_path} {policy.origin} {policy.int8} {dtype}"
        if name not in self._planners or self.cluster is None:

            def read() -> Any:
                return policy.initial_model("reference").requires_grad_(False).to(dtype)

            weights = read()
            self.fill(name, weights, 0, read)
            self._planners[name] = weights.to("meta")
        return name

    def _passes(self, planner: Any, policy: Policy, rows: TokenRows) -> list[ForwardPass]:
        passes = forward_passes(planner, **rows.inputs(), max_tokens=policy.max_forward_tokens)
        if policy.max_forward_tokens is None and 0 < len(passes) < self.count:
            tokens = sum(forward_pass.input_ids.numel() for forward_pass in passes)
            share = -(-tokens // self.count)
            passes = forward_passes(planner, **rows.inputs(), max_tokens=share)
        return passes

    async def _ask(self, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the workers' log-probabilities in the order of the calls; each worker has one call at a time."""
        waiting, answers = iter(enumerate(calls)), dict[int, Any]()

        async def serve(place: int) -> None:
            for number, call in waiting:
                answers[number] = await self.ask(place, _DOES, "logprobs", *call)

        await together(serve(place) for place in range(self.count))
        return [answers[number] for number in range(len(calls))]
