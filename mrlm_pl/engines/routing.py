"""An engine over engines: each policy's requests go to its engine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

from mrlm_pl.concurrency.calls import together
from mrlm_pl.engines.base import Engine, EngineWrapper, LearnerPlace, Sample, SampleRequest, sample_checked
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.grouping import grouped

P = TypeVar("P", bound=Hashable)


class RoutingEngine(EngineWrapper):
    """Sends the requests of a call to the engines of their policies, to all of them at the same time.

    Args:
        default: engine of every policy that ``elsewhere`` does not name; it may compute in the thread that waits.
        elsewhere: engines by policy.
    """

    def __init__(self, default: Engine, elsewhere: Mapping[str, Engine]) -> None:
        super().__init__(default)
        self.elsewhere = dict(elsewhere)

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        """Return one sample per request, in order; see :meth:`Engine.sample`.

        Raises:
            Exception: the first error of an engine; the other engines' work is cancelled.
        """
        engines = [self.engine_of(request.policy) for request in requests]
        return await sample_in_parts(requests, engines, sample_checked)

    def engine_of(self, policy: str) -> Engine:
        """Return the engine that generates for a policy."""
        return self.elsewhere.get(policy, self.engine)

    @property
    def holds_weights(self) -> bool:
        """True if all engines hold a copy of the weights."""
        return all(engine.holds_weights for engine in self._engines())

    @property
    def takes_chunks(self) -> bool:
        """True if all engines take chunks."""
        return all(engine.takes_chunks for engine in self._engines())

    def meet_learner(self, place: LearnerPlace) -> None:
        """Pass the learner's place to all engines; see :meth:`Engine.meet_learner`."""
        for engine in self._engines():
            engine.meet_learner(place)

    def release(self, session_prefix: str) -> None:
        """Drop caches in all engines; see :meth:`Engine.release`."""
        for engine in self._engines():
            engine.release(session_prefix)

    def close(self) -> None:
        """Close all engines; may be called twice."""
        self.engine.close()
        self.close_elsewhere()

    def close_elsewhere(self) -> None:
        """Close all engines but the default one; may be called twice."""
        for engine in self._engines()[1:]:
            engine.close()

    def _engines(self) -> list[Engine]:
        return list(dict.fromkeys([self.engine, *self.elsewhere.values()]))


def check_servers(engine: Engine, trained: Iterable[str]) -> None:
    """Validate that no two trained policies are on one server, without a request to it.

    Args:
        engine: engine of all policies.
        trained: names of the trained policies.

    Raises:
        ConfigurationError: two trained policies are on one server.
    """
    owners: dict[str, str] = {}
    for policy in trained:
        for url in engine.servers(policy):
            if (owner := owners.setdefault(url, policy)) != policy:
                raise ConfigurationError(
                    f"policies {owner!r} and {policy!r} are both trained, and {url} holds the weights of one; start a "
                    "server for each, and name them in a RoutingEngine (data.engine), or leave data.engine out to "
                    "generate in this process"
                )


async def sample_in_parts(
    requests: Sequence[SampleRequest],
    places: Sequence[P],
    ask: Callable[[P, list[SampleRequest]], Awaitable[list[Sample]]],
) -> list[Sample]:
    """Return one sample per request, in order, from places that are asked at the same time.

    Args:
        requests: requests of one call.
        places: place of each request.
        ask: returns the samples of a place for its requests, in order.

    Raises:
        Exception: the first error of a place; the other places' work is cancelled.
    """
    numbers_by_place = grouped((place, number) for number, place in enumerate(places))
    answers = await together(
        ask(place, [requests[number] for number in numbers]) for place, numbers in numbers_by_place.items()
    )
    by_request: dict[int, Sample] = {}
    for numbers, samples in zip(numbers_by_place.values(), answers, strict=True):
        by_request.update(zip(numbers, samples, strict=True))
    return [by_request[number] for number in range(len(requests))]
