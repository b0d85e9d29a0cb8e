"""Runs of ``mrlm fit`` whose servers, workers and controllers come and go; what that costs is counted in episodes."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from mrlm_pl.serving.transport import environment_pb2 as pb
from mrlm_pl.serving.transport import environment_pb2_grpc
from tests.support.servers.environment_servers import eventually
from tests.support.servers.ports import free_port
from tests.support.servers.served_training import (
    GROUP_SIZE,
    GROUPS,
    HERE,
    collections,
    episodes,
    finished,
    fit,
    on,
    rewards,
    serve_controller,
    serve_math,
)

pytestmark = pytest.mark.slow
ITERATIONS = 30


@pytest.fixture
def runs() -> Iterator[list[subprocess.Popen[str]]]:
    """Runs that are ended with the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for run in started:
        if run.poll() is None:
            run.kill()
            run.communicate()


def begun(runs: Any, folder: Path, environment: str, iterations: int = ITERATIONS) -> subprocess.Popen[str]:
    """A run that has written a few collections."""
    runs.append(fit(folder, "--data.iterations", str(iterations), environment=environment))
    reached(runs[-1], folder, 4)
    return runs[-1]


def reached(run: subprocess.Popen[str], folder: Path, count: int) -> None:
    eventually(lambda: collections(folder) >= count or run.poll() is not None, 180)
    assert run.poll() is None, "it is over too early"


def cost(folder: Path, iterations: int = ITERATIONS) -> tuple[int, int]:
    """Return the numbers of failed and of retried episodes of a whole run."""
    found = episodes(folder)
    lost = sum(episode["error"] is not None for episode in found)
    again = sum(episode["attempts"] > 1 and episode["error"] is None for episode in found)
    print(f"{len(found)} episodes, {lost} lost, {again} played again")
    assert len(found) == iterations * GROUPS * GROUP_SIZE
    assert (folder / "policies/main/model.safetensors").is_file()
    return lost, again


def test_the_same_seed_gives_the_same_weights_here_and_there(tmp_path: Path, process: Any) -> None:
    server = serve_math(process)
    for folder, environment in (("here", HERE), ("there", on(server.target))):
        finished(fit(tmp_path / folder, "--data.iterations", "4", environment=environment))
    weights = [(tmp_path / name / "policies/main/model.safetensors").read_bytes() for name in ("here", "there")]
    assert weights[0] == weights[1]
    assert rewards(tmp_path / "here") == rewards(tmp_path / "there")


def test_servers_that_are_killed_and_started_again(tmp_path: Path, process: Any, runs: Any) -> None:
    server = serve_math(process)
    run = begun(runs, tmp_path / "run", on(server.target))
    for kills in range(3):
        reached(run, tmp_path / "run", 4 * (kills + 1))
        server.send(signal.SIGKILL)
        server.process.wait(100)
        time.sleep(1.0)
        server = serve_math(process, port=server.port)
    finished(run)
    lost, _ = cost(tmp_path / "run")
    assert lost <= 3 * GROUPS * GROUP_SIZE


def test_a_worker_that_is_killed_leaves_its_episodes_to_the_other(tmp_path: Path, process: Any, runs: Any) -> None:
    controller = serve_controller(process)
    workers = [serve_math(process, "--join", controller.target) for _ in range(2)]
    run = begun(runs, tmp_path / "run", on(controller.target))
    workers[0].send(signal.SIGKILL)
    finished(run)
    lost, again = cost(tmp_path / "run")
    assert lost == 0
    assert again <= GROUPS * GROUP_SIZE // 2 + 1, "at most those of one wave that the worker had"


def test_a_worker_is_swapped_for_another_behind_a_controller(tmp_path: Path, process: Any, runs: Any) -> None:
    controller = serve_controller(process)
    old = serve_math(process, "--join", controller.target)
    run = begun(runs, tmp_path / "run", on(controller.target))
    serve_math(process, "--join", controller.target)
    with grpc.insecure_channel(controller.target) as channel:
        stub = environment_pb2_grpc.ControllerServiceStub(channel)
        eventually(lambda: len(stub.ListWorkers(pb.ListWorkersRequest(), timeout=60).workers) == 2)
    old.send(signal.SIGTERM)
    assert old.process.wait(200) == 0
    reached(run, tmp_path / "run", collections(tmp_path / "run") + 2)
    finished(run)
    assert cost(tmp_path / "run") == (0, 0)


def test_a_server_is_swapped_for_another_address(tmp_path: Path, process: Any, runs: Any) -> None:
    port = free_port()
    old = serve_math(process)
    run = begun(runs, tmp_path / "run", on(old.target, f"127.0.0.1:{port}"))
    serve_math(process, port=port)
    old.send(signal.SIGTERM)
    assert old.process.wait(200) == 0
    reached(run, tmp_path / "run", collections(tmp_path / "run") + 2)
    finished(run)
    assert cost(tmp_path / "run") == (0, 0)


def test_a_controller_that_is_killed_and_started_again(tmp_path: Path, process: Any, runs: Any) -> None:
    controller = serve_controller(process)
    for _ in range(2):
        serve_math(process, "--join", controller.target)
    run = begun(runs, tmp_path / "run", on(controller.target))
    for kills in range(2):
        controller.send(signal.SIGKILL)
        controller.process.wait(100)
        time.sleep(1.0)
        controller = serve_controller(process, controller.port)
        reached(run, tmp_path / "run", 4 * (kills + 2))
    finished(run)
    assert cost(tmp_path / "run") == (0, 0)


def test_a_server_that_stands_still_for_a_while(tmp_path: Path, process: Any, runs: Any) -> None:
    server = serve_math(process)
    run = begun(runs, tmp_path / "run", on(server.target))
    server.send(signal.SIGSTOP)

    def waits() -> bool:  # once the steps that were running have ended
        still = collections(tmp_path / "run")
        time.sleep(5.0)
        return collections(tmp_path / "run") == still

    eventually(waits)
    assert run.poll() is None
    server.send(signal.SIGCONT)
    finished(run)
    assert cost(tmp_path / "run") == (0, 0)


def test_a_run_that_is_killed_frees_its_places_for_the_next(tmp_path: Path, process: Any, runs: Any) -> None:
    episodes_at_once = GROUPS * GROUP_SIZE
    server = serve_math(process, "--lease_seconds", "2", "--max_sessions", str(episodes_at_once))
    with grpc.insecure_channel(server.target) as channel:
        stub = environment_pb2_grpc.EnvironmentServiceStub(channel)

        def live() -> int:
            return stub.ListSessions(pb.ListSessionsRequest(), timeout=60).total

        run = begun(runs, tmp_path / "killed", on(server.target), 200)
        assert 0 < live() <= episodes_at_once
        run.kill()
        run.wait(100)
        eventually(lambda: live() == 0, 60)  # the lease, and half a second until it is noticed
    for folder, environment in (("next", on(server.target)), ("undisturbed", HERE)):
        finished(fit(tmp_path / folder, "--data.iterations", "4", environment=environment))
    assert cost(tmp_path / "next", 4) == (0, 0)
    weights = [(tmp_path / name / "policies/main/model.safetensors").read_bytes() for name in ("next", "undisturbed")]
    assert weights[0] == weights[1]
