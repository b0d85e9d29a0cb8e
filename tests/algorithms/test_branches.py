"""C3 and Tree-GRPO: advantages by hand, fits, and options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from mrlm_pl.algorithms import C3, TreeGRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode, Origin
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.policy import Policy
from mrlm_pl.policy.forward.packing import RowPlan
from tests.support.runs.distributed_run import Duet
from tests.support.runs.short_fits import fingerprint
from tests.support.runs.turn_episodes import advantages, episode
from tests.support.runs.watching import Watch


@pytest.fixture
def policies(model_folder: Path) -> dict[str, Policy]:
    return {"main": Policy(str(model_folder), learning_rate=1e-3)}


def branch(number: int, origin: int, agent: str, step: int, rewards: Mapping[str, Sequence[float]]) -> Episode:
    made = episode(number, "g", {name: [("s", reward) for reward in found] for name, found in rewards.items()})
    return replace(made, origin=Origin(str(origin), (agent,), step))


def test_messages_are_compared_with_their_alternatives(policies: Any, quiet_trainer: Any) -> None:
    episodes = [
        episode(0, "g", {"a": [("s", 1.0), ("s", 0.0)], "b": [("s", 2.0)]}),  # the team: 1.5
        branch(1, 0, "a", 1, {"a": [1.0, 4.0], "b": [1.0]}),  # 3
        branch(2, 0, "a", 1, {"a": [1.0, 4.0], "b": [4.0]}),  # 4.5
        branch(3, 0, "b", 0, {"a": [0.0, 0.0], "b": [0.5]}),  # 0.25
    ]
    found = advantages(C3(policies), episodes, quiet_trainer())
    assert [row[0] for row in found] == pytest.approx([1.5 - 3.75, 3 - 3.0, 4.5 - 2.25, 1.5 - 0.25, 0.25 - 1.5])
    assert all(len(row) == 1 for row in found), "the other turns of a row are no actions of it"
    own = advantages(C3(policies, reward="own"), episodes, quiet_trainer())
    assert [row[0] for row in own] == pytest.approx([1 - 5.0, 5 - 3.0, 5 - 3.0, 2 - 0.5, 0.5 - 2])
    replayed = advantages(C3(policies, rest="replay", reward="own"), episodes[:3], quiet_trainer())
    assert replayed == [[0.0], [0.0]], "the recorded message is not compared"
    failed = [episodes[0], replace(episodes[1], error="away"), *episodes[2:]]
    shrunk = advantages(C3(policies), failed, quiet_trainer())
    assert [row[0] for row in shrunk] == pytest.approx([1.5 - 4.5, 4.5 - 1.5, 1.5 - 0.25, 0.25 - 1.5])


class WithoutOne(C3):
    def advantages(self, returns: Any) -> Any:
        return super().advantages(returns)[1:]


def test_too_few_advantages_of_messages_are_refused(policies: Any, quiet_trainer: Any) -> None:
    episodes = [episode(0, "g", {"a": [("s", 1.0)]}), branch(1, 0, "a", 0, {"a": [2.0]})]
    with pytest.raises(
        ConfigurationError, match=r"WithoutOne\.advantages returned shape \[1\]; .* each of the 2 returns"
    ):
        advantages(WithoutOne(policies), episodes, quiet_trainer())


def leaves() -> list[Episode]:
    """Returns of two trees: 4, 2 (which leaves after a turn) | 1, 5 (which shares nothing)."""
    return [
        episode(0, "g", {"a": [("s", 1.0), ("t", 3.0)]}),
        episode(1, "g", {"a": [("s", 0.0), ("t", 1.0)]}),
        branch(2, 0, "a", 1, {"a": [1.0, 1.0]}),
        branch(3, 1, "a", 0, {"a": [2.0, 3.0]}),
    ]


def test_turns_are_compared_with_leaves_that_do_not_contain_them(policies: Any, quiet_trainer: Any) -> None:
    found = advantages(TreeGRPO(policies, normalize=False), leaves(), quiet_trainer())
    assert found == [
        pytest.approx([4 - (1 + 5) / 2, 4 - (1 + 2 + 5) / 3]),
        pytest.approx([1 - (4 + 2 + 5) / 3] * 2),
        pytest.approx([2 - (1 + 5) / 2, 2 - (4 + 1 + 5) / 3]),
        pytest.approx([5 - (4 + 1 + 2) / 3] * 2),
    ]
    spread = torch.tensor([4.0, 1.0, 2.0, 5.0]).std().item()
    normalized = advantages(TreeGRPO(policies), leaves(), quiet_trainer())
    assert normalized[0] == pytest.approx([1 / spread, (4 - 8 / 3) / spread], rel=1e-4)


def test_leaves_with_equal_returns_have_no_signal(policies: Any) -> None:
    equal = [*leaves()[:1], branch(1, 0, "a", 1, {"a": [1.0, 3.0]})]
    assert TreeGRPO(policies).lacks_signal(equal)
    assert not TreeGRPO(policies).lacks_signal(leaves())


def test_the_paper_adds_the_tree_and_the_task(policies: Any, quiet_trainer: Any) -> None:
    found = advantages(TreeGRPO(policies, turn_baseline="paper", normalize=False), leaves(), quiet_trainer())
    assert found == [
        pytest.approx([4 - 3 + 4 - 3] * 2),
        pytest.approx([1 - 3 + 1 - 3] * 2),
        pytest.approx([2 - 3 + 2 - 3] * 2),
        pytest.approx([5 - 3 + 5 - 3] * 2),
    ]


@pytest.mark.parametrize(
    ("algorithm", "branches"),
    [
        (lambda policies: C3(policies, alternatives=2), 2 * 2 * (2 * 2) * 2),
        (lambda policies: C3(policies, alternatives=2, messages=1, rest="replay"), 2 * 2 * 1 * 2),
        (lambda policies: TreeGRPO(policies, rounds=2, nodes=2), 2 * 2 * 4),
    ],
)
@pytest.mark.long_after(1)
def test_a_fit_trains_and_resumes_bit_for_bit(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path, algorithm: Any, branches: int
) -> None:
    def run(**options: Any) -> str:
        made = algorithm({"main": Policy(str(model_folder), learning_rate=1e-3)})
        minibatches = 2 if made.uses_importance_ratio else 1
        data = RolloutDataModule(
            Duet(), groups=2, group_size=2, iterations=3, minibatches=minibatches, sampling=Sampling(max_tokens=4)
        )
        quiet_trainer(**options.pop("trainer", {})).fit(made, data, **options)
        return fingerprint(made)

    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    metrics = Watch()
    whole = run(trainer={"callbacks": [keep, metrics], "enable_checkpointing": True})
    assert metrics.steps[-1]["rollout/branch_episodes"] == branches
    assert 0 < metrics.steps[-1]["rollout/branch_tokens"] < metrics.steps[-1]["progress/generated_tokens"]
    assert metrics.steps[-1]["train/grad_norm"] > 0
    assert run(ckpt_path=tmp_path / "step=1.ckpt") == whole


def test_leaves_compute_their_prefix_once(policies: Any, quiet_trainer: Any) -> None:
    algorithm = TreeGRPO(policies)
    algorithm.configure_model()
    algorithm.trainer = quiet_trainer()
    with torch.no_grad():
        rows: PolicyBatch = algorithm.prepare(leaves(), Sampling(max_tokens=8))["main"]
    (packed,) = RowPlan(rows.token_ids, rows.action_mask, rows.groups).packed(None)
    assert packed.input_ids.numel() == 3, "of 4 leaves with equal tokens; the last token predicts nothing"


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        (C3, {"alternatives": 0}, "alternatives is 0"),
        (C3, {"alternatives": 1, "rest": "replay"}, "alternatives is 1; it must be 2 or above"),
        (C3, {"messages": 0}, "messages is 0"),
        (C3, {"rest": "skip"}, "rest is 'skip'; choose from play, replay"),
        (C3, {"reward": "sum"}, "reward is 'sum'; choose from team, own"),
        (TreeGRPO, {"rounds": 0}, "rounds is 0"),
        (TreeGRPO, {"nodes": 0}, "nodes is 0"),
        (TreeGRPO, {"turn_baseline": "mean"}, "turn_baseline is 'mean'; choose from unbiased, paper"),
    ],
)
def test_wrong_options_are_named(algorithm: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        algorithm(**options)
