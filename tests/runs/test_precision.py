"""Precision plugins: fp32 masters under bf16 computation, and rejected combinations."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins import MixedPrecision

from mrlm_pl.algorithms import GRPO, PPO, SFT
from mrlm_pl.data import RolloutDataModule, TrajectoryDataModule
from mrlm_pl.engines import Engine, InProcessEngine, Sampling
from mrlm_pl.engines.base import EngineWrapper
from mrlm_pl.environment import Outcome
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import Policy
from mrlm_pl.runs import Trainer
from mrlm_pl.runs import trainer as trainer_module
from mrlm_pl.runs.records.run import read_run
from mrlm_pl.trainer.precision import product_seconds


def test_small_steps_change_the_masters_under_bf16(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{n}+{n}=", "completion": f" {2 * n}, as it should be"} for n in range(20)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    algorithm = SFT({"main": Policy(str(model_folder), learning_rate=5e-6)})
    data = TrajectoryDataModule(str(source), batch_size=20)
    trainer = quiet_trainer(max_epochs=20, precision="bf16-mixed")
    before = Policy(str(model_folder))
    before.load()
    trainer.fit(algorithm, data)
    assert trainer.global_step == 20
    matrices = [
        (old, new)
        for (name, old), new in zip(
            before.model.named_parameters(), algorithm.policy("main").model.parameters(), strict=True
        )
        if old.dim() == 2 and "embed" not in name and "lm_head" not in name
    ]
    assert all(new.dtype == torch.float32 for _, new in matrices)
    changed = sum(int((old != new).sum()) for old, new in matrices)
    assert changed > 0.95 * sum(old.numel() for old, _ in matrices)
    # A step of this size on weights held in bf16 would be rounded away for most of them.
    stuck = sum(int((old.bfloat16() - 5e-6 == old.bfloat16()).sum()) for old, _ in matrices)
    assert stuck > 0.5 * sum(old.numel() for old, _ in matrices)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_a_rollout_and_its_update_agree_in_every_precision(
    precision: str, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    algorithm = GRPO({"main": Policy(str(model_folder), learning_rate=1e-3)})
    data = RolloutDataModule(echo(), groups=2, group_size=3, iterations=2, sampling=Sampling(max_tokens=5))
    trainer = quiet_trainer(precision=precision)
    trainer.fit(algorithm, data)
    # The learner's own numbers stand in for the sampler's where these are rounded differently.
    assert float(trainer.callback_metrics["train/ratio_deviation"]) < 1e-4
    assert float(trainer.callback_metrics["train/mismatch_max_ratio"]) < 1.2


@pytest.mark.parametrize("algorithm", [GRPO, PPO])
def test_rewards_and_advantages_are_exact_beside_weights_in_bf16(
    algorithm: Any, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    def targets(precision: str) -> tuple[list[Any], float]:
        learner = algorithm({"main": Policy(str(model_folder), learning_rate=0.0)})
        found, loss = [], learner.policy_loss

        def noted(name: str, rows: Any, batch: Any) -> Any:
            found.extend([rows.advantages, rows.advantages if rows.returns is None else rows.returns])
            return loss(name, rows, batch)

        learner.policy_loss = noted
        rewards = itertools.cycle([1000.1, 1000.2, 1000.4])

        class Fixed(echo):
            def reply(self, message: Any) -> Any:
                return Outcome({"x": next(rewards)})

        data = RolloutDataModule(Fixed(), groups=1, group_size=3, iterations=1, sampling=Sampling(max_tokens=1))
        trainer = quiet_trainer(precision=precision)
        trainer.fit(learner, data)
        return found, float(trainer.callback_metrics["rollout/reward"])

    (exact, reward), (found, in_half) = targets("32-true"), targets("bf16-true")
    assert reward == in_half == pytest.approx(1000.2333)
    for value, expected in zip(found, exact, strict=True):
        assert expected.any()
        torch.testing.assert_close(value, expected)


class Untold(EngineWrapper):
    """Does not tell in which precision it computes, as servers do not."""

    def precision(self, policy: str) -> str | None:
        return "unknown"


@pytest.mark.parametrize(
    ("engine", "precision", "differs"),
    [
        (None, "32-true", False),
        (InProcessEngine(), "32-true", False),
        (InProcessEngine(), "64-true", False),
        (InProcessEngine(dtype=torch.float32), "32-true", False),
        (InProcessEngine(dtype=torch.float32), "64-true", True),
        (InProcessEngine(dtype=torch.bfloat16), "32-true", True),
        (EngineWrapper(InProcessEngine(dtype=torch.bfloat16)), "32-true", True),
        (Untold(InProcessEngine()), "32-true", True),
        (InProcessEngine(), "bf16-mixed", True),
    ],
)
def test_the_learner_computes_pi_old_where_the_engines_precision_is_another(
    engine: Engine | None, precision: Any, differs: bool, model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    algorithm = GRPO({"main": Policy(str(model_folder), learning_rate=1e-3)})
    data = RolloutDataModule(
        echo(), engine=engine, groups=1, group_size=2, iterations=1, sampling=Sampling(max_tokens=3)
    )
    quiet_trainer(precision=precision, max_steps=1).fit(algorithm, data)
    assert algorithm.recomputes(Sampling()) == differs
    assert algorithm.recomputes(Sampling(top_p=0.9))


def test_a_named_engine_computes_in_the_precision_of_each_run(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    engines = [InProcessEngine(), InProcessEngine(dtype=torch.float32)]
    found = []
    for precision in ("bf16-mixed", "32-true"):
        for engine in engines:
            data = RolloutDataModule(
                echo(),
                engine=EngineWrapper(engine),
                groups=1,
                group_size=2,
                iterations=1,
                sampling=Sampling(max_tokens=3),
            )
            quiet_trainer(precision=precision, max_steps=1).fit(GRPO({"main": Policy(str(model_folder))}), data)
            found.append(engine.precision("main"))
    assert found == ["bfloat16", "float32", None, "float32"]


class Measured:
    """Stands in for the measurement, with its result and the number of calls."""

    def __init__(self, full: float, mixed: float) -> None:
        self.seconds, self.calls = {"32-true": full, "bf16-mixed": mixed}, 0

    def __call__(self, inputs: int, outputs: int, device: torch.device) -> dict[str, float]:
        self.calls += 1
        self.widths = inputs, outputs
        return self.seconds


def auto_run(folder: Path, model: Path, echo: Any, iterations: int = 1, **options: Any) -> Trainer:
    trainer = Trainer(
        output=str(folder), precision="auto", accelerator="cpu", logger=False, enable_progress_bar=False, **options
    )
    data = RolloutDataModule(echo(), groups=1, group_size=2, iterations=iterations, sampling=Sampling(max_tokens=3))
    trainer.fit(GRPO({"main": Policy(str(model), learning_rate=1e-3)}), data)
    return trainer


@pytest.mark.parametrize(("mixed", "chosen"), [(0.0079, "bf16-mixed"), (0.0081, "32-true")])
def test_a_measurement_chooses_the_precision(
    mixed: float, chosen: str, model_folder: Path, echo: Any, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    measured = Measured(0.01, mixed)
    monkeypatch.setattr(trainer_module, "product_seconds", measured)
    trainer = auto_run(tmp_path / "run", model_folder, echo)
    config = json.loads((model_folder / "config.json").read_text())
    assert measured.widths == (config["hidden_size"], config["intermediate_size"])
    assert trainer.precision == chosen
    autocast = isinstance(trainer.precision_plugin, MixedPrecision)
    assert autocast == (chosen == "bf16-mixed")
    assert f"precision {chosen}: matrix products of" in capsys.readouterr().err
    assert read_run(str(tmp_path / "run")).precision == chosen, "a script's run has no configuration"
    recorded = json.loads((tmp_path / "run" / "precision.json").read_text())
    assert recorded == {"precision": chosen, "milliseconds": {"32-true": 10.0, "bf16-mixed": 1000 * mixed}}


def test_a_resumed_run_keeps_its_precision(model_folder: Path, echo: Any, tmp_path: Path, monkeypatch: Any) -> None:
    measured = Measured(0.01, 0.001)
    monkeypatch.setattr(trainer_module, "product_seconds", measured)
    auto_run(tmp_path / "run", model_folder, echo, iterations=2, max_steps=1)
    measured.seconds = {"32-true": 0.001, "bf16-mixed": 0.01}
    resumed = auto_run(tmp_path / "run", model_folder, echo, iterations=2, max_steps=2, resume=True)
    assert (resumed.precision, resumed.global_step, measured.calls) == ("bf16-mixed", 2, 1)


def test_a_resumed_run_rounds_no_weights(model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path) -> None:
    def weights(steps: int, ckpt: Path | None = None, save: Path | None = None) -> list[torch.Tensor]:
        algorithm = GRPO({"main": Policy(str(model_folder), learning_rate=1e-3)})
        data = RolloutDataModule(echo(), groups=2, group_size=4, iterations=2, sampling=Sampling(max_tokens=5))
        trainer = quiet_trainer(precision="64-true", max_steps=steps)
        trainer.fit(algorithm, data, ckpt_path=ckpt)
        if save is not None:
            trainer.save_checkpoint(save)
        return [weight.detach() for weight in algorithm.parameters()]

    weights(1, save=tmp_path / "half.ckpt")
    for found, expected in zip(weights(2, tmp_path / "half.ckpt"), weights(2), strict=True):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_a_resume_that_trains_nothing_keeps_the_precision_of_the_run(
    model_folder: Path, echo: Any, tmp_path: Path
) -> None:
    for precision in ("32-true", "bf16-mixed"):
        trainer = Trainer(
            output=str(tmp_path / "run"),
            resume=True,
            precision=precision,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
        )
        data = RolloutDataModule(echo(), groups=1, group_size=2, iterations=1, sampling=Sampling(max_tokens=3))
        trainer.fit(GRPO({"main": Policy(str(model_folder), learning_rate=1e-3)}), data)
        assert read_run(str(tmp_path / "run")).precision == "32-true"


def test_several_processes_do_not_measure() -> None:
    with pytest.raises(ConfigurationError, match="which one process measures, but the run has 2; name one: bf16-mixed"):
        Trainer(precision="auto", accelerator="cpu", devices=2)


def test_a_model_without_policies_is_not_measured(tmp_path: Path) -> None:
    trainer = Trainer(precision="auto", accelerator="cpu", output=str(tmp_path / "run"))
    with pytest.raises(ConfigurationError, match="BoringModel has no policy with weights in this process"):
        trainer.fit(BoringModel())


def test_a_gpu_is_measured_with_as_many_tokens_as_an_update_has(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[list[int]] = []

    def products(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype, rows: int) -> None:
        measured.append([len(x), rows])

    monkeypatch.setattr("mrlm_pl.trainer.precision._products", products)
    monkeypatch.setattr("mrlm_pl.trainer.precision._seconds", lambda *_: 1.0)
    for device in ("meta", "cpu"):  # no accelerator computes here
        product_seconds(4864, 896, torch.device(device))
    assert measured == [[4096, 256]] * 2 + [[32, 32]] * 2


def test_products_are_measured_in_both_precisions() -> None:
    seconds = product_seconds(64, 172, torch.device("cpu"))
    assert seconds.keys() == {"32-true", "bf16-mixed"}
    assert all(0 < value < 60 for value in seconds.values())
