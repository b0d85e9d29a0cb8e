"""Policy gradients with token losses by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.algorithms import CISPO, GRPO, GSPO, REINFORCE
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.losses import LOSSES, Clip, LossName
from mrlm_pl.policy import Policy
from tests.support.runs.watching import Watch


def rollouts(echo: Any, iterations: int, **options: Any) -> RolloutDataModule:
    return RolloutDataModule(
        echo(), groups=2, group_size=4, iterations=iterations, sampling=Sampling(max_tokens=5), **options
    )


@pytest.mark.parametrize("loss", list(LOSSES))
@pytest.mark.long_after(3)
def test_a_run_with_each_loss(loss: LossName, model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    policy = Policy(str(model_folder), learning_rate=1e-2)
    algorithm = GRPO({"main": policy}, loss=loss)
    algorithm.read_weights()
    before = {name: weight.detach().clone() for name, weight in policy.named_parameters()}
    watch = Watch()
    passes = 2 if algorithm.uses_importance_ratio else 1
    quiet_trainer(callbacks=[watch]).fit(algorithm, rollouts(echo, 2, passes=passes))
    assert not all(weight.equal(before[name]) for name, weight in policy.named_parameters())
    assert len(watch.steps) == 2 * passes
    if loss == "reinforce":
        assert "train/loss_weight" not in watch.steps[0]
        return
    assert watch.steps[0]["train/loss_weight"] == pytest.approx(1, abs=1e-5), "on-policy"
    assert any(abs(step["train/loss_weight"] - 1) > 1e-4 for step in watch.steps), "off-policy"
    assert all(0 <= step["train/clip_fraction"] <= 1 for step in watch.steps)


def test_an_algorithm_has_the_loss_of_its_paper_unless_another_is_named(model_folder: Path) -> None:
    policies = {"main": str(model_folder)}
    for algorithm, reduction, clip in [
        (GSPO(policies), "sequence_mean", (3e-4, 4e-4)),
        (GRPO(policies, loss="gspo"), "sequence_mean", (3e-4, 4e-4)),
        (GRPO(policies, loss="gspo", reduction="token_mean", clip={"high": 1e-3}), "token_mean", (3e-4, 1e-3)),
        (CISPO(policies), "token_mean", (1.0, 4.0)),
    ]:
        assert algorithm.reduction == reduction
        assert algorithm.loss.settings["clip"].range(*((3e-4, 4e-4) if clip[0] < 1 else (1.0, 4.0))) == clip
    assert not REINFORCE(policies).uses_importance_ratio
    clipped = REINFORCE(policies, loss="ppo", clip=Clip(high=0.28))
    assert clipped.uses_importance_ratio


def test_a_loss_that_does_not_exist_is_an_error_before_the_run(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="loss is 'spo'; did you mean 'sapo'"):
        GRPO({"main": str(model_folder)}, loss="spo")
    with pytest.raises(ConfigurationError, match=r"max_length is 9 with reduction 'sequence_mean'"):
        GRPO({"main": str(model_folder)}, loss="sapo", max_length=9)
