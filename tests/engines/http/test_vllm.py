"""The engine against a real vLLM server on the CPU (``make vllm``)."""

from __future__ import annotations

import asyncio
import csv
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mrlm_pl.cli.main import main
from mrlm_pl.engines import InProcessEngine, OpenAICompatible, SampleRequest, Sampling
from mrlm_pl.policy import Policy
from tests.engines.conftest import sums
from tests.support.servers.environment_servers import eventually
from tests.support.servers.foreign_servers import VLLM, vllm_server
from tests.support.servers.ports import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (VLLM / "vllm").exists(), reason="vLLM is not installed; run `make vllm`"),
]
ROOT = Path(__file__).parents[3]
SMALL = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "16")
Saved = Callable[..., Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Return a function that saves a random Llama; on a CPU vLLM needs heads of at least 32 features."""

    def save(**changes: Any) -> Path:
        tiny = Policy("builtin:tiny")
        tiny.load()
        tokenizer, folder = tiny.chat.tokenizer, tmp_path_factory.mktemp("model")
        tokenizer.save_pretrained(folder)
        shape = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
        tokens = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
        options = shape | tokens | {"num_key_value_heads": 2, "max_position_embeddings": 256} | changes
        torch.manual_seed(0)
        # A wide spread makes the model's preferences clear, so that greedy tokens do not hang on rounding.
        config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.2, **options)
        LlamaForCausalLM(config).save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="module")
def folder(saved: Saved) -> Path:
    return saved(tie_word_embeddings=False)


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with vllm_server(folder, *SMALL) as url:
        yield url


def loaded(folder: Path, trained: bool = True) -> Policy:
    policy = Policy(str(folder), trained=trained)
    policy.load()
    policy.model.eval()
    return policy


def test_greedy_tokens_and_log_probabilities_are_those_of_the_in_process_engine(folder: Path, url: str) -> None:
    policy = loaded(folder, trained=False)
    own, served = InProcessEngine(), OpenAICompatible(url)
    for engine in (own, served):
        engine.load("main", policy.network, 0)
    asked = sums(policy, Sampling(temperature=0.0, max_tokens=24), 24)
    expected, found = asyncio.run(own.sample(asked)), asyncio.run(served.sample(asked))
    assert [sample.token_ids for sample in found] == [sample.token_ids for sample in expected]
    assert [sample.finish_reason for sample in found] == [sample.finish_reason for sample in expected]
    assert {sample.finish_reason for sample in found} == {"stop", "length"}
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    own.close()
    served.close()


def test_sampled_tokens_have_the_log_probability_of_their_temperature(folder: Path, url: str) -> None:
    policy, served = loaded(folder, trained=False), OpenAICompatible(url)
    asked = sums(policy, Sampling(temperature=0.7, max_tokens=12), 24)
    first, second = asyncio.run(served.sample(asked)), asyncio.run(served.sample(asked))
    assert first == second, "seeds decide"
    assert len({sample.token_ids for sample in first}) > 12
    for request, sample in zip(asked, first, strict=True):
        with torch.no_grad():
            logits = policy.network(torch.tensor([[*request.token_ids, *sample.token_ids]])).logits
        rows = (logits[0, len(request.token_ids) - 1 : -1] / 0.7).log_softmax(-1)
        expected = rows.gather(-1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        assert sample.logprobs == pytest.approx(expected.tolist(), abs=1e-4)
    served.close()


def test_a_turn_ends_at_the_window(folder: Path, url: str) -> None:
    served = OpenAICompatible(url)
    request = SampleRequest(tuple(range(3, 103)) * 2 + (5,) * 50, "main", 0, Sampling(max_tokens=32), (2,))
    [sample] = asyncio.run(served.sample([request]))
    assert (len(sample.token_ids), sample.finish_reason) == (6, "length")
    assert served.window("main") == 256
    served.close()


def test_trained_weights_are_what_the_server_samples_with(folder: Path, url: str, tmp_path: Path) -> None:
    policy = loaded(folder)
    own, served = InProcessEngine(), OpenAICompatible(url, weights_folder=str(tmp_path))
    asked, replies = sums(policy, Sampling(temperature=0.0, max_tokens=12), 24), []
    for version in range(3):
        with torch.no_grad():
            for parameter in policy.network.parameters():
                parameter += 0.03 * version * torch.randn_like(parameter)
        for engine in (own, served):
            engine.load("main", policy.network, version)
        expected, found = asyncio.run(own.sample(asked)), asyncio.run(served.sample(asked))
        assert [sample.token_ids for sample in found] == [sample.token_ids for sample in expected]
        assert {sample.version for sample in found} == {version}
        replies.append([sample.token_ids for sample in found])
    assert replies[0] != replies[1] != replies[2]
    own.close()
    served.close()


def words(output: Path, config: str, **options: Any) -> list[str]:
    short = {"data.groups": 4, "data.group_size": 4, "data.iterations": 6, "data.sampling.max_tokens": 24}
    given = {"config": ROOT / "configs" / config, **short, **options, "output": output}
    return ["fit", *(word for name, value in given.items() for word in (f"--{name}", str(value)))]


def fit(output: Path, config: str, **options: Any) -> int:
    return main(words(output, config, **options))


def served(folder: Path, url: str, output: Path) -> int:
    policy = {"model.policies.main.model": folder, "model.policies.main.learning_rate": 1e-3}
    engine = {"data.engine.url": url, "data.engine.weights_folder": output.parent / "weights"}
    return fit(output, "scaling/served_rollouts.yaml", **policy, **engine)


def largest_ratios(run: Path, policy: str = "") -> list[float]:
    """Return the largest importance ratio of the learner to the sampler in each update."""
    name, rows = f"train/{policy}mismatch_max_ratio", csv.DictReader((run / "metrics.csv").open())
    return [float(row[name]) for row in rows if row[name]]


def test_a_run_learns_from_its_samples_with_importance_ratios_of_1(folder: Path, url: str, tmp_path: Path) -> None:
    assert served(folder, url, tmp_path / "run") == 0
    assert largest_ratios(tmp_path / "run") == pytest.approx([1.0] * 6, abs=1e-3)


def test_a_server_that_is_killed_and_started_again_gets_the_current_weights(folder: Path, tmp_path: Path) -> None:
    port, policy = free_port(), loaded(folder)
    own, served = InProcessEngine(), OpenAICompatible(f"http://127.0.0.1:{port}", weights_folder=str(tmp_path))
    sampling = Sampling(temperature=0.0, max_tokens=128)
    asked = [replace(request, stop_ids=()) for request in sums(policy, sampling, 16)]
    with torch.no_grad():
        for parameter in policy.network.parameters():
            parameter += 0.03 * torch.randn_like(parameter)
    with ThreadPoolExecutor() as pool:
        with vllm_server(folder, *SMALL, port=port):
            for engine in (own, served):
                engine.load("main", policy.network, 1)
            found = pool.submit(lambda: asyncio.run(served.sample(asked)))
            eventually(lambda: served._under_way, 100)
        assert not found.done(), "killed while it samples"
        with vllm_server(folder, *SMALL, port=port):
            replies = [found.result(300)]
        with vllm_server(folder, *SMALL, port=port):  # it was idle when it was killed
            replies.append(asyncio.run(served.sample(asked)))
    expected = [sample.token_ids for sample in asyncio.run(own.sample(asked))]
    assert [[sample.token_ids for sample in samples] for samples in replies] == [expected, expected]
    own.close()
    served.close()


def test_each_policy_of_a_team_takes_a_server(folder: Path, url: str, tmp_path: Path) -> None:
    with vllm_server(folder, *SMALL) as other:
        policies = {name: {"model": str(folder), "learning_rate": 1e-3} for name in ("first", "second")}
        own, others = (
            {"class_path": "OpenAICompatible", "init_args": {"url": one, "weights_folder": str(tmp_path / "weights")}}
            for one in (url, other)
        )
        engines = {"data.engine.default": json.dumps(own), "data.engine.elsewhere": json.dumps({"second": others})}
        options = {"model.policies": json.dumps(policies), "data.engine": "RoutingEngine", **engines}
        validation = {"trainer.limit_val_batches": 0}
        assert fit(tmp_path / "run", "tasks/games/coordination.yaml", **options, **validation) == 0
    for policy in policies:
        assert largest_ratios(tmp_path / "run", f"{policy}/") == pytest.approx([1.0] * 6, abs=1e-3)


def test_the_head_that_vllm_keeps_on_a_cpu_is_noticed(
    saved: Saved, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM 0.32 packs a head for the CPU once; a model with tied embeddings keeps that one at an update."""
    folder = saved(tie_word_embeddings=True)
    policy = loaded(folder)
    with vllm_server(folder, *SMALL) as url:
        served = OpenAICompatible(url, weights_folder=str(tmp_path / "weights"))
        for version in range(4):
            with torch.no_grad():
                policy.network.lm_head.weight += 0.05 * (version == 1) * torch.randn_like(policy.network.lm_head.weight)
            served.load("main", policy.network, version)
        served.close()
    assert "seems to keep some old ones" in caplog.text
