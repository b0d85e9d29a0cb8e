"""The engine against the real ``transformers serve`` with the built-in tiny model."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mrlm_pl.cli.main import main
from mrlm_pl.engines import InProcessEngine, OpenAICompatible, Sampling
from mrlm_pl.engines.http.replicas import Terms
from mrlm_pl.policy import Policy
from tests.engines.conftest import sums
from tests.support.servers.foreign_servers import http_server
from tests.support.servers.ports import free_port

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("MRLM_SERVE_PYTHON", sys.executable)
"""An interpreter with ``transformers[serving]``; its packages are large and no part of this one's extras."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    found = subprocess.run([PYTHON, "-c", "import fastapi, openai, pydantic, uvicorn"], capture_output=True, text=True)
    if found.returncode:
        missing = found.stderr.strip().splitlines()[-1]
        pytest.skip(f"{missing}: pip install 'transformers[serving]', or name an interpreter in MRLM_SERVE_PYTHON")
    port = free_port()
    command = [PYTHON, "-m", "transformers.cli.transformers", "serve", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with http_server([*command, "--device", "cpu"], port, 180, env=environment) as url:
        yield url


def tiny(trained: bool) -> Policy:
    policy = Policy("builtin:tiny", trained=trained)
    policy.load()
    policy.model.eval()
    return policy


def test_greedy_tokens_are_those_of_the_in_process_engine(url: str) -> None:
    policy = tiny(trained=False)
    asked = sums(policy, Sampling(temperature=0.0, max_tokens=24), 36)
    own, served = InProcessEngine(), OpenAICompatible(url, "transformers", tokenizer="builtin:tiny")
    own.load("main", policy.network, 0)
    served.load("main", policy.network, 0)
    expected, found = asyncio.run(own.sample(asked)), asyncio.run(served.sample(asked))
    assert [sample.token_ids for sample in found] == [sample.token_ids for sample in expected]
    assert [sample.finish_reason for sample in found] == [sample.finish_reason for sample in expected]
    own.close()
    served.close()


def test_one_request_at_a_time_is_reproducible(url: str) -> None:
    policy = tiny(trained=False)
    asked = sums(policy, Sampling(max_tokens=12), 36)
    served = OpenAICompatible(url, "transformers", tokenizer="builtin:tiny", terms=Terms(concurrency=1))
    first, second = asyncio.run(served.sample(asked)), asyncio.run(served.sample(asked))
    assert first == second
    assert len({sample.token_ids for sample in first}) > 3
    served.close()


def test_trained_weights_are_what_the_server_generates_with(url: str, tmp_path: Path) -> None:
    policy = tiny(trained=True)
    served = OpenAICompatible(url, "transformers", tokenizer="builtin:tiny", weights_folder=str(tmp_path))
    own = InProcessEngine()
    asked = sums(policy, Sampling(temperature=0.0, max_tokens=12), 36)
    replies = []
    for version in (0, 1):
        with torch.no_grad():
            policy.network.lm_head.weight[policy.chat.encode("7")[0]] *= 1 + 2 * version
        own.load("main", policy.network, version)
        served.load("main", policy.network, version)
        expected, found = asyncio.run(own.sample(asked)), asyncio.run(served.sample(asked))
        # Hidden special tokens are not part of the text.
        assert [policy.chat.decode(one.token_ids) for one in found] == [
            policy.chat.decode(one.token_ids) for one in expected
        ]
        assert {sample.version for sample in found} == {version}
        replies.append([sample.token_ids for sample in found])
    assert replies[0] != replies[1]
    own.close()
    served.close()


def test_training_refuses_it_and_evaluation_hands_it_the_weights(
    url: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {
        "--config": str(ROOT / "configs/quickstart.yaml"),
        "--data.engine": "OpenAICompatible",
        "--data.engine.url": url,
        "--data.engine.dialect": "transformers",
        "--data.engine.tokenizer": "builtin:tiny",
        "--data.engine.weights_folder": str(tmp_path / "weights"),
        "--data.validation_episodes": "8",
        "--trainer.callbacks": "[]",
        "--trainer.default_root_dir": str(tmp_path / "run"),
    }
    arguments = [word for pair in options.items() for word in pair]
    assert main(["fit", *arguments]) == 2
    assert "returns no token ids and log-probabilities of its samples; use `dialect: vllm`" in capfd.readouterr().err
    assert main(["validate", *arguments]) == 0
    assert (tmp_path / "weights/main/version-00000000/model.safetensors").is_file()


def test_a_partner_by_url(url: str, tmp_path: Path) -> None:
    arguments = [
        *("fit", "--config", str(ROOT / "configs/scaling/coordination_served.yaml")),
        *("--model.policies.partner.served_by", f"transformers+{url}"),
        *("--data.groups", "2", "--data.group_size", "2", "--data.iterations", "1"),
        *("--trainer.default_root_dir", str(tmp_path / "run")),
    ]
    assert main(arguments) == 0
