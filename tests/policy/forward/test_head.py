"""Chunked log-probabilities and entropies of the output head."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mrlm_pl.policy.forward import head as head_file
from mrlm_pl.policy.forward.head import chunked_log_probs, default_chunk_size, log_probs_from_logits
from tests.support.models.largest_tensor import LargestTensor


def head(n: int = 7, hidden: int = 5, V: int = 11, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(n, hidden, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(V, hidden, generator=generator, dtype=dtype, requires_grad=True)
    bias = torch.randn(V, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, V, (n,), generator=generator)
    temperature = torch.rand(n, generator=generator, dtype=dtype) + 0.5
    return states, weight, bias, targets, temperature


def test_log_probs_and_entropy_by_hand() -> None:
    # logits (0, ln 3) at temperature 1: p = (1/4, 3/4); at temperature 1/2 the logits double: p = (1/10, 9/10)
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3)]])
    log_probs, entropy = chunked_log_probs(
        hidden, weight, torch.tensor([1, 0]), temperature=torch.tensor([1.0, 0.5]), with_entropy=True
    )
    expected = [
        -(0.25 * math.log(0.25) + 0.75 * math.log(0.75)),
        -(0.1 * math.log(0.1) + 0.9 * math.log(0.9)),
    ]
    assert log_probs.tolist() == pytest.approx([math.log(0.75), math.log(0.1)], abs=1e-6)
    assert entropy is not None
    assert entropy.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("chunk_size", [1, 3, 100])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients_of_both_results(chunk_size: int, with_bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_file, "default_chunk_size", lambda *_: chunk_size)
    hidden, weight, bias, targets, temperature = head()

    def both(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        return chunked_log_probs(
            hidden,
            weight,
            targets,
            bias=bias if with_bias else None,
            temperature=temperature,
            with_entropy=True,
        )

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))


@pytest.mark.parametrize("output", [0, 1])
def test_gradient_of_one_result_alone(output: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_file, "default_chunk_size", lambda *_: 2)
    hidden, weight, bias, targets, _ = head()
    chosen = chunked_log_probs(hidden, weight, targets, bias=bias, with_entropy=True)[output]
    log_p = torch.log_softmax(hidden @ weight.t() + bias, -1)
    expected = (log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))[output]
    assert chosen is not None
    torch.testing.assert_close(chosen, expected)
    upstream = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    got = torch.autograd.grad((chosen * upstream).sum(), (hidden, weight, bias))
    want = torch.autograd.grad((expected * upstream).sum(), (hidden, weight, bias))
    torch.testing.assert_close(got, want)


def test_frozen_head_gets_no_gradient() -> None:
    hidden, weight, _, targets, _ = head()
    log_probs, _ = chunked_log_probs(hidden, weight.detach(), targets)
    log_probs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_without_gradients_the_values_are_the_same() -> None:
    hidden, weight, bias, targets, temperature = head()
    with torch.no_grad():
        log_probs, entropy = chunked_log_probs(hidden, weight, targets, bias=bias, temperature=temperature)
    expected, _ = log_probs_from_logits(hidden @ weight.t() + bias, targets, temperature=temperature)
    assert entropy is None
    assert not log_probs.requires_grad
    torch.testing.assert_close(log_probs, expected)


def test_no_tensor_is_larger_than_a_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    n, V, chunk = 64, 100, 8
    monkeypatch.setattr(head_file, "default_chunk_size", lambda *_: chunk)
    hidden, weight, _, targets, _ = head(n, 3, V, torch.float32)
    with LargestTensor() as seen:
        log_probs, entropy = chunked_log_probs(hidden, weight, targets, with_entropy=True)
        assert entropy is not None
        (log_probs.sum() + entropy.sum()).backward()
    assert seen.elements == chunk * V


def test_autocast_multiplies_in_bf16_and_normalizes_in_fp32() -> None:
    hidden, weight, _, targets, _ = head(64, 32, 50, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        log_probs, _ = chunked_log_probs(hidden, weight, targets)
    log_probs.sum().backward()
    exact, _ = log_probs_from_logits(hidden.bfloat16() @ weight.bfloat16().t(), targets)
    assert log_probs.dtype == torch.float32
    torch.testing.assert_close(log_probs, exact)
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    want = torch.autograd.grad(log_probs_from_logits(hidden @ weight.t(), targets)[0].sum(), weight)[0]
    assert (weight.grad - want).norm() < 0.02 * want.norm()


def test_chunk_size_keeps_the_logits_within_the_budget() -> None:
    assert default_chunk_size(2**14, torch.device("cpu")) * 2**14 == 2**24
    assert default_chunk_size(2**40, torch.device("cuda")) == 1


@pytest.mark.parametrize("with_entropy", [False, True])
def test_a_low_temperature_loses_no_digits(with_entropy: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(50, 16, generator=generator), torch.randn(104, 16, generator=generator)
    logits = hidden @ weight.t() / 0.01  # up to about 1,300, of which neighbors in float32 are 1e-4 apart
    exact = logits.double().log_softmax(-1)
    targets = exact.exp().multinomial(1, generator=generator)[:, 0]
    found = chunked_log_probs(hidden, weight, targets, temperature=torch.full((50,), 0.01), with_entropy=with_entropy)
    expected = [exact.gather(-1, targets[:, None])[:, 0], -(exact.exp() * exact).sum(-1)]
    for value, number in zip(found, expected[: 1 + with_entropy], strict=False):
        torch.testing.assert_close(value.double(), number, rtol=0.0, atol=1e-6)
