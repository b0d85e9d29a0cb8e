"""Chunked divergences against autograd through the whole logits."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mrlm_pl.losses import ppo_clip_loss
from mrlm_pl.policy.forward import divergence
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
    ("beta", "temperature", "chunk_size"), [*itertools.product([0.0, 0.3, 0.5, 1.0], [1.0, 1.7], [3, 100])]
)
def test_value_and_gradient_are_those_of_the_whole_logits(
    beta: float, temperature: float, chunk_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_chunks_of(chunk_size, monkeypatch)
    given, names = inputs(), ["hidden", "weight", "bias"]
    want, divergences = plain(given, beta, temperature)
    expected = torch.autograd.grad(want * 1.5, [given[name] for name in names])
    loss, found, _ = weighted_divergence(**given, beta=beta, temperature=torch.full((7,), temperature))
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close(found, divergences)
    for one, other in zip(torch.autograd.grad(loss * 1.5, [given[name] for name in names]), expected, strict=True):
        torch.testing.assert_close(one, other)


def in_chunks_of(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "default_chunk_size", lambda *_: 2 * tokens)  # of two models


def heads(given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The log-probabilities of teacher and student from the whole logits."""
    teacher = given["teacher_hidden"] @ given["teacher_weight"].T + given["teacher_bias"]
    return teacher.log_softmax(-1), (given["hidden"] @ given["weight"].T + given["bias"]).log_softmax(-1)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_the_two_ends_are_torchs_divergences(beta: float) -> None:
    given = inputs()
    log_p, log_q = heads(given)
    target, own = (log_p, log_q) if beta == 0.0 else (log_q, log_p)
    want = F.kl_div(own, target, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(weighted_divergence(**given, beta=beta)[1], want.detach())


@pytest.mark.parametrize(("beta", "top_k"), [*itertools.product([0.0, 0.4, 1.0], [1, 4, 10, 11, 50])])
def test_the_k_most_probable_tokens_and_a_bucket(beta: float, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks_of(3, monkeypatch)
    given, names = inputs(), ["hidden", "weight", "bias"]
    log_p, log_q = heads(given)
    if top_k < 10:  # with 10 of 11 tokens the bucket is the last token
        order = log_p.argsort(-1, descending=True)
        log_p, log_q = (
            torch.cat([table.gather(-1, order[:, :top_k]), table.gather(-1, order[:, top_k:]).logsumexp(-1, True)], -1)
            for table in (log_p, log_q)
        )
    mixed = torch.log(beta * log_p.exp() + (1 - beta) * log_q.exp())
    if beta in (0.0, 1.0):
        mixed = log_q if beta == 0.0 else log_p
    toward = [F.kl_div(mixed, of, log_target=True, reduction="none").sum(-1) for of in (log_p, log_q)]
    want = toward[0] if beta == 0.0 else toward[1] if beta == 1.0 else beta * toward[0] + (1 - beta) * toward[1]
    expected = torch.autograd.grad((want * given["token_weights"]).sum(), [given[name] for name in names])
    loss, found, _ = weighted_divergence(**given, beta=beta, top_k=top_k)
    torch.testing.assert_close(found, want.detach())
    for one, other in zip(torch.autograd.grad(loss, [given[name] for name in names]), expected, strict=True):
        torch.testing.assert_close(one, other)


def test_each_token_may_have_a_temperature_and_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    in_chunks_of(3, monkeypatch)
    given, targets = inputs(), torch.arange(7)
    scaled = [weighted_divergence(**given, beta=0.3, temperature=torch.full((7,), t))[1] for t in (0.5, 2.0)]
    temperature = torch.tensor([0.5, 2.0] * 3 + [0.5])
    _, found, logp = weighted_divergence(**given, beta=0.3, temperature=temperature)
    torch.testing.assert_close(found, torch.where(temperature == 0.5, *scaled))
    assert logp.shape == (2, 0)
    _, _, logp = weighted_divergence(**given, targets=targets)
    log_p, log_q = heads(given)
    torch.testing.assert_close(logp, torch.stack([log_q.diag(), log_p.diag()]).detach())


def test_sampled_tokens_have_the_gradient_of_the_reverse_divergence() -> None:
    """All tokens of a small vocabulary are summed, each with the probability that the student samples it."""
    logits = torch.tensor([0.3, -1.0, 0.8, 0.1], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([1.0, 0.2, -0.5, 0.0], dtype=torch.float64).log_softmax(-1)
    logp = logits.log_softmax(-1)
    old = logp.detach()
    shape, mask = (4, 1), torch.ones(4, 1, dtype=torch.bool)  # one row for each token
    losses = ppo_clip_loss(logp.view(shape), old.view(shape), (teacher - old).view(shape), mask)
    (found,) = torch.autograd.grad((old.exp() * losses.flatten()).sum(), logits)
    eye, one = torch.eye(4, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    want, _, _ = weighted_divergence(logits[None], eye, teacher[None], eye, one, beta=1.0)
    torch.testing.assert_close(found, torch.autograd.grad(want, logits)[0])


def test_a_head_without_a_gradient_has_none() -> None:
    given = inputs()
    given["weight"].requires_grad_(False)
    loss, _, _ = weighted_divergence(**given)
    loss.backward()
    assert given["weight"].grad is None
    assert given["hidden"].grad is not None


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_student_like_its_teacher_has_no_divergence_and_no_gradient(beta: float) -> None:
    given = inputs()
    given |= {f"teacher_{name}": given[name].detach() for name in ("hidden", "weight", "bias")}
    loss, divergences, _ = weighted_divergence(**given, beta=beta)
    assert divergences.abs().max() < 1e-12
    loss.backward()
    assert given["hidden"].grad is not None
    assert given["hidden"].grad.abs().max() < 1e-12


def test_bf16_products_have_a_wide_softmax() -> None:
    given = inputs(torch.float32)
    want, _ = plain(given, 0.5, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        loss, divergences, _ = weighted_divergence(**given)
    assert divergences.dtype == torch.float32
    assert loss.item() == pytest.approx(want.item(), rel=0.05)
    loss.backward()
    assert given["hidden"].grad is not None
    assert given["hidden"].grad.dtype == torch.float32


@pytest.mark.parametrize("beta", [0.5, 1.0])
def test_autocast_rounds_the_products_alone(beta: float) -> None:
    given = inputs(torch.bfloat16)  # products of these are the same with and without autocast
    results = []
    for casts in (False, True):
        hidden = given["hidden"].detach().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            loss, divergences, _ = weighted_divergence(**(given | {"hidden": hidden}), beta=beta)
        results.append((divergences, *torch.autograd.grad(loss, hidden)))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)
