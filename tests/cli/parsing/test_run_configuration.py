"""Settings that a resumed run changes: honored or rejected, and named."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import Namespace

from mrlm_pl.cli.parsing.run_configuration import (
    SaveConfig,
    changed_files,
    changed_settings,
    check_resumable,
    with_files,
)
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
    assert changed_settings({"model": "model"}, {"model": str(tmp_path / "model")}) == {}


def test_code_and_data_that_are_newer_than_the_run_are_named(tmp_path: Path) -> None:
    old, new, config, rows, test = (tmp_path / name for name in ("o.py", "a b:c.py", "config.yaml", "r.jsonl", "t.csv"))
    rewards = [f"{old}:exact", {"call": f"{new}:exact"}, f"{new}:length", f"{tmp_path}/gone.py:exact"]
    data = {"train": str(rows), "validation": str(old), "test": str(test)}
    environment = [{"class_path": "QuestionEnvironment", "init_args": {"rewards": rewards, "data": data}}]
    settings = {"data": {"init_args": {"environment": environment}}, "ckpt_path": str(test), "n": 3}
    config.write_text(f"# {new}:exact\n" + yaml.safe_dump(settings, default_flow_style=None))
    for at, file in enumerate((old, config, new, rows)):
        file.touch()
        os.utime(file, (1000 + at, 1000 + at))
    assert changed_files(config) == [f"{new} (newer)", f"{rows} (newer)"]
    test.touch()
    assert changed_files(config) == [f"{file} (newer)" for file in (new, test, rows)]
    config.write_text("")
    assert changed_files(config) == []


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
        step = algorithm.end_update

        def note(optimizer: torch.optim.Optimizer) -> None:
            group = optimizer.param_groups[0]
            seen.append((group["lr"], group["weight_decay"], group["betas"][1]))
            step(optimizer)

        algorithm.end_update = note  # type: ignore[method-assign]
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


def test_files_of_environments_are_recorded_with_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "graders_of_this_test.py").write_text("def exact(reply, row):\n    return 1.0\n")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setitem(sys.modules, "graders_of_this_test", None)  # removed at the end
    del sys.modules["graders_of_this_test"]
    importlib.import_module("graders_of_this_test")
    given = {
        "data": "rows.jsonl",
        "rewards": ["graders_of_this_test.exact", {"call": "random.random"}],
        "prompt": "a.b",
    }
    environment = {"class_path": "mrlm_environments.QuestionEnvironment", "init_args": given}
    config = {
        "data": {"class_path": "D", "init_args": {"environment": [environment, "math"], "groups": 2}},
        "output": "x",
    }
    recorded = with_files(config)
    (first, second) = recorded["data"]["init_args"]["environment"]
    assert first["init_args"] == {
        "data": str(tmp_path / "rows.jsonl"),
        "rewards": [f"{folder}/graders_of_this_test.py:exact", {"call": "random.random"}],
        "prompt": "a.b",
    }
    assert (first["class_path"], second) == (environment["class_path"], "math")
    assert {**recorded, "data": None} == {**config, "data": None}
    assert with_files(recorded) == recorded
    assert with_files({"model": {}}) == {"model": {}}


def test_loggers_receive_no_secrets(tmp_path: Path) -> None:
    parser: Any = SimpleNamespace(dump=lambda config, **_: "{}")
    config = Namespace(data={"tools": {"env": {"A_TOKEN": "sesame"}, "timeout": 3}, "API_KEY": "sesame"})
    logged: list[Any] = []
    logger = SimpleNamespace(log_hyperparams=logged.append)
    trainer: Any = SimpleNamespace(default_root_dir=str(tmp_path), loggers=[logger])
    SaveConfig(parser, config).save_config(trainer, None, "fit")  # type: ignore[arg-type]
    assert logged == [{"data": {"tools": {"timeout": 3}}}]


@pytest.mark.slow
def test_a_run_with_files_of_its_folder_is_played_from_another_one(mrlm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Path("home").absolute()
    (home / "mine").mkdir(parents=True)
    Path("elsewhere").mkdir()
    (home / "mine/graders_of_a_run.py").write_text("def length(reply, row):\n    return len(reply) / row['n']\n")
    (home / "rows.jsonl").write_text("".join(f'{{"prompt": "Say {n}", "n": {n}}}\n' for n in range(1, 41)))
    monkeypatch.chdir(home)
    monkeypatch.syspath_prepend(str(home / "unused"))  # restores the path, to which the command adds folders
    options = ["--data.environment.data=rows.jsonl", "--data.environment.rewards=[./mine/graders_of_a_run.py:length]"]
    sizes = ["--data.iterations=1", "--data.groups=1", "--data.group_size=2", "--data.sampling.max_tokens=4"]
    trainer = ["--trainer.default_root_dir=run", "--trainer.limit_val_batches=0", "--trainer.accelerator=cpu"]
    model = ["--model=GRPO", '--model.policies={"main": {"model": "builtin:tiny"}}', "--data=RolloutDataModule"]
    status, _, err = mrlm("fit", *model, "--data.environment=question", *options, *sizes, *trainer)
    assert status == 0, err
    monkeypatch.chdir(home.parent / "elsewhere")
    program = "import sys; from mrlm_pl.cli.main import main; sys.exit(main(['replay', sys.argv[1]]))"
    done = subprocess.run(
        [sys.executable, "-c", program, str(home / "run")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "2 of 2 episodes are equal to their record" in done.stdout
