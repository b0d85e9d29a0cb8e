"""Settings of Lightning's trainer that a run cannot keep are rejected."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BaseFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from torch import Tensor

from mrlm_pl.algorithms import GRPO
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.policies.reference import KL
from mrlm_pl.trainer.fsdp import FSDP
from mrlm_pl.trainer.refusals import refuse_unsupported
from tests.support.runs.short_fits import make


class Freezes(BaseFinetuning):
    """Freezes the layers of the policy in the first epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([module for name, module in pl_module.named_modules() if name.endswith(".layers")])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.policies["main"].model.model.layers, optimizer)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"overfit_batches": 1}, "overfit_batches is 1, but each epoch continues with other batches"),
        ({"gradient_clip_val": -1.0}, r"trainer.gradient_clip_val is -1\.0; it must be 0 or above"),
        ({"accumulate_grad_batches": 0}, "trainer.accumulate_grad_batches is 0; it must be 1 or above"),
        ({"precision": "16-true"}, "precision is 16-true, .* use 16-mixed or bf16-true"),
        (
            {"callbacks": [GradientAccumulationScheduler({0: 2})]},
            "GradientAccumulationScheduler changes .* set trainer.accumulate_grad_batches",
        ),
        ({"callbacks": [BackboneFinetuning()]}, "BackboneFinetuning unfreezes a `backbone`, .* `trained: false`"),
        ({"callbacks": [Freezes()]}, "Freezes freezes weights before they are read, .* call `algorithm.read_weights"),
        ({"callbacks": [LearningRateFinder()]}, "LearningRateFinder sets one .* give it `update_attr: false`"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging .* use WeightAveraging"),
        ({"callbacks": [ModelPruning("l1_unstructured", amount=0.5)]}, "ModelPruning .* call `algorithm.read_weights"),
    ],
)
def test_a_setting_that_would_do_something_else_is_refused(
    options: dict[str, Any], told: str, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    algorithm, data = make(model_folder, echo(), iterations=1)
    with pytest.raises(ConfigurationError, match=told):
        quiet_trainer(**options).fit(algorithm, data)


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        (lambda: torch.autocast("cpu", torch.bfloat16), r"torch\.autocast"),
        (torch.inference_mode, r"torch\.inference_mode"),
        (lambda: torch.device("meta"), r"torch\.set_default_device\('meta'\)"),
    ],
)
def test_a_mode_of_the_caller_that_would_change_the_training_is_refused(
    mode: Any, name: str, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    algorithm, data = make(model_folder, echo(), iterations=1)
    trainer = quiet_trainer()
    with mode(), pytest.raises(ConfigurationError, match=f"trainer.fit is called under {name}; call it outside"):
        trainer.fit(algorithm, data)


@pytest.mark.long_after(1)
def test_a_group_that_a_callback_has_added_is_trained_and_resumed(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    """Lightning gives added weights a tenth of the rate. The first update ended in `KeyError: 'policy'`."""

    def fit(epochs: int, checkpoint: Path | None) -> tuple[list[float], list[bool]]:
        algorithm, data = make(model_folder, echo(), iterations=1)
        algorithm.read_weights()
        layers: Any = algorithm.policy("main").model.model.layers
        before = [weight.clone() for weight in layers.parameters()]
        trainer = quiet_trainer(callbacks=[Freezes()], max_epochs=epochs)
        trainer.fit(algorithm, data, ckpt_path=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{epochs}.ckpt")
        moved = [not torch.equal(weight, former) for weight, former in zip(layers.parameters(), before, strict=True)]
        return [group["lr"] for group in trainer.optimizers[0].param_groups], moved

    assert fit(1, None) == ([1e-3], [False] * 18)
    rates, moved = fit(2, None)
    assert rates == pytest.approx([1e-3, 1e-4])
    assert all(moved)
    assert fit(3, tmp_path / "2.ckpt")[0] == pytest.approx(rates)


def test_a_compiled_algorithm_is_refused(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, echo(), iterations=1)
    with pytest.raises(ConfigurationError, match=r"torch\.compile cannot trace .* policy with its `compile: true`"):
        quiet_trainer().fit(torch.compile(algorithm), data)


def test_hyperparameters_that_a_resume_cannot_read_are_named(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    class Keeps(GRPO):
        def __init__(self, policies: Any, kl: Any, rate: float = 0.5, ignore: Any = ()) -> None:
            super().__init__(policies, kl=kl)
            self.save_hyperparameters(ignore=ignore)

    _, data = make(model_folder, echo(), iterations=1)
    for ignore, warns in (((), True), (["policies", "kl"], False)):
        algorithm = Keeps({"main": str(model_folder)}, KL(), ignore=ignore)
        told = pytest.warns(UserWarning, match=r"save_hyperparameters keeps \['kl'\].*save_hyperparameters\(ignore=")
        with told if warns else nullcontext():
            quiet_trainer(limit_train_batches=0).fit(algorithm, data)


def test_weights_that_are_read_before_are_pruned(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, echo(), iterations=1)
    assert isinstance(algorithm, GRPO)
    algorithm.read_weights()
    quiet_trainer(callbacks=[ModelPruning("l1_unstructured", amount=0.5)]).fit(algorithm, data)
    weights = [weight for weight in algorithm.parameters() if weight.requires_grad]
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    assert zeros >= 0.45 * sum(weight.numel() for weight in weights)


def test_weights_that_are_read_before_are_averaged(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, echo(), iterations=2)
    assert isinstance(algorithm, GRPO)
    algorithm.read_weights()
    averaged: list[list[Tensor]] = []

    class Weights(Callback):
        def on_train_epoch_start(self, *_: Any) -> None:
            averaged.append([weight.detach().clone() for weight in algorithm.parameters()])

    callbacks = [StochasticWeightAveraging(1e-3, swa_epoch_start=1), Weights()]
    quiet_trainer(callbacks=callbacks, max_epochs=2).fit(algorithm, data)
    for weight, first, second in zip(algorithm.parameters(), *averaged, strict=True):
        torch.testing.assert_close(weight.detach(), (first + second) / 2)
    assert any(not torch.equal(first, second) for first, second in zip(*averaged, strict=True))


def plain_trainer(callback: Callback, strategy: Any = None) -> Any:
    return SimpleNamespace(
        overfit_batches=0,
        gradient_clip_val=float("inf"),
        accumulate_grad_batches=1,
        precision="32-true",
        callbacks=[callback],
        strategy=strategy,
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_have_no_common_clock_for_validations(processes: int) -> None:
    """One that validates while the other trains waits for it without end."""
    trainer = Trainer(val_check_interval=timedelta(seconds=3), devices=processes, strategy="ddp", accelerator="cpu")
    with pytest.raises(ConfigurationError, match="val_check_interval is a time") if processes > 1 else nullcontext():
        refuse_unsupported(trainer, LightningModule())


def test_a_sharded_model_is_not_averaged() -> None:
    """Torch refused to copy it, in words that name no setting."""
    module = LightningModule()
    with pytest.raises(ConfigurationError, match=r"EMAWeightAveraging copies the model, .* use `ddp`"):
        refuse_unsupported(plain_trainer(EMAWeightAveraging(), FSDP()), module)
    refuse_unsupported(plain_trainer(EMAWeightAveraging()), module)


def test_an_own_backbone_is_unfrozen(model_folder: Path) -> None:
    algorithm = GRPO({"main": str(model_folder)})  # type: ignore[dict-item]
    trainer = plain_trainer(BackboneFinetuning())
    with pytest.raises(ConfigurationError, match="BackboneFinetuning"):
        refuse_unsupported(trainer, algorithm)
    algorithm.backbone = torch.nn.Linear(1, 1)
    refuse_unsupported(trainer, algorithm)


def test_the_learning_rate_is_measured_without_being_set(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, echo(), iterations=2)
    finder = LearningRateFinder(num_training_steps=2, update_attr=False, early_stop_threshold=None)
    trainer = quiet_trainer(callbacks=[finder])
    trainer.fit(algorithm, data)
    assert trainer.global_step == 2
    assert len(finder.optimal_lr.results["lr"]) == 2
