"""Settings of Lightning's trainer that a run cannot keep are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)

from mrlm_pl.algorithms import GRPO
from mrlm_pl.errors import ConfigurationError
from tests.support.short_fits import make


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"overfit_batches": 1}, "overfit_batches is 1, but each epoch continues with other batches"),
        (
            {"callbacks": [GradientAccumulationScheduler({0: 2})]},
            "GradientAccumulationScheduler changes .* set trainer.accumulate_grad_batches",
        ),
        ({"callbacks": [BackboneFinetuning()]}, "BackboneFinetuning unfreezes a `backbone`, .* `trained: false`"),
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


def test_weights_that_are_read_before_are_pruned(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, echo(), iterations=1)
    assert isinstance(algorithm, GRPO)
    algorithm.read_weights()
    quiet_trainer(callbacks=[ModelPruning("l1_unstructured", amount=0.5)]).fit(algorithm, data)
    weights = [weight for weight in algorithm.parameters() if weight.requires_grad]
    zeros = sum(int((weight == 0).sum()) for weight in weights)
    assert zeros >= 0.45 * sum(weight.numel() for weight in weights)


def test_the_learning_rate_is_measured_without_being_set(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, echo(), iterations=2)
    finder = LearningRateFinder(num_training_steps=2, update_attr=False, early_stop_threshold=None)
    trainer = quiet_trainer(callbacks=[finder])
    trainer.fit(algorithm, data)
    assert trainer.global_step == 2
    assert len(finder.optimal_lr.results["lr"]) == 2
