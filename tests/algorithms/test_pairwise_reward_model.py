"""The reward model of pairs: its loss, its metrics, resuming, and its export."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from mrlm_pl.algorithms import PairwiseRewardModel
from mrlm_pl.data import PreferenceDataModule
from mrlm_pl.data.files.preferences import pair_of
from mrlm_pl.episode import Message, Trajectory
from mrlm_pl.errors import ConfigurationError, NonFiniteError
from mrlm_pl.learner.batch import Batch, collate_rows
from mrlm_pl.losses import BatchTotals, last_token_mask
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.reward_models import RewardModel
from tests.support.runs.watching import Watch


def pairs_file(folder: Path, count: int = 8) -> str:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"{n}+{n}?"}],
            "chosen": [{"role": "assistant", "content": f"{2 * n} it is"}],
            "rejected": [{"role": "assistant", "content": f"{3 * n + 1} or so"}],
        }
        for n in range(count)
    ]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def model(folder: Path, lora: LoRA | None = None, **options: Any) -> PairwiseRewardModel:
    return PairwiseRewardModel({"main": Policy(str(folder), learning_rate=1e-2, lora=lora)}, **options)


def compared(
    model_folder: Path,
    scores: list[float],
    training: bool = True,
    margins: tuple[float, ...] = (0.0,) * 3,
    **options: Any,
) -> tuple[float, dict[str, float]]:
    """Loss and log of pairs with these scores, the chosen and the rejected one in turn."""
    algorithm = model(model_folder, **options).train(training)
    algorithm.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    row = Trajectory("a", "main", (8, 9, 10), (False, True, True), (0.0, 0.0, 0.0), ())
    count = len(scores)
    rows = collate_rows([row] * count, list(range(count)), [0] * count, list(range(count)))
    rows.margins = torch.tensor(margins[: count // 2]).repeat_interleave(2)
    algorithm.policy("main").values = lambda *_, **__: torch.tensor([[0.0, 0.0, score] for score in scores])  # type: ignore[method-assign]
    totals = BatchTotals(2.0 * count, float(count), float(count))
    loss = algorithm.policy_loss("main", rows, Batch({"main": rows}, {"main": totals})).item()
    return loss, algorithm.metrics.take_update()


def test_loss_accuracy_and_margin_are_those_of_arithmetic(model_folder: Path) -> None:
    scores = [2.0, 1.0, 0.5, 2.0, 3.0, 3.0]  # ahead by 1, behind by 1.5, equal
    loss, noted = compared(model_folder, scores)
    assert loss == pytest.approx(sum(math.log1p(math.exp(-gap)) for gap in (1.0, -1.5, 0.0)) / 3, rel=1e-6)
    assert noted["train/pair_accuracy"] == pytest.approx(1.5 / 3)
    assert noted["train/margin"] == pytest.approx(-0.5 / 3)
    centered, _ = compared(model_folder, scores, centering=0.01)
    assert centered == pytest.approx(loss + 0.01 * (3.0**2 + 2.5**2 + 6.0**2) / 3, rel=1e-6)
    loss, _ = compared(model_folder, scores, margin=0.5)
    assert loss == pytest.approx(sum(math.log1p(math.exp(0.5 - gap)) for gap in (1.0, -1.5, 0.0)) / 3, rel=1e-6)
    loss, _ = compared(model_folder, scores, margin=0.5, margins=(1.0, 0.0, 2.0))
    behind = ((1.5, 1.0), (0.5, -1.5), (2.5, 0.0))
    assert loss == pytest.approx(sum(math.log1p(math.exp(margin - gap)) for margin, gap in behind) / 3, rel=1e-6)


def test_an_evaluation_stops_at_scores_that_are_not_finite(model_folder: Path) -> None:
    with pytest.raises(NonFiniteError, match="1 of 2 pairs have scores that are not finite"):
        compared(model_folder, [1.0, 0.0, math.inf, 0.0], training=False)


@pytest.mark.parametrize("margin", [-1.0, math.nan, math.inf])
def test_a_margin_that_is_none_is_refused(margin: float, model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="margin is"):
        model(model_folder, margin=margin)


def test_it_learns_the_pairs_and_the_exported_folder_scores_alike(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    source, watch = pairs_file(tmp_path), Watch()
    data = PreferenceDataModule(source, source, batch_size=8)
    trainer = quiet_trainer(max_epochs=20, limit_val_batches=1.0, check_val_every_n_epoch=20, callbacks=[watch])
    algorithm = model(model_folder)
    trainer.fit(algorithm, data)
    assert watch.steps[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert watch.steps[0]["train/pair_accuracy"] == 0.5, "the head begins at 0"
    assert trainer.callback_metrics["val/pair_accuracy"] == 1.0
    assert trainer.callback_metrics["val/margin"] > 1.0
    rows = data.collate("train", range(8))["main"]
    with torch.no_grad():
        own = algorithm.critic.scores("main", rows, last_token_mask, 0)[last_token_mask(rows.action_mask)].tolist()
    exported = RewardModel(str(Path(trainer.default_root_dir) / "policies" / "main"))
    for number in range(8):
        for side, text in enumerate((f"{2 * number} it is", f"{3 * number + 1} or so")):
            messages = (Message("user", f"{number}+{number}?"), Message("assistant", text))
            assert exported.score(messages).value == pytest.approx(own[2 * number + side], abs=1e-5)


def test_plain_text_is_scored_as_a_chat(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"prompt": "2+2?", "chosen": "4", "rejected": "5"}) + "\n")
    data = PreferenceDataModule(str(path))
    quiet_trainer().fit(model(model_folder, lora=LoRA(rank=2)), data)
    (pair,) = data.examples["train"]
    decode = data.learner()[1].tokenizer.decode
    texts = [decode(row.token_ids) for row in pair.rows]
    assert texts == [f"<|user|>2+2?<|end|><|assistant|>{answer}<|end|>" for answer in "45"]


def test_a_row_has_its_margin(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": "2+2?", "chosen": "4", "rejected": wrong} for wrong in ("5", "666")]
    path.write_text(json.dumps({**rows[0], "margin": 1.5}) + "\n" + json.dumps({**rows[1], "margin": None}) + "\n")
    data = PreferenceDataModule(str(path))
    quiet_trainer().fit(model(model_folder, lora=LoRA(rank=2)), data)
    assert data.collate("train", [1, 0])["main"].margins.tolist() == [0.0, 0.0, 1.5, 1.5]
    for margin in ("large", math.inf):
        with pytest.raises(ValueError, match=f"its margin is {margin!r}; it must be a finite number"):
            pair_of({**rows[0], "margin": margin})


@pytest.mark.long
def test_a_run_goes_on_bit_for_bit(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    source = pairs_file(tmp_path)

    def fit(ckpt: Any = None, **options: Any) -> PairwiseRewardModel:
        algorithm = model(model_folder)
        quiet_trainer(max_epochs=2, **options).fit(
            algorithm, PreferenceDataModule(source, batch_size=2), ckpt_path=ckpt
        )
        return algorithm

    whole = fit()
    fit(
        enable_checkpointing=True, callbacks=[ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=3, save_top_k=-1)]
    )
    again = fit(tmp_path / "step=3.ckpt").state_dict()
    assert any(name.startswith("policies.main.value_head") for name in again)
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, again[name]), name
