"""The pool under Ray itself: real worker processes, real kills, and remaining processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mrlm_pl.engines import (
    InProcessEngine,
    PoolDeadlines,
    PoolResources,
    RayPool,
    SampleRequest,
    WeightTransfer,
)
from mrlm_pl.engines.base import LearnerPlace
from mrlm_pl.episode import Turn
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError, EngineError
from tests.engines.conftest import build, request, run
from tests.support.runs.short_runs import ShortRuns

SHORT = {"--data.groups": "4", "--data.group_size": "8"}
IN_PROCESS = "{class_path: InProcessEngine, init_args: {}}"  # which drops the pool's settings


def descendants(parent: int) -> dict[int, str]:
    """Return command lines of all processes below one, by process id."""
    found = subprocess.run(
        ["ps", "-e", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split(None, 2) for line in found.splitlines()]
    parents = {int(row[0]): int(row[1]) for row in rows}
    lines = {int(row[0]): row[2] if len(row) > 2 else "" for row in rows}
    below: dict[int, str] = {}
    for pid in parents:
        above = pid
        while above in parents and above != parent:
            above = parents[above]
        if above == parent and pid != parent:
            below[pid] = lines[pid]
    return {pid: line for pid, line in below.items() if not line.startswith("ps ")}


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def eventually(holds: Callable[[], Any], seconds: float) -> Any:
    """Wait until ``holds`` returns a true value; return it."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        time.sleep(0.05)
    return found


def workers_of(parent: int) -> list[int]:
    """Return process ids of the pool's workers below a process."""
    return [pid for pid, line in descendants(parent).items() if line.startswith("ray::PoolWorker")]


def check_samples(pool: RayPool, model: Any, asked: list[SampleRequest], within: float) -> None:
    """Compare the samples of pool and process for three versions of the weights, one after a worker was killed."""
    alone = InProcessEngine()
    try:
        for version in (1, 2, 3):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(1.05)
            pool.load("p", model, version)
            alone.load("p", model, version)
            if version == 3:
                os.kill(workers_of(os.getpid())[0], signal.SIGKILL)
            wanted = [run(alone, item)[0] for item in asked]
            found = run(pool, *asked)
            assert [(item.token_ids, item.version) for item in found] == [(item.token_ids, version) for item in wanted]
            for one, other in zip(found, wanted, strict=True):
                assert one.logprobs == pytest.approx(other.logprobs, abs=within)
    finally:
        alone.close()
    assert pool.replaced == 1


@pytest.mark.slow
def test_workers_answer_like_the_learner_also_after_one_was_killed() -> None:
    pytest.importorskip("ray")
    pool = RayPool(2)
    requests = [request([3 + n, 9, 4], n, temperature=float(n), max_tokens=8) for n in range(2)]
    try:
        check_samples(pool, build("qwen2"), requests, within=1e-6)
        below = descendants(os.getpid())
        assert any("gcs_server" in line for line in below.values()), below
    finally:
        pool.close()
    eventually(lambda: not any(alive(pid) for pid in below), 20)


OVER_CPU = WeightTransfer(transport="gloo")  # the GPUs are not there


@pytest.mark.slow
def test_ray_places_workers_on_gpus_that_the_learner_does_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Use four GPUs that exist for Ray alone, under a Ray that the test starts."""
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    model = build("qwen2")
    ray.init(address="local", num_cpus=8, num_gpus=4, include_dashboard=False, log_to_driver=False)
    try:
        taken: set[str] = set()
        refused = []
        for device in range(4):
            pool = RayPool(2, resources=PoolResources(gpus=1, learner_gpus=1), transfer=OVER_CPU)
            pool.meet_learner(LearnerPlace((device,)))
            try:
                pool.load("p", model, 1)
            except ConfigurationError as error:
                refused.append(str(error))
                continue
            else:
                gpus = [gpu for worker in pool.describe() for gpu in worker["gpus"]]
                taken |= set(gpus)
                assert len(set(gpus)) == 2
                assert str(device) not in gpus
            finally:
                pool.close()
        assert taken, "one of the four is what Ray keeps free"
        assert all("was given GPU" in text for text in refused)
        assert ray.is_initialized(), "who has started it ends it"
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_an_own_ray_gives_its_workers_the_gpus_that_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pools of one process share a Ray, which outlives the end of one of them."""
    pytest.importorskip("ray")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    halves = RayPool(2, resources=PoolResources(gpus=0.5))
    whole = RayPool(1, resources=PoolResources(gpus=1), transfer=OVER_CPU)
    shared = RayPool(1, resources=PoolResources(gpus=0.5, share_learner_gpus=True))
    pools = (halves, whole, shared)
    try:
        for pool in pools:
            pool.meet_learner(LearnerPlace((1,)))
            pool.load("p", build("qwen2"), 1)
        assert [worker["gpus"] for worker in halves.describe()] == [["4"], ["4"]]
        assert [worker["gpus"] for worker in whole.describe()] == [["6"]]
        assert [worker["gpus"] for worker in shared.describe()] == [["5"]], "only who says so shares the learner's"
        below = descendants(os.getpid())
        assert sum("gcs_server" in line for line in below.values()) == 1
        halves.close()
        os.kill(whole.describe()[0]["pid"], signal.SIGKILL)
        run(whole, request([3, 9], 1))
        assert whole.replaced == 1
    finally:
        for pool in pools:
            pool.close()
    eventually(lambda: not any(alive(pid) for pid in below), 20)


# Runs of the command line.


@pytest.fixture
def fit(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts short runs with a pool of two; all are ended with the test."""
    runs = ShortRuns(tmp_path, "configs/scaling/ray_pool.yaml", SHORT)

    def start(folder: str, *arguments: str, iterations: int = 6) -> subprocess.Popen[str]:
        return runs.start(folder, *arguments, iterations=str(iterations))

    yield start
    runs.end()


def finished(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-3000:]
    return output


def collections(folder: Path) -> int:
    return len(list((folder / "episodes").glob("*.zst")))


def running(process: subprocess.Popen[str], folder: Path, count: int = 2) -> None:
    """Wait until a run has written some collections."""
    eventually(lambda: collections(folder) >= count or process.poll() is not None, 300)
    assert process.poll() is None, process.communicate()[0][-3000:]


def weights(folder: Path) -> bytes:
    return (folder / "policies/main/model.safetensors").read_bytes()


@pytest.mark.slow
def test_killed_workers_do_not_change_the_weights(fit: Any, tmp_path: Path) -> None:
    finished(fit("whole", iterations=10))
    process = fit("killed", iterations=10)
    for count in (2, 5):
        running(process, tmp_path / "killed", count)
        os.kill(workers_of(process.pid)[-1], signal.SIGKILL)
    assert "is replaced" in finished(process)
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
def test_a_killed_head_ends_the_run_with_the_remedy(part: str, fit: Any, tmp_path: Path) -> None:
    process = fit("run", iterations=500)
    running(process, tmp_path / "run")
    below = descendants(process.pid)
    killed = next(pid for pid, line in below.items() if line.split()[0].endswith(f"/{part}"))
    os.kill(killed, signal.SIGKILL)
    started = time.monotonic()
    output, _ = process.communicate(timeout=120)
    assert process.returncode not in (0, None)
    assert time.monotonic() - started < 60
    assert "Ray at " in output
    assert "--ckpt_path last" in output
    eventually(lambda: not any(alive(pid) for pid in below), 90)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_run_that_is_stopped(number: signal.Signals, fit: Any, tmp_path: Path) -> None:
    process = fit("run", iterations=500)
    running(process, tmp_path / "run")
    below = descendants(process.pid)
    assert len(workers_of(process.pid)) == 2
    process.send_signal(number)
    process.communicate(timeout=120)
    eventually(lambda: not any(alive(pid) for pid in below), 90)


@pytest.mark.slow
def test_sigterm_is_the_runs_while_ray_runs_and_after_it() -> None:
    pytest.importorskip("ray")
    program = """
import signal, time
from mrlm_pl.engines.ray.connection import RayConnection
signal.signal(signal.SIGTERM, lambda *_: print("in order", flush=True))
connection = RayConnection.shared(None, 120)
signal.raise_signal(signal.SIGTERM)
time.sleep(4)  # Ray's own handler ends the process after 3 s
connection.give_back()
signal.raise_signal(signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert (done.returncode, done.stdout) == (0, "in order\n" * 2), done.stderr


@pytest.mark.slow
def test_two_ranks_have_a_pool_each(fit: Any, tmp_path: Path) -> None:
    options = ("--data.engine.workers", "1", "--trainer.devices", "2")
    finished(fit("pool", *options, "--trainer.strategy", "ddp", iterations=3))
    finished(fit("plain", *options, "--trainer.strategy", "ddp", "--data.engine", IN_PROCESS, iterations=3))
    assert weights(tmp_path / "pool") == weights(tmp_path / "plain")


@pytest.mark.slow
def test_an_asynchronous_run_samples_in_the_pool(fit: Any, tmp_path: Path) -> None:
    output = finished(fit("run", "--data.mode", "async", "--data.max_lag", "2", iterations=8))
    assert "is replaced" not in output
    sampled = turns(tmp_path / "run")
    assert {turn.engine for turn in sampled} == {"ray_pool/0", "ray_pool/1"}
    assert {turn.version for turn in sampled} >= {0, 4}


def turns(folder: Path) -> list[Turn]:
    """Return all turns that a run has written."""
    episodes = read_episodes(folder / "episodes")
    return [turn for one in episodes for rows in one.trajectories.values() for row in rows for turn in row.turns]


def test_a_cluster_that_is_not_there_is_told() -> None:
    pytest.importorskip("ray")
    pool = RayPool(address="127.0.0.1:1", deadlines=PoolDeadlines(start=20))
    with pytest.raises(EngineError, match=r"Ray at 127.0.0.1:1 .*ray start --head"):
        pool.load("p", build("llama"), 1)
    pool.close()
