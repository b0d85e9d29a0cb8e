"""Trust-region losses against their published formulas, written out in plain Python."""

import math

import pytest
import torch
from torch import Tensor

from mrlm_pl.losses import Clip, dppo_loss, gmpo_loss, off_policy_sequence_mask, sapo_loss, vespo_loss

LOGP = [[-0.2, -1.0, -2.5], [-0.7, -0.1, -3.0]]
OLD = [[-0.3, -0.4, -2.5], [-1.9, -0.1, -0.5]]
MASK = [[True, True, True], [True, False, True]]


def tensors(advantages: list[float]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logp = torch.tensor(LOGP, dtype=torch.float64, requires_grad=True)
    spread = torch.tensor(advantages, dtype=torch.float64)[:, None].expand(2, 3)
    return logp, torch.tensor(OLD, dtype=torch.float64), spread, torch.tensor(MASK)


def places() -> list[tuple[int, int]]:
    return [(row, column) for row in range(2) for column in range(3) if MASK[row][column]]


def assert_matches(loss: Tensor, expected: dict[tuple[int, int], float]) -> None:
    for row in range(2):
        for column in range(3):
            assert loss[row, column].item() == pytest.approx(expected.get((row, column), 0.0), abs=1e-12)


@pytest.mark.parametrize("advantages", [[1.5, -0.5], [-2.0, 0.25]])
def test_sapo_gates_the_ratio(advantages: list[float]) -> None:
    logp, old, spread, mask = tensors(advantages)
    expected, slopes = {}, torch.zeros(2, 3, dtype=torch.float64)
    for row, column in places():
        advantage = advantages[row]
        tau = 1.0 if advantage > 0 else 1.05
        ratio = math.exp(LOGP[row][column] - OLD[row][column])
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        expected[row, column] = -4 / tau * gate * advantage
        slopes[row, column] = -4 * gate * (1 - gate) * ratio * advantage
    loss = sapo_loss(logp, old, spread, mask)
    assert_matches(loss, expected)
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, slopes)


@pytest.mark.parametrize("advantages", [[1.5, -0.5], [-2.0, 0.0]])
def test_vespo_weighs_by_the_sequence(advantages: list[float]) -> None:
    logp, old, spread, mask = tensors(advantages)
    expected, slopes = {}, torch.zeros(2, 3, dtype=torch.float64)
    for row, column in places():
        k, scale = (2, 3) if advantages[row] >= 0 else (3, 2)
        weight = math.exp(sum(LOGP[r][c] - OLD[r][c] for r, c in places() if r == row))
        phi = math.exp(scale) * weight**k * math.exp(-scale * weight)
        expected[row, column] = -phi * advantages[row] * LOGP[row][column]
        slopes[row, column] = -phi * advantages[row]
    loss = vespo_loss(logp, old, spread, mask)
    assert_matches(loss, expected)
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, slopes)


def test_vespo_is_finite_at_both_ends() -> None:
    logp = torch.tensor([[-1000.0, -1000.0], [-0.1, -0.1]])
    loss = vespo_loss(logp, logp.flip(0), torch.ones(2, 2), torch.ones(2, 2, dtype=torch.bool))
    assert loss[0].tolist() == pytest.approx([math.exp(3) * 1e-16 * 1000] * 2, rel=1e-4), "phi(1e-8) = e^3 1e-16"
    assert loss[1].tolist() == [0.0, 0.0], "phi(e^20) = 0"


@pytest.mark.parametrize("advantages", [[1.5, -0.5], [-2.0, 0.25]])
def test_dppo_leaves_out_tokens_that_have_moved_too_far(advantages: list[float]) -> None:
    logp, old, spread, mask = tensors(advantages)
    expected, slopes = {}, torch.zeros(2, 3, dtype=torch.float64)
    for row, column in places():
        advantage, new, before = advantages[row], LOGP[row][column], OLD[row][column]
        moved = math.exp(new) - math.exp(before)
        if moved <= 0.15 if advantage > 0 else moved >= -0.25:
            weight = min(math.exp(new - before), 2.0)
            expected[row, column] = -weight * advantage * new
            slopes[row, column] = -weight * advantage
    assert 0 < len(expected) < len(places())
    loss = dppo_loss(logp, old, spread, mask, Clip(0.25, 0.15), largest_ratio=2.0)
    assert_matches(loss, expected)
    loss.sum().backward()
    torch.testing.assert_close(logp.grad, slopes)


@pytest.mark.parametrize("advantages", [[1.5, -0.5], [-2.0, 0.25]])
def test_gmpo_has_the_gradient_of_the_geometric_mean(advantages: list[float]) -> None:
    logp, old, spread, mask = tensors(advantages)
    rows = []
    for row, advantage in enumerate(advantages):
        ratios = [logp[r, c] - old[r, c] for r, c in places() if r == row]
        bounded = [min(x, x.clamp(-0.4, 0.4)) if advantage > 0 else max(x, x.clamp(-0.4, 0.4)) for x in ratios]
        rows.append(-advantage * (sum(bounded) / len(bounded)).exp())  # type: ignore[union-attr]
    (objective,) = torch.autograd.grad(sum(rows), logp)  # type: ignore[arg-type]
    loss = gmpo_loss(logp, old, spread, mask)
    assert_matches(loss, {(row, column): rows[row].item() for row, column in places()})
    (loss / mask.sum(-1, keepdim=True)).sum().backward()  # `sequence_mean`, but for the number of rows
    torch.testing.assert_close(logp.grad, objective)


def test_rows_far_from_the_behavior_policy_lose_their_negative_tokens() -> None:
    logp, old, spread, mask = tensors([-1.0, -1.0])
    means = [sum(OLD[r][c] - LOGP[r][c] for r, c in places() if r == row) / MASK[row].count(True) for row in range(2)]
    assert means == pytest.approx([0.5 / 3, 0.65])
    assert off_policy_sequence_mask(logp, old, spread, mask, 0.7).tolist() == MASK
    assert off_policy_sequence_mask(logp, old, spread, mask, 0.6).tolist() == [MASK[0], [False] * 3]
    assert off_policy_sequence_mask(logp, old, spread, mask, 0.1).tolist() == [[False] * 3] * 2
    assert off_policy_sequence_mask(logp, old, -spread, mask, 0.1).tolist() == MASK


@pytest.mark.parametrize("loss", [sapo_loss, vespo_loss, dppo_loss, gmpo_loss])
def test_values_outside_the_mask_reach_nothing(loss: object) -> None:
    logp, old, spread, mask = tensors([1.0, -1.0])
    wild = torch.where(mask, logp, torch.nan).detach().requires_grad_()
    wild_old, wild_spread = torch.where(mask, old, torch.inf), torch.where(mask, spread, torch.nan)
    losses = [loss(logp, old, spread, mask), loss(wild, wild_old, wild_spread, mask)]  # type: ignore[operator]
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)
    losses[0].sum().backward()
    losses[1].sum().backward()
    assert logp.grad is not None
    assert wild.grad is not None
    torch.testing.assert_close(wild.grad, logp.grad, rtol=0, atol=0)
