"""Settings that a resumed run changes: honored or refused, and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mrlm_pl.cli.parsing.run_configuration import changed_settings, check_resumable
from mrlm_pl.errors import ConfigurationError

BEFORE = {
    "seed_everything": 0,
    "model": {
        "class_path": "GRPO",
        "init_args": {"policies": {"main": {"model": "a", "learning_rate": 1e-5}}, "kl": {"coefficient": 0.1}},
    },
    "data": {"class_path": "RolloutDataModule", "init_args": {"groups": 8}},
    "trainer": {"default_root_dir": "x", "max_epochs": 1},
    "ckpt_path": None,
}


def changed_to(**paths: object) -> dict[str, tuple[object, object]]:
    now = yaml.safe_load(yaml.safe_dump(BEFORE))
    for path, value in paths.items():
        *folders, name = path.split("__")
        place = now
        for folder in folders:
            place = place[folder]
        place[name] = value
    return changed_settings(BEFORE, now)


def test_each_change_is_named_as_an_option_is() -> None:
    path = "model__init_args__policies__main__learning_rate"
    found = changed_to(**{path: 3e-5}, ckpt_path="last.ckpt", trainer__default_root_dir="y", trainer__max_epochs=2)
    assert found == {"model.policies.main.learning_rate": (1e-5, 3e-5), "trainer.max_epochs": (1, 2)}
    check_resumable(found, adaptive_kl=False)


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("data__class_path", "Other", r"data\.class_path is 'Other', .* has 'RolloutDataModule'"),
        ("model__init_args__policies__main__model", "b", r"model\.policies\.main\.model is 'b', .* has 'a'"),
        ("model__init_args__kl__coefficient", 0.2, r"model\.kl\.coefficient is 0\.2"),
    ],
)
def test_what_the_checkpoint_decides_is_refused(path: str, value: object, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        check_resumable(changed_to(**{path: value}), adaptive_kl=True)


@pytest.mark.parametrize("place", ["critics.main", "agent_critics.alice", "critic"])
def test_the_model_of_a_critic_is_refused(place: str) -> None:
    with pytest.raises(ConfigurationError, match="the weights come from the checkpoint"):
        check_resumable({f"model.{place}.model": ("a", "b")}, adaptive_kl=False)


def test_another_spelling_of_a_path_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    check_resumable({"model.policies.main.model": ("model", str(tmp_path / "model"))}, adaptive_kl=False)


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_the_configured_rates_are_used_after_a_resume(
    schedule: str, model_folder: Path, quiet_trainer: object, tmp_path: Path
) -> None:
    import json

    from mrlm_pl.algorithms import SFT
    from mrlm_pl.data import TrajectoryDataModule
    from mrlm_pl.policy import Policy

    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}?", "completion": str(n)}) + "\n" for n in range(8)))

    def fit(rate: float, decay: float, checkpoint: Path | None = None, schedule: str = schedule) -> tuple[float, ...]:
        policy = Policy(str(model_folder), learning_rate=rate, weight_decay=decay)
        betas = (0.9, 0.95) if checkpoint else (0.9, 0.999)
        options: Any = {"schedule": schedule, "betas": betas}
        algorithm = SFT({"main": policy}, optimization=options)
        trainer = quiet_trainer(max_epochs=1 if checkpoint is None else 2)  # type: ignore[operator]
        data = TrajectoryDataModule(str(rows), batch_size=4)
        seen: list[tuple[float, ...]] = []
        step = algorithm.on_before_optimizer_step

        def note(optimizer: torch.optim.Optimizer) -> None:
            group = optimizer.param_groups[0]
            seen.append((group["lr"], group["weight_decay"], group["betas"][1]))
            step(optimizer)

        algorithm.on_before_optimizer_step = note  # type: ignore[method-assign]
        trainer.fit(algorithm, data, ckpt_path=checkpoint)
        if checkpoint is None:
            trainer.save_checkpoint(tmp_path / "last.ckpt")
        return seen[0]

    fit(1e-3, 0.0)
    # Two of four updates are done: a linear schedule is at half of its rate.
    rate = 4e-3 if schedule == "constant" else 2e-3
    assert fit(4e-3, 0.1, tmp_path / "last.ckpt") == pytest.approx((rate, 0.1, 0.95))
    if schedule == "constant":
        found = fit(4e-3, 0.1, tmp_path / "last.ckpt", schedule="linear")
        assert found == pytest.approx((2e-3, 0.1, 0.95)), "a schedule that is new begins where the run is"
