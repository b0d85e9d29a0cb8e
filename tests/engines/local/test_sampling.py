"""The sampler against arithmetic, against transformers' logits processors and against a chi-square test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

from mrlm_pl.engines import Sampling
from mrlm_pl.engines.local import sampling as sampling_module
from mrlm_pl.engines.local.sampling import Sampler, draw, draw_shares, uniforms

VOCABULARIES = (7, 300, 5000)


def _splitmix64(seed: int, count: int) -> list[int]:
    """Return the reference generator in plain integers (Steele, Lea and Flood 2014)."""
    out = []
    for n in range(1, count + 1):
        z = (seed + n * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        out.append(z ^ (z >> 31))
    return out


def test_uniforms_are_splitmix64_started_at_the_mixed_seed() -> None:
    # The first output for seed 0 is published with the generator's reference code.
    assert _splitmix64(0, 1) == [0xE220A8397B1DCDAF]
    for seed in (0, 5, 2**63 - 1):
        start = _splitmix64(seed, 1)[0]
        expected = [(word >> 12) / 2**52 for word in _splitmix64(start, 4)]
        assert uniforms([seed], 4)[0].tolist() == expected


def test_uniforms_of_a_row_do_not_depend_on_other_rows_or_on_the_count() -> None:
    assert (uniforms([1, 2, 3], 9)[1, :4] == uniforms([2], 4)[0]).all()


def test_uniforms_are_uniform_within_and_across_seeds() -> None:
    for sample in (uniforms([11], 20_000)[0], uniforms(range(20_000), 1)[:, 0]):
        counts, _ = np.histogram(sample, bins=20, range=(0, 1))
        assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001


def _expected(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return log-probabilities ``[B, V]`` by transformers' own processors."""
    scores = logits / sampling.temperature
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.log_softmax(-1)


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(top_k=5),
        Sampling(top_p=0.8),
        Sampling(top_p=0.9999),
        Sampling(temperature=1.7, top_k=6, top_p=0.6),
    ],
    ids=str,
)
@pytest.mark.long_after(8)
def test_draws_follow_the_distribution_and_report_its_log_probabilities(vocabulary: int, sampling: Sampling) -> None:
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 2
    expected = _expected(logits, sampling)[0]
    draws = 8_000
    tokens = torch.empty(0, dtype=torch.long)
    logprobs = torch.empty(0)
    for uniform in torch.from_numpy(uniforms([3], draws)[0]).split(500):
        some = draw(logits.expand(500, -1), uniform, sampling)
        tokens, logprobs = torch.cat((tokens, some[0])), torch.cat((logprobs, some[1]))
    torch.testing.assert_close(logprobs, expected[tokens], atol=2e-6, rtol=0)
    mass = expected.exp() * draws
    counts = torch.bincount(tokens, minlength=vocabulary).float()
    assert (counts[expected.isinf()] == 0).all()
    large = mass >= 8
    observed = torch.cat((counts[large], counts[~large].sum()[None]))
    wanted = torch.cat((mass[large], mass[~large].sum()[None])).clamp(min=1e-9)
    keep = wanted > 1
    statistic = ((observed[keep] - wanted[keep]) ** 2 / wanted[keep]).sum().item()
    freedom = int(keep.sum()) - 1
    assert statistic < freedom + 3.3 * (2 * freedom) ** 0.5 + 8  # mean and spread of a chi-square variable


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_extreme_uniforms_pick_the_first_and_the_last_token_with_mass(vocabulary: int) -> None:
    logits = torch.full((2, vocabulary), -torch.inf)
    logits[:, 2:5] = 0.0
    ends = torch.tensor([0.0, 1 - 2.0**-52], dtype=torch.float64)
    for sampling in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.999)):
        tokens, logprobs = draw(logits, ends, sampling)
        assert set(tokens.tolist()) <= {2, 3, 4}
        assert tokens[0] != tokens[1]
        torch.testing.assert_close(logprobs.exp(), torch.full((2,), 1 / 3))


def test_one_kernel_for_the_softmax_draws_the_same_tokens() -> None:
    logits = 3 * torch.randn(64, 5000, generator=torch.Generator().manual_seed(0))
    uniform = torch.from_numpy(uniforms(range(64), 1)[:, 0])
    tokens, logprobs = draw(logits, uniform, Sampling())
    found = draw_shares(logits, uniform[:, None])
    assert torch.equal(found[0], tokens)
    torch.testing.assert_close(found[1], logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1], logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=0)


def test_temperature_zero_is_argmax_with_its_log_probability_at_temperature_one() -> None:
    logits = torch.tensor([[0.2, 0.5, 0.3]]).log()
    tokens, logprobs = draw(logits, torch.tensor([0.99], dtype=torch.float64), Sampling(temperature=0, top_p=0.1))
    assert tokens.tolist() == [1]
    assert logprobs.exp().item() == pytest.approx(0.5)


def test_top_p_keeps_the_token_that_crosses_the_threshold() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(200, -1)
    uniform = torch.from_numpy(uniforms([0], 200)[0])
    assert set(draw(logits, uniform, Sampling(top_p=0.45))[0].tolist()) == {0}
    assert set(draw(logits, uniform, Sampling(top_p=0.6))[0].tolist()) == {0, 1}
    assert set(draw(logits, uniform, Sampling(top_p=0.81))[0].tolist()) == {0, 1, 2}


def test_top_k_alone_keeps_a_token_whose_mass_is_below_single_precision() -> None:
    logits = torch.tensor([[0.0, -20.0, -30.0]])  # exp(-20) = 2e-9: the first token's share rounds to 1
    tokens, logprobs = draw(logits, torch.tensor([1 - 2.0**-52], dtype=torch.float64), Sampling(top_k=2))
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(-20, abs=1e-4)


def test_feature_major_logits_give_the_same_draws() -> None:
    logits = torch.randn(6, 5000, generator=torch.Generator().manual_seed(0))
    uniform = torch.from_numpy(uniforms([4], 6)[0])
    for sampling in (Sampling(), Sampling(top_k=9), Sampling(top_p=0.7)):
        for size in (500, 5000):
            plain = draw(logits[:, :size].contiguous(), uniform, sampling)
            strided = draw(logits[:, :size].t().contiguous().t(), uniform, sampling)
            assert torch.equal(plain[0], strided[0])
            torch.testing.assert_close(plain[1], strided[1])


def test_rows_with_different_settings_are_drawn_as_if_alone_also_after_rows_left() -> None:
    settings = [Sampling(), Sampling(temperature=0), Sampling(top_k=2), Sampling(), Sampling(top_p=0.4)]
    seeds = [9, 8, 7, 6, 5]
    logits = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(0))
    cpu = torch.device("cpu")
    sampler = Sampler(seeds, settings, 2, cpu)
    first, _ = sampler.draw(logits[0], 0)
    sampler.keep([0, 2, 4])
    second, logprobs = sampler.draw(logits[1, [0, 2, 4]], 1)
    for b in range(5):
        alone = Sampler([seeds[b]], [settings[b]], 2, cpu)
        assert alone.draw(logits[0, b : b + 1], 0)[0].item() == first[b]
        if b in (0, 2, 4):
            token, logprob = alone.draw(logits[1, b : b + 1], 1)
            assert token.item() == second[b // 2]
            assert logprob.item() == pytest.approx(logprobs[b // 2].item(), abs=1e-6)


def test_rows_with_other_limits_are_drawn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def noted(logits: torch.Tensor, *options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        sizes.append(len(logits))
        return draw(logits, *options)

    monkeypatch.setattr(sampling_module, "draw", noted)
    settings = [Sampling(max_tokens=5), Sampling(max_tokens=6, max_context=9), Sampling(top_k=2), Sampling()]
    sampler = Sampler([1, 2, 3, 4], settings, 2, torch.device("cpu"))
    sampler.draw(torch.zeros(4, 8), 0)
    sampler.keep([0, 1, 3])
    sampler.draw(torch.zeros(3, 8), 1)
    assert sizes == [3, 1, 3]


def test_no_global_generator_is_touched() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    draw(torch.randn(3, 9, generator=torch.Generator()), torch.from_numpy(uniforms([1], 3)[0]), Sampling(top_p=0.9))
    assert torch.equal(before[0], torch.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


def test_a_device_without_float64_draws_on_the_host() -> None:
    host = Sampler([3, 4], [Sampling()] * 2, 5, torch.device("cpu"))
    apple = Sampler([3, 4], [Sampling()] * 2, 5, torch.device("mps"))  # its float64 tensors raise an error
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    assert [part.tolist() for part in apple.draw(logits, 2)] == [part.tolist() for part in host.draw(logits, 2)]
