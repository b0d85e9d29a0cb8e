"""The update's own pass has pi_old, and parts of groups add up, whatever the algorithm and its loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlm_pl.algorithms import GRPO, MAGRPO, PPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.policy import Policy


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (GRPO, {"loss": "vespo", "correction": {"kind": "truncated", "level": "sequence"}}),
        (GRPO, {"off_policy_threshold": 0.05, "zero_variance": "exclude", "credit": "turn"}),
        (GRPO, {"loss": "gspo", "entropy": {"coefficient": 0.01}, "top_entropy": 0.5}),
        (PPO, {}),
        (MAGRPO, {}),
    ],
)
@pytest.mark.long_after(2)
def test_gradient_and_metrics_are_those_of_a_pass_over_whole_groups(
    model_folder: Path,
    echo: Any,
    quiet_trainer: Any,
    monkeypatch: pytest.MonkeyPatch,
    cls: Any,
    options: dict[str, Any],
) -> None:
    meet, found = PolicyGradient.check_rollouts, {}
    for kind, accumulation in (("apart", 1), ("own", 1), ("parts", 8)):
        algorithm = cls({"main": Policy(str(model_folder), learning_rate=1e-3)}, **options)
        sampling = Sampling(max_tokens=6, top_p=0.9)
        data = RolloutDataModule(echo(turns=2), groups=4, group_size=4, iterations=1, sampling=sampling)
        with monkeypatch.context() as patch:
            if kind == "apart":  # an algorithm that does not know the number of updates makes a pass before them
                patch.setattr(PolicyGradient, "check_rollouts", lambda self, x: meet(self, replace(x, updates=None)))
            trainer = quiet_trainer(accumulate_grad_batches=accumulation)
            trainer.fit(algorithm, data)
        assert algorithm.old_policy.is_current == (kind != "apart")
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("train/")}
        # After one step AdamW's first moment is (1 - beta1) times the gradient.
        found[kind] = metrics, [state["exp_avg"] for state in trainer.optimizers[0].state_dict()["state"].values()]
    for kind in ("own", "parts"):
        assert found[kind][0] == pytest.approx(found["apart"][0], rel=2e-3, abs=2e-5), kind
        for got, want in zip(found[kind][1], found["apart"][1], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-6)
