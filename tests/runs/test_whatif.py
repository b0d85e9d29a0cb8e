"""The value of recorded decisions against the exact one, and the command."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from mrlm_environments import DebateEnvironment, Halves
from mrlm_environments.debate.judge_by_rules import RuleJudge

from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step
from mrlm_pl.episode import Episode, Message, Task
from mrlm_pl.episode_files import write_episodes
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import Policy
from mrlm_pl.policy.chat import Conversation
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.runs import whatif
from mrlm_pl.runs.seated_model import SeatedModel
from tests.serving.policies.test_placement import Partner

ONE_TOKEN = Sampling(max_tokens=1, temperature=2.0)


class Pair(Environment):
    """``a`` says one token, ``b`` hears it and says another; sums of their characters that 3 divides reward ``a``."""

    name = "pair"
    agents = ("a", "b")

    def tasks(self, split: str) -> DatasetTasks:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(20)])

    def reset(self, task: Task) -> Observations:
        self.number, self.first = task.data["n"], None
        return {"a": [Message("user", f"{self.number}?")]}

    def step(self, actions: Mapping[str, Message]) -> Step:
        if self.first is None:
            self.first = actions["a"].content
            return Step({"b": [Message("user", f"{self.first} and")]})
        reward = worth(self.first, actions["b"].content)
        return Step(rewards={"a": 2.0 * reward, "b": 0.0}, done=True, stop_reason="end")


def worth(first: str, second: str) -> float:
    return float((sum(map(ord, first)) + 2 * sum(map(ord, second))) % 3 == 0)


def recorded(count: int, folder: Path, environment: Environment | None = None) -> tuple[list[Episode], Path]:
    environment = environment or Pair()
    seated = SeatedModel("builtin:tiny", environment, None, None)
    tasks = environment.tasks("train")
    with seated.player(ONE_TOKEN, None, "cpu") as player:
        specs = [EpisodeSpec(f"e{number}", tasks[number % 5], "g", seed=number) for number in range(count)]
        episodes = player.play_blocking(specs)
    write_episodes(folder / "episodes.jsonl.zst", episodes)
    return episodes, folder / "episodes.jsonl.zst"


class Exact:
    """Expected rewards of the tiny model, which says one token in each turn, summed over all tokens."""

    def __init__(self) -> None:
        self.policy = Policy("builtin:tiny")
        self.policy.load()
        assert self.policy.model is not None
        self.model, self.chat = self.policy.model, self.policy.chat
        self.known: dict[tuple[int, str], float] = {}
        self.texts = [self.said(token) for token in range(self.model.config.vocab_size)]

    def said(self, token: int) -> str:
        conversation = Conversation(self.chat, [])
        conversation.observe([Message("user", "x")])
        return conversation.act((token,), (0.0,)).content

    @functools.cache  # noqa: B019 (one object)
    def choices(self, heard: str) -> dict[str, float]:
        """The probability of each text of one token."""
        conversation = Conversation(self.chat, [])
        conversation.observe([Message("user", heard)])
        with torch.no_grad():
            logits = self.model(torch.tensor([conversation.row.token_ids])).logits[0, -1]
        found = dict.fromkeys(self.texts, 0.0)
        for text, probability in zip(self.texts, (logits.double() / 2.0).softmax(-1).tolist(), strict=True):
            found[text] += probability
        return found

    def of_replies(self, value: Callable[[str], float], heard: str) -> float:
        return sum(probability * value(said) for said, probability in self.choices(heard).items())


def play(environment: Environment, task: Task, said: Sequence[str]) -> tuple[str, float]:
    """Return the message to the next agent after these successive replies, and the mean reward."""
    observations, rewards = environment.reset(task), [0.0]
    for text in said:
        step = environment.step({agent: Message("assistant", text) for agent in observations})
        observations, rewards = step.observations, list(step.rewards.values())
    return next((heard[-1].content for heard in observations.values()), ""), sum(rewards) / max(len(rewards), 1)


def by_turns(environment: Environment, episode: Episode, exact: Exact) -> dict[tuple[str, int], float]:
    """The advantages of two replies, of which the second answers the first."""
    turns = sorted((turn.index, agent) for agent, rows in episode.trajectories.items() for turn in rows[0].turns)
    first, second = (episode.trajectories[agent][0].messages[-1].content for _, agent in turns)

    def after(text: str) -> float:
        key = episode.task.index, text
        if key not in exact.known:
            heard, _ = play(environment, episode.task, [text])
            exact.known[key] = exact.of_replies(lambda said: play(environment, episode.task, [text, said])[1], heard)
        return exact.known[key]

    opening, _ = play(environment, episode.task, [])
    values = after(first), play(environment, episode.task, [first, second])[1]
    baselines = exact.of_replies(after, opening), values[0]
    return {
        (agent, index): value - baseline
        for (index, agent), value, baseline in zip(turns, values, baselines, strict=True)
    }


def at_once(environment: Environment, episode: Episode, exact: Exact) -> dict[tuple[str, int], float]:
    """The advantages of two replies to the same text: of each against others beside the partner's."""
    said = {agent: rows[0].messages[-1].content for agent, rows in episode.trajectories.items()}

    def worth_of(replies: Mapping[str, str]) -> float:
        environment.reset(episode.task)
        return environment.step({agent: Message("assistant", text) for agent, text in replies.items()}).rewards["left"]

    heard = environment.reset(episode.task)["left"][-1].content
    return {
        (agent, 0): worth_of(said) - exact.of_replies(lambda text, agent=agent: worth_of({**said, agent: text}), heard)
        for agent in said
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environment", "advantages", "least"),
    [
        pytest.param(Pair(), by_turns, 90, id="pair"),
        pytest.param(Halves(), at_once, 95, id="halves"),
        pytest.param(DebateEnvironment(RuleJudge(words=1), reward="score", max_turns=1), by_turns, 95, id="debate"),
    ],
)
def test_the_interval_holds_the_exact_advantage(
    environment: Environment, advantages: Callable[..., dict[tuple[str, int], float]], least: int, tmp_path: Path
) -> None:
    episodes, path = recorded(50, tmp_path, environment)
    exact, inside, found = Exact(), 0, set()
    for episode in episodes:
        for (agent, turn), advantage in advantages(environment, episode, exact).items():
            report = whatif(
                "builtin:tiny",
                environment,
                episode=episode.id,
                agent=agent,
                turn=turn,
                episodes=path,
                sampling=ONE_TOKEN,
                samples=24,
                device="cpu",
            )
            found.add(round(advantage, 6))
            inside += report.ci95[0] - 1e-9 <= advantage <= report.ci95[1] + 1e-9
    assert len(found) > 20, "advantages that differ"
    assert inside >= least


def test_a_message_is_played_in_the_place_of_a_decision(tmp_path: Path) -> None:
    (episode, *_), path = recorded(1, tmp_path)
    first, second = (episode.trajectories[agent][0].messages[-1].content for agent in ("a", "b"))
    said = next(text for text in "!#%" if worth(first, text) != worth(first, second))
    report = whatif(
        "builtin:tiny",
        Pair(),
        episode="e0",
        agent="b",
        turn=1,
        message=said,
        samples=3,
        episodes=path,
        own_reward=True,
        device="cpu",
    )
    assert report.other.texts == (said,) * 3
    assert report.recorded.texts == (second,) * 3
    assert set(report.other.returns) == {0.0}, "b has no reward of its own"
    team = whatif("builtin:tiny", Pair(), episode="e0", agent="b", turn=1, message=said, samples=3, episodes=path)
    assert team.other.returns == (worth(first, said),) * 3
    assert team.recorded.returns == (worth(first, second),) * 3
    assert team.advantage == worth(first, second) - worth(first, said)


def test_a_policy_on_a_server_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MRLM_TOKEN", raising=False)
    _, path = recorded(1, tmp_path)
    asked = {"episode": "e0", "agent": "a", "turn": 0, "samples": 8, "episodes": path, "sampling": ONE_TOKEN}
    server = Partner(name="main")
    try:
        policy = Policy("builtin:tiny", trained=False, served_by=server.target)
        there = whatif("builtin:tiny", Pair(), model=policy, device="cpu", **asked)
        assert whatif("builtin:tiny", Pair(), served_by={"main": server.target}, device="cpu", **asked) == there
    finally:
        server.stop()
    assert policy.model is None, "its weights are on the server"
    assert there == whatif("builtin:tiny", Pair(), device="cpu", **asked)
    with pytest.raises(ConfigurationError, match="no policy 'mian' to be served; did you mean 'main'"):
        whatif("builtin:tiny", Pair(), served_by={"mian": "127.0.0.1:1"}, device="cpu", **asked)
    with pytest.raises(ConfigurationError, match=r"policies\.main: served_by: the address 'x' is"):
        whatif("builtin:tiny", Pair(), served_by={"main": "x"}, device="cpu", **asked)


def test_later_decisions_are_replayed(tmp_path: Path) -> None:
    (episode, *_), path = recorded(1, tmp_path)
    second = episode.trajectories["b"][0].messages[-1].content
    report = whatif(
        "builtin:tiny",
        Pair(),
        episode="e0",
        agent="a",
        turn=0,
        samples=8,
        rest="replay",
        episodes=path,
        sampling=ONE_TOKEN,
        device="cpu",
    )
    assert report.other.returns == tuple(worth(first, second) for first in report.other.texts)
    assert len(set(report.other.texts)) > 1


class Louder(Pair):
    """Asks with another prompt."""

    def reset(self, task: Task) -> Observations:
        return {agent: [Message("user", "Louder!")] for agent in super().reset(task)}


class Reversed(Pair):
    """Asks the other agent first."""

    def reset(self, task: Task) -> Observations:
        super().reset(task)
        return {"b": [Message("user", f"{self.number}?")]}


@pytest.mark.parametrize("environment", [Louder, Reversed])
@pytest.mark.long_after(1)
def test_an_episode_whose_beginning_does_not_replay_is_refused(environment: type[Pair], tmp_path: Path) -> None:
    _, path = recorded(1, tmp_path)
    with pytest.raises(ConfigurationError, match=r"its beginning does not replay: .* at step 0"):
        whatif("builtin:tiny", environment(), episode="e0", agent="b", turn=1, samples=1, episodes=path)


def test_another_model_plays_with_the_settings_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = recorded(1, tmp_path)
    seen: list[Sampling] = []
    player = SeatedModel.player
    monkeypatch.setattr(SeatedModel, "player", lambda self, *given: seen.append(given[0]) or player(self, *given))
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("data: {init_args: {sampling: {max_tokens: 1, temperature: 0.7}}}\n")
    whatif(run, Pair(), episode="e0", agent="b", turn=1, samples=1, episodes=path, model="builtin:tiny", device="cpu")
    assert seen == [Sampling(max_tokens=1, temperature=0.7)]


def test_a_decision_that_was_not_recorded_is_refused_with_the_choices(tmp_path: Path) -> None:
    _, path = recorded(1, tmp_path)
    known = "choose a turn of a at 0; b at 1"
    with pytest.raises(ConfigurationError, match=f"agent 'a' did not decide at turn 1 of episode 'e0'; {known}"):
        whatif("builtin:tiny", Pair(), episode="e0", agent="a", turn=1, episodes=path)
    with pytest.raises(ConfigurationError, match=f"agent 'c' did not decide .*; {known}"):
        whatif("builtin:tiny", Pair(), episode="e0", agent="c", turn=0, episodes=path)
    with pytest.raises(ConfigurationError, match="samples"):
        whatif("builtin:tiny", Pair(), episode="e0", agent="a", turn=0, samples=0, episodes=path)
    with pytest.raises(ConfigurationError, match="samples is 1000000000"):
        whatif("builtin:tiny", Pair(), episode="e0", agent="a", turn=0, samples=10**20, episodes=path)


def test_the_command_prints_both_decisions_and_the_advantage(
    mrlm: Callable[..., tuple[int, str, str]], unread: Callable[..., None], tmp_path: Path
) -> None:
    _, path = recorded(1, tmp_path)
    named = ("builtin:tiny", "--environment", "tests.runs.test_whatif.Pair", "--episodes", str(path))
    decision = ("--episode", "e0", "--agent", "a", "--turn", "0", "--samples", "4")
    status, out, _ = mrlm("whatif", *named, *decision, "--output", str(tmp_path / "report.json"))
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == "sampled with the policies of builtin:tiny"
    assert lines[1].startswith("recorded ")
    assert lines[-1].startswith("advantage of the decision of a at turn 0: ")
    assert len(json.loads((tmp_path / "report.json").read_text())["other"]["returns"]) == 4
    unread("whatif", *named, *decision, "--output", "unread.json")
    assert json.loads(Path("unread.json").read_text())["agent"] == "a"
    status, _, err = mrlm("whatif", *named, *decision[2:])
    assert status == 2
    assert "--episode is missing" in err


def test_equal_returns_give_no_interval(mrlm: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    (episode,), path = recorded(1, tmp_path)
    said = episode.trajectories["a"][0].messages[-1].content
    named = ("builtin:tiny", "--environment", "tests.runs.test_whatif.Pair", "--episodes", str(path))
    decision = ("--episode", "e0", "--agent", "a", "--turn", "0", "--message", said, "--samples", "4")
    report = tmp_path / "report.json"
    status, out, err = mrlm("whatif", *named, *decision, "--rest", "replay", "--output", str(report))
    assert status == 0, err
    found = json.loads(report.read_text())
    assert len({*found["recorded"]["returns"], *found["other"]["returns"]}) == 1
    assert [found[side]["ci95"] for side in ("recorded", "other")] == [[None, None]] * 2
    assert (found["advantage"], found["ci95"]) == (0.0, [None, None])
    assert "advantage of the decision of a at turn 0: +0.0000  no 95 % interval (equal values or one task)\n" in out
    assert out.endswith(
        "all returns are equal: the decision makes no difference, or one too rare for these --samples\n"
    )
