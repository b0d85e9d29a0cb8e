"""Requests go to the engines of their policies, to all at once, and the samples come back in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from mrlm_pl.engines import ContinuousEngine, Engine, RoutingEngine, Sample, SampleRequest, Sampling
from mrlm_pl.engines.base import EngineWrapper
from mrlm_pl.errors import EngineError


class Noting(Engine):
    """Answers a request with its seed; waits for the other engine first, if it is to."""

    def __init__(self, name: str, here: asyncio.Event | None = None, other: asyncio.Event | None = None) -> None:
        self.name, self.here, self.other = name, here, other
        self.notes: list[Any] = []

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        self.notes.append([request.seed for request in requests])
        if self.here is not None and self.other is not None:
            self.here.set()
            try:
                await asyncio.wait_for(self.other.wait(), 60)
            except asyncio.CancelledError:
                self.notes.append("cancelled")
                raise
        if any(request.seed < 0 for request in requests):
            raise EngineError("no")
        return [Sample((request.seed,), (-1.0,), "length", 0, self.name) for request in requests]

    def load(self, policy: str, weights: Any, version: int) -> None:
        self.notes.append(("load", policy, weights, version))

    def release(self, session_prefix: str) -> None:
        self.notes.append(("release", session_prefix))

    def close(self) -> None:
        self.notes.append("close")


def request(policy: str, seed: int) -> SampleRequest:
    return SampleRequest((1,), policy, seed, Sampling())


def test_each_request_goes_to_its_engine_and_all_engines_work_at_once() -> None:
    async def play() -> tuple[Noting, Noting, list[Sample]]:
        first, second = asyncio.Event(), asyncio.Event()
        here, there = Noting("here", first, second), Noting("there", second, first)
        asked = [request(policy, seed) for seed, policy in enumerate(["a", "b", "c", "b", "a"])]
        return here, there, await RoutingEngine(here, {"b": there}).sample(asked)

    here, there, samples = asyncio.run(play())
    assert (here.notes, there.notes) == ([[0, 2, 4]], [[1, 3]]), "one call each, which waited for the other"
    assert [(sample.token_ids[0], sample.engine) for sample in samples] == [
        (0, "here"),
        (1, "there"),
        (2, "here"),
        (3, "there"),
        (4, "here"),
    ]


def test_an_engine_that_is_not_needed_is_not_asked() -> None:
    here, there = Noting("here"), Noting("there")
    assert len(asyncio.run(RoutingEngine(here, {"b": there}).sample([request("b", 1)]))) == 1
    assert asyncio.run(RoutingEngine(here, {"b": there}).sample([])) == []
    assert here.notes == []


def test_a_failure_ends_the_call_and_what_the_others_do() -> None:
    async def play() -> Noting:
        begun = asyncio.Event()
        here, there = Noting("here", begun, asyncio.Event()), Noting("there")
        with pytest.raises(EngineError, match="no"):
            await RoutingEngine(here, {"b": there}).sample([request("a", 1), request("b", -1)])
        await asyncio.sleep(0)
        return here

    assert asyncio.run(play()).notes == [[1], "cancelled"]


def test_weights_go_to_the_policys_engine_and_the_rest_to_all() -> None:
    here, there = Noting("here"), Noting("there")
    engine = RoutingEngine(here, {"b": there, "c": there})
    engine.load("a", "weights", 3)
    engine.load("b", "others", 4)
    engine.release("x/")
    engine.close()
    assert here.notes == [("load", "a", "weights", 3), ("release", "x/"), "close"]
    assert there.notes == [("load", "b", "others", 4), ("release", "x/"), "close"]


HOOKS = {name for name in vars(Engine) if not name.startswith("_")}


def overriding(kind: type) -> set[str]:
    """Return the hooks of an engine that the class does not leave to :class:`Engine`."""
    return {name for name in HOOKS if getattr(kind, name) is not getattr(Engine, name)}


@pytest.mark.parametrize("kind", [EngineWrapper, ContinuousEngine, RoutingEngine])
def test_an_engine_over_engines_leaves_out_no_hook(kind: type) -> None:
    assert HOOKS - overriding(kind) == set()


class Telling(Noting):
    """Says something of its own to every question."""

    holds_weights, takes_chunks = False, True

    def window(self, policy: str) -> int | None:
        return 5

    def reports_logprobs(self, policy: str) -> bool:
        return False

    def precision(self, policy: str) -> str | None:
        return self.name

    def meet_learner(self, place: Any) -> None:
        self.notes.append(("met", place))


def answers(engine: Engine) -> tuple[Any, ...]:
    engine.meet_learner("place")  # type: ignore[arg-type]
    return (
        engine.holds_weights,
        engine.takes_chunks,
        engine.window("p"),
        engine.reports_logprobs("p"),
    )


def test_what_an_engine_says_is_heard_through_its_wrappers() -> None:
    inner, other = Telling("inner"), Telling("other")
    expected = (False, True, 5, False)
    assert answers(inner) == answers(ContinuousEngine(inner)) == answers(RoutingEngine(inner, {})) == expected
    both = RoutingEngine(ContinuousEngine(inner), {"p": other})
    assert (both.precision("p"), both.precision("q")) == ("other", "inner")
    assert inner.notes.count(("met", "place")) == 3
