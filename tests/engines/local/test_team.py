"""Policies of one architecture in one batch of the in-process engine."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from mrlm_pl.engines import InProcessEngine
from mrlm_pl.engines.local.llama import Decoder
from tests.engines.conftest import FUSED, VOCABULARY, build, request, run
from tests.engines.local.test_engine import forward_logprobs

MakeEngine = Callable[..., InProcessEngine]


def team(make_engine: MakeEngine, name: str, **changes: int) -> tuple[dict[str, PreTrainedModel], InProcessEngine]:
    """Return three models of one architecture, and an engine that holds them."""
    models = {policy: build(name, seed) for seed, policy in enumerate("pqr")}
    engine = make_engine(models["p"], **changes)
    engine.load("q", models["q"], 5)
    engine.load("r", models["r"], 9)
    return models, engine


def context(length: int, seed: int) -> list[int]:
    return [random.Random(seed).randrange(1, VOCABULARY) for _ in range(length)]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of rows of every decode step."""
    found: list[int] = []
    hidden = Decoder.hidden

    def counted(self: Decoder, ids: torch.Tensor, *arguments: torch.Tensor) -> torch.Tensor:
        if ids.dim() == 1:
            found.append(len(ids))
        return hidden(self, ids, *arguments)

    monkeypatch.setattr(Decoder, "hidden", counted)
    return found


@pytest.mark.parametrize("name", FUSED)
def test_each_policy_has_its_own_log_probabilities_while_rows_and_policies_leave(
    name: str, make_engine: MakeEngine, steps: list[int]
) -> None:
    models, engine = team(make_engine, name)
    shared = context(9, 1)
    requests = [
        request(row, seed, policy=policy, max_tokens=limit)
        for seed, (policy, row, limit) in enumerate(
            [
                ("q", shared, 12),
                ("p", shared, 7),
                ("q", context(4, 2), 3),
                ("r", context(17, 3), 2),
                ("p", shared, 10),
                ("r", shared, 2),
                ("q", shared, 9),
            ]
        )
    ]
    samples = run(engine, *requests)
    assert [sample.version for sample in samples] == [5, 1, 5, 9, 1, 9, 5]
    for one, sample in zip(requests, samples, strict=True):
        assert len(sample.token_ids) == one.sampling.max_tokens
        expected = forward_logprobs(models[one.policy], one.token_ids, sample.token_ids)
        assert sample.logprobs == pytest.approx(expected, abs=1e-5)
    # The first token needs no step: 7 rows in the next, then the two of r have ended, then one of q, ...
    assert steps == [7, 5, 4, 4, 4, 4, 3, 3, 2, 1, 1]


def test_the_tokens_are_those_of_each_policy_alone(make_engine: MakeEngine) -> None:
    _, engine = team(make_engine, "qwen3")
    requests = [
        request(context(5 + seed % 3, seed), seed, policy="pqr"[seed % 3], max_tokens=4 + seed, stop_ids=(seed,))
        for seed in range(9)
    ]
    together = run(engine, *requests)
    for one, sample in zip(requests, together, strict=True):
        (alone,) = run(engine, one)
        assert (sample.token_ids, sample.finish_reason) == (alone.token_ids, alone.finish_reason)


def test_new_weights_of_one_policy_take_effect(make_engine: MakeEngine) -> None:
    models, engine = team(make_engine, "llama")
    row = context(6, 0)
    before = run(engine, *[request(row, 3, policy=policy, max_tokens=5) for policy in "pq"])
    with torch.no_grad():
        for parameter in models["q"].parameters():
            parameter.mul_(0.5)
    engine.load("q", models["q"], 6)
    after = run(engine, *[request(row, 3, policy=policy, max_tokens=5) for policy in "pq"])
    assert after[0] == before[0]
    assert after[1].logprobs == pytest.approx(forward_logprobs(models["q"], row, after[1].token_ids), abs=1e-5)
    assert after[1].version == 6


def test_a_turn_continues_the_session_of_its_own_policy(make_engine: MakeEngine) -> None:
    models, engine = team(make_engine, "qwen2")
    row = context(8, 0)
    first = run(engine, *[request(row, 1, policy=policy, max_tokens=4, session="e/a") for policy in "pq"])
    longer = {policy: [*row, *sample.token_ids, 7, 8] for policy, sample in zip("pq", first, strict=True)}
    second = run(engine, *[request(longer[policy], 2, policy=policy, max_tokens=4, session="e/a") for policy in "pq"])
    assert engine.stats.cached_tokens == 2 * (8 + 3)  # the last sampled token was never fed
    for policy, sample in zip("pq", second, strict=True):
        expected = forward_logprobs(models[policy], longer[policy], sample.token_ids)
        assert sample.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 1}, {"rms_norm_eps": 1e-3}, {"vocab_size": 50}])
def test_policies_of_other_architectures_have_steps_of_their_own(
    changes: dict[str, float], make_engine: MakeEngine, steps: list[int]
) -> None:
    models = {"p": build("llama"), "q": build("llama", 1, **changes)}
    engine = make_engine(models["p"])
    engine.load("q", models["q"], 1)
    row = context(6, 0)
    samples = run(engine, *[request(row, 3, policy=policy, max_tokens=3) for policy in "pq"])
    assert steps == [1, 1, 1, 1]
    for policy, sample in zip("pq", samples, strict=True):
        assert sample.logprobs == pytest.approx(forward_logprobs(models[policy], row, sample.token_ids), abs=1e-5)
