"""The benchmarks of papers' effects and of teams at equal tokens: their arithmetic by hand."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from mrlm_environments import CollaborativeReasoningEnvironment

from mrlm_pl import check_environment
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.learner.credit.returns import returns_of

TASKS = [Task("collaborative_reasoning", "test", 0, data={"question": "2 + 2?", "answer": "4", "format": "math"})]
TASKS += [replace(TASKS[0], index=1)]


@pytest.fixture
def budget(learning_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return learning_benchmark("budget")


@pytest.fixture
def effects(learning_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return learning_benchmark("effects")


def episode(task: Task, reply: str, tokens: int) -> Episode:
    said = (Message("user", "2 + 2?"), Message("assistant", reply))
    row = Trajectory(
        "solver_1", "main", (1,) * (tokens + 5), (False,) * 5 + (True,) * tokens, (0.0,) * (tokens + 5), ()
    )
    own = {"solver_1": (replace(row, messages=said),)}
    return Episode(f"{task.index} {reply}", task, task.key, 0, -1, own, "turns", success="4" in reply)


def test_a_majority_takes_as_many_tokens_as_its_samples(budget: ModuleType) -> None:
    replies: list[Sequence[str]] = [("It is 5.", "It is 4.", "It is 4."), ("It is 4.", "It is 4.", "It is 5.")]
    played = [
        episode(task, reply, tokens=8 + 2 * number)
        for task, said in zip(TASKS, replies, strict=True)
        for number, reply in enumerate(said)
    ]
    found = budget.points(played, CollaborativeReasoningEnvironment(solvers=1, max_turns=1), samples=3)
    # 10 tokens a sample; 4 of 6 are right; of two different answers the first counts; both majorities of 3 are right
    assert found == [(10, 0.6667), (20, 0.5), (30, 1.0)]


def test_between_two_numbers_of_samples_some_problems_have_one_more(budget: ModuleType) -> None:
    curve = [(10, 0.4), (20, 0.4), (30, 0.8)]
    assert budget.at_tokens(curve, 22) == pytest.approx(0.8 * 0.4 + 0.2 * 0.8)
    assert budget.at_tokens(curve, 30) == pytest.approx(0.8)
    for outside in (9, 31):
        with pytest.raises(ValueError, match="are not between 10 and 30"):
            budget.at_tokens(curve, outside)


def test_a_team_is_compared_with_majorities_of_its_own_seed(budget: ModuleType) -> None:
    def row(seed: int, before: list[tuple[float, float]], after: list[tuple[float, float]]) -> dict[str, object]:
        return {"seed": seed, "before": before, "after": after}

    alone = [row(seed, [(10, 0.3), (40, 0.3)], [(10, 0.5), (40, 0.5 + 0.3 * seed)]) for seed in (0, 1)]
    team = [row(seed, [(20, 0.2)], [(30, 0.6 + 0.2 * seed)]) for seed in (0, 1)]
    found = budget.summary({"GRPO": alone, "MAPoRL": team})["MAPoRL, after"]
    assert found["untrained"] == [0.3, 0.0]
    assert found["trained"][0] == pytest.approx((0.5 + 0.7) / 2)
    # 0.6 - 0.5 and 0.8 - 0.7
    assert found["minus trained"] == [0.1, 0.0]


def test_all_agents_have_one_mean_and_one_deviation(effects: ModuleType) -> None:
    rows = [
        replace(episode(TASKS[0], "4", 1), id=str(number), trajectories=paid)
        for number, paid in enumerate([_paid(1.0, 0.0), _paid(1.0, 0.0)])
    ]
    returns = returns_of(rows)
    algorithm = effects.OverAllAgents()
    # of 1, 0, 1, 0 the mean is 1/2 and the unbiased deviation sqrt(1/3)
    expected = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64) * 3**0.5 / 2
    torch.testing.assert_close(algorithm.advantages(returns), expected, atol=1e-5, rtol=0)
    assert algorithm.with_baselines(returns).baseline.tolist() == [0.5] * 4
    agentwise = effects.DrMAS()
    assert agentwise.advantages(returns).tolist() == [0.0] * 4


def _paid(*rewards: float) -> dict[str, tuple[Trajectory, ...]]:
    """Return the trajectories of a planner and a helper with these returns."""
    paid = {}
    for agent, reward in zip(("planner", "helper"), rewards, strict=True):
        turn = Turn(agent, 0, 0, 1, reward, {}, "stop", "main", 0, "local")
        paid[agent] = (Trajectory(agent, "main", (1,), (True,), (0.0,), (turn,)),)
    return paid


def test_chance_answers_each_move_of_alpha_with_a_free_cell(effects: ModuleType) -> None:
    check_environment(effects.AlphaBegins())
    game = effects.Chance()
    for task in (game.tasks("test")[index] for index in range(20)):
        observations = game.reset(task)
        free, done = set("123456789"), False
        while not done:
            (text,) = [message.content for message in observations["alpha"]]
            shown = {cell for cell in text.rpartition(" ")[2] if cell.isdigit()}
            assert shown < free or shown == free == set("123456789")
            cell = min(shown)
            step = game.step({"alpha": Message("assistant", cell)})
            observations, done, free = step.observations, step.done, shown - {cell}
        assert set(step.rewards) == {"alpha"}
        assert step.stop_reason in ("three_in_a_row", "draw"), "neither makes an illegal move"


def test_alpha_always_begins(effects: ModuleType) -> None:
    game = effects.AlphaBegins()
    assert all("alpha" in game.reset(game.tasks("train")[index]) for index in range(10))


@pytest.mark.parametrize("arm", ["GRPO", "AT-GRPO"])
def test_a_run_ends_with_its_budget_of_tokens(effects: ModuleType, arm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effects, "EPISODES", 4)
    effect = effects.EFFECTS["at_grpo"]
    two_groups = {**effect.data, "groups": 2, "group_size": 4}
    short = replace(effect, measure=partial(effects.AtTheBudget, 100), data=two_groups)
    found = effects.run(replace(short, model=lambda folder: "builtin:tiny"), effect.arms[arm], 0, Path())
    # the built-in model makes no move here: 2 tasks x 4 episodes or branches x 5 turns x 2 agents x 1 token a rollout
    assert found["tokens"] == 80
    assert 0 <= found["success before"] <= found["reward before"] <= 1.25


def test_a_recipe_whose_policy_is_kept_does_not_run_again(
    effects: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[Sequence[str]] = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: ran.append([*command]) or done)
    model = effects.EFFECTS["at_grpo_long"].model
    assert model(tmp_path) == str(tmp_path / "run/policies/main")
    assert [Path(words[1]).name for words in ran] == ["make_path_demonstrations.py", "fit"]
    assert ran[0][-2:] == ["--settings", '{"size": 4, "walls": 3, "distance": [3, 6], "turns": 8}']
    (tmp_path / "run/policies/main").mkdir(parents=True)
    assert model(tmp_path) == str(tmp_path / "run/policies/main")
    assert len(ran) == 2


def test_a_small_model_that_is_missing_names_its_command(
    effects: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[Sequence[str]] = []
    done = subprocess.CompletedProcess([], 0)
    monkeypatch.setattr(subprocess, "run", lambda command, **options: ran.append([*command]) or done)
    monkeypatch.setattr(effects, "SMALL", str(tmp_path / "small"))
    model = effects.EFFECTS["rae_small"].model
    with pytest.raises(SystemExit, match="make small-model"):
        model(tmp_path)
    assert ran == []
    (tmp_path / "small").mkdir()
    assert model(tmp_path) == str(tmp_path / "run/policies/main")
    begins = ["--model.policies.main.model", str(tmp_path / "small")]
    assert ran[1][-4:] == [*begins, "--model.policies.main.learning_rate", "0.00075"]


@pytest.mark.parametrize("name", ["at_grpo_alone", "at_grpo_alone_long"])
def test_one_agent_moves_by_itself_in_the_grid_of_the_team(effects: ModuleType, name: str) -> None:
    effect = effects.EFFECTS[name]
    alone, team = effect.arms["one agent"].environment(), effect.environment()
    assert (alone.agents, team.agents) == (("executor",), ("planner", "executor"))
    task = team.tasks("test")[0]
    assert alone.tasks("test")[0].data == task.data
    alone.reset(task)
    for move in alone.gold(task)["executor"]:
        step = alone.step({"executor": Message("assistant", move)})
    assert (step.done, step.success) == (True, True)


def test_an_arm_has_its_own_model_and_environment(
    effects: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(effects, "EPISODES", 4)
    effect = effects.EFFECTS["at_grpo_alone"]
    kept: list[Path] = []
    own = replace(effect.arms["one agent"], model=lambda folder: kept.append(folder) or "builtin:tiny")
    small = {**effect.data, "groups": 2, "group_size": 4}
    measure = partial(effects.AtTheBudget, 50, rewards=False)
    found = effects.run(replace(effect, measure=measure, data=small), own, 0, tmp_path)
    assert kept == [tmp_path]
    assert found["tokens"] == 40, "2 tasks x 4 episodes x 5 turns x 1 token: a team generates twice as many"
    assert {*found} == {"success before", "success", "tokens", "cpu_seconds"}


def test_self_play_at_a_budget_is_scored_before_and_after(effects: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(effects, "EPISODES", 4)
    effect = effects.EFFECTS["rae_rules"]
    short = replace(effect, measure=partial(effects.AgainstChanceAtTheBudget, 10))
    short = replace(short, data={**effect.data, "groups": 2}, model=lambda folder: "builtin:tiny")
    found = effects.run(short, effect.arms["RAE"], 0, Path())
    scored = {f"{name}{moment}" for name in ("score", "illegal") for moment in (" before", "")}
    assert {*found} == {*scored, "entropy", "tokens", "cpu_seconds"}
    assert all(0 <= found[name] <= 1 for name in scored)
    assert 0 < found["entropy"] < 4.63, "in nats, below that of a choice among its 102 tokens"
    assert found["tokens"] >= 5, "with half of the budget another rollout might exceed it"


def test_differences_are_to_the_first_arm_by_seed(effects: ModuleType) -> None:
    first = [{"seed": 0, "score": 0.1}, {"seed": 1, "score": 0.5}]
    found = effects.summary({"plain": first, "other": [{**row, "score": row["score"] + 0.2} for row in first]})
    assert found["plain"] == {"score": [0.3, 2.5412]}  # 12.706 * sqrt(0.08) / sqrt(2)
    assert found["other"]["score minus plain"] == [0.2, 0.0]
