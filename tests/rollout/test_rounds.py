"""Rounds against lockstep: the same episodes, fixed batches, and environments that answer beside the sampling."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from mrlm_pl.engines import Engine, InProcessEngine, Sample, SampleRequest, Sampling
from mrlm_pl.engines.base import EngineWrapper
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, Task, TaskSource
from mrlm_pl.episode import Episode, Message
from mrlm_pl.errors import ConfigurationError, EngineError, NonFiniteError
from mrlm_pl.policy.chat import ChatFormat
from mrlm_pl.policy.tiny import build_tokenizer
from mrlm_pl.rollout.play import EpisodeSpec, Seat
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.rollout.rounds import RoundOptions, Rounds
from mrlm_pl.rollout.tree_player import Branching, TreePlayer
from tests.engines.conftest import build

TOKENIZER = build_tokenizer()
CHAT = ChatFormat(TOKENIZER)


class Batches(EngineWrapper):
    """Notes the episodes of each batch."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.batches: list[list[str]] = []

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        self.batches.append([request.session for request in requests])
        return await super().sample(requests)


class ByLength(Engine):
    """Each turn is as long as the last digit of its seed says."""

    takes_chunks = True

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        found = []
        for request in requests:
            left = request.seed % 10 + 1 - request.offset
            count = min(left, request.chunk_tokens or left)
            ids = [5] * count
            reason: Any = "length"
            if count == left:
                ids[-1], reason = TOKENIZER.eos_token_id, "stop"
            found.append(Sample(tuple(ids), (-0.5,) * count, reason, 0, "lengths"))
        return found

    def load(self, policy: str, weights: Any, version: int) -> None:
        raise AssertionError("the player loads no weights")


class Words(Environment):
    """The agent speaks three times; task ``n`` answers after its own time."""

    name = "words"
    agents = ("agent",)

    def __init__(self, seconds: Mapping[int, float] | None = None) -> None:
        self.seconds = seconds or {}

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(8)])

    def reset(self, task: Task) -> Observations:
        self.n, self.left = task.data["n"], 3
        return {"agent": [Message("user", f"Begin {self.n}")]}

    def step(self, actions: Mapping[str, Message]) -> Step:
        time.sleep(self.seconds.get(self.n, 0.0))
        self.left -= 1
        if self.left:
            return Step({"agent": [Message("user", "Go on")]}, {"agent": 0.0})
        return Step(rewards={"agent": float(len(actions["agent"].content))}, done=True, stop_reason="end")


def in_rounds(player: EpisodePlayer, chunk_tokens: int, answer: int = 1) -> Rounds:
    rounds = Rounds(player.engine, RoundOptions(chunk_tokens, answer))
    player.engine, player.call = rounds, partial(rounds.call, player.caller)
    return rounds


def play(environment: Environment, engine: Engine, chunk_tokens: int | None, answer: int = 1) -> list[Episode]:
    seats = {agent: Seat("p", CHAT, Sampling(max_tokens=10), 256) for agent in environment.agents}
    player = EpisodePlayer({environment.name: environment}, seats, engine)
    source = environment.tasks("train")
    todo = [EpisodeSpec(f"e{n}", source[n], f"g{n}", seed=n) for n in range(8)]
    try:
        if chunk_tokens is None:
            return player.play_blocking(todo)
        apart = in_rounds(player, chunk_tokens, answer).apart(player.play)
        return player.run_blocking(lambda: apart(todo))
    finally:
        player.close()


def tokens(episodes: Sequence[Episode]) -> list[Any]:
    return [[row.token_ids for row in episode.rows()] for episode in episodes]


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
def test_episodes_are_those_of_lockstep(chunk_tokens: int) -> None:
    engine = InProcessEngine()
    engine.load("p", build("qwen2", vocab_size=len(TOKENIZER), max_position_embeddings=256), 0)
    whole, rounds = (play(Words(), engine, size) for size in (None, chunk_tokens))
    assert tokens(rounds) == tokens(whole)
    for one, other in zip(whole, rounds, strict=True):
        for row, again in zip(one.rows(), other.rows(), strict=True):
            assert again.logprobs == pytest.approx(row.logprobs, abs=1e-5)
            assert again.turns == row.turns


@pytest.mark.parametrize("answer", [1, 2])
def test_batches_do_not_depend_on_the_time_that_environments_take(answer: int) -> None:
    found = []
    for seconds in ({}, {0: 0.1, 3: 0.03}, {5: 0.1}):
        engine = Batches(ByLength())
        play(Words(seconds), engine, 2, answer)
        found.append(engine.batches)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("answer", [1, 3])
def test_episodes_join_again_when_their_answer_is_due(answer: int) -> None:
    engine = Batches(ByLength())
    play(Words(), engine, 2, answer)
    turns = [{session.split("/")[0] for session in batch} for batch in engine.batches]
    lockstep = Batches(ByLength())
    play(Words(), lockstep, None)
    assert [len(batch) for batch in lockstep.batches] == [8, 8, 8]
    assert len(turns[0]) == 8
    leaves = next(n for n in range(1, len(turns)) if len(turns[n]) < 8)
    away = turns[0] - turns[leaves]
    assert [len(away & later) for later in turns[leaves : leaves + answer]] == [0] * answer
    assert away <= turns[leaves + answer]


def test_environments_answer_while_the_engine_samples() -> None:
    """The first batch in which an episode is absent lasts until that episode's environment is in its step."""
    stepping = threading.Event()
    seen: list[bool] = []

    class Lasts(ByLength):
        async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
            if len(requests) < 8 and not seen:
                seen.append(await asyncio.to_thread(stepping.wait, 60))
            return await super().sample(requests)

    class Tells(Words):
        def step(self, actions: Mapping[str, Message]) -> Step:
            stepping.set()
            return super().step(actions)

    play(Tells(), Lasts(), 2)
    assert seen == [True]


def test_a_tree_in_rounds_is_the_tree_of_levels() -> None:
    environment, engine = Words(), InProcessEngine()
    engine.load("p", build("qwen2", vocab_size=len(TOKENIZER), max_position_embeddings=256), 0)
    found = []
    for chunk_tokens in (None, 3):
        seats = {"agent": Seat("p", CHAT, Sampling(max_tokens=8), 256)}
        player = EpisodePlayer({"words": environment}, seats, engine)
        source = environment.tasks("train")
        roots = [EpisodeSpec(f"e{n}", source[n], f"e{n}", seed=n) for n in range(3)]
        play_trees: Any = TreePlayer(player, Branching(), 2).play
        if chunk_tokens is not None:
            play_trees = in_rounds(player, chunk_tokens).apart(play_trees)
        found.append([tokens(paths) for paths in player.run_blocking(partial(play_trees, roots))])
        player.close()
    assert found[0] == found[1]
    assert len(found[0][0]) == 2**3


def test_outside_of_rounds_requests_and_calls_go_through() -> None:
    engine = Batches(ByLength())
    player = EpisodePlayer({"words": Words()}, {"agent": Seat("p", CHAT, Sampling(max_tokens=10), 256)}, engine)
    in_rounds(player, 2)
    source = Words().tasks("train")
    played = player.play_blocking([EpisodeSpec(f"e{n}", source[n], f"g{n}", seed=n) for n in range(8)])
    player.close()
    assert [len(batch) for batch in engine.batches] == [8, 8, 8]
    assert not any(episode.failed for episode in played)


class Fails(ByLength):
    """One episode's requests fail."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        if any(request.session.startswith("e3/") for request in requests):
            raise self.error
        return await super().sample(requests)


@pytest.mark.parametrize("error", [EngineError("no such policy"), NonFiniteError("NaN")])
def test_an_error_of_the_engine_ends_all_episodes(error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        play(Words(), Fails(error), 2)


def test_a_failed_environment_is_started_again_in_rounds() -> None:
    broken: list[int] = []

    class Breaks(Words):
        def step(self, actions: Mapping[str, Message]) -> Step:
            if self.n == 2 and not broken:
                broken.append(self.n)
                raise OSError("lost")
            return super().step(actions)

    episodes = play(Breaks(), ByLength(), 2)
    assert [episode.attempts for episode in episodes] == [1, 1, 2, 1, 1, 1, 1, 1]
    assert not any(episode.failed for episode in episodes)


def test_a_cancelled_play_leaves_nothing_running() -> None:
    engine = Batches(ByLength())
    rounds = Rounds(engine, RoundOptions(2))
    ended = []

    async def waits() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append(True)

    async def cancelled() -> None:
        playing = asyncio.ensure_future(rounds.play([waits(), waits()]))
        await asyncio.sleep(0.01)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        await asyncio.sleep(0)
        assert ended == [True, True]

    asyncio.run(cancelled())


def test_an_engine_of_whole_turns_is_refused() -> None:
    class Whole(ByLength):
        takes_chunks = False

    with pytest.raises(ConfigurationError, match="Whole samples whole turns"):
        Rounds(Whole(), RoundOptions())
