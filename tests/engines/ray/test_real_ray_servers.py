"""A pool under Ray itself whose workers sample from servers, which are in this process and have small models."""

from __future__ import annotations

import csv
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.engines import OpenAICompatible, RayPool
from mrlm_pl.policy import Policy
from tests.engines.conftest import build, request
from tests.engines.ray.test_real_ray import check_samples, turns
from tests.support.runs.short_runs import ROOT
from tests.support.servers.fake_servers import FakeVllm

pytestmark = pytest.mark.slow
CONTEXTS = [(5, 9, 2), (7,), (11, 3, 3, 20, 41), (4, 4)]


@pytest.fixture
def serve() -> Iterator[Callable[..., list[FakeVllm]]]:
    """Starts two servers in the mode in which weights are updated; they are stopped afterwards."""
    pytest.importorskip("ray")
    started: list[FakeVllm] = []

    def start(model: Any, window: int) -> list[FakeVllm]:
        for _ in range(2):
            started.append(FakeVllm(model, window=window))
            started[-1].development = started[-1].scaled = True
        return started

    yield start
    for server in started:
        server.stop()


def folders(server: FakeVllm) -> list[str]:
    """Return folders from which a server loaded weights, in order."""
    return [body["kwargs"]["weights_path"] for body in server.asked("/collective_rpc")]


def test_samples_are_those_of_the_process_also_after_a_worker_was_killed(serve: Any, tmp_path: Path) -> None:
    servers = serve(build("llama", seed=3), 64)
    urls = [server.url for server in servers]
    pool = RayPool(2, engine=partial(OpenAICompatible, url=urls, weights_folder=str(tmp_path)))
    asked = [request(context, temperature=0.0, max_tokens=8) for context in CONTEXTS]
    try:
        check_samples(pool, build("llama"), asked, within=1e-4)
    finally:
        pool.close()
    told = [[int(folder[-1]) for folder in folders(server)] for server in servers]
    assert sorted(told) == [[1, 2, 3], [1, 2, 3, 3]]


def test_a_run_hands_every_version_to_the_servers(serve: Any, tmp_path: Path) -> None:
    policy = Policy("builtin:tiny")
    policy.load()
    servers = serve(policy.network.eval(), 512)
    options = {
        "--config": "configs/quickstart.yaml",
        "--data.engine": "RayPool",
        "--data.engine.workers": "2",
        "--data.engine.engine": "OpenAICompatible",
        "--data.engine.engine.url": str([server.url for server in servers]),
        "--data.engine.engine.weights_folder": str(tmp_path / "weights"),
        "--data.groups": "4",
        "--data.group_size": "4",
        "--data.iterations": "3",
        "--data.sampling.max_tokens": "12",
        "--trainer.callbacks": "null",
        "--trainer.accelerator": "cpu",
        "--trainer.log_every_n_steps": "1",
        "--trainer.default_root_dir": str(tmp_path / "run"),
    }
    arguments = [word for pair in options.items() for word in pair]
    command = [sys.executable, "-m", "mrlm_pl.cli.main", "fit", *arguments]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert process.returncode == 0, process.stderr[-3000:]
    for place, server in enumerate(servers):
        wanted = [str(tmp_path / f"weights/worker-{place}/main/version-{version:08d}") for version in range(3)]
        assert folders(server) == wanted
    sampled = turns(tmp_path / "run")
    assert {turn.engine for turn in sampled} == {"ray_pool/0", "ray_pool/1"}
    assert {turn.version for turn in sampled} == {0, 1, 2}
    ratios = [
        float(value)
        for path in (tmp_path / "run").rglob("metrics.csv")
        for row in csv.DictReader(path.open())
        for name, value in row.items()
        if "mismatch_max_ratio" in name and value
    ]
    assert len(ratios) == 3
    assert max(ratios) < 1.001, "samples are of the weights that train on them"
