"""Relations that hold for every policy gradient, on random episodes of a team: no number is expected, only equality."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import Tensor

from mrlm_pl import algorithms
from mrlm_pl.algorithms import RAE, OnPolicyDistillation
from mrlm_pl.data.rollout.stream import GroupPart, micro_batches
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy
from mrlm_pl.rollout.branches import Expansions
from mrlm_pl.rollout.play import EpisodeSpec
from tests.learner.credit.test_decisions import path
from tests.learner.credit.test_marginal import Terms, play

CLASSES = [
    cls
    for cls in (getattr(algorithms, name) for name in dir(algorithms))
    if issubclass(cls, PolicyGradient) and cls is not OnPolicyDistillation  # needs a teacher, and has no advantages
]


def played(draw: random.Random, number: int, group: str) -> Episode:
    """An episode of two agents with one to three turns; an agent may begin a second row, or not act."""
    rows: dict[str, tuple[Trajectory, ...]] = {}
    for agent in ("a", "b") if draw.random() < 0.8 else ("a",):
        made: list[Trajectory] = []
        for step in range(draw.randint(1, 3)):
            said_before = made[-1].messages if made else ()
            before = Trajectory(agent, "main", (), (), (), (), said_before)
            before = made.pop() if made and draw.random() < 0.7 else before
            seen, said = ([draw.randrange(4, 60) for _ in range(draw.randint(1, 3))] for _ in range(2))
            start = len(before.token_ids) + len(seen)
            parts = {"score": draw.choice([0.0, 0.5, 1.0]), "form": draw.random()}
            turn = Turn(agent, step, start, start + len(said), sum(parts.values()), parts, "stop", "main", 0, "e")
            row = Trajectory(
                agent,
                "main",
                (*before.token_ids, *seen, *said),
                (*before.action_mask, *[False] * len(seen), *[True] * len(said)),
                (*before.logprobs, *[0.0] * len(seen), *[-draw.uniform(1, 5) for _ in said]),
                (*before.turns, turn),
                (*before.messages, Message("user", f"{draw.choice('st')}{step}"), Message("assistant", "x")),
            )
            made.append(row)
        rows[agent] = tuple(made)
    task = Task("t", "train", 0, 0, {"answer": "7"})
    return Episode(f"{group}{number}", task, group, number, 0, rows, "end", draw.random() < 0.3, agents=("a", "b"))


def rollout(algorithm: PolicyGradient) -> list[Episode]:
    """Three groups of a kind that the algorithm compares: paths of trees, with branch episodes, or separate ones."""
    draw = random.Random(1)
    if algorithm.unit.branching is not None:
        joints = [(first, second) for first in range(2) for second in range(2)]
        return [
            path([(joint, draw.random()), ((n, n), draw.random())], g)
            for g in "ghi"
            for joint in joints
            for n in (0, 1)
        ]
    if algorithm.unit.branch_rule is None or isinstance(algorithm.unit.branch_rule, Expansions):
        return [played(draw, number, group) for group in "ghi" for number in range(4)]
    task = Terms().tasks("train")[0]
    groups = [
        play([EpisodeSpec(f"{g}{n}", task, g, seed=7 * k + n) for n in (4, 5, 8)])[0] for k, g in enumerate("ghi")
    ]
    return [e for group in groups for e in (*group, *play(algorithm.unit.branch_rule.due(group, 0))[0])]


@dataclass
class Prepared:
    """An algorithm, a rollout, its rows by policy, and the gradient of one update on it."""

    algorithm: Any
    episodes: list[Episode]
    tables: dict[str, PolicyBatch]
    gradient: dict[str, Tensor]


def tables_of(algorithm: Any, episodes: Sequence[Episode]) -> dict[str, PolicyBatch]:
    greedy = [replace(episode, id=episode.group) for episode in episodes] if algorithm.uses_greedy_baseline else []
    algorithm.load_progress({})
    with torch.no_grad():
        found: dict[str, PolicyBatch] = algorithm.prepare(episodes, Sampling(max_tokens=8), greedy)
    return found


def gradient(algorithm: Any, tables: Mapping[str, PolicyBatch], parts: Sequence[GroupPart] = ()) -> dict[str, Tensor]:
    """Return the gradient of an update, summed over its micro-batches."""
    algorithm.zero_grad()
    groups = torch.cat([table.groups for table in tables.values()]).unique()
    for batch in micro_batches(algorithm, tables, parts or [GroupPart(groups)], lambda sizes: sizes):
        losses = {name: algorithm.policy_loss(name, rows, batch) for name, rows in batch.policies.items()}
        if losses:
            algorithm.combined(losses, batch).backward()
    return {name: weight.grad.clone() for name, weight in algorithm.named_parameters() if weight.grad is not None}


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    largest = max(float(value.abs().max()) for value in expected.values())
    assert largest > 0
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.0, atol=3e-5 * largest)


@pytest.fixture(scope="module", params=CLASSES, ids=lambda cls: cls.__name__)
def prepared(request: Any, model_folder: Path) -> Prepared:
    torch.manual_seed(0)
    algorithm = request.param({"main": Policy(str(model_folder))})
    algorithm.configure_model()
    algorithm.trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    with torch.no_grad():  # value heads begin with zeros
        for weight in algorithm.parameters():
            weight.add_(0.05 * torch.randn_like(weight))
    episodes = rollout(algorithm)
    if isinstance(algorithm, algorithms.CCPO):  # which compares with the rollouts before
        tables_of(algorithm, episodes)
    tables = tables_of(algorithm, episodes)
    return Prepared(algorithm, episodes, tables, gradient(algorithm, tables))


def test_padding_and_numbers_outside_the_action_mask_reach_no_gradient(prepared: Prepared) -> None:
    tables = {}
    for name, table in prepared.tables.items():
        wider: dict[str, Any] = {}
        mask = torch.nn.functional.pad(table.action_mask, (0, 3))
        beyond = torch.arange(mask.shape[1]) >= table.lengths[:, None]
        for field, value in table.tensors().items():
            if value.shape == table.action_mask.shape:
                value = torch.nn.functional.pad(value, (0, 3))
                if value.is_floating_point():
                    value = torch.where(mask, value, 1e4)
                elif field == "token_ids":
                    value = torch.where(beyond, 9, value)
            wider[field] = value
        tables[name] = PolicyBatch(**wider)
    assert_same(gradient(prepared.algorithm, tables), prepared.gradient)


def test_micro_batches_add_up_to_the_update(prepared: Prepared) -> None:
    parts = 3 if prepared.algorithm.divides_groups else 1
    divided = [GroupPart(group, part, parts) for group in torch.tensor([[2], [0], [1]]) for part in range(parts)]
    assert_same(gradient(prepared.algorithm, prepared.tables, divided), prepared.gradient)


def test_rows_that_are_left_out_have_no_gradient(prepared: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared.algorithm, "rows_with_gradient", lambda rows: torch.arange(len(rows)))
    assert_same(gradient(prepared.algorithm, prepared.tables), prepared.gradient)


def test_names_and_the_order_of_groups_and_agents_change_nothing(prepared: Prepared) -> None:
    if isinstance(prepared.algorithm, RAE):
        pytest.skip("its baselines move from episode to episode")
    groups = [[replace(e, group=f"{e.group}'") for e in prepared.episodes if e.group == name] for name in "ihg"]
    others = [e for group in groups for e in group]
    if not isinstance(prepared.algorithm, algorithms.MAPPO):  # whose critic reads the agents in their order
        others = [replace(e, trajectories=dict(reversed([*e.trajectories.items()]))) for e in others]
    assert_same(gradient(prepared.algorithm, tables_of(prepared.algorithm, others)), prepared.gradient)


def test_equal_returns_are_no_signal_and_have_no_advantage(prepared: Prepared) -> None:
    algorithm = prepared.algorithm
    if algorithm.smallest_group < 2 or isinstance(algorithm, algorithms.IGPO):
        pytest.skip("it also learns from something else than differences in a group")
    equal = prepared.episodes[0].with_turns(lambda turn: replace(turn, reward=0.1, components={"score": 0.1}))
    group = [replace(equal, id=str(number)) for number in range(11)]  # a rounded mean of 0.1
    assert algorithm.lacks_signal(group)
    assert not any(table.advantages.any() for table in tables_of(algorithm, group).values())
