"""Tiny random models and helpers for the engine tests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mrlm_pl.engines import InProcessEngine, Sample, SampleRequest, Sampling
from mrlm_pl.engines.local.generation import EngineStats, Generated, SessionCache, generate
from mrlm_pl.engines.local.llama import FusedDecoder
from mrlm_pl.episode import Message
from mrlm_pl.policy import Policy
from mrlm_pl.policy.chat import Conversation

VOCABULARY = 48
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "llama-bias": {
        **COMMON,
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "llama3-rope": {
        **COMMON,
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "yarn-rope": {
        **COMMON,
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 500.0,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "qwen2": COMMON,
    "qwen3": {**COMMON, "head_dim": 16},
    "mistral": {**COMMON, "sliding_window": None},
    "mistral-sliding": {**COMMON, "model_type": "mistral", "sliding_window": 8},
    "dynamic-rope": {
        **COMMON,
        "model_type": "llama",
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0},
    },
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    },
    "mamba": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 4,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": 0,
    },
}
FUSED = ("llama", "llama-bias", "llama3-rope", "yarn-rope", "qwen2", "qwen3", "mistral")
GENERIC = ("gpt2", "mistral-sliding", "dynamic-rope", "mamba")


def build(name: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Return a random model with every parameter, norms and biases too, away from its trivial initial value."""
    settings = {**CONFIGS[name], **changes}
    config = AutoConfig.for_model(settings.pop("model_type", name), **settings)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)
    return model


def run(engine: InProcessEngine, *requests: SampleRequest) -> list[Sample]:
    """Return the engine's samples for the requests."""
    return asyncio.run(engine.sample(requests))


def request(token_ids: Sequence[int], seed: int = 0, **changes: Any) -> SampleRequest:
    """Return a request for policy ``p``; settings of :class:`Sampling` and of the request by name."""
    sampling = {name: changes.pop(name) for name in ("temperature", "top_p", "top_k", "max_tokens") if name in changes}
    return SampleRequest(tuple(token_ids), changes.pop("policy", "p"), seed, Sampling(**sampling), **changes)


def sums(policy: Policy, sampling: Sampling, count: int) -> list[SampleRequest]:
    """Return turns of policy ``main``, each a question for a sum in the policy's chat format."""
    found = []
    for number in range(count):
        conversation = Conversation(policy.chat)
        conversation.observe([Message("user", f"What is {number * 7 % 90}+{number * 5 % 80}?")])
        ids = tuple(conversation.row.token_ids)
        found.append(SampleRequest(ids, "main", number, sampling, policy.chat.stop_ids))
    return found


def generated(
    backend: FusedDecoder, requests: Sequence[SampleRequest], sessions: SessionCache | None = None
) -> list[Generated]:
    """Return the replies of a decoder to the requests; without ``sessions`` it keeps no caches."""
    limits = [one.sampling.max_tokens for one in requests]
    cache = SessionCache(0) if sessions is None else sessions
    with torch.inference_mode():
        return generate(backend, requests, limits, cache, EngineStats(), threading.Event())


@pytest.fixture
def make_engine() -> Iterator[Callable[..., InProcessEngine]]:
    """A function that makes an engine with a model loaded as policy ``p``; all are closed afterwards."""
    engines: list[InProcessEngine] = []

    def make(model: PreTrainedModel, version: int = 1, **settings: Any) -> InProcessEngine:
        engine = InProcessEngine(**settings)
        engines.append(engine)
        engine.load("p", model, version)
        return engine

    yield make
    for engine in engines:
        engine.close()
