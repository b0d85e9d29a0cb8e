"""The measures of individual tokens: their numbers, and the files and records of runs that keep them."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from mrlm_environments import LengthRatioGame
from transformers import AutoModelForCausalLM

from mrlm_pl.algorithms import GRPO, MAGRPO
from mrlm_pl.compressed_files import unpacked
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Trajectory, Turn
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.learner.batch import collate_rows
from mrlm_pl.learner.token_measures import TokenMeasures
from mrlm_pl.policy import Policy
from mrlm_pl.viewer.runs import find_runs
from tests.support.models.device_waits import DeviceWaits

SIZES: dict[str, Any] = {"groups": 2, "group_size": 2, "iterations": 1, "sampling": Sampling(max_tokens=6)}
KEPT = {"save_episodes": {"tokens": 1}}


def measured(run: Path) -> list[Any]:
    lines = b"".join(unpacked(run / "tokens" / "iteration-000000.jsonl.zst")).splitlines()
    return [json.loads(line) for line in lines]


def test_the_ratio_and_the_divergence_are_those_of_the_log_probabilities() -> None:
    turns = [Turn("a", 0, 1, 3, 0.0, {}, "stop", "main", 0, "e"), Turn("a", 1, 4, 5, 0.0, {}, "stop", "main", 0, "e")]
    mask = (False, True, True, False, True)
    row = Trajectory("a", "main", (1, 2, 3, 4, 5), mask, (0.0, -1.0, -2.0, 0.0, -3.0), tuple(turns))
    rows = collate_rows([row], [0], [0], [0])
    rows.numbers, rows.ref_logp = torch.tensor([1]), torch.tensor([[0.0, -1.5, -1.5, 0.0, -3.0]])
    first, second = ("0", "", "a", 0), ("0", "", "a", 1)
    measures = TokenMeasures(0, {"main": [[], [(first, 1, 3), (second, 4, 5)]]})
    logp = torch.tensor([[0.0, -1.0 + math.log(1.25), -2.0 + math.log(0.5), 0.0, -3.0]])
    measures.add("main", logp, rows, entropy=torch.tensor([[0.0, 0.12345, 2.0, 0.0, 1.0]]))
    (line,) = measures.lines()
    assert json.loads(line) == {
        "of": "0",
        "turns": {
            "/a/0": {"ratio": [1.25, 0.5], "entropy": [0.123, 2.0], "kl": [0.723, -1.193]},
            "/a/1": {"ratio": [1.0], "entropy": [1.0], "kl": [0.0]},
        },
    }


def test_the_measures_of_a_micro_batch_leave_the_device_in_one_transfer() -> None:
    turn = Turn("a", 0, 1, 3, 0.0, {}, "stop", "main", 0, "e")
    row = Trajectory("a", "main", (1, 2, 3), (False, True, True), (0.0, -1.0, -2.0), (turn,))
    host = collate_rows([row], [0], [0], [0])
    host.numbers, host.ref_logp = torch.tensor([0]), torch.zeros(1, 3)
    copies: dict[str, Any] = {name: value.clone() for name, value in host.tensors().items()}
    measures = TokenMeasures(0, {"main": [[(("0", "", "a", 0), 1, 3)]]})
    with DeviceWaits() as device:
        logp, entropy = torch.zeros(1, 3), torch.ones(1, 3)
        device.place([logp, entropy, *copies.values()])
        measures.add("main", logp, replace(host, **copies, host=host), entropy)
    assert len(device.places) == 1
    assert list(measures.found[("0", "", "a", 0)]) == ["ratio", "entropy", "kl"]


def test_a_run_keeps_the_entropies_of_its_tokens(model_folder: Path, quiet_trainer: Any, echo: Any) -> None:
    algorithm = GRPO({"main": Policy(str(model_folder), 1e-3)}, kl={"coefficient": 0.1}, entropy={"coefficient": 0.1})
    trainer = quiet_trainer()
    trainer.fit(algorithm, RolloutDataModule(echo(), **SIZES, **KEPT))
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    of_episodes = {item["of"]: item["turns"] for item in measured(Path(trainer.default_root_dir))}
    episodes = list(read_episodes(Path(trainer.default_root_dir) / "episodes"))
    assert len(of_episodes) == len(episodes) == 4
    for episode in episodes:
        (row,) = episode.rows()
        (turn,) = row.turns
        with torch.no_grad():
            logp = model(torch.tensor([row.token_ids])).logits[0].log_softmax(-1)[turn.start - 1 : turn.stop - 1]
        found = of_episodes[episode.id]["/agent/0"]
        assert found["entropy"] == pytest.approx((-(logp.exp() * logp).sum(-1)).tolist(), abs=6e-4)
        assert found["ratio"] == pytest.approx([1.0] * (turn.stop - turn.start), abs=2e-3)
        assert found["kl"] == pytest.approx([0.0] * (turn.stop - turn.start), abs=2e-3)


def test_all_paths_of_a_turn_tree_show_the_measures_of_their_decisions(model_folder: Path, quiet_trainer: Any) -> None:
    """Two policies; the second of two updates has moved from the old policy."""
    policies = {name: Policy(str(model_folder), 3e-2) for name in ("one", "two")}
    environment, trainer = LengthRatioGame(rounds=2), quiet_trainer()
    seats = dict(zip(environment.agents, policies, strict=True))
    algorithm = MAGRPO(policies, seats, loss="ppo")
    trainer.fit(algorithm, RolloutDataModule(environment, **SIZES, **KEPT, minibatches=2, passes=2))
    trees = {item["of"]: item["turns"] for item in measured(Path(trainer.default_root_dir))}
    (run,) = find_runs([str(trainer.default_root_dir)]).values()
    ratios: list[list[float]] = []
    for episode in read_episodes(Path(trainer.default_root_dir) / "episodes"):
        of_turns = trees[episode.group]
        for agent, (row,) in run.record(episode.id)["trajectories"].items():
            assert {"ratio"} <= set(row["per_token"])
            assert "entropy" not in row["per_token"]
            for turn in row["turns"]:
                ratios.append(of_turns[f"{turn['node']}/{agent}/{turn['sample']}"]["ratio"])
                assert row["ratio"][turn["start"] : turn["stop"]] == ratios[-1]
            assert [value is None for value in row["ratio"]] == [not acted for acted in row["action_mask"]]
    moved = [max(abs(ratio - 1) for ratio in of_turn) > 0.01 for of_turn in ratios]
    assert 0 < sum(moved) < len(moved)


def test_a_run_resumed_within_the_first_pass_has_the_same_measures(
    model_folder: Path, quiet_trainer: Any, echo: Any, tmp_path: Path
) -> None:
    def run(folder: str, checkpoint: Path | None = None, **options: Any) -> bytes:
        trainer = quiet_trainer(default_root_dir=tmp_path / folder, **options)
        data = RolloutDataModule(echo(), **{**SIZES, "groups": 3}, **KEPT, minibatches=3, passes=2)
        trainer.fit(GRPO({"main": Policy(str(model_folder), 1e-2)}), data, ckpt_path=checkpoint)
        return (tmp_path / folder / "tokens" / "iteration-000000.jsonl.zst").read_bytes()

    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = run("whole", enable_checkpointing=True, callbacks=[saver])
    assert run("resumed", tmp_path / "step=1.ckpt") == whole
    assert "tokens" not in torch.load(tmp_path / "step=3.ckpt", weights_only=True)["RolloutDataModule"]
