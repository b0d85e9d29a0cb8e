"""The multi-agent policy gradients over turn trees: their credit on worked numbers, their gradients, their runs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from mrlm_pl.algorithms import ATGRPO, C3, COMA, IPPO, MAGRPO, MAREINFORCE, MAREMAX, MARLOO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import Batch, PolicyBatch
from mrlm_pl.learner.contract import RolloutFacts
from mrlm_pl.learner.credit.team import has_constant_sum
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.losses import batch_totals
from mrlm_pl.policy import Policy
from mrlm_pl.policy.forward import row_tree
from mrlm_pl.policy.forward.packing import RowPlan
from mrlm_pl.rollout.tree_player import Branching
from tests.support.runs.logs import logged_here
from tests.support.runs.turn_episodes import beside_partner

FAMILY = [MAREINFORCE, MAGRPO, MARLOO, MAREMAX, COMA, ATGRPO]
AGENTS = "abc"
Joint = tuple[int, ...]


def token(agent: str, level: int, parent: int, number: int) -> int:
    """A token that no other decision has."""
    return 4 + AGENTS.index(agent) + 3 * number + 9 * parent + 36 * level


def path(steps: Sequence[tuple[Joint, Any]], group: str = "g", error: str | None = None) -> Episode:
    """An episode of joint actions with their rewards: one number for all agents, or one for each."""
    agents = AGENTS[: len(steps[0][0])]
    nodes = list(itertools.accumulate(("".join(map(str, joint)) for joint, _ in steps), "{}-{}".format, initial=group))
    rows: dict[str, tuple[Trajectory, ...]] = {}
    for place, agent in enumerate(agents):
        ids, mask, turns = [1, 2], [False, False], []
        for level, (joint, _) in enumerate(steps):
            parent = steps[level - 1][0][0] if level else 0
            turns.append(
                Turn(agent, level, len(ids), len(ids) + 1, 0.0, {}, "stop", "main", 0, "e", nodes[level], joint[place])
            )
            ids += [token(agent, level, parent, joint[place]), 3]
            mask += [True, False]
        rows[agent] = (Trajectory(agent, "main", tuple(ids), tuple(mask), (-1.0,) * len(ids), tuple(turns)),)
    paid = [dict(zip(agents, r, strict=True)) if isinstance(r, tuple) else dict.fromkeys(agents, r) for _, r in steps]
    if error:
        paid = paid[:-1]
    return Episode(nodes[-1], Task("t", "train", 0), group, 0, 0, rows, "end", step_rewards=tuple(paid), error=error)


def grid(rewards: Mapping[Joint, float]) -> list[Episode]:
    return [path([(joint, reward)]) for joint, reward in rewards.items()]


def made(cls: Callable[..., Any], model_folder: Path, trainer: Any, **options: Any) -> Any:
    algorithm = cls({"main": Policy(str(model_folder))}, **options)
    algorithm.configure_model()
    algorithm.trainer = trainer
    return algorithm


def credited(algorithm: PolicyGradient, episodes: list[Episode], greedy: Sequence[Episode] = ()) -> Any:
    """The advantage of each decision by its token, and the rows."""
    rows = algorithm.credit(episodes, Sampling(max_tokens=8), greedy)["main"]
    assert rows.action_mask.sum(-1).tolist() == [1] * len(rows), "a row has the tokens of one decision"
    return {int(ids[mask]): float(a[mask]) for ids, mask, a in zip(*parts(rows), strict=True)}, rows


def parts(rows: PolicyBatch) -> tuple[Tensor, Tensor, Tensor]:
    return rows.token_ids, rows.action_mask, rows.advantages


def by_agent(found: Mapping[int, float], agents: int, branches: int) -> list[list[float]]:
    return [[found[token(agent, 0, 0, number)] for number in range(branches)] for agent in AGENTS[:agents]]


SQUARE = {(0, 0): 1.0, (0, 1): 2.0, (1, 0): 3.0, (1, 1): 4.0}


@pytest.mark.parametrize(
    ("cls", "options", "expected"),
    [
        (MAREINFORCE, {}, [[1.5, 3.5], [2.0, 3.0]]),
        (MAGRPO, {}, [[-1.0, 1.0], [-0.5, 0.5]]),
        (MARLOO, {}, [[-2.0, 2.0], [-1.0, 1.0]]),
        (MAREMAX, {"baseline": "group_max"}, [[-2.0, 0.0], [-1.0, 0.0]]),
        (MAREINFORCE, {"cross_reduction": "sum"}, [[3.0, 7.0], [4.0, 6.0]]),
    ],
)
def test_crossed_decisions_have_the_mean_of_their_joint_actions(
    cls: Any, options: dict[str, Any], expected: Any, model_folder: Path, quiet_trainer: Any
) -> None:
    algorithm = made(cls, model_folder, quiet_trainer(), joint_mode="cross", **options)
    found, rows = credited(algorithm, grid(SQUARE))
    assert by_agent(found, 2, 2) == expected
    assert len(rows) == 4, "a decision is trained on once, however many joint actions it is in"


@pytest.mark.parametrize(
    ("cls", "expected"),
    [(MAREINFORCE, [1.0, 4.0]), (MAGRPO, [-1.5, 1.5]), (MARLOO, [-3.0, 3.0])],
)
def test_aligned_decisions_have_the_advantages_of_their_rule(
    cls: Any, expected: list[float], model_folder: Path, quiet_trainer: Any
) -> None:
    found, _ = credited(made(cls, model_folder, quiet_trainer()), grid({(0, 0): 1.0, (1, 1): 4.0}))
    assert by_agent(found, 2, 2) == [expected, expected]


def test_counterfactual_credit_of_aligned_joint_actions(model_folder: Path, quiet_trainer: Any) -> None:
    found, _ = credited(made(COMA, model_folder, quiet_trainer()), grid(SQUARE))
    # The diagonals of [[-1, -1], [1, 1]] and [[-0.5, 0.5], [-0.5, 0.5]].
    assert by_agent(found, 2, 2) == [[-1.0, 1.0], [-0.5, 0.5]]


class DoubledCOMA(COMA):
    def advantages(self, returns: Any) -> Any:
        return 2 * super().advantages(returns)


def test_own_advantages_may_build_on_those_of_counterfactual_credit(model_folder: Path, quiet_trainer: Any) -> None:
    found, _ = credited(made(DoubledCOMA, model_folder, quiet_trainer()), grid(SQUARE))
    assert by_agent(found, 2, 2) == [[-2.0, 2.0], [-1.0, 1.0]]


def test_counterfactual_credit_differs_from_the_crossed_mean(model_folder: Path, quiet_trainer: Any) -> None:
    # Only (1, 1) earns: beside the other's decision 0, the own decision makes no difference.
    rewards = {(0, 0): 0.0, (0, 1): 0.0, (1, 0): 0.0, (1, 1): 4.0}
    counterfactual, _ = credited(made(COMA, model_folder, quiet_trainer()), grid(rewards))
    crossed, _ = credited(made(MAGRPO, model_folder, quiet_trainer(), joint_mode="cross"), grid(rewards))
    assert by_agent(counterfactual, 2, 2) == [[0.0, 2.0], [0.0, 2.0]]
    assert by_agent(crossed, 2, 2) == [[-1.0, 1.0], [-1.0, 1.0]]


def test_counterfactual_credit_of_three_agents(model_folder: Path, quiet_trainer: Any) -> None:
    joints = Branching("counterfactual").joint_actions(3, 2)
    episodes = grid({(i, j, k): 4.0 * i + 2 * j + k for i, j, k in joints})
    found, _ = credited(made(COMA, model_folder, quiet_trainer()), episodes)
    assert by_agent(found, 3, 2) == [[-2.0, 2.0], [-1.0, 1.0], [-0.5, 0.5]]


TREE = [
    ([((0, 0), 1.0), ((0, 0), 0.0)], [((0, 0), 1.0), ((1, 1), 2.0)]),
    ([((1, 1), 2.0), ((0, 0), 3.0)], [((1, 1), 2.0), ((1, 1), 5.0)]),
]


@pytest.mark.parametrize(("gamma", "roots"), [(1.0, [2, 6]), (0.9, [1.9, 5.6]), (0.5, [1.5, 4]), (0.0, [1, 2])])
def test_a_decision_earns_its_reward_and_the_discounted_mean_of_its_successors(
    gamma: float, roots: list[float], model_folder: Path, quiet_trainer: Any
) -> None:
    episodes = [path(steps) for pair in TREE for steps in pair]
    found, rows = credited(made(MAREINFORCE, model_folder, quiet_trainer(), gamma=gamma, weighting="equal"), episodes)
    assert by_agent(found, 2, 2)[0] == pytest.approx(roots)
    later = [found[token("a", 1, parent, number)] for parent in (0, 1) for number in (0, 1)]
    assert later == [0.0, 2.0, 3.0, 5.0]
    assert len(rows) == 2 * (2 + 4)
    centred, _ = credited(made(MAGRPO, model_folder, quiet_trainer(), gamma=gamma, weighting="equal"), episodes)
    later = [centred[token("b", 1, parent, number)] for parent in (0, 1) for number in (0, 1)]
    assert later == [-1.0, 1.0, -1.0, 1.0], "decisions are compared in their own state"


def test_rows_hold_what_came_before_and_share_a_prompt_within_a_state(model_folder: Path, quiet_trainer: Any) -> None:
    episodes = [path(steps) for pair in TREE for steps in pair]
    _, rows = credited(made(MAREINFORCE, model_folder, quiet_trainer()), episodes)
    long = [place for place in range(len(rows)) if rows.lengths[place] == 5]
    assert len(long) == 8
    for place in long:
        assert rows.behavior_logp[place].tolist() == [0.0] * 4 + [-1.0], "an earlier turn is no action of this row"
    prompts: dict[int, set[tuple[int, ...]]] = {}
    for place in range(len(rows)):
        ids = rows.token_ids[place, : int(rows.lengths[place]) - 1]
        prompts.setdefault(int(rows.comparisons[place]), set()).add(tuple(ids.tolist()))
    assert all(len(found) == 1 for found in prompts.values())
    assert len(prompts) == 2 * 3


def test_an_update_computes_what_the_rows_of_a_tree_have_in_common_once(
    model_folder: Path, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_tree, "LEAST_SAVING", 1)
    _, rows = credited(
        made(MAREINFORCE, model_folder, quiet_trainer()), [path(steps) for pair in TREE for steps in pair]
    )
    inputs = rows.inputs()
    plan = RowPlan(inputs.token_ids, inputs.action_mask, inputs.prefix_groups)
    (packed,) = plan.packed(None)
    # the prompt of two tokens, and for two first decisions of two agents the decision and the token after it; what is
    # decided last is predicted from these, and not read again
    assert packed.input_ids.shape == (1, 2 + 2 * 2 * 2)
    assert len(packed.targets) == 12


def test_own_rewards_are_kept_apart(model_folder: Path, quiet_trainer: Any) -> None:
    episodes = [path([((0, 0), (1.0, 5.0))]), path([((1, 1), (3.0, 1.0))])]
    own, _ = credited(made(MAREINFORCE, model_folder, quiet_trainer(), reward="own"), episodes)
    team, _ = credited(made(MAREINFORCE, model_folder, quiet_trainer()), episodes)
    assert by_agent(own, 2, 2) == [[1.0, 3.0], [5.0, 1.0]]
    assert by_agent(team, 2, 2) == [[3.0, 2.0], [3.0, 2.0]]
    paid = {(0, 0): (1.0, 0.0), (0, 1): (2.0, 0.0), (1, 0): (3.0, 0.0), (1, 1): (4.0, 8.0)}
    square = [path([(joint, rewards)]) for joint, rewards in paid.items()]
    counterfactual, _ = credited(made(COMA, model_folder, quiet_trainer(), reward="own"), square)
    assert by_agent(counterfactual, 2, 2) == [[-1.0, 1.0], [0.0, 4.0]]


def test_the_greedy_rollout_is_the_baseline_turn_by_turn(model_folder: Path, quiet_trainer: Any) -> None:
    episodes = [path(steps) for pair in TREE for steps in pair]
    greedy = [path([((0, 0), 1.0), ((0, 0), 4.0)])]
    algorithm = made(MAREMAX, model_folder, quiet_trainer(), gamma=0.5, weighting="equal")
    found, _ = credited(algorithm, episodes, greedy)
    # Greedy returns: 1 + 0.5 * 4 = 3 from the first turn on, 4 from the second.
    assert by_agent(found, 2, 2)[0] == [1.5 - 3.0, 4.0 - 3.0]
    assert [found[token("a", 1, 1, number)] for number in (0, 1)] == [-1.0, 1.0]


@pytest.mark.parametrize("agents", [2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_greedy_rollout_is_subtracted_from_every_joint_action_that_a_return_sums_over(
    reduction: str, agents: int, model_folder: Path, quiet_trainer: Any
) -> None:
    algorithm = made(MAREMAX, model_folder, quiet_trainer(), joint_mode="cross", cross_reduction=reduction)
    joints = list(itertools.product(range(2), repeat=agents))
    zero = (0,) * agents
    found, _ = credited(algorithm, grid(dict.fromkeys(joints, 1.0)), [path([(zero, 1.0)])])
    assert set(found.values()) == {0.0}, "all earn as much as the greedy joint action"
    # The first agent's second decision earns 2 more in each of its 2 ** (agents - 1) joint actions.
    found, _ = credited(algorithm, grid({joint: 1.0 + 2 * joint[0] for joint in joints}), [path([(zero, 1.0)])])
    assert by_agent(found, 1, 2) == [[0.0, 2.0 * (2 ** (agents - 1) if reduction == "sum" else 1)]]


def test_groups_without_a_greedy_rollout_are_left_out(model_folder: Path, quiet_trainer: Any) -> None:
    episodes = [*grid({(0, 0): 1.0, (1, 1): 3.0}), path([((0, 0), 7.0)], group="h")]
    algorithm = made(MAREMAX, model_folder, quiet_trainer())
    greedy = [path([((0, 0), 1.0)]), path([((0, 0), 0.0)], "h", error="away")]
    rows = algorithm.prepare(episodes, Sampling(max_tokens=8), greedy)["main"]
    assert rows.advantages[rows.action_mask].tolist() == [0.0, 2.0, 0.0, 2.0]
    assert algorithm.metrics.take_rollout()["train/missing_baselines"] == 1.0


def test_the_best_is_compared_by_its_own_turn_alone(model_folder: Path, quiet_trainer: Any) -> None:
    episodes = [
        path([((0, 0), 1.0)]),
        path([((1, 1), 3.0), ((0, 0), 10.0)]),
        path([((1, 1), 3.0), ((1, 1), 0.0)]),
    ]
    found, _ = credited(made(ATGRPO, model_folder, quiet_trainer()), episodes)
    # Two values with distance d: -+ (d / 2) / (d / sqrt 2).
    assert by_agent(found, 2, 2)[0] == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)
    assert [found[token("a", 1, 1, n)] for n in (0, 1)] == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)


def test_failed_joint_actions_do_not_count(model_folder: Path, quiet_trainer: Any) -> None:
    episodes = [*grid({(0, 0): 1.0, (0, 1): 2.0, (1, 0): 3.0}), path([((1, 1), 0.0)], error="the sandbox broke")]
    found, _ = credited(made(MAREINFORCE, model_folder, quiet_trainer(), joint_mode="cross"), episodes)
    assert by_agent(found, 2, 2) == [[1.0, 3.0], [1.0, 2.0]], "beside the other's decision 0 alone"
    summed, _ = credited(
        made(MAREINFORCE, model_folder, quiet_trainer(), joint_mode="cross", cross_reduction="sum"), episodes
    )
    assert by_agent(summed, 2, 2) == [[2.0, 6.0], [2.0, 4.0]]


def test_states_weigh_as_much_as_they_are_probable(model_folder: Path, quiet_trainer: Any) -> None:
    episodes = [path(steps) for pair in TREE for steps in pair]
    equal, _ = credited(made(MAREINFORCE, model_folder, quiet_trainer(), weighting="equal"), episodes)
    found, _ = credited(made(MAREINFORCE, model_folder, quiet_trainer()), episodes)
    # Weights 1 and 1/2 of two and four decisions of each agent, scaled to a mean of 1: 6 / (2 + 4 / 2) = 1.5.
    assert by_agent(found, 2, 2)[0] == pytest.approx([1.5 * value for value in by_agent(equal, 2, 2)[0]])
    later = token("a", 1, 1, 1)
    assert found[later] == pytest.approx(0.75 * equal[later])


def test_an_agent_that_never_acts_is_part_of_the_team(model_folder: Path, quiet_trainer: Any) -> None:
    episodes = [dataclasses.replace(episode, agents=("a", "b", "c")) for episode in grid({(0, 0): 3.0, (1, 1): 6.0})]
    found, _ = credited(made(MAREINFORCE, model_folder, quiet_trainer()), episodes)
    assert by_agent(found, 2, 2) == [[2.0, 4.0], [2.0, 4.0]]
    assert episodes[0].team_size == 3
    greedy = [dataclasses.replace(path([((0, 0), 3.0)]), agents=("a", "b", "c"))]
    found, _ = credited(made(MAREMAX, model_folder, quiet_trainer()), episodes, greedy)
    assert by_agent(found, 2, 2) == [[0.0, 2.0], [0.0, 2.0]], "doing as the greedy episode earns nothing more"


def test_penalties_of_length_are_part_of_both_sides(model_folder: Path, quiet_trainer: Any) -> None:
    # Every turn has one token of at most one: all are punished by 1, so nothing differs.
    sampling, greedy = Sampling(max_tokens=1), [path([((0, 0), 1.0)])]
    for cls in (COMA, MAREMAX, MAGRPO):
        algorithm = made(cls, model_folder, quiet_trainer(), overlong_buffer=1)
        rows = algorithm.credit(grid(dict.fromkeys(SQUARE, 1.0)), sampling, greedy)["main"]
        assert rows.advantages[rows.action_mask].tolist() == [0.0] * 4, cls.__name__
    algorithm = made(MAREINFORCE, model_folder, quiet_trainer(), overlong_buffer=1)
    rows = algorithm.credit(grid({(0, 0): 1.0, (1, 1): 3.0}), sampling, [])["main"]
    assert sorted(rows.advantages[rows.action_mask].tolist()) == [0.0, 0.0, 2.0, 2.0]


def test_the_best_counts_also_when_what_follows_it_failed(model_folder: Path, quiet_trainer: Any) -> None:
    episodes = [
        path([((0, 0), 1.0)]),
        path([((1, 1), 3.0), ((0, 0), 0.0)], error="away"),
        path([((1, 1), 3.0), ((1, 1), 0.0)], error="away"),
    ]
    found, _ = credited(made(ATGRPO, model_folder, quiet_trainer()), episodes)
    assert by_agent(found, 2, 2)[0] == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-5)


def test_a_failed_step_does_not_count_although_it_was_paid(model_folder: Path, quiet_trainer: Any) -> None:
    broken = dataclasses.replace(path([((0, 0), 9.0)]), error="the observation could not be rendered")
    found, _ = credited(made(MAREINFORCE, model_folder, quiet_trainer()), [broken, path([((1, 1), 2.0)])])
    assert sorted(found.values()) == [2.0, 2.0]


def test_a_group_is_without_signal_by_its_credit(model_folder: Path, quiet_trainer: Any) -> None:
    # Equal sums, but the discounted returns 1 and 0.5 differ; pay that sums to the same for the team does not.
    late = [path([((0, 0), 1.0), ((0, 0), 0.0)]), path([((1, 1), 0.0), ((0, 0), 1.0)])]
    assert not made(MAGRPO, model_folder, quiet_trainer(), gamma=0.5).lacks_signal(late)
    assert made(MAGRPO, model_folder, quiet_trainer()).lacks_signal(late)
    against = [path([((0, 0), (1.0, 0.0))]), path([((1, 1), (0.0, 1.0))])]
    assert made(MAGRPO, model_folder, quiet_trainer()).lacks_signal(against)
    assert not made(MAGRPO, model_folder, quiet_trainer(), reward="own").lacks_signal(against)
    # Both joint actions are better than those in which one agent decides otherwise, by the same 0.5.
    alike = grid({(0, 0): 1.0, (1, 1): 1.0, (0, 1): 0.0, (1, 0): 0.0})
    assert not made(COMA, model_folder, quiet_trainer()).lacks_signal(alike)
    assert made(COMA, model_folder, quiet_trainer()).lacks_signal(grid(dict.fromkeys(SQUARE, 0.1)))


@pytest.mark.parametrize("cls", FAMILY)
def test_decisions_of_a_frozen_partner_are_no_signal(cls: Callable[..., Any]) -> None:
    algorithm = cls({"main": Policy(), "partner": Policy(trained=False)}, reward="own")
    group = [path([((a, b), (1.0, float(b)))]) for a, b in SQUARE]
    assert not algorithm.lacks_signal(group)
    assert algorithm.lacks_signal(beside_partner(group, "b"))
    assert not algorithm.lacks_signal(beside_partner(group, "a"))


@pytest.mark.parametrize(("sums", "warns"), [((1.0, 1.0), True), ((1.0, 2.0), False)])
def test_a_team_reward_in_a_game_of_constant_sum_is_warned_of_once(
    sums: tuple[float, float], warns: bool, model_folder: Path, quiet_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    episodes = [path([((n, n), (float(n), total - n))]) for n, total in enumerate(sums)]
    for cls in (MAGRPO, COMA, ATGRPO, IPPO):
        for reward in ("team", "own"):
            caplog.clear()
            algorithm = made(cls, model_folder, quiet_trainer(), reward=reward)
            for _ in range(2):
                algorithm.prepare(episodes, Sampling(max_tokens=8))
            told = [record for record in caplog.records if "zero-sum" in record.getMessage()]
            assert len(told) == (warns and reward == "team"), (cls, reward)
    assert has_constant_sum(episodes) == warns


def test_counterfactual_credit_of_trees_without_counterfactuals_is_warned_of(
    model_folder: Path, quiet_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    algorithm = made(COMA, model_folder, quiet_trainer())
    caplog.clear()
    credited(algorithm, grid(SQUARE))
    assert not logged_here(caplog)
    found, _ = credited(algorithm, grid({(0, 0): 1.0, (1, 1): 4.0}))
    assert set(found.values()) == {0.0}
    credited(algorithm, grid({(0, 0): 1.0, (1, 1): 4.0}))
    (warning,) = logged_here(caplog)
    assert "differs from another in the decision of one agent alone" in warning.getMessage()


def test_a_joint_action_whose_continuations_all_failed_is_unknown(model_folder: Path, quiet_trainer: Any) -> None:
    steps = [((0, 0), 1.0), ((0, 0), 0.0)]
    episodes = [path(steps, error="away"), path([((0, 0), 1.0), ((1, 1), 0.0)], error="away"), path([((1, 1), 2.0)])]
    found, rows = credited(made(MAREINFORCE, model_folder, quiet_trainer()), episodes)
    assert len(rows) == 2
    assert found[token("a", 0, 0, 1)] == 2.0


def test_a_collection_that_failed_altogether_has_no_rows(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm = made(MAGRPO, model_folder, quiet_trainer())
    assert algorithm.credit([path([((0, 0), 1.0)], error="away")], Sampling(), []) == {}


def gradient(cls: Any, model_folder: Path, trainer: Any, **options: Any) -> Tensor:
    algorithm = made(cls, model_folder, trainer, **options)
    greedy = [path([((0, 0), 2.5)])]
    rows = algorithm.prepare(grid({(n, n): r for n, r in enumerate([1.0, 2.0, 4.0, 9.0])}), Sampling(), greedy)["main"]
    batch = Batch({"main": rows}, {"main": batch_totals(rows.action_mask, rows.episode_tokens)})
    algorithm.policy_loss("main", rows, batch).backward()
    return torch.cat([w.grad.flatten() for w in algorithm.policy("main").model.parameters() if w.grad is not None])


def test_the_four_baselines_have_different_first_gradients(model_folder: Path, quiet_trainer: Any) -> None:
    trainer = quiet_trainer()
    found = {cls.__name__: gradient(cls, model_folder, trainer) for cls in (MAREINFORCE, MAGRPO, MARLOO, MAREMAX)}
    for one, other in itertools.combinations(found, 2):
        distance = (found[one] - found[other]).norm() / found[one].norm()
        assert distance > 0.1, (one, other)
    # Leave-one-out is the centred return times G / (G - 1), so those two share a direction.
    torch.testing.assert_close(found["MARLOO"], found["MAGRPO"] * 4 / 3, rtol=1e-4, atol=1e-7)
    # The baselines differ by constants: with c = the greedy return, REINFORCE - ReMax = c (gradient of the mean logp).
    ones = found["MAREINFORCE"] - found["MAGRPO"]
    torch.testing.assert_close((found["MAREINFORCE"] - found["MAREMAX"]) * 4.0, ones * 2.5, rtol=1e-3, atol=1e-6)


def test_scaled_baselines_become_alike_and_are_off_by_default(model_folder: Path, quiet_trainer: Any) -> None:
    trainer = quiet_trainer()
    centred, others = (gradient(cls, model_folder, trainer, normalize=True) for cls in (MAGRPO, MARLOO))
    torch.testing.assert_close(others, centred * 4 / 3, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {"joint_mode": "diagonal"},
        {"cross_reduction": "max"},
        {"reward": "mine"},
        {"gamma": 1.5},
        {"weighting": "late"},
        {"stop_above": float("nan")},
    ],
)
def test_unknown_names_and_values_out_of_range_are_refused(options: dict[str, Any], model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        MAGRPO({"main": Policy(str(model_folder))}, **options)


@pytest.mark.parametrize("cls", [*FAMILY, C3])
def test_rows_of_single_decisions_are_no_episodes(cls: Any, model_folder: Path) -> None:
    algorithm = cls({"main": Policy(str(model_folder))}, reduction="episode_mean")
    with pytest.raises(ConfigurationError, match="rows of single decisions are not episodes; use sequence_mean"):
        algorithm.check_rollouts(RolloutFacts(("a", "b"), ("t",)))


def test_a_joint_mode_of_no_use_is_answered_with_those_that_are(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"joint_mode is 'counterfactual'; choose from align, cross$"):
        MAGRPO({"main": Policy(str(model_folder))}, joint_mode="counterfactual")


class Digits(Environment):
    """Two speakers, for some turns; both earn the share of digits in their joint answer."""

    name = "digits"
    agents = ("a", "b")
    forks = True

    def __init__(self, turns: int = 2) -> None:
        self.turns, self.left = turns, 0

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(8)])

    def reset(self, task: Task) -> Observations:
        self.left = self.turns
        return {agent: [Message("user", f"Say {task.data['n']}")] for agent in self.agents}

    def step(self, actions: Mapping[str, Message]) -> Step:
        self.left -= 1
        text = "".join(message.content for message in actions.values())
        rewards = dict.fromkeys(self.agents, sum(map(str.isdigit, text)) / max(len(text), 1))
        if not self.left:
            return Step(rewards=rewards, done=True, stop_reason="end")
        return Step({agent: [Message("user", "More")] for agent in self.agents}, rewards)


@pytest.mark.parametrize("cls", FAMILY)
@pytest.mark.parametrize("policies", [1, 2])
@pytest.mark.long_after(4)
def test_each_runs_and_the_ratio_is_one_at_first(
    cls: Any, policies: int, model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    names = ["one", "two"][:policies]
    algorithm = cls(
        {name: Policy(str(model_folder), learning_rate=1e-3) for name in names}, {"a": names[0], "b": names[-1]}
    )
    data = RolloutDataModule(Digits(), groups=2, group_size=3, iterations=1, sampling=Sampling(max_tokens=4))
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    metrics = trainer.callback_metrics
    prefix = "train/" if policies == 1 else "train/one/"
    assert metrics[f"{prefix}approx_kl"] < 1e-6
    assert metrics[f"{prefix}ratio_deviation"] < 1e-4
    states = {COMA: 1 + 9, ATGRPO: 2}.get(cls, 1 + 3)
    assert metrics[f"{prefix}comparison_groups"] == 2 * states * (2 if policies == 1 else 1)
    (file,) = (tmp_path / "run" / "episodes").iterdir()
    paths = [episode for episode in read_episodes(file) if not episode.id.endswith("greedy")]
    assert len(paths) == 2 * {COMA: 81, ATGRPO: 2 + 3}.get(cls, 9)


@pytest.mark.long
def test_accumulation_does_not_change_the_update(model_folder: Path, quiet_trainer: Any) -> None:
    weights = []
    for pieces in (1, 4, 12):
        algorithm = MAGRPO({name: Policy(str(model_folder), learning_rate=1e-3) for name in ("a", "b")})
        data = RolloutDataModule(Digits(), groups=4, group_size=3, iterations=1, sampling=Sampling(max_tokens=4))
        quiet_trainer(accumulate_grad_batches=pieces).fit(algorithm, data)
        trained = [weight.flatten() for name in ("a", "b") for weight in algorithm.policy(name).model.parameters()]
        weights.append(torch.cat(trained))
    for other in weights[1:]:
        torch.testing.assert_close(weights[0], other, rtol=0, atol=2e-5)


@pytest.mark.parametrize("cls", [MAGRPO, MAREMAX, COMA, ATGRPO])
@pytest.mark.long_after(1)
def test_a_resumed_run_equals_an_uninterrupted_one(
    cls: Any, model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    def fit(trainer: Any, **options: Any) -> Any:
        policies = {name: Policy(str(model_folder), learning_rate=1e-2) for name in ("a", "b")}
        algorithm = cls(policies)
        data = RolloutDataModule(
            Digits(), groups=2, group_size=2, minibatches=2, iterations=2, sampling=Sampling(max_tokens=3)
        )
        trainer.fit(algorithm, data, **options)
        return algorithm.state_dict()

    whole = fit(quiet_trainer())
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(quiet_trainer(enable_checkpointing=True, callbacks=[saver], max_steps=1))
    resumed = fit(quiet_trainer(), ckpt_path=tmp_path / "step=1.ckpt")  # in the middle of a collection
    assert all(torch.equal(weight, resumed[name]) for name, weight in whole.items())


def test_groups_without_signal_are_replaced_by_other_tasks(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm = MAGRPO({"main": Policy(str(model_folder), learning_rate=0.0)})
    data = RolloutDataModule(
        Digits(1), groups=2, group_size=2, iterations=1, resample_rounds=2, sampling=Sampling(max_tokens=1)
    )
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    assert trainer.callback_metrics["rollout/resampled_groups"] >= 1
