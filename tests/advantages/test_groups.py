"""GRPO, mean-centred and leave-one-out advantages: published numbers, identities and invariances."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mrlm_pl.advantages import (
    finite_rewards,
    group_centered_advantages,
    group_normalized_advantages,
    leave_one_out_advantages,
    remax_advantages,
)
from mrlm_pl.errors import NonFiniteError

CENTRED_MODES = [group_normalized_advantages, group_centered_advantages, leave_one_out_advantages]


@pytest.fixture(autouse=True)
def _quiet_singletons() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "a group of one episode")
        yield


def of_one_group(mode, rewards: list[float], **options: bool) -> list[float]:
    return mode(torch.tensor(rewards), torch.full((len(rewards),), 7), **options).tolist()


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 1.0, 1.0, 0.0], [0.499999] * 3 + [-1.499997]),
        ([1.0, 0, 0, 0, 0, 0, 0, -0.2], [2.430271] + [-0.270030] * 6 + [-0.810090]),
        ([1.0, 2.0, 4.0, 9.0], [-0.8429, -0.5620, 0.0, 1.4049]),
    ],
)
def test_published_grpo_numbers(rewards: list[float], expected: list[float]) -> None:
    assert of_one_group(group_normalized_advantages, rewards) == pytest.approx(expected, abs=1e-4)


def test_published_numbers_of_the_other_baselines() -> None:
    rewards = [1.0, 2.0, 4.0, 9.0]
    assert of_one_group(group_centered_advantages, rewards) == [-3, -2, 0, 5]
    assert of_one_group(leave_one_out_advantages, rewards) == pytest.approx([-4, -2.6667, 0, 6.6667], abs=1e-4)


def test_eps_is_added_to_the_standard_deviation() -> None:
    advantages = group_normalized_advantages(torch.tensor([0.0, 2.0]), torch.tensor([0, 0]), eps=1.0)
    assert advantages.tolist() == pytest.approx([-1 / (2**0.5 + 1), 1 / (2**0.5 + 1)])


@pytest.mark.parametrize("mode", CENTRED_MODES)
@pytest.mark.parametrize("rewards", [[0.1] * 3, [0.1] * 7, [1e8] * 5, [-0.3] * 6, [0.7]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_signal_is_exactly_zero(mode, rewards: list[float], dtype: torch.dtype) -> None:
    advantages = mode(torch.tensor(rewards, dtype=dtype), torch.zeros(len(rewards), dtype=torch.int64))
    assert (advantages == 0.0).all()


@pytest.mark.parametrize("mode", CENTRED_MODES)
def test_a_group_of_one_warns(mode) -> None:
    with pytest.warns(RuntimeWarning, match="group of one"):
        advantages = mode(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0, 5, 5]))
    assert advantages[0].item() == 0.0
    assert advantages[1].item() < 0.0 < advantages[2].item()


@pytest.mark.parametrize("mode", CENTRED_MODES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_reward_names_its_row(mode, bad: float) -> None:
    with pytest.raises(NonFiniteError, match=f"reward of row 2 is {bad}"):
        mode(torch.tensor([0.0, 1.0, bad, bad]), torch.tensor([0, 0, 1, 1]))


@pytest.mark.parametrize("mode", CENTRED_MODES)
@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool])
def test_rewards_of_other_types_are_not_truncated(mode, dtype: torch.dtype) -> None:
    rewards = torch.tensor([1, 1, 1, 0]).to(dtype)
    advantages = mode(rewards, torch.zeros(4, dtype=torch.int64))
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == mode(rewards.float(), torch.zeros(4, dtype=torch.int64)).tolist()
    assert 0 < advantages[0].item() < 1


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"group_ids has shape \(2,\); it must be \(3,\)"):
        group_centered_advantages(torch.zeros(3), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="one number per row"):
        finite_rewards(torch.zeros(2, 2))


@st.composite
def grouped_rewards(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Rewards on a grid of 1/8 (so that shifts are exact) under scattered labels; spreads are 0 or far above eps."""
    rows = draw(st.integers(1, 12))
    rewards = draw(st.lists(st.integers(-40, 40), min_size=rows, max_size=rows))
    groups = draw(st.lists(st.sampled_from([-3, 0, 4, 10**12]), min_size=rows, max_size=rows))
    return torch.tensor(rewards, dtype=torch.float64) / 8, torch.tensor(groups)


def members(group_ids: Tensor) -> list[list[int]]:
    labels = group_ids.tolist()
    return [[i for i, label in enumerate(labels) if label == group] for group in sorted(set(labels))]


@settings(max_examples=100, deadline=None)
@given(data=grouped_rewards())
def test_formulas_hold_group_by_group(data: tuple[Tensor, Tensor]) -> None:
    rewards, group_ids = data
    centred, normalized, rloo = (
        mode(rewards, group_ids).tolist()
        for mode in (group_centered_advantages, group_normalized_advantages, leave_one_out_advantages)
    )
    for group in members(group_ids):
        values = [rewards[i].item() for i in group]
        mean = statistics.fmean(values)
        std = statistics.stdev(values) if len(group) > 1 else 0.0
        for i in group:
            others = [rewards[j].item() for j in group if j != i]
            assert centred[i] == pytest.approx(rewards[i].item() - mean, abs=1e-9)
            assert normalized[i] == pytest.approx((rewards[i].item() - mean) / (std + 1e-6), abs=1e-6)
            assert rloo[i] == pytest.approx(rewards[i].item() - statistics.fmean(others) if others else 0.0, abs=1e-9)


@pytest.mark.parametrize("mode", CENTRED_MODES)
@settings(max_examples=60, deadline=None)
@given(data=grouped_rewards(), shift=st.integers(-100, 100), scale=st.sampled_from([0.5, 2.0, 3.0]))
def test_shift_and_scale(mode, data: tuple[Tensor, Tensor], shift: int, scale: float) -> None:
    rewards, group_ids = data
    base = mode(rewards, group_ids)
    torch.testing.assert_close(mode(rewards + shift, group_ids), base, atol=1e-9, rtol=0)
    factor = 1.0 if mode is group_normalized_advantages else scale
    torch.testing.assert_close(mode(rewards * scale, group_ids), base * factor, atol=1e-4, rtol=0)


@pytest.mark.parametrize("mode", CENTRED_MODES)
@settings(max_examples=60, deadline=None)
@given(data=grouped_rewards(), random=st.randoms(use_true_random=False))
def test_row_order_and_labels_do_not_matter(mode, data: tuple[Tensor, Tensor], random) -> None:
    rewards, group_ids = data
    order = list(range(len(rewards)))
    random.shuffle(order)
    base = mode(rewards, group_ids)
    torch.testing.assert_close(mode(rewards[order], group_ids[order] * -7 + 1), base[order], atol=1e-9, rtol=0)


def test_remax_subtracts_the_greedy_reward() -> None:
    assert remax_advantages(torch.tensor([1.0, 0.0, 0.5]), torch.tensor([0.5, 0.5, 0.5])).tolist() == [0.5, -0.5, 0.0]
    assert remax_advantages(torch.tensor([3, 1]), torch.tensor([0.5, 0.5])).tolist() == [2.5, 0.5]
    assert remax_advantages(torch.tensor([3, 1]), torch.tensor([1, 1])).dtype == torch.float32


def test_bad_inputs_of_remax_are_named() -> None:
    bad, good = torch.tensor([1.0, float("nan")]), torch.tensor([1.0, -1.0])
    for pair in [(bad, good), (good, bad)]:
        with pytest.raises(NonFiniteError, match="row 1 is nan"):
            remax_advantages(*pair)
    with pytest.raises(ValueError, match=r"greedy_rewards has shape \(1,\); it must be \(2,\)"):
        remax_advantages(torch.zeros(2), torch.zeros(1))
