"""kill -9 of a run that plays while it updates: complete groups train unchanged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mrlm_pl.episode import Episode
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.rollout.replay import differences

ROOT = Path(__file__).parents[4]
ITERATIONS = 14


def start(folder: Path) -> subprocess.Popen[bytes]:
    command = [
        *(str(Path(sys.executable).with_name("mrlm")), "train", "--config", "configs/scaling/async.yaml"),
        *("--output", str(folder), "--resume", "--checkpoint.every_n_train_steps", "1"),
        *("--trainer.enable_progress_bar", "false", "--trainer.callbacks", "[]"),
        *("--data.iterations", str(ITERATIONS), "--data.groups", "4", "--data.group_size", "4"),
    ]
    with Path(f"{folder}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_complete_groups_survive_the_kill_of_the_learner(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    checkpoint = folder / "checkpoints" / "last.ckpt"
    kept: dict[str, Episode] = {}
    for steps in (2, 6, 10):
        process = start(folder)
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline and process.poll() is None:
            if checkpoint.exists() and torch.load(checkpoint)["global_step"] >= steps:
                break
            time.sleep(0.2)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        state = torch.load(checkpoint)["RolloutDataModule"]
        assert state["iteration"] < ITERATIONS, Path(f"{folder}.log").read_text()[-2000:]
        for _, _, _, episodes, *_ in state["ahead"][0]["complete"]:
            kept |= {episode.id: episode for episode in map(Episode.from_json, episodes)}
    process = start(folder)
    assert process.wait(240) == 0, Path(f"{folder}.log").read_text()[-2000:]

    episodes = list(read_episodes(folder / "episodes"))
    assert len(episodes) == ITERATIONS * 16
    assert kept, "a kill found groups that were complete and had not trained"
    found = {item.id: item for item in episodes if item.id in kept}
    assert set(found) == set(kept)
    assert [differences(item, found[id]) for id, item in kept.items()] == [[]] * len(kept)
    lags = [
        item.iteration - span.version
        for item in episodes
        for row in item.rows()
        for turn in row.turns
        for span in turn.token_spans()
    ]
    assert 0 <= min(lags) <= max(lags) <= 2
