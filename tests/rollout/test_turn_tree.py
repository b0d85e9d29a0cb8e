from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mrlm_pl.data.rollout.metrics import CollectionSums, distinct_turns, path_weights
from mrlm_pl.engines import InProcessEngine
from mrlm_pl.engines.base import SampleRequest, Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import SCHEMA, Episode, Message, Task
from mrlm_pl.episode_files import read_episodes, write_episodes
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.rollout.tree_player import THRESHOLD_STOP, UNEXPANDED_STOP, Branching, TreePlayer
from mrlm_pl.turn_tree import TurnTree, episodes_of
from tests.rollout.test_player import TOKENIZER, ScriptedEngine, seats


def played_trees(trees: TreePlayer, specs: Sequence[EpisodeSpec]) -> list[list[Episode]]:
    """Play turn trees, while this thread computes for the engine."""
    return trees.player.run_blocking(lambda: trees.play(specs))


class GrowingSums(Environment):
    """Both players say a digit at once, for some turns; each earns both digits together. Everybody hears everything."""

    name = "sums"
    agents = ("a", "b")

    def __init__(self, turns: int = 2, forks: bool = True) -> None:
        self.turns, self.forks = turns, forks
        self.said: list[str] = []
        self.resets = 0

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{}])

    def reset(self, task: Task) -> Observations:
        self.said = []
        self.resets += 1
        return {agent: [Message("user", "Digit?")] for agent in self.agents}

    def step(self, actions: Mapping[str, Message]) -> Step:
        digits = "".join(actions[agent].content for agent in self.agents)
        self.said.append(digits)
        rewards = dict.fromkeys(self.agents, float(sum(int(digit) for digit in digits)))
        if len(self.said) == self.turns:
            return Step(rewards=rewards, done=True, stop_reason="end", metrics={"turns": float(self.turns)})
        return Step({agent: [Message("user", " ".join(self.said))] for agent in self.agents}, rewards)


class Flaky(GrowingSums):
    """Its first steps fail, in any episode."""

    name = "flaky"

    def __init__(self, failures: int, **options: Any) -> None:
        super().__init__(**options)
        self.left = [failures]  # shared by all copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Flaky:
        made = Flaky(0, turns=self.turns, forks=self.forks)
        made.left, made.said = self.left, list(self.said)
        return made

    def step(self, actions: Mapping[str, Message]) -> Step:
        if self.left[0]:
            self.left[0] -= 1
            raise OSError("the connection broke")
        return super().step(actions)


class Moody(GrowingSums):
    """Says something else each time it is played."""

    name = "moody"
    count = 0

    def step(self, actions: Mapping[str, Message]) -> Step:
        step = super().step(actions)
        Moody.count += 1
        return step if step.done else Step({agent: [Message("user", str(Moody.count))] for agent in self.agents})


class TakesTurns(GrowingSums):
    """``a`` decides, then ``b``."""

    name = "takes_turns"

    def reset(self, task: Task) -> Observations:
        return {"a": [Message("user", "Digit?")]}

    def step(self, actions: Mapping[str, Message]) -> Step:
        if "a" in actions:
            return Step({"b": [Message("user", actions["a"].content)]})
        return Step(rewards={"a": 1.0, "b": 1.0}, done=True, stop_reason="end")


def grow(
    environment: Environment, tree: Branching, branches: int = 2, trees: int = 1, **options: Any
) -> tuple[list[list[Episode]], ScriptedEngine]:
    engine = ScriptedEngine()
    player = EpisodePlayer({environment.name: environment}, seats(*environment.agents), engine, **options)
    task = environment.tasks("train")[0]
    try:
        specs = [EpisodeSpec(f"t{n}", task, f"t{n}", seed=n) for n in range(trees)]
        return played_trees(TreePlayer(player, tree, branches), specs), engine
    finally:
        player.close()


def said(episode: Episode, agent: str) -> list[str]:
    (row,) = episode.trajectories[agent]
    return [message.content for message in row.messages if message.role == "assistant"]


@pytest.mark.parametrize(("mode", "paths"), [("align", 9), ("cross", 81), ("counterfactual", 81)])
@pytest.mark.parametrize("forks", [True, False])
def test_every_path_is_an_episode_of_its_own_decisions(mode: Any, paths: int, forks: bool) -> None:
    (episodes,), _ = grow(GrowingSums(forks=forks), Branching(mode), branches=3)
    assert len(episodes) == paths == len({episode.id for episode in episodes})
    for episode in episodes:
        assert episode.error is None
        assert episode.stop_reason == "end"
        assert episode.metrics == {"turns": 2.0}
        digits = [int(digit) for agent in "ab" for digit in said(episode, agent)]
        assert episode.rewards() == {"a": sum(digits), "b": sum(digits)}
        first, second = (int(x) + int(y) for x, y in zip(said(episode, "a"), said(episode, "b"), strict=True))
        assert episode.step_rewards == ({"a": first, "b": first}, {"a": second, "b": second})
        assert Episode.from_json(episode.to_json()) == episode


def test_the_tree_of_a_group_has_every_state_and_decision_once() -> None:
    """Two turns of two agents with three decisions each: 1 + 3 states, 3 + 9 joint actions, 4 x 2 x 3 decisions."""
    (episodes,), _ = grow(GrowingSums(), Branching("align"), branches=3)
    tree = TurnTree.of(episodes)
    children = tree.children()
    assert (len(children), len(tree.actions), len(tree.decisions)) == (4, 12, 24)
    assert all(len(names) == 3 for names in children.values())
    (root,) = children.keys() - tree.actions.keys()
    assert [tree.actions[name].depth for name in children[root]] == [0, 0, 0]
    assert {action.node for action in tree.actions.values() if action.depth == 1} == set(children[root])
    for path in tree.paths:
        last = tree.actions[path.id]
        assert (tree.actions[last.node].rewards, last.rewards) == path.step_rewards
        for agent, number in last.decisions.items():
            turn, row = tree.decisions[last.node, agent, number]
            assert (
                row.token_ids[turn.start : turn.stop] == path.trajectories[agent][0].token_ids[turn.start : turn.stop]
            )
    read = TurnTree.of([Episode.from_json(episode.to_json()) for episode in episodes])
    assert (read.actions, read.decisions) == (tree.actions, tree.decisions)


@pytest.mark.parametrize("mode", ["align", "cross", "counterfactual"])
def test_a_tree_in_a_file_has_the_tokens_of_each_decision_once_and_loses_nothing(mode: Any, tmp_path: Path) -> None:
    (first, second), _ = grow(GrowingSums(turns=3), Branching(mode), trees=2)
    alone = replace(first[0], id="alone", group="g", trajectories={})
    write_episodes(tmp_path / "trees.jsonl.gz", [*first, *second, alone])
    with gzip.open(tmp_path / "trees.jsonl.gz", "rt") as file:
        records = [json.loads(line) for line in file]
    assert [("paths" in record, record["schema"]) for record in records] == [(n < 2, SCHEMA) for n in range(3)]
    assert len(records[0]["decisions"]) == len(TurnTree.of(first).decisions)
    assert list(read_episodes(tmp_path)) == [*first, *second, alone]
    newer = {**records[0], "newer": 1, "paths": [{**path, "newer": 1} for path in records[0]["paths"]]}
    assert list(episodes_of(newer)) == first
    for fault in ({"decisions": {}}, {"paths": 3}):
        with pytest.raises(ValueError, match="turn tree"):
            episodes_of({**records[0], **fault})


def test_files_of_before_the_schema_are_read() -> None:
    """Paths of a tree stood there as episodes of their own, which share a group, states and decisions."""
    alone, *paths = read_episodes(Path(__file__).parents[1] / "data/samples/episodes_without_schema.jsonl")
    assert (alone.id, alone.success, alone.reward) == ("0-0-0", True, 1.0)
    tree = TurnTree.of(paths)
    assert (len(tree.paths), len(tree.children()), len(tree.decisions)) == (4, 3, 12)


def test_forked_and_replayed_environments_give_the_same_records() -> None:
    (forked,), _ = grow(GrowingSums(turns=3), Branching("cross"))
    (replayed,), _ = grow(GrowingSums(turns=3, forks=False), Branching("cross"))
    assert [said(e, "a") + said(e, "b") for e in forked] == [said(e, "a") + said(e, "b") for e in replayed]
    assert [e.trajectories for e in forked] == [e.trajectories for e in replayed]


def test_turns_name_their_state_and_decision() -> None:
    (episodes,), _ = grow(GrowingSums(), Branching("align"))
    keys = [[(turn.node, turn.sample) for turn in e.trajectories["a"][0].turns] for e in episodes]
    assert [e.id for e in episodes] == ["t0-0-0", "t0-0-1", "t0-1-0", "t0-1-1"]
    assert keys == [
        [("t0", 0), ("t0-0", 0)],
        [("t0", 0), ("t0-0", 1)],
        [("t0", 1), ("t0-1", 0)],
        [("t0", 1), ("t0-1", 1)],
    ]
    shared = {(said(e, "a")[0], said(e, "b")[0]) for e in episodes[:2]}
    assert len(shared) == 1, "paths of one state share the decisions that led to it"


def test_a_level_of_all_trees_and_agents_is_one_engine_call() -> None:
    _, engine = grow(GrowingSums(turns=3), Branching("align"), branches=2, trees=3)
    assert [len(call) for call in engine.calls] == [3 * 2 * 2, 3 * 2 * 4, 3 * 2 * 8]
    seeds = [request.seed for call in engine.calls for request in call]
    assert len(set(seeds)) == len(seeds)
    contexts = Counter(request.token_ids for request in engine.calls[0])
    assert list(contexts.values()) == [12], "decisions in one state are asked for with the same prompt"


class Words(GrowingSums):
    """Any reply counts; both players hear the number of the turn."""

    name = "words"

    def step(self, actions: Mapping[str, Message]) -> Step:
        self.said.append("")
        if len(self.said) == self.turns:
            return Step(rewards=dict.fromkeys(self.agents, 1.0), done=True, stop_reason="end")
        return Step({agent: [Message("user", f"turn {len(self.said)}")] for agent in self.agents})


@pytest.mark.parametrize(("tree", "contexts"), [(False, 1 + 2 * 3), (True, 1 + 2 * (2 + 4 + 8))])
def test_a_turn_computes_only_what_is_new_since_the_turn_before(tree: bool, contexts: int) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(TOKENIZER), **sizes))
    environment, engine = Words(turns=4), InProcessEngine()
    engine.load("main", model, 0)
    taken = {agent: replace(seat, sampling=Sampling(max_tokens=6)) for agent, seat in seats("a", "b").items()}
    player = EpisodePlayer({"words": environment}, taken, engine)
    spec = EpisodeSpec("t0", environment.tasks("train")[0], "t0", seed=0)
    try:
        episodes = played_trees(TreePlayer(player, Branching(), 2), [spec])[0] if tree else player.play_blocking([spec])
        assert len(engine._sessions) == 0, "released with their episodes"
    finally:
        player.close()
    # by distinct context: its tokens but those of the turn before, whose last token was sampled and never computed
    new: dict[tuple[int, ...], int] = {}
    for episode in episodes:
        for rows in episode.trajectories.values():
            (row,) = rows
            for turn, before in zip(row.turns, [None, *row.turns], strict=False):
                known = 0 if before is None else before.stop - 1
                new[row.token_ids[: turn.start]] = turn.start - known
    assert len(new) == contexts, "both agents begin with the same one"
    assert engine.stats.prefill_tokens == sum(new.values())


def test_agents_that_take_turns_branch_one_after_the_other() -> None:
    (episodes,), _ = grow(TakesTurns(), Branching("cross"), branches=3)
    assert len(episodes) == 9
    assert Counter(e.trajectories["a"][0].turns[0].sample for e in episodes) == {0: 3, 1: 3, 2: 3}


def test_paths_are_paid_apart_for_an_earlier_decision_that_they_share() -> None:
    (episodes,), _ = grow(TakesTurns(), Branching("align"), branches=3)
    assert [episode.rewards() for episode in episodes] == [{"a": 1.0, "b": 1.0}] * 9
    assert all(episode.components() == {"reward": 1.0} for episode in episodes)


def test_a_shared_decision_is_measured_once() -> None:
    (episodes,), engine = grow(GrowingSums(), Branching("cross"), branches=2)
    assert len(episodes) == 16
    made = sum(len(call) for call in engine.calls)
    assert made == 2 * 2 + 4 * 2 * 2
    assert len(distinct_turns(episodes)) == made
    sums = CollectionSums.of(episodes, seconds=2.0)
    assert sums.sums["rollout/tokens_per_second"] == made * 2 / 2.0  # a digit and the end of the turn
    assert len(distinct_turns(plain_episodes())) == 2 * 2 * 2


def test_only_the_best_is_played_on() -> None:
    (episodes,), _ = grow(GrowingSums(), Branching("align", expand="best"), branches=4)
    stops = Counter(episode.stop_reason for episode in episodes)
    assert stops == {UNEXPANDED_STOP: 3, "end": 4}
    firsts = {e.step_rewards[0]["a"] for e in episodes if e.stop_reason == UNEXPANDED_STOP}
    (best,) = {e.step_rewards[0]["a"] for e in episodes if e.stop_reason == "end"}
    assert best >= max(firsts)
    assert all(episode.truncated == (episode.stop_reason == UNEXPANDED_STOP) for episode in episodes)


class Ones(ScriptedEngine):
    """The first decision of each request group is worth 1, the second 2."""

    def _sample(self, request: SampleRequest) -> Any:
        sample = super()._sample(request)
        digit = "12"[self.calls[-1].index(request) % 2]
        ids = (*TOKENIZER.encode(digit, add_special_tokens=False), TOKENIZER.eos_token_id)
        return type(sample)(ids, sample.logprobs, "stop", 3, "scripted")


@pytest.mark.parametrize(("threshold", "paths"), [(2.9, 2), (3.0, 4)])
def test_a_state_whose_mean_reward_is_above_the_threshold_ends(threshold: float, paths: int) -> None:
    # Joint rewards 1 + 1 and 2 + 2: their mean is 3, which has to be above the threshold, not at it.
    environment = GrowingSums()
    player = EpisodePlayer({"sums": environment}, seats("a", "b"), Ones())
    spec = EpisodeSpec("t", environment.tasks("train")[0], "t", seed=0)
    (episodes,) = played_trees(TreePlayer(player, Branching("align", stop_above=threshold), 2), [spec])
    player.close()
    assert [e.step_rewards[0]["a"] for e in episodes][:: paths // 2] == [2.0, 4.0]
    assert len(episodes) == paths
    assert {e.stop_reason for e in episodes} == ({THRESHOLD_STOP} if paths == 2 else {"end"})
    assert not any(episode.truncated for episode in episodes)


@pytest.mark.parametrize("forks", [True, False])
def test_a_step_that_fails_is_tried_again(forks: bool) -> None:
    (episodes,), _ = grow(Flaky(2, forks=forks), Branching("align"), retries=2, workers=1)
    assert len(episodes) == 4
    assert not any(episode.failed for episode in episodes)
    (steady,), _ = grow(GrowingSums(), Branching("align"))
    assert [e.step_rewards for e in episodes] == [e.step_rewards for e in steady]


def test_a_path_that_keeps_failing_is_a_record_and_the_others_go_on() -> None:
    (episodes,), _ = grow(Flaky(1), Branching("align"), retries=0, workers=1)
    failed = [episode for episode in episodes if episode.failed]
    assert [(e.id, e.stop_reason) for e in failed] == [("t0-0", "error")]
    assert "the connection broke" in str(failed[0].error)
    assert len(episodes) == 3
    assert sum(e.stop_reason == "end" for e in episodes) == 2


def test_an_environment_that_does_not_repeat_itself_is_refused() -> None:
    with pytest.raises(EnvironmentContractError, match=r"moody.*deterministic"):
        grow(Moody(forks=False, turns=2), Branching("align"))


class Brittle(GrowingSums):
    """Its tools fail at the first try, after the step was judged."""

    name = "brittle"

    def __init__(self) -> None:
        super().__init__()
        self.left = [1]  # shared by all copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Brittle:
        made = Brittle()
        made.left = self.left
        return made

    def reset(self, task: Task) -> Observations:
        return {"a": [Message("user", "Digit?")]}

    def step(self, actions: Mapping[str, Message]) -> Step:
        if "a" in actions:
            return Step({"b": [Message("user", actions["a"].content)]}, {"a": 1.0})
        return Step(rewards={"b": 1.0}, done=True, stop_reason="end")

    def tools(self, agent: str) -> Sequence[Any]:
        if agent == "b" and self.left:
            self.left.pop()
            raise OSError("the schema is away")
        return ()


def test_a_fault_after_the_judgement_is_tried_again_from_the_state_before() -> None:
    (episodes,), _ = grow(Brittle(), Branching("align"), retries=1, workers=1)
    assert [episode.error for episode in episodes] == [None] * 4
    assert all(episode.step_rewards == ({"a": 1.0}, {"b": 1.0}) for episode in episodes)
    assert sorted(episode.attempts for episode in episodes) == [1, 1, 2, 2]


class Counted(GrowingSums):
    """Counts the instances that are open."""

    name = "counted"
    forks = False

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.open_instances: list[int] = []  # shared by all copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Counted:
        made = Counted(self.turns, self.forks)
        made.open_instances, made.said = self.open_instances, list(self.said)
        made.open_instances.append(id(made))
        return made

    def close(self) -> None:
        if id(self) in self.open_instances:
            self.open_instances.remove(id(self))


class CountedAsync(Counted):
    """The same with methods that wait."""

    name = "counted_async"

    async def close(self) -> None:  # type: ignore[override]
        super().close()


@pytest.mark.parametrize("forks", [True, False])
@pytest.mark.parametrize("cls", [Counted, CountedAsync])
def test_all_instances_are_closed_with_the_player(cls: type[Counted], forks: bool) -> None:
    environment = cls(3, forks)
    grow(environment, Branching("align"), branches=2, trees=2)
    assert environment.open_instances == []


@pytest.mark.parametrize("forks", [True, False])
def test_instances_of_a_run_that_breaks_are_closed_too(forks: bool) -> None:
    environment = Counted(3, forks)

    class Breaks(ScriptedEngine):
        async def sample(self, requests: Sequence[SampleRequest]) -> Any:
            if len(self.calls) == 2:
                raise RuntimeError("the engine broke")
            return await super().sample(requests)

    player = EpisodePlayer({"counted": environment}, seats("a", "b"), Breaks())
    spec = EpisodeSpec("t", environment.tasks("train")[0], "t", seed=0)
    with pytest.raises(RuntimeError, match="the engine broke"):
        played_trees(TreePlayer(player, Branching("align"), 3), [spec])
    assert len(environment.open_instances) >= 9
    player.close()
    assert environment.open_instances == []


def test_paths_that_are_over_give_their_instances_back_at_once() -> None:
    environment = Counted(4, forks=False)
    player = EpisodePlayer({"counted": environment}, seats("a", "b"), ScriptedEngine())
    spec = EpisodeSpec("t", environment.tasks("train")[0], "t", seed=0)
    played_trees(TreePlayer(player, Branching("align", expand="best"), 8), [spec])
    kept = len(environment.open_instances)
    player.close()
    assert kept <= 16, "eight at a level, and those of the level before"


def test_a_replay_has_the_deadline_of_a_step_for_each_step() -> None:
    class Slow(GrowingSums):
        name = "slow"

        def step(self, actions: Mapping[str, Message]) -> Step:
            time.sleep(0.6)
            return super().step(actions)

    (episodes,), _ = grow(Slow(4, forks=False), Branching("align"), branches=1, step_timeout=2.2)
    assert not any(episode.failed for episode in episodes)
    (episodes,), _ = grow(Slow(4, forks=False), Branching("align", expand="best"), step_timeout=2.2, retries=0)
    assert not any(episode.failed for episode in episodes)


def test_the_level_beyond_the_last_turn_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrlm_pl.rollout.tree_player.MOST_JOINT_ACTIONS", 4)
    (episodes,), _ = grow(GrowingSums(5), Branching("align"), branches=2, max_turns=2)
    assert len(episodes) == 4


def test_a_turn_limit_truncates_all_paths_of_a_tree() -> None:
    (episodes,), _ = grow(GrowingSums(turns=5), Branching("align"), max_turns=2)
    assert len(episodes) == 4
    assert {(e.stop_reason, e.truncated) for e in episodes} == {("turn_limit", True)}


def test_too_many_joint_actions_are_refused_before_they_are_sampled() -> None:
    with pytest.raises(ConfigurationError, match=r"1000000 joint actions.*group_size.*use joint_mode align"):
        grow(GrowingSums(), Branching("cross"), branches=1000)


def test_a_tree_that_grows_towards_the_limit_is_announced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mrlm_pl.rollout.tree_player.MOST_JOINT_ACTIONS", 16)
    with pytest.raises(ConfigurationError, match=r"32 joint actions") as error:
        grow(GrowingSums(5), Branching("align"))
    assert "joint_mode align" not in str(error.value)  # it is the mode already
    (warning,) = caplog.messages
    assert warning.startswith("turn 3 of the turn trees has 8 joint actions, and each further turn 2 times as many")


@pytest.mark.parametrize("options", [{"joint_mode": "diagonal"}, {"expand": "some"}])
def test_unknown_words_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options.values()))):
        Branching(**options)


@pytest.mark.parametrize("mode", ["align", "cross", "counterfactual"])
@pytest.mark.parametrize("agents", [1, 2, 3, 4])
def test_joint_actions_are_counted_without_making_them(mode: Any, agents: int) -> None:
    for branches in (1, 2, 3):
        made = Branching(mode).joint_actions(agents, branches)
        assert len(made) == len(set(made)) == Branching(mode).count(agents, branches)


def test_paths_count_by_the_probability_with_which_they_are_taken() -> None:
    (episodes,), _ = grow(GrowingSums(), Branching("align", expand="best"), branches=4)
    weights = dict(zip((e.stop_reason for e in episodes), path_weights(episodes), strict=True))
    assert weights == {UNEXPANDED_STOP: 0.0, "end": 1 / 4}
    (all_paths,), _ = grow(GrowingSums(turns=3), Branching("align"), branches=2)
    assert path_weights(all_paths) == [1 / 8] * 8
    assert path_weights(plain_episodes()) == [1.0, 1.0]


def plain_episodes() -> Sequence[Episode]:
    environment = GrowingSums()
    player = EpisodePlayer({"sums": environment}, seats("a", "b"), ScriptedEngine())
    task = environment.tasks("train")[0]
    episodes = player.play_blocking([EpisodeSpec(f"e{n}", task, "g", seed=n) for n in range(2)])
    player.close()
    return episodes


def test_instances_do_not_pile_up_over_collections() -> None:
    environment = GrowingSums()
    player = EpisodePlayer({"sums": environment}, seats("a", "b"), ScriptedEngine())
    trees = TreePlayer(player, Branching("align"), 3)
    spec = EpisodeSpec("t", environment.tasks("train")[0], "t", seed=0)
    kept = []
    for _ in range(3):
        played_trees(trees, [spec])
        kept.append(len(player._idle["sums"]))
    player.close()
    assert kept == [1, 1, 1]
