from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mrlm_pl.concurrency import event_loop
from mrlm_pl.data.rollout.metrics import CollectionSums
from mrlm_pl.engines.base import Engine, Sample, SampleRequest, Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Outcome, Step, TaskSource
from mrlm_pl.episode import Episode, Message, Task
from mrlm_pl.errors import ConfigurationError, EngineError, NonFiniteError
from mrlm_pl.policy.chat import ChatFormat
from mrlm_pl.policy.chat.template import with_arguments
from mrlm_pl.policy.tiny import build_tokenizer
from mrlm_pl.rollout.play import EpisodeSpec, Seat
from mrlm_pl.rollout.player import EpisodePlayer

TOKENIZER = build_tokenizer()
CHAT = ChatFormat(TOKENIZER)


class ScriptedEngine(Engine):
    """Answers with a digit that is a function of the request's seed, and remembers its calls."""

    def __init__(self) -> None:
        self.calls: list[list[SampleRequest]] = []

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        self.calls.append(list(requests))
        return [self._sample(request) for request in requests]

    def _sample(self, request: SampleRequest) -> Sample:
        ids = (*TOKENIZER.encode(str(request.seed % 10), add_special_tokens=False), TOKENIZER.eos_token_id)
        return Sample(ids, (-0.5, -0.1), "stop", 3, "scripted")

    def load(self, policy: str, weights: Any, version: int) -> None:
        raise AssertionError("the player loads no weights")


EOS = TOKENIZER.eos_token_id


class Relay(Environment):
    """``a`` speaks, then ``b`` hears it and speaks; ``b``'s word rewards both of them."""

    name = "relay"
    agents = ("a", "b")

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{}])

    def reset(self, task: Task) -> Observations:
        return {"a": [Message("user", "Begin")]}

    def step(self, actions: Mapping[str, Message]) -> Step:
        if "a" in actions:
            return Step({"b": [Message("user", f"a said {actions['a'].content}")]}, {"a": 0.25})
        return Step(rewards={"a": 1.0, "b": 2.0}, components={"b": {"x": 1.5, "y": 0.5}}, done=True, stop_reason="end")


def seats(*agents: str, window: int = 2048) -> dict[str, Seat]:
    return {agent: Seat("main", CHAT, Sampling(), window) for agent in agents}


def play(environment: Environment, specs: int = 1, seat: dict[str, Seat] | None = None, **options: Any):
    engine = ScriptedEngine()
    player = EpisodePlayer({environment.name: environment}, seat or seats(*environment.agents), engine, **options)
    source = environment.tasks("train")
    todo = [EpisodeSpec(f"e{n}", source[n % source.size], f"g{n}", seed=n) for n in range(specs)]
    try:
        return player.play_blocking(todo), engine
    finally:
        player.close()


def test_turns_rewards_and_tokens_of_two_agents() -> None:
    (episode,), engine = play(Relay())
    assert [request.session for call in engine.calls for request in call] == ["e0/a", "e0/b"]
    (a,), (b,) = episode.trajectories["a"], episode.trajectories["b"]
    assert a.turns[0].reward == 1.25, "a late reward belongs to the agent's latest turn"
    assert b.turns[0].components == {"x": 1.5, "y": 0.5}
    assert (a.turns[0].index, b.turns[0].index) == (0, 1)
    assert episode.reward == pytest.approx((1.25 + 2.0) / 2)
    said = TOKENIZER.decode(a.token_ids[a.turns[0].start : a.turns[0].stop - 1])
    assert b.messages[0].content == f"a said {said}"
    assert a.action_mask.count(True) == 2
    assert a.logprobs[-2:] == (-0.5, -0.1)
    assert (a.turns[0].version, a.turns[0].engine) == (3, "scripted")
    assert Episode.from_json(episode.to_json()) == episode


@pytest.mark.parametrize("one", [True, np.True_, np.float32(1.0), torch.tensor(1.0)])
def test_numbers_of_any_kind_are_recorded(one: Any) -> None:
    class Rewarding(Relay):
        def step(self, actions: Mapping[str, Message]) -> Step:
            step = super().step(actions)
            parts = {"a": {"x": one}, "b": {"x": 2.0}}
            if not step.done:
                return step
            return replace(step, rewards={"a": one, "b": 2.0}, components=parts, metrics={"m": one})

    (episode,), _ = play(Rewarding())
    record = Episode.from_json(episode.to_json())
    assert record.trajectories["a"][0].turns[0].components == {"reward": 0.25, "x": 1.0}
    assert (record.rewards(), record.metrics) == ({"a": 1.25, "b": 2.0}, {"m": 1.0})
    assert record.step_rewards == ({"a": 0.25}, {"a": 1.0, "b": 2.0})


def test_all_waiting_episodes_are_sampled_in_one_call(echo: Any) -> None:
    episodes, engine = play(echo(turns=3), specs=5)
    assert [len(call) for call in engine.calls] == [5, 5, 5]
    assert all(len(episode.trajectories["agent"][0].turns) == 3 for episode in episodes)


def test_an_episode_does_not_depend_on_its_neighbors(echo: Any) -> None:
    together, _ = play(echo(turns=2), specs=4)
    alone = play(echo(turns=2), specs=1)[0][0]
    assert alone.trajectories == together[0].trajectories


@pytest.mark.parametrize(("thinking", "restarts"), [(True, 0), (False, 2)])
def test_rows_after_a_rewritten_history_are_counted(echo: Any, thinking: bool, restarts: int) -> None:
    # Without thinking the generation prompt has an empty block, which the history lacks.
    qwen = (Path(__file__).parents[1] / "data" / "templates" / "qwen3.jinja").read_text()
    chat = ChatFormat(TOKENIZER, with_arguments(qwen, {"enable_thinking": thinking}, "m"))
    (episode,), _ = play(echo(turns=3), seat={"agent": Seat("main", chat, Sampling(), 2048)})
    assert episode.row_restarts == restarts
    assert [len(row.turns) for row in episode.trajectories["agent"]] == ([3] if thinking else [1, 1, 1])


def test_a_failing_environment_is_a_record_and_not_a_reward(echo: Any) -> None:
    episodes, _ = play(echo(fail_every=2), specs=4, retries=1)
    assert [episode.failed for episode in episodes] == [True, False, True, False]
    assert episodes[0].attempts == 2
    assert "the back end is away" in (episodes[0].error or "")
    assert episodes[0].stop_reason == "error"
    assert not episodes[0].trajectories


def test_a_fault_that_passes_is_retried(echo: Any) -> None:
    tries: list[int] = []

    class Flaky(echo):  # type: ignore[misc, valid-type]
        def begin(self, task: Task) -> str:
            tries.append(task.index)
            if len(tries) == 1:
                raise OSError("once")
            return super().begin(task)

    (episode,), _ = play(Flaky())
    assert (episode.failed, episode.attempts, len(tries)) == (False, 2, 2)


def test_the_decisions_and_tokens_of_attempts_that_failed_are_counted(echo: Any) -> None:
    steps: list[str] = []

    class Flaky(echo):  # type: ignore[misc, valid-type]
        def reply(self, message: Message) -> Outcome:
            steps.append(message.content)
            if len(steps) in (2, 3):  # in the second turn of the first attempt, and the first turn of the second
                raise OSError("twice")
            return super().reply(message)

    (episode,), engine = play(Flaky(turns=2))
    assert (episode.attempts, len(engine.calls)) == (3, 5)
    assert episode.retried_tokens == 2 * 3, "each turn has a digit and its end"
    assert episode.retried_decisions == 3
    played = CollectionSums.of([episode], seconds=2.0).played
    assert (played["decisions"], played["generated_tokens"]) == (5, 2 * 5)
    assert CollectionSums.of([episode], seconds=2.0).metrics()["rollout/tokens_per_second"] == 5.0


def test_the_waits_for_a_thread_are_measured_apart_from_the_environment(echo: Any) -> None:
    class Blocking(echo):  # type: ignore[misc, valid-type]
        def reply(self, message: Message) -> Outcome:
            time.sleep(0.1)
            return super().reply(message)

    episodes, _ = play(Blocking(turns=1), specs=3, workers=1)
    metrics = CollectionSums.of(episodes, seconds=1.0).metrics()
    first, second, third = sorted((episode.timings for episode in episodes), key=lambda timings: timings["queue"])
    assert first["environment"] >= 0.1
    assert second["queue"] >= 0.1, "it waits for the call before it"
    assert third["queue"] >= 0.2
    for phase in first:
        mean = (first[phase] + second[phase] + third[phase]) / 3
        assert metrics[f"rollout/seconds/{phase}"] == pytest.approx(mean)
    (episode,), _ = play(echo())
    assert metrics.keys() >= {f"rollout/seconds/{phase}" for phase in episode.timings}


def test_a_reward_that_is_not_a_number_stops_the_run(echo: Any) -> None:
    with pytest.raises(NonFiniteError, match=r"echo.*nan"):
        play(echo(reward=float("nan")))


def test_an_endless_episode_is_cut(echo: Any) -> None:
    (episode,), _ = play(echo(turns=1000), max_turns=4)
    assert (episode.stop_reason, episode.truncated) == ("turn_limit", True)
    assert len(episode.trajectories["agent"][0].turns) == 4


def test_a_full_context_window_cuts_the_episode(echo: Any) -> None:
    (episode,), _ = play(echo(turns=1000), seat=seats("agent", window=40))
    assert (episode.stop_reason, episode.truncated) == ("context_window", True)


def test_a_shorter_window_of_the_engine_cuts_the_episode(echo: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedEngine, "window", lambda engine, policy: {"main": 40}[policy])
    (episode,), engine = play(echo(turns=1000), seat=seats("agent", window=2048))
    (again,), _ = play(echo(turns=1000), seat=seats("agent", window=40))
    assert (episode.stop_reason, episode.trajectories) == ("context_window", again.trajectories)
    assert max(len(request.token_ids) for call in engine.calls for request in call) < 40


def test_a_token_budget_cuts_the_last_turn_and_the_episode(echo: Any, caplog: pytest.LogCaptureFixture) -> None:
    budget = {"agent": Seat("main", CHAT, Sampling(max_context=40), 2048)}
    (episode,), engine = play(echo(turns=1000), seat=budget)
    assert (episode.stop_reason, episode.truncated) == ("context_window", True)
    requests = [request for call in engine.calls for request in call]
    assert max(len(request.token_ids) + request.sampling.max_tokens for request in requests) == 40
    assert not caplog.records
    short = {"agent": Seat("main", CHAT, Sampling(policies={"main": {"max_context": 4}}).of("main"), 2048)}
    play(echo(), seat=short)
    assert "agent 'agent' on echo/train/0 has" in caplog.text
    assert "tokens, sampling.max_context 4: such episodes end before it decides" in caplog.text


def test_a_first_prompt_beyond_the_context_window_is_named_once(echo: Any, caplog: pytest.LogCaptureFixture) -> None:
    episodes, _ = play(echo(), specs=2, seat=seats("agent", window=4))
    assert [(episode.stop_reason, episode.trajectories) for episode in episodes] == [("context_window", {})] * 2
    (record,) = [record for record in caplog.records if record.name.startswith("mrlm_pl.rollout")]
    assert re.search("agent 'agent' on echo/.* tokens, the context window of its policy 4: ", record.getMessage())


def test_a_first_prompt_that_does_not_fit_is_named_after_turns_of_others_too(caplog: pytest.LogCaptureFixture) -> None:
    short = {**seats("a"), "b": Seat("other", CHAT, Sampling(), 4)}
    episodes, _ = play(Relay(), specs=2, seat=short)
    assert [(episode.stop_reason, [*episode.trajectories]) for episode in episodes] == [("context_window", ["a"])] * 2
    (record,) = [record for record in caplog.records if record.name.startswith("mrlm_pl.rollout")]
    assert re.search(
        "agent 'b' on relay/.* the context window of its policy 4: .* before it decides", record.getMessage()
    )


def test_an_environment_that_hangs_is_given_up() -> None:
    class Stuck(Relay):
        async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
            await asyncio.sleep(60)
            raise AssertionError

    (episode,), _ = play(Stuck(), step_timeout=1.0, retries=0)
    assert "TimeoutError in step of relay/train/0" in (episode.error or "")


def test_an_async_environment_that_sleeps_without_awaiting_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(event_loop, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(event_loop, "_LATE_SECONDS", 0.002)

    class Sleeps(Relay):
        async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
            time.sleep(0.02)
            return super().step(actions)

    task = Sleeps().tasks("train")[0]
    player = EpisodePlayer({"relay": Sleeps()}, seats("a", "b"), ScriptedEngine())
    for number in range(100):  # one after another: all at once would be a single stop of the loop
        player.play_blocking([EpisodeSpec(str(number), task, str(number), seed=0)])
        if caplog.records:
            break
    player.close()
    assert re.search(r"stood still in \d+ of \d+ looks in step \(.*test_player\.py:\d+\); it stops all", caplog.text)


def test_sampling_settings_are_checked() -> None:
    with pytest.raises(ConfigurationError, match=r"top_p is 0"):
        Sampling(top_p=0)


def test_decisions_that_are_not_due_never_reach_the_environment() -> None:
    stepped: list[Mapping[str, Message]] = []

    class Watched(Relay):
        def step(self, actions: Mapping[str, Message]) -> Step:
            stepped.append(actions)
            return super().step(actions)

    player = EpisodePlayer({"relay": Watched()}, seats("a", "b"), ScriptedEngine())
    wrong, right = (
        player.new_play(EpisodeSpec(name, Watched().tasks("train")[0], name, seed=0), 1) for name in ("wrong", "right")
    )

    async def step() -> None:
        await player.reset([wrong, right])
        wrong.actions = {"b": Message("assistant", "1")}
        right.actions = {"a": Message("assistant", "1")}
        await player.step([wrong, right])

    try:
        asyncio.run(step())
    finally:
        player.close()
    assert "step received actions of ['b'], but due are ['a']" in (wrong.error or "")
    assert right.error is None
    assert stepped == [{"a": Message("assistant", "1")}]


@pytest.mark.parametrize("hangs", [False, True])
def test_an_environment_that_cannot_be_closed_costs_a_warning(caplog: pytest.LogCaptureFixture, hangs: bool) -> None:
    ended, closed, before = threading.Event(), list[int](), set(threading.enumerate())

    class Unclosable(Relay):
        def close(self) -> None:
            closed.append(id(self))
            if hangs:
                ended.wait(60)
            raise OSError("the handle is gone")

    try:
        with caplog.at_level(logging.WARNING):
            episodes, _ = play(Unclosable(), specs=3, step_timeout=0.2)
    finally:
        ended.set()
    reason = "TimeoutError: the environment did not answer within 0.2 s" if hangs else "OSError: the handle is gone"
    assert [episode.error for episode in episodes] == [None] * 3
    assert len(set(closed)) == 3
    assert caplog.text.count(f"closing a 'relay' environment: {reason}") == 1
    assert not [item for item in set(threading.enumerate()) - before if item.name == "mrlm-event-loop"]


def test_environments_that_are_not_closed_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    player = EpisodePlayer({"relay": Relay()}, seats("a", "b"), ScriptedEngine())
    player.play_blocking([EpisodeSpec("one", Relay().tasks("train")[0], "one", seed=0)])
    player.caller.close()
    player.close()
    assert "not all of 1 environments were closed: " in caplog.text


@pytest.mark.long
def test_environments_that_close_slowly_are_all_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrlm_pl.rollout.player.END_SECONDS", 0.0)
    closed = list[int]()

    class Slow(Relay):
        def close(self) -> None:
            time.sleep(0.4)
            closed.append(id(self))

    play(Slow(), specs=3, workers=1, step_timeout=1.0)
    assert len(closed) == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "Broken gave 0 samples for 1 request$"),
        (None, "Broken gave 0 samples for 1 request$"),
        ([Sample((), (), "stop", 0, "e")], "Broken gave 0 log-probabilities for 0 tokens"),
        ([Sample((5, 6), (-0.5,), "stop", 0, "e")], "Broken gave 1 log-probabilities for 2 tokens"),
        ([Sample((5,), (float("nan"),), "length", 0, "e")], "Broken gave a log-probability of nan"),
        ([Sample((5,), (0.5,), "length", 0, "e")], "Broken gave a log-probability of 0.5"),
        (
            [Sample((5,), (-0.5,), "stop", 0, "e")],
            r"1 log-probabilities for 1 token, stop tokens at \[\] and .* 'stop'",
        ),
        (
            [Sample((EOS, 5), (-0.5,) * 2, "length", 0, "e")],
            r"2 log-probabilities for 2 tokens, stop tokens at \[1\] and .* 'length'",
        ),
        (
            [Sample((5, EOS), (-0.5,) * 2, "length", 0, "e")],
            r"2 log-probabilities for 2 tokens, stop tokens at \[2\] and .* 'length'",
        ),
    ],
)
def test_an_engine_that_breaks_its_contract_is_named(given: Any, message: str) -> None:
    class Broken(ScriptedEngine):
        async def sample(self, requests: Sequence[SampleRequest]) -> Any:
            return given

    player = EpisodePlayer({"relay": Relay()}, seats("a", "b"), Broken())
    with closing(player), pytest.raises(EngineError, match=message):
        player.play_blocking([EpisodeSpec("e", Relay().tasks("train")[0], "g", seed=0)])


@pytest.mark.parametrize("token", [-1, 999])
def test_a_sampled_token_outside_the_vocabulary_is_named(token: int) -> None:
    class Foreign(ScriptedEngine):
        async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
            return [Sample((5, token), (-0.5, -0.5), "length", 0, "mine") for _ in requests]

    known = {agent: replace(seat, vocabulary=999) for agent, seat in seats("a", "b").items()}
    player = EpisodePlayer({"relay": Relay()}, known, Foreign())
    message = f"engine 'mine' gave the token id {token}, .* vocabulary of policy 'main' of 999 tokens"
    with closing(player), pytest.raises(EngineError, match=message):
        player.play_blocking([EpisodeSpec("e", Relay().tasks("train")[0], "g", seed=0)])


def test_a_long_error_is_recorded_without_its_end() -> None:
    class Talkative(Relay):
        def step(self, actions: Mapping[str, Message]) -> Step:
            raise OSError("begins" + "x" * 100_000)

    (episode,), _ = play(Talkative(), retries=0)
    assert episode.error is not None
    assert "OSError in step of relay/train/0" in episode.error
    assert "beginsxxx" in episode.error
    assert len(episode.error) < 3000
