"""Task normalization: published numbers, the same from any cut, and degenerate task types."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrlm_pl.advantages import (
    Moments,
    task_moments,
    task_scaled_advantages,
    unnormalizable_tasks,
)

EASY, HARD = 3, 11
TASKS = torch.tensor([EASY] * 4 + [HARD] * 4)
ADVANTAGES = torch.tensor([0.5, 0.5, 0.5, -1.5, 1.479658, -0.261116, -0.609271, -0.609271])
LENGTHS = torch.tensor([2, 2, 2, 2, 1, 3, 4, 4])
MASK = torch.arange(4)[None] < LENGTHS[:, None]
TOKENS = torch.where(MASK, ADVANTAGES[:, None], float("nan"))
NORMALIZATIONS = [task_scaled_advantages, partial(task_scaled_advantages, center=True)]


def per_row(tokens: Tensor) -> list[float]:
    """The number that a row's action tokens share; everything else must be 0."""
    assert (tokens[~MASK] == 0).all()
    assert torch.equal(tokens, tokens[:, :1] * MASK)
    return tokens[:, 0].tolist()


def test_published_paper_form() -> None:
    rows = per_row(task_scaled_advantages(TOKENS, MASK, TASKS, center=True))
    assert rows[:4] == pytest.approx([0.540061] * 3 + [-1.620183], abs=1e-4)
    assert rows[4:] == pytest.approx([3.066126, 0.146006, -0.438018, -0.438018], abs=1e-4)


def test_published_scale_only_form() -> None:
    rows = per_row(task_scaled_advantages(TOKENS, MASK, TASKS))
    assert rows[:4] == pytest.approx([0.540061] * 3 + [-1.620183], abs=1e-4)
    assert rows[4:] == pytest.approx([2.482106, -0.438019, -1.022044, -1.022044], abs=1e-4)


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
@settings(max_examples=40, deadline=None)
@given(pieces=st.lists(st.integers(0, 3), min_size=8, max_size=8), padding=st.integers(0, 3))
def test_any_cut_into_ranks_and_micro_batches_gives_the_same(normalize, pieces: list[int], padding: int) -> None:
    whole = normalize(TOKENS, MASK, TASKS)
    tokens = torch.nn.functional.pad(TOKENS, (0, padding), value=float("nan"))
    mask = torch.nn.functional.pad(MASK, (0, padding))
    cuts = [[i for i in range(8) if pieces[i] == piece] for piece in sorted(set(pieces), reverse=True)]
    moments: dict[int, Moments] = {}
    for rows in cuts:
        for task, of_task in task_moments(tokens[rows], mask[rows], TASKS[rows]).items():
            moments[task] = moments.get(task, Moments(0, 0.0, 0.0)) + of_task
    for rows in cuts:
        part = normalize(tokens[rows], mask[rows], TASKS[rows], moments)
        torch.testing.assert_close(part[:, :4], whole[rows], atol=1e-6, rtol=0)
        assert (part[:, 4:] == 0).all()


@pytest.mark.parametrize("normalize", NORMALIZATIONS)
def test_one_token_and_no_spread_stay_as_they_are(normalize) -> None:
    advantages = torch.tensor([[0.7, 9.0], [0.1, 0.1], [0.1, 0.1], [1.0, 3.0]])
    mask = torch.tensor([[True, False], [True, True], [True, True], [True, True]])
    tasks = torch.tensor([0, 1, 1, 2])
    normalized = normalize(advantages, mask, tasks)
    assert torch.equal(normalized[:3], torch.where(mask, advantages, 0.0)[:3])
    assert normalized[3].tolist() != [1.0, 3.0]
    assert unnormalizable_tasks(task_moments(advantages, mask, tasks)) == [0, 1]


def test_scaling_keeps_signs_and_zeros() -> None:
    """A zero-signal row beside a strong one: the paper's form gives it a sign, scaling does not."""
    advantages = torch.tensor([[0.0, 0.0, 0.0], [3.0, -1.0, 2.0]])
    mask, tasks = torch.ones(2, 3, dtype=torch.bool), torch.tensor([0, 0])
    assert task_scaled_advantages(advantages, mask, tasks).sign().tolist() == advantages.sign().tolist()
    assert (task_scaled_advantages(advantages, mask, tasks, center=True)[0] < 0).all()


def test_a_task_type_without_moments_is_an_error() -> None:
    with pytest.raises(ValueError, match="task type 11 has no moments"):
        task_scaled_advantages(TOKENS, MASK, TASKS, {EASY: task_moments(TOKENS, MASK, TASKS)[EASY]})
    with pytest.raises(ValueError, match=r"task_types has shape \(3,\)"):
        task_moments(TOKENS, MASK, TASKS[:3])
