"""Reference models in worker processes that Ray places on this machine or on a cluster."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.engines.learner_place import LearnerPlace
from mrlm_pl.engines.ray.cluster import CHECK_SECONDS, WorkerLostError
from mrlm_pl.engines.ray.group import OfWorkers, Worker, WorkerGroup
from mrlm_pl.engines.ray.settings import PoolDeadlines, PoolResources, WeightTransfer
from mrlm_pl.engines.reference import Reference, TokenRows
from mrlm_pl.policy import Policy
from mrlm_pl.policy.forward.passes import ForwardPass, forward_passes

logger = logging.getLogger(__name__)


class RayReference(OfWorkers, Reference):
    """Holds the reference models in worker processes under Ray, and computes log-probabilities there.

    The learner reads the initial weights when they are first asked for, sends them to every worker, and keeps none;
    policies that begin with the same weights have one reference. Rows go out as the forward passes that the learner
    would make, of at most the policy's ``max_forward_tokens`` (where it has none and there are several workers, an even
    share each), to whichever worker is free. A worker that dies or does not answer is replaced, the weights are read
    again for it, and its pass is made again.

    Args:
        workers: worker processes.
        address: ``HOST:PORT`` of a Ray cluster, ``auto`` for the one that this machine belongs to; None starts Ray on
            this machine, one for all pools of this process.
        resources: what is reserved for each worker and for the learner.
        transfer: how weights are sent.
        deadlines: how long things may take; ``sample`` is that of a forward pass.
        replacements: how many workers may be replaced before the run ends.

    Raises:
        ConfigurationError: a number is out of its range.
    """

    name = "ray_reference"

    def __init__(
        self,
        workers: int = 1,
        address: str | None = None,
        resources: PoolResources = PoolResources(),  # noqa: B008 (frozen)
        transfer: WeightTransfer = WeightTransfer(),  # noqa: B008 (frozen)
        deadlines: PoolDeadlines = PoolDeadlines(),  # noqa: B008 (frozen)
        replacements: int = 8,
    ) -> None:
        self._group = WorkerGroup(
            "the reference pool", self._worker, workers, address, resources, transfer, deadlines, replacements
        )
        self._planners: dict[str, Any] = {}  # models without memory, which the passes are planned for

    def _worker(self, place: int, gpus: str | None) -> tuple[type, tuple[Any, ...]]:
        from mrlm_pl.engines.ray.workers import ReferenceWorker

        return ReferenceWorker, (gpus, f"{self.name}/{place}")

    @torch.no_grad()
    def logprobs(self, policy: Policy, rows: TokenRows) -> Tensor:
        """See :meth:`Reference.logprobs`; the numbers are those of :meth:`Policy.reference_logprobs`.

        Raises:
            PolicyError: the initial weights cannot be read.
            EngineError: too many workers were lost, or the cluster is, or the pool is closed.
        """
        from mrlm_pl.engines.ray.workers import Precision

        model = self._loaded(policy)
        device = rows.token_ids.device
        passes = self._passes(self._planners[model], policy, rows)
        precision = Precision.now(device)
        found = self._ask("logprobs", [(model, one.to("cpu"), precision) for one in passes])
        dtype = found[0].dtype if found else torch.float32
        flat = torch.zeros(rows.token_ids.numel(), dtype=dtype, device=device)
        for one, values in zip(passes, found, strict=True):
            flat[one.inputs.destinations] = values.to(device)
        return flat.view(rows.token_ids.shape)

    def _loaded(self, policy: Policy) -> str:
        """Return the name of the policy's initial weights in the workers, which have them."""
        held = next(policy.network.parameters())
        dtype = held.dtype  # of a trainer that computes in one precision throughout
        self._group.learner = self._group.learner or LearnerPlace.of(held.device)
        name = f"{policy.name_or_path} {policy.origin} {dtype}"
        if name not in self._planners or self._group.cluster is None:

            def read() -> Any:
                return policy.initial_model().requires_grad_(False).to(dtype)

            weights = read()
            self._group.load(name, weights, 0, read)
            self._planners[name] = weights.to("meta")
        return name

    def _passes(self, planner: Any, policy: Policy, rows: TokenRows) -> list[ForwardPass]:
        passes = forward_passes(planner, **rows.inputs(), max_tokens=policy.max_forward_tokens)
        if policy.max_forward_tokens is None and 0 < len(passes) < self._group.count:
            tokens = sum(one.inputs.input_ids.numel() for one in passes)
            share = -(-tokens // self._group.count)
            passes = forward_passes(planner, **rows.inputs(), max_tokens=share)
        return passes

    def _ask(self, method: str, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the workers' answers in the order of the calls; each worker has one call at a time."""
        group, does = self._group, "compute log-probabilities for the learner, which waits for them"
        waiting, answers = deque(range(len(calls))), dict[int, Any]()
        under_way: dict[Future[Any], tuple[Worker, int, float]] = {}
        while waiting or under_way:
            busy = {worker for worker, _, _ in under_way.values()}
            for worker in [item for item in group.workers if item not in busy][: len(waiting)]:
                number = waiting.popleft()
                future = group.cluster.call(worker.actor, method, *calls[number])
                under_way[future] = worker, number, time.monotonic() + group.deadlines.sample
            first = min(deadline for _, _, deadline in under_way.values())
            seconds = max(0.0, min(CHECK_SECONDS, first - time.monotonic()))
            if not wait(under_way, timeout=seconds, return_when=FIRST_COMPLETED).done:
                group.cluster.check()
            for future in [item for item, (_, _, ends) in under_way.items() if item.done() or time.monotonic() > ends]:
                worker, number, _ = under_way.pop(future)
                try:
                    answers[number] = self._answer(future, worker, does)
                except WorkerLostError as error:
                    group.replace_if_current(worker, str(error))
                    waiting.appendleft(number)
        return [answers[number] for number in range(len(calls))]

    def _answer(self, future: Future[Any], worker: Worker, does: str) -> Any:
        if not future.done():
            raise WorkerLostError(f"{worker.name} did not {does}, within {self._group.deadlines.sample:g} s")
        return self._group.cluster.wait(future, self._group.deadlines.sample, worker.name, does)
