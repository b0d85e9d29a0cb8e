"""Runs with W&B, MLflow and TensorBoard: all metrics and hyperparameters arrive."""

from __future__ import annotations

import csv
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.documents import ROOT

pytestmark = pytest.mark.slow
RATE = "model/init_args/policies/main/learning_rate"
SMALL = ("--data.groups", "2", "--data.group_size", "2", "--data.iterations", "3", "--trainer.accelerator", "cpu")
QUIET = ("--trainer.callbacks", "null", "--trainer.limit_val_batches", "0", "--output", "run")


def fit(logger: str, folder: Path, store: tuple[str, str] = ("", "")) -> list[dict[str, str]]:
    """Train the quick start shortly with a logger, perhaps in another store; return the rows of ``metrics.csv``."""
    logging = folder / "logging.yaml"
    logging.write_text((ROOT / f"configs/logging/{logger}.yaml").read_text().replace(*store))
    configs = ("--config", f"{ROOT}/configs/quickstart.yaml", "--config", str(logging))
    command = [sys.executable, "-m", "mrlm_pl.cli.main", "fit", *configs, *SMALL, *QUIET]
    search = os.pathsep.join(str(ROOT / part) for part in ("", "environments", "callbacks"))
    environment = {**os.environ, "PYTHONPATH": search, "WANDB_SILENT": "true", "WANDB_MODE": "offline"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    with (folder / "run/metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def last_values(rows: Sequence[dict[str, str]]) -> dict[str, float]:
    """Return the last logged value of each metric."""
    return {name: float(value) for row in rows for name, value in row.items() if value and name != "step"}


def test_tensorboard_has_the_metrics_and_the_settings(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = fit("tensorboard", tmp_path)
    events = EventAccumulator(str(next((tmp_path / "runs/tensorboard").rglob("events*")).parent)).Reload()
    found = {name: events.Scalars(name) for name in events.Tags()["scalars"]}
    assert {name: values[-1].value for name, values in found.items()} == pytest.approx(last_values(rows), rel=1e-5)
    assert [value.step for value in found["rollout/reward"]] == [0, 1, 2]
    assert (tmp_path / "runs/tensorboard/version_0/hparams.yaml").is_file()


@pytest.mark.skipif(find_spec("mlflow") is None or find_spec("alembic") is None, reason='pip install "mrlm[mlflow]"')
@pytest.mark.parametrize("store", ["sqlite:///mlflow.db", "file:mlruns"])
def test_mlflow_has_the_metrics_and_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    from mlflow import MlflowClient

    if store.startswith("file"):
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    rows = fit("mlflow", tmp_path, ("sqlite:///mlflow.db", store))
    monkeypatch.chdir(tmp_path)
    client = MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("mrlm")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.metrics == pytest.approx(last_values(rows))
    assert [item.step for item in client.get_metric_history(run.info.run_id, "rollout/reward")] == [0, 1, 2]
    assert float(run.data.params[RATE]) > 0


def records_of(data: bytes) -> Iterator[Any]:
    """Yield the records of a run's file: a log of LevelDB behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    position, whole = 7, b""
    while position + 7 <= len(data):
        if (left := 32768 - position % 32768) < 7:  # blocks end with a filling
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4 : position + 7])
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


@pytest.mark.skipif(find_spec("wandb") is None, reason='pip install "mrlm[wandb]"')
def test_weights_and_biases_has_the_metrics_and_the_settings(tmp_path: Path) -> None:
    rows = fit("wandb", tmp_path)
    (file,) = (tmp_path / "runs/wandb").glob("offline-run-*/run-*.wandb")
    found, config = dict[str, list[float]](), dict[str, Any]()
    for record in records_of(file.read_bytes()):
        for item in record.history.item:
            found.setdefault("/".join(item.nested_key) or item.key, []).append(json.loads(item.value_json))
        config |= {item.key: json.loads(item.value_json) for item in record.config.update}
    wanted = last_values(rows)
    assert {name: found[name][-1] for name in wanted} == pytest.approx(wanted)
    assert found["trainer/global_step"] == [0, 1, 2]
    assert config["model"]["init_args"]["policies"]["main"]["learning_rate"] > 0
