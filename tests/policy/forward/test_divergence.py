"""Chunked divergences against autograd through the whole logits."""

import itertools

import pytest
import torch
from torch import Tensor

from mrlm_pl.policy.forward.divergence import weighted_divergence


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = {"hidden": (7, 5), "weight": (11, 5), "bias": (11,)}
    shapes |= {"teacher_hidden": (7, 8), "teacher_weight": (11, 8), "teacher_bias": (11,)}
    made = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
    for name in ("hidden", "weight", "bias"):
        made[name].requires_grad_()
    return made | {"token_weights": torch.tensor([0.5, 0.0, 1.0, 2.0, 1.0, 0.25, 3.0], dtype=dtype)}


def plain(given: dict[str, Tensor], beta: float, temperature: float) -> tuple[Tensor, Tensor]:
    """The definition, term by term, with all the logits at once."""
    q = ((given["hidden"] @ given["weight"].T + given["bias"]) / temperature).softmax(-1)
    p = ((given["teacher_hidden"] @ given["teacher_weight"].T + given["teacher_bias"]) / temperature).softmax(-1)
    if beta in (0.0, 1.0):
        of, other = (p, q) if beta == 0.0 else (q, p)
        divergences = (of * (of / other).log()).sum(-1)
    else:
        m = beta * p + (1 - beta) * q
        divergences = beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)
    return (divergences * given["token_weights"]).sum(), divergences


@pytest.mark.parametrize(
    ("beta", "temperature", "chunk_size"), itertools.product([0.0, 0.3, 0.5, 1.0], [1.0, 1.7], [None, 3, 100])
)
def test_value_and_gradient_are_those_of_the_whole_logits(
    beta: float, temperature: float, chunk_size: int | None
) -> None:
    given, names = inputs(), ["hidden", "weight", "bias"]
    want, divergences = plain(given, beta, temperature)
    expected = torch.autograd.grad(want * 1.5, [given[name] for name in names])
    loss, found = weighted_divergence(**given, beta=beta, temperature=temperature, chunk_size=chunk_size)
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(found, divergences)
    for one, other in zip(torch.autograd.grad(loss * 1.5, [given[name] for name in names]), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_head_without_a_gradient_has_none() -> None:
    given = inputs()
    given["weight"].requires_grad_(False)
    loss, _ = weighted_divergence(**given)
    loss.backward()
    assert given["weight"].grad is None
    assert given["hidden"].grad is not None


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_like_its_teacher_has_no_divergence_and_no_gradient(beta: float) -> None:
    given = inputs()
    given |= {f"teacher_{name}": given[name].detach() for name in ("hidden", "weight", "bias")}
    loss, divergences = weighted_divergence(**given, beta=beta)
    assert divergences.abs().max() < 1e-12
    loss.backward()
    assert given["hidden"].grad is not None
    assert given["hidden"].grad.abs().max() < 1e-12


def test_bf16_products_have_a_wide_softmax() -> None:
    given = inputs(torch.float32)
    want, _ = plain(given, 0.5, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss, divergences = weighted_divergence(**given)
    assert divergences.dtype == torch.float32
    assert loss.item() == pytest.approx(want.item(), rel=0.05)
    loss.backward()
    assert given["hidden"].grad is not None
    assert given["hidden"].grad.dtype == torch.float32


def test_other_vocabularies_and_weights_are_errors() -> None:
    given = inputs()
    with pytest.raises(ValueError, match="vocabularies differ: 11 and 10"):
        weighted_divergence(**(given | {"teacher_weight": given["teacher_weight"][:10]}))
    with pytest.raises(ValueError, match=r"beta is 1\.5"):
        weighted_divergence(**given, beta=1.5)
