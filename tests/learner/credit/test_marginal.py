"""Credit of agents from replays without them: by arithmetic, summed over outcomes, and in runs."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from mrlm_environments import Halves

from mrlm_pl.advantages import Moments, history_normalized_advantages, marginal_values, shapley_values
from mrlm_pl.algorithms import CCPO, SHARP, Shapley
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Episode, Message, Task, Turn
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.credit.marginal import Coalitions
from mrlm_pl.policy import Policy
from mrlm_pl.rollout.play import EpisodeSpec, Seat
from mrlm_pl.rollout.player import EpisodePlayer
from tests.rollout.test_replay import CHAT, Digits
from tests.support.runs.short_fits import fingerprint
from tests.support.runs.turn_episodes import beside_partner


class Terms(Environment):
    """``a`` and ``b`` say digits at once, then ``c`` hears both; all earn a + b c, with 0 for an empty message."""

    name = "terms"
    agents: tuple[str, ...] = ("a", "b", "c")
    stubborn = False

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{}])

    def reset(self, task: Task) -> Observations:
        self.said: dict[str, str] = {}
        return {agent: [Message("user", "Begin")] for agent in self.agents if agent != "c"}

    def step(self, actions: Mapping[str, Message]) -> Step:
        self.said |= {agent: message.content for agent, message in actions.items()}
        if self.stubborn and not self.said["a"] and "c" not in self.said and "a" in actions:
            self.stubborn = False
            return Step({"a": [Message("user", "Say it!")]})
        if "c" not in self.said:
            return Step({"c": [Message("user", f"They said {self.said}")]})
        a, b, c = (int(self.said[agent] or 0) for agent in "abc")
        return Step(rewards=dict.fromkeys(self.agents, float(a + b * c)), done=True, stop_reason="end")


def play(specs: Sequence[EpisodeSpec], environment: Environment | None = None) -> tuple[list[Episode], Digits]:
    environment, engine = environment or Terms(), Digits()
    seats = {agent: Seat("main", CHAT, Sampling(), 2048) for agent in environment.agents}
    player = EpisodePlayer({environment.name: environment}, seats, engine)
    try:
        return player.play_blocking(specs), engine
    finally:
        player.close()


@pytest.fixture(scope="module")
def group() -> list[Episode]:
    return play([EpisodeSpec(f"e{n}", Terms().tasks("train")[0], "g", seed=n) for n in (4, 5, 8)])[0]


def digits(episode: Episode) -> tuple[int, int, int]:
    a, b, c = (int(episode.trajectories[agent][0].messages[-1].content) for agent in "abc")
    return a, b, c


def contributions(coalitions: Coalitions, episodes: Sequence[Episode]) -> list[list[float]]:
    """Return the contributions of a, b and c to each ordinary episode."""
    returns = coalitions.returns(episodes)
    assert returns.agent == tuple("abc") * (len(returns.agent) // 3)
    return returns.reward.reshape(-1, 3).tolist()


def test_the_digits_differ(group: list[Episode]) -> None:
    assert len({digits(episode) for episode in group}) == 3
    assert all(b * c for _, b, c in map(digits, group))


def test_marginal_contributions_by_arithmetic(group: list[Episode]) -> None:
    coalitions = Coalitions("marginal")
    made, engine = play(coalitions.due(group, 0))
    assert len(made) == 3 * 3
    assert engine.sampled == 0, "all decisions are replayed or empty"
    assert all(turn.scripted for branch in made for row in branch.rows() for turn in row.turns)
    assert contributions(coalitions, [*group, *made]) == [[a, b * c, b * c] for a, b, c in map(digits, group)]
    assert not coalitions.due([*group, *made], 1), "one round"


def test_shapley_values_by_arithmetic(group: list[Episode]) -> None:
    """b and c earn nothing without each other; each has half of their joint reward."""
    coalitions = Coalitions("shapley")
    made, _ = play(coalitions.due(group, 0))
    assert len(made) == 3 * (2**3 - 2) + 1, "the empty coalition is that of all three episodes"
    expected = [[a, b * c / 2, b * c / 2] for a, b, c in map(digits, group)]
    for found, wanted in zip(contributions(coalitions, [*group, *made]), expected, strict=True):
        assert found == pytest.approx(wanted)


def test_sampled_orders_share_the_whole_value(group: list[Episode]) -> None:
    coalitions = Coalitions("shapley", orders=1)
    made, _ = play(coalitions.due(group, 0))
    assert len(made) <= 3 * 4 + 1, "an order and its reverse have four coalitions between none and all"
    for found, episode in zip(contributions(coalitions, [*group, *made]), group, strict=True):
        a, b, c = digits(episode)
        assert sum(found) == pytest.approx(a + b * c)
        assert found[0] == a
        assert found[1:] == pytest.approx([b * c / 2] * 2), "the one that comes second has all, in each direction"


def test_absent_agents_decide_as_in_another_episode(group: list[Episode]) -> None:
    coalitions = Coalitions("shapley", absent="other")
    made, engine = play(coalitions.due(group, 0))
    assert len(made) <= 3 * (2**3 - 2), "no one decides as here: the other episode itself"
    assert engine.sampled == 0
    for found, episode, other in zip(
        contributions(coalitions, [*group, *made]), group, [group[-1], *group[:-1]], strict=True
    ):
        (a, b, c), (x, y, z) = digits(episode), digits(other)
        both = (b - y) * (c + z) / 2, (c - z) * (b + y) / 2
        assert found == pytest.approx([a - x, *both])


def test_equal_decisions_are_replayed_once(group: list[Episode]) -> None:
    twin = dataclasses.replace(group[0], id="twin", seed=99)
    assert len(Coalitions("marginal").due([group[0], twin], 0)) == 3
    assert not Coalitions("marginal", absent="other").due([group[0], twin], 0), "nothing differs"


def test_with_rest_play_members_decide_again_after_an_absent_agent(group: list[Episode]) -> None:
    made, engine = play(Coalitions("marginal", rest="play").due(group, 0))
    assert engine.sampled == 3 * 2, "c decides again without a and without b"
    fresh = {(b.origin.agents, t.agent) for b in made if b.origin for r in b.rows() for t in r.turns if not t.scripted}
    assert fresh == {(("a",), "c"), (("b",), "c")}


def test_an_absent_agent_has_nothing_to_say_when_it_is_asked_again(group: list[Episode]) -> None:
    environment = Terms()
    environment.stubborn = True
    (without_a, *_), engine = play(Coalitions("marginal").due(group[:1], 0), environment)
    assert without_a.origin is not None
    assert without_a.origin.agents == ("a",)
    assert [turn.stop - turn.start for turn in without_a.trajectories["a"][0].turns] == [0, 0]
    assert engine.sampled == 1, "c has no recorded decision at the later step"


def test_an_episode_without_all_its_replays_is_left_out(group: list[Episode]) -> None:
    coalitions = Coalitions("marginal")
    made, _ = play(coalitions.due(group, 0))
    failed = dataclasses.replace(made[1], error="away")
    other = dataclasses.replace(group[0], id="o", group="other", error="away")
    returns = coalitions.returns([other, *group, made[0], failed, *made[2:]])
    assert [episode.id for episode in returns.episode] == ["e5"] * 3 + ["e8"] * 3
    assert returns.group.tolist() == [1] * 6, "numbered as in the whole rollout"


def test_bonuses_of_turns_are_added(group: list[Episode]) -> None:
    coalitions = Coalitions("marginal")
    made, _ = play(coalitions.due(group, 0))

    def bonus(turn: Turn) -> float:
        return -10.0 if turn.agent == "b" else 0.0

    plain, with_bonus = (coalitions.returns([*group, *made], found).reward for found in (None, bonus))
    assert (with_bonus - plain).tolist() == [0.0, -10.0, 0.0] * 3


def test_equal_contributions_are_silent(group: list[Episode]) -> None:
    algorithm = Shapley()
    assert not algorithm.lacks_signal([*group, *play(Coalitions("shapley").due(group, 0))[0]])
    assert algorithm.lacks_signal([group[0], *play(Coalitions("shapley").due(group[:1], 0))[0]])


def test_contributions_of_a_frozen_partner_are_no_signal(group: list[Episode]) -> None:
    policies = {"main": Policy("builtin:tiny"), "partner": Policy("builtin:tiny", trained=False)}
    for algorithm in (Shapley(policies), SHARP(policies, team_weight=0.0)):
        found = [*group, *play(algorithm.unit.branch_rule.due(group, 0))[0]]  # type: ignore[union-attr]
        assert not algorithm.lacks_signal(found)
        for agent in "abc":
            found = beside_partner(found, agent)
        assert algorithm.lacks_signal(found)


def paid(episode: Episode, reward: float) -> Episode:
    """Return an episode in which each agent earns ``reward`` in all."""
    rows = {}
    for agent, (row,) in episode.trajectories.items():
        turns = [dataclasses.replace(turn, reward=0.0) for turn in row.turns]
        turns[-1] = dataclasses.replace(turns[-1], reward=reward)
        rows[agent] = (dataclasses.replace(row, turns=tuple(turns)),)
    return dataclasses.replace(episode, trajectories=rows)


@pytest.mark.parametrize(("team", "silent"), [((0.0, 5.0), False), ((5.0, 5.0), True)])
def test_the_returns_of_the_team_are_a_signal(group: list[Episode], team: tuple[float, float], silent: bool) -> None:
    """All contributions are 0: an episode and its replays without an agent have the same return."""
    made, _ = play(Coalitions("marginal").due(group[:2], 0))
    returns = dict(zip([episode.id for episode in group], team, strict=False))
    found = [paid(e, returns[e.id if e.origin is None else e.origin.episode]) for e in [*group[:2], *made]]
    assert Coalitions("marginal").returns(found).reward.tolist() == [0.0] * 6
    assert SHARP().lacks_signal(found) is silent
    assert not CCPO().lacks_signal(found), "compared with earlier rollouts"


class Crowd(Terms):
    agents = tuple("abcdefghijkl")


def test_exact_values_of_twelve_agents_are_refused() -> None:
    episodes, _ = play([EpisodeSpec("e", Crowd().tasks("train")[0], "g", seed=1)], Crowd())
    with pytest.raises(ConfigurationError, match=r"12 agents of environment 'terms' take 4095 replays .*`orders: 4`"):
        Coalitions("shapley").due(episodes, 0)
    assert len(Coalitions("shapley", orders=4).due(episodes, 0)) <= 2 * 4 * 11 + 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shapley(orders=0), "orders is 0"),
        (lambda: CCPO(absent="gone"), "absent is 'gone'; choose from empty, other"),  # type: ignore[arg-type]
        (lambda: SHARP(rest="skip"), "rest is 'skip'; choose from play, replay"),  # type: ignore[arg-type]
        (lambda: SHARP(marginal_weight=-1.0), "marginal_weight is -1.0"),
        (
            lambda: SHARP(team_weight=0.0, marginal_weight=0.0, process={"r": 0.0}),
            "SHARP: all of team_weight, marginal_weight, process are 0",
        ),
    ],
)
def test_wrong_options_are_named(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


# Two agents choose a bit at once; the null choice None is that of an absent agent.

CHANCE = {"a": 0.3, "b": 0.6}
PAY = {(0, 0): 1.0, (0, 1): -2.0, (1, 0): 0.5, (1, 1): 4.0, (None, 0): 0.2, (None, 1): 3.0}
PAY |= {(0, None): 1.5, (1, None): -1.0, (None, None): 0.7}


def gradient(credit: Any) -> float:
    """Return the expectation of credit times the derivative of log p in the logit of a's choice."""
    total = 0.0
    for a, b in itertools.product((0, 1), repeat=2):
        chance = math.prod(p if bit else 1 - p for p, bit in ((CHANCE["a"], a), (CHANCE["b"], b)))
        total += chance * credit({"a": a, "b": b}) * (a - CHANCE["a"])
    return total


def value_of(played: Mapping[str, int]) -> Any:
    return lambda members: PAY[played["a"] if "a" in members else None, played["b"] if "b" in members else None]


def true_gradient(second: float | None) -> float:
    """Return the derivative of a's expected pay: with b's chance of a 1, or with b absent."""
    pay = [PAY[a, None] if second is None else second * PAY[a, 1] + (1 - second) * PAY[a, 0] for a in (0, 1)]
    return CHANCE["a"] * (1 - CHANCE["a"]) * (pay[1] - pay[0])


def test_the_marginal_contribution_has_the_true_gradient() -> None:
    def credit(played: Mapping[str, int], mean: float = 0.0) -> float:
        return marginal_values("ab", value_of(played))["a"] - mean

    assert gradient(credit) == pytest.approx(true_gradient(0.6))
    assert gradient(lambda played: credit(played, 2.5)) == pytest.approx(true_gradient(0.6)), "the history's mean"


def test_the_shapley_value_has_the_gradient_of_the_mean_over_coalitions() -> None:
    found = gradient(lambda played: shapley_values("ab", value_of(played))["a"])
    assert found == pytest.approx((true_gradient(0.6) + true_gradient(None)) / 2)
    assert found != pytest.approx(true_gradient(0.6), rel=0.1), "another objective than the team's return"


def test_the_history_normalizes_by_key() -> None:
    history = {"a": Moments(2, 1.0, 2.0), "b": Moments(4, -1.0, 0.0)}
    found = history_normalized_advantages(torch.tensor([3.0, 0.0, 5.0]), ["a", "b", "c"], history, eps=0.0)
    assert found.tolist() == pytest.approx([(3 - 1) / 2**0.5, 0 + 1, 5])


def prepared(algorithm: Any, episodes: Sequence[Episode], trainer: Any) -> list[float]:
    """Return the advantage of each trajectory."""
    algorithm.configure_model()
    algorithm.trainer = trainer
    with torch.no_grad():
        rows = algorithm.prepare(episodes, Sampling())["main"]
    return [row[mask][0].item() for row, mask in zip(rows.advantages, rows.action_mask, strict=True)]


def test_ccpo_compares_with_earlier_rollouts(group: list[Episode], quiet_trainer: Any) -> None:
    algorithm = CCPO({"main": Policy("builtin:tiny")})
    assert isinstance(algorithm.unit.branch_rule, Coalitions)
    made, _ = play(algorithm.unit.branch_rule.due(group, 0))
    trainer, terms = quiet_trainer(), [digits(episode) for episode in group]
    first = prepared(algorithm, [*group, *made], trainer)
    assert first == pytest.approx([x for a, b, c in terms for x in (a, b * c, b * c)]), "no history yet"
    second = prepared(algorithm, [*group, *made], trainer)
    mean = sum(a for a, _, _ in terms) / 3
    deviation = math.sqrt(sum((a - mean) ** 2 for a, _, _ in terms) / 2)
    assert second[::3] == pytest.approx([(a - mean) / (deviation + 1e-6) for a, _, _ in terms], rel=1e-5)
    assert algorithm.metrics.take_rollout()["train/contribution/terms/a"] == pytest.approx(mean)
    again = CCPO({"main": Policy("builtin:tiny")})
    again.load_progress(algorithm.progress())
    assert again.progress() == algorithm.progress()


def test_sharp_adds_team_margin_and_process(group: list[Episode], quiet_trainer: Any) -> None:
    algorithm = SHARP({"main": Policy("builtin:tiny")}, team_weight=2.0, marginal_weight=3.0, process={"reward": 0.5})
    made, _ = play(algorithm.unit.branch_rule.due(group, 0))  # type: ignore[union-attr]
    found = prepared(algorithm, [*group, *made], quiet_trainer())
    for place in range(3):
        # The environment's own component is the team's reward.
        sums = [2.5 * (a + b * c) + 3 * (a if place == 0 else b * c) for a, b, c in map(digits, group)]
        mean = sum(sums) / 3
        deviation = math.sqrt(sum((x - mean) ** 2 for x in sums) / 2)
        assert found[place::3] == pytest.approx([(x - mean) / (deviation + 1e-6) for x in sums], rel=1e-5)


def test_sharp_adds_the_length_penalty_as_it_is(group: list[Episode]) -> None:
    algorithm = SHARP(team_weight=0.0, marginal_weight=3.0)
    made, _ = play(algorithm.unit.branch_rule.due(group, 0))  # type: ignore[union-attr]
    returns = algorithm.returns([*group, *made], lambda turn: -10.0 if turn.agent == "b" else 0.0, ())
    expected = [3 * x - penalty for a, b, c in map(digits, group) for x, penalty in ((a, 0), (b * c, 10), (b * c, 0))]
    assert returns.reward.tolist() == expected


def test_a_process_reward_that_does_not_occur_causes_a_warning(
    group: list[Episode], quiet_trainer: Any, caplog: Any
) -> None:
    algorithm = SHARP({"main": Policy("builtin:tiny")}, process={"rewrad": 0.5})
    made, _ = play(algorithm.unit.branch_rule.due(group, 0))  # type: ignore[union-attr]
    assert not algorithm.lacks_signal([*group, *made])
    for _ in range(2):
        prepared(algorithm, [*group, *made], quiet_trainer())
    assert caplog.text.count("model.process weighs rewrad, but the reward components of this rollout are reward;") == 1


def game(**options: Any) -> RolloutDataModule:
    return RolloutDataModule(Halves(), groups=2, group_size=3, sampling=Sampling(max_tokens=2), **options)


def test_another_episode_of_the_group_is_needed(quiet_trainer: Any) -> None:
    data = RolloutDataModule(Halves(), groups=2, group_size=1, sampling=Sampling(max_tokens=2), iterations=1)
    with pytest.raises(ConfigurationError, match=r"data\.group_size is 1, but CCPO compares at least 2 episodes"):
        quiet_trainer().fit(CCPO(absent="other"), data)
    quiet_trainer().fit(CCPO(), data)


@pytest.mark.parametrize("make", [CCPO, SHARP, Shapley, lambda: Shapley(orders=1, absent="other", rest="play")])
def test_a_run_updates_the_weights(make: Any, quiet_trainer: Any) -> None:
    algorithm = make()
    trainer = quiet_trainer()
    trainer.fit(algorithm, game(iterations=2))
    assert trainer.global_step == 2
    assert trainer.callback_metrics["train/grad_norm"] > 0
    assert trainer.callback_metrics["rollout/branch_tokens"] == 0
    assert trainer.callback_metrics["rollout/branch_episodes"] <= 2 * 3 * 3


def test_a_resumed_run_has_the_same_weights(quiet_trainer: Any, tmp_path: Path) -> None:
    def run(**options: Any) -> str:
        algorithm, trainer = CCPO(), quiet_trainer(**options.pop("trainer", {}))
        trainer.fit(algorithm, game(iterations=3), **options)
        return fingerprint(algorithm)

    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = run(trainer={"callbacks": [keep], "enable_checkpointing": True})
    assert run(ckpt_path=tmp_path / "step=2.ckpt") == whole
