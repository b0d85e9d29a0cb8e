"""DPO: its first loss, overfitting, the reference, and what pairs of which rows it compares."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor

from mrlm_pl.algorithms import DPO
from mrlm_pl.data import PreferenceDataModule
from mrlm_pl.episode import Trajectory
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import Batch, collate_rows
from mrlm_pl.losses import BatchTotals
from mrlm_pl.policy import LoRA, Policy
from tests.support.runs.watching import Watch

ROLES_OF = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}


def pairs_file(folder: Path, count: int = 8) -> str:
    rows = [
        {"prompt": f"What is {n}+{n}? ", "chosen": f"{2 * n} it is", "rejected": f"{3 * n + 1} or so"}
        for n in range(count)
    ]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def fit(model_folder: Path, data: PreferenceDataModule, trainer: Any, ckpt: Any = None, **options: Any) -> DPO:
    algorithm = DPO({"main": Policy(str(model_folder), learning_rate=3e-3)}, **options)
    trainer.fit(algorithm, data, ckpt_path=ckpt)
    return algorithm


@pytest.mark.parametrize(("loss", "first"), [("sigmoid", math.log(2)), ("hinge", 1.0), ("ipo", 25.0)])
@pytest.mark.long_after(1)
def test_the_first_loss_and_overfitting(
    loss: str, first: float, model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    watch = Watch()
    data = PreferenceDataModule(pairs_file(tmp_path), batch_size=8)
    fit(model_folder, data, quiet_trainer(max_epochs=25, callbacks=[watch]), loss=loss)
    assert watch.steps[0]["train/loss"] == pytest.approx(first, abs=1e-5)
    assert watch.steps[0]["train/reward_margin"] == pytest.approx(0.0, abs=1e-5)
    assert watch.steps[-1]["train/preference_accuracy"] == 1.0
    assert watch.steps[-1]["train/loss"] < 0.5 * first
    assert watch.steps[-1]["train/rewards_chosen"] > watch.steps[-1]["train/rewards_rejected"]


@pytest.mark.parametrize("precision", ["64-true", "bf16-mixed", "bf16-true"])
def test_the_first_margin_is_0_in_every_precision(
    precision: str, model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    watch = Watch()
    data = PreferenceDataModule(pairs_file(tmp_path, 2), batch_size=2)
    fit(model_folder, data, quiet_trainer(precision=precision, callbacks=[watch]))
    assert watch.steps[0]["train/reward_margin"] == pytest.approx(0.0, abs=1e-5)


def loss_of(model_folder: Path, sums: list[float], references: list[float] | None, **options: Any) -> float:
    return compared(model_folder, sums, references, **options)[0]


def notes_of(model_folder: Path, sums: list[float], references: list[float], **options: Any) -> dict[str, float]:
    return compared(model_folder, sums, references, **options)[1]


def compared(
    model_folder: Path, sums: list[float], references: list[float] | None, **options: Any
) -> tuple[float, dict[str, float]]:
    """Loss and log of one pair whose answers are one token each with these log-probabilities."""
    algorithm = DPO({"main": Policy(str(model_folder))}, **options)
    algorithm.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    row = Trajectory("a", "main", (8, 9), (False, True), (0.0, 0.0), ())
    rows = collate_rows([row, row], [0, 0], [0, 0], [0, 1])
    rows.reference_sums = None if references is None else torch.tensor(references)
    algorithm.policies["main"].forward = lambda _: torch.tensor([[0.0, value] for value in sums])
    loss = algorithm.policy_loss("main", rows, Batch({"main": rows}, {"main": BatchTotals(2.0, 2.0, 2.0)})).item()
    return loss, algorithm.metrics.take_update()


def test_the_losses_of_a_pair(model_folder: Path) -> None:
    # gap (-1 + 2) - (-3 + 2.5) = 1.5, beta 0.1
    sums, references = [-1.0, -3.0], [-2.0, -2.5]
    noted = notes_of(model_folder, sums, references, beta=0.2)
    assert noted["train/rewards_chosen"] == pytest.approx(0.2 * 1.0)
    assert noted["train/rewards_rejected"] == pytest.approx(0.2 * -0.5)
    assert noted["train/reward_margin"] == pytest.approx(0.2 * 1.5)
    sigmoid = -math.log(1 / (1 + math.exp(-0.15)))
    assert loss_of(model_folder, sums, references) == pytest.approx(sigmoid, abs=1e-6)
    smoothed = 0.9 * sigmoid + 0.1 * math.log(1 + math.exp(0.15))
    assert loss_of(model_folder, sums, references, label_smoothing=0.1) == pytest.approx(smoothed, abs=1e-6)
    shifted = math.log(1 + math.exp(-(0.15 - 0.5)))
    assert loss_of(model_folder, sums, references, margin=0.5) == pytest.approx(shifted, abs=1e-6)
    assert loss_of(model_folder, sums, references, loss="hinge") == pytest.approx(0.85, abs=1e-6)
    assert loss_of(model_folder, sums, references, loss="ipo") == pytest.approx((1.5 - 5.0) ** 2, abs=1e-5)
    free = math.log(1 + math.exp(-0.2))
    assert loss_of(model_folder, sums, None, reference_free=True) == pytest.approx(free, abs=1e-6)


@pytest.mark.parametrize(("loss", "expected"), [("sigmoid", math.log(1 + math.exp(-0.1))), ("ipo", 16.0)])
def test_means_over_answers_of_different_lengths_and_the_likelihood_of_the_chosen(
    loss: Any, expected: float, model_folder: Path
) -> None:
    # Means -1 and -1.5 of the policy, -1 and -0.5 of the reference: the gap is 1; ipo's loss (1 - 1 / (2 * 0.1))^2.
    algorithm = DPO({"main": Policy(str(model_folder))}, loss=loss, length_normalized=True, sft_weight=0.5)
    chosen = Trajectory("a", "main", (8, 9), (False, True), (0.0, 0.0), ())
    rejected = Trajectory("a", "main", (8, 9, 10), (False, True, True), (0.0, 0.0, 0.0), ())
    rows = collate_rows([chosen, rejected], [0, 0], [0, 0], [0, 1])
    rows.reference_sums = torch.tensor([-1.0, -1.0])
    algorithm.policies["main"].forward = lambda _: torch.tensor([[0.0, -1.0, 0.0], [0.0, -2.0, -1.0]])
    losses, metrics = algorithm.compare("main", rows)
    assert losses.tolist() == pytest.approx([expected + 0.5 * 1.0], abs=1e-6)
    assert metrics["reward_margin"].item() == pytest.approx(0.1)


class Gradient(Callback):
    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_before_optimizer_step(self, trainer: Any, algorithm: Any, optimizer: Any) -> None:
        named = algorithm.policy("main").model.named_parameters()
        self.gradients = {name: weight.grad.clone() for name, weight in named}


def test_accumulation_does_not_change_the_gradient(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    found = []
    for size, pieces in ((8, 1), (2, 4)):
        seen = Gradient()
        data = PreferenceDataModule(pairs_file(tmp_path), batch_size=size)
        fit(model_folder, data, quiet_trainer(accumulate_grad_batches=pieces, callbacks=[seen]))
        found.append(seen.gradients)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_the_reference_is_that_of_the_first_weights_after_a_resume(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    source = pairs_file(tmp_path)
    whole = fit(model_folder, PreferenceDataModule(source, batch_size=2), quiet_trainer(max_epochs=2))
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    fit(
        model_folder,
        PreferenceDataModule(source, batch_size=2),
        quiet_trainer(max_epochs=2, enable_checkpointing=True, callbacks=[saver]),
    )
    data = PreferenceDataModule(source, batch_size=2)
    again = fit(model_folder, data, quiet_trainer(max_epochs=2), ckpt=tmp_path / "step=3.ckpt")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_a_second_model_on_the_same_data_has_its_own_tokens_and_reference(
    model_folder: Path, gpt2_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    """At its first update every policy is its own reference: the loss is ln 2."""
    data = PreferenceDataModule(pairs_file(tmp_path), batch_size=8)
    for folder in (model_folder, gpt2_folder):
        watch = Watch()
        fit(folder, data, quiet_trainer(max_epochs=1, callbacks=[watch]))
        assert watch.steps[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)


def test_other_pairs_than_the_run_began_with_are_refused(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    trainer = quiet_trainer(max_steps=1)
    fit(model_folder, PreferenceDataModule(pairs_file(tmp_path), batch_size=2), trainer)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    other = PreferenceDataModule(pairs_file(tmp_path, count=6), batch_size=2)
    with pytest.raises(ConfigurationError, match=r"data\.train: .* differs from the examples the run started with"):
        fit(model_folder, other, quiet_trainer(max_epochs=2), ckpt=tmp_path / "one.ckpt")


def test_tokens_that_differ_after_a_resume_have_a_reference_of_their_own(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    """As where a chat template writes the date. The initial weights score the tokens of the second day."""
    chats = [{key: [{"role": role, "content": f"{key} {n}"}] for key, role in ROLES_OF.items()} for n in range(4)]
    source = tmp_path / "chats.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in chats))

    def fitted(day: int, trainer: Any, ckpt: Path | None = None) -> Tensor:
        template = f"Day {day}\n{{% for m in messages %}}{{{{ m['content'] }}}}\n{{% endfor %}}"
        data = PreferenceDataModule(str(source), batch_size=2)
        policy = Policy(str(model_folder), learning_rate=1e-2, chat_template=template)
        trainer.fit(DPO({"main": policy}), data, ckpt_path=ckpt)
        return data.references["train"]

    trainer = quiet_trainer(max_steps=1)
    before = fitted(9, trainer)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed = fitted(10, quiet_trainer(max_steps=2), tmp_path / "one.ckpt")
    assert not torch.allclose(resumed, before, atol=1e-3)
    torch.testing.assert_close(resumed, fitted(10, quiet_trainer(max_steps=1)))


def test_a_validation_measures_against_the_reference_of_the_run(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    source = pairs_file(tmp_path)
    options = {"validation": source, "batch_size": 8}
    trainer = quiet_trainer(max_epochs=3, limit_val_batches=1.0)
    fit(model_folder, PreferenceDataModule(source, **options), trainer)
    known = float(trainer.callback_metrics["val/loss"])
    assert known < math.log(2)
    trainer.save_checkpoint(tmp_path / "three.ckpt")
    algorithm = DPO({"main": Policy(str(model_folder))})
    validation = quiet_trainer(limit_val_batches=1.0)
    (found,) = validation.validate(
        algorithm, PreferenceDataModule(source, **options), ckpt_path=tmp_path / "three.ckpt"
    )
    assert found["val/loss"] == pytest.approx(known, abs=1e-6)
    with pytest.raises(ConfigurationError, match=r"give the checkpoint of a run, `--ckpt_path RUN/checkpoints/last"):
        quiet_trainer(limit_val_batches=1.0).validate(
            DPO({"main": Policy(str(model_folder))}), PreferenceDataModule(source, **options)
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0.0}, r"beta is 0\.0"),
        ({"label_smoothing": 0.5}, r"label_smoothing is 0\.5"),
        ({"label_smoothing": 0.1, "loss": "hinge"}, "belongs to loss 'sigmoid' or 'robust' or 'exo_pair', not to"),
        ({"loss": "exo_pair"}, "label_smoothing is 0; loss 'exo_pair' needs a rate above 0"),
        ({"margin": float("nan")}, "margin is nan; it must be 0 or above"),
        ({"margin": 1.0, "loss": "ipo"}, "belongs to loss 'sigmoid' or 'hinge', not to 'ipo'"),
        ({"loss": "kto"}, "loss is 'kto'"),
    ],
)
def test_bad_settings_are_refused(model_folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        DPO({"main": Policy(str(model_folder))}, **options)


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
@pytest.mark.long_after(1)
def test_other_pairs_are_validated_against_the_initial_weights(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path, lora: LoRA | None
) -> None:
    """A run that has the pairs from the start gives the expected loss."""
    source = pairs_file(tmp_path)
    (tmp_path / "other").mkdir()
    other = pairs_file(tmp_path / "other", count=6)

    def policy() -> dict[str, Policy]:
        return {"main": Policy(str(model_folder), learning_rate=1e-2, lora=lora)}

    trainer = quiet_trainer(limit_val_batches=1.0)
    trainer.fit(DPO(policy()), PreferenceDataModule(source, validation=other, batch_size=4))
    known = float(trainer.callback_metrics["val/loss"])
    trainer = quiet_trainer()
    trainer.fit(DPO(policy()), PreferenceDataModule(source, batch_size=4))
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    data = PreferenceDataModule(source, validation=other, test=other, batch_size=4)
    algorithm = DPO(policy())
    (found,) = quiet_trainer(limit_val_batches=1.0).validate(algorithm, data, ckpt_path=tmp_path / "one.ckpt")
    (tested,) = quiet_trainer().test(algorithm, data, ckpt_path=tmp_path / "one.ckpt")
    assert found["val/loss"] == tested["test/loss"] == pytest.approx(known, abs=1e-6) != math.log(2)
    assert algorithm.policy("main").reference is None


def test_an_evaluation_without_a_reference_names_the_option_that_needs_none(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    source = pairs_file(tmp_path)
    data = PreferenceDataModule(source, validation=source, batch_size=4)
    with pytest.raises(ConfigurationError, match=r"--ckpt_path .*, or use `model.reference_free`"):
        quiet_trainer(limit_val_batches=1.0).validate(DPO({"main": Policy(str(model_folder))}), data)


def test_a_failure_under_the_reference_leaves_no_copy_and_no_evaluation_mode(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(policy: Policy, *_: Any) -> None:
        assert not policy.training, "dropout is off"
        raise RuntimeError("out of memory")

    source = pairs_file(tmp_path)
    (tmp_path / "other").mkdir()
    other = pairs_file(tmp_path / "other", count=6)
    trainer, data = quiet_trainer(limit_val_batches=1.0), PreferenceDataModule(source, validation=other, batch_size=4)
    algorithm = fit(model_folder, PreferenceDataModule(source, batch_size=4), trainer)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    monkeypatch.setattr(Policy, "reference_logprobs", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.validate(algorithm, data, ckpt_path=tmp_path / "one.ckpt")
    assert algorithm.policy("main").reference is None
    monkeypatch.setattr(Policy, "forward", fails)
    algorithm.train()
    with pytest.raises(RuntimeError, match="out of memory"):
        quiet_trainer().fit(algorithm, PreferenceDataModule(source, batch_size=4))
    assert algorithm.training, "updates need the mode of training"
