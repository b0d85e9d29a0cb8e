"""An engine over engines: each policy's requests go where that policy is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from mrlm_pl.engines.base import Engine, Sample, SampleRequest

if TYPE_CHECKING:
    from mrlm_pl.engines.learner_place import LearnerPlace
import asyncio
from collections.abc import Awaitable, Hashable

T = TypeVar("T")


class RoutingEngine(Engine):
    """Sends the requests of a call to the engines of their policies, to all of them at the same time.

    Args:
        default: the engine of every policy that ``elsewhere`` does not name.
        elsewhere: engines by policy.
    """

    def __init__(self, default: Engine, elsewhere: Mapping[str, Engine]) -> None:
        self.default, self.elsewhere = default, dict(elsewhere)

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one sample per request, in order; see :meth:`Engine.sample`.

        Raises:
            Exception: what the first engine that fails raises; what the others still do is cancelled.
        """
        places = [self.engine_of(request.policy) for request in requests]
        return await sampled_in_parts(requests, places, lambda engine, own: engine.sample(own))

    def engine_of(self, policy: str) -> Engine:
        """Return the engine that generates for a policy."""
        return self.elsewhere.get(policy, self.default)

    @property
    def holds_weights(self) -> bool:
        """True if all engines do."""
        return all(engine.holds_weights for engine in self._engines())

    def window(self, policy: str) -> int | None:
        """See :meth:`Engine.window`."""
        return self.engine_of(policy).window(policy)

    def precision(self, policy: str) -> str | None:
        """See :meth:`Engine.precision`."""
        return self.engine_of(policy).precision(policy)

    @property
    def takes_pieces(self) -> bool:
        """True if all engines do."""
        return all(engine.takes_pieces for engine in self._engines())

    @property
    def calls_at_once(self) -> int:
        """As many as the engine that takes fewest."""
        return min(engine.calls_at_once for engine in self._engines())

    @property
    def stats(self) -> list[Any]:
        """Counters of the engines, the default one first; see :attr:`Engine.stats`."""
        return [engine.stats for engine in self._engines()]

    def join_pool(self, place: int, places: int) -> Sequence[str]:
        """Return the claims of all engines; see :meth:`Engine.join_pool`."""
        return [claim for engine in self._engines() for claim in engine.join_pool(place, places)]

    def reports_logprobs(self, policy: str) -> bool:
        """See :meth:`Engine.reports_logprobs`."""
        return self.engine_of(policy).reports_logprobs(policy)

    def meet_learner(self, place: LearnerPlace) -> None:
        """Tell all engines; see :meth:`Engine.meet_learner`."""
        for engine in self._engines():
            engine.meet_learner(place)

    def load(self, policy: str, weights: Any, version: int) -> None:
        """Give the weights to the policy's engine; see :meth:`Engine.load`."""
        self.engine_of(policy).load(policy, weights, version)

    def compute_during(self, start: Callable[[], Future[T]]) -> T:
        """Return the result of the future that ``start`` gives; until then, the default engine may compute here."""
        return self.default.compute_during(start)

    def release(self, session_prefix: str) -> None:
        """Forget caches in all engines; see :meth:`Engine.release`."""
        for engine in self._engines():
            engine.release(session_prefix)

    def close(self) -> None:
        """Close all engines; may be called twice."""
        for engine in self._engines():
            engine.close()

    def close_elsewhere(self) -> None:
        """Close all engines but the default one; may be called twice."""
        for engine in dict.fromkeys(self.elsewhere.values()):
            if engine is not self.default:
                engine.close()

    def _engines(self) -> list[Engine]:
        return list(dict.fromkeys([self.default, *self.elsewhere.values()]))


P = TypeVar("P", bound=Hashable)


async def sampled_in_parts(
    requests: Sequence[SampleRequest],
    places: Sequence[P],
    ask: Callable[[P, list[SampleRequest]], Awaitable[list[Sample]]],
) -> list[Sample]:
    """Return one sample per request, in order, when each goes to its place; all places are asked at the same time.

    Args:
        requests: of one call.
        places: where each of them goes.
        ask: the samples that a place gives for its requests, in their order.

    Raises:
        Exception: what the first place that fails raises; what the others still do is cancelled.
    """
    parts: dict[P, list[int]] = {}
    for number, place in enumerate(places):
        parts.setdefault(place, []).append(number)
    asked = [
        asyncio.ensure_future(ask(place, [requests[number] for number in numbers])) for place, numbers in parts.items()
    ]
    try:
        answers = await asyncio.gather(*asked)
    finally:
        for task in asked:
            task.cancel()
    found: dict[int, Sample] = {}
    for numbers, samples in zip(parts.values(), answers, strict=True):
        found.update(zip(numbers, samples, strict=True))
    return [found[number] for number in range(len(requests))]
