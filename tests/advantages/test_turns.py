"""Advantages of turns: by hand, and as gradients summed over all outcomes of small games."""

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from mrlm_pl.advantages import (
    TurnBaseline,
    group_normalized_advantages,
    leaf_advantages,
    state_advantages,
    turn_advantages,
)

Episode = tuple[int, ...]
"""The actions of an episode: 1 continues, 0 stops."""

TURNS = 3
REWARD = 1.0
ADVANCE = torch.tensor([0.4, -0.3, 0.9], dtype=torch.float64)
"""Logits of continuing in each turn."""


def episodes() -> Iterator[Episode]:
    """Every episode of a game with a reward of 1 for each turn, until the agent stops, at most three turns."""
    for actions in itertools.product((1, 0), repeat=TURNS):
        length = actions.index(0) + 1 if 0 in actions else TURNS
        if all(actions[length:]):
            yield actions[:length]


def logp(actions: Episode, logits: Tensor) -> Tensor:
    signs = torch.tensor([1.0 if action else -1.0 for action in actions], dtype=torch.float64)
    return torch.nn.functional.logsigmoid(signs * logits[: len(actions)])


def expected_gradient(members: int, advantages: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Return the expectation of a group's policy gradient over all its outcomes."""
    logits = ADVANCE.clone().requires_grad_()
    total = torch.zeros(3, dtype=torch.float64)
    for group in itertools.product(list(episodes()), repeat=members):
        probability = math.exp(sum(logp(actions, logits).sum().item() for actions in group))
        numbers = torch.cat([torch.full((len(actions),), number) for number, actions in enumerate(group)])
        turns = torch.cat([torch.arange(len(actions)) for actions in group])
        rewards = torch.full((len(turns),), REWARD, dtype=torch.float64)
        credit = advantages(rewards, torch.zeros_like(turns), numbers, turns)
        logps = torch.cat([logp(actions, logits) for actions in group])
        (gradient,) = torch.autograd.grad((credit * logps).sum() / members, logits)
        total += probability * gradient
    return total


def true_gradient() -> Tensor:
    logits = ADVANCE.clone().requires_grad_()
    value = torch.stack([logp(actions, logits).sum().exp() * len(actions) * REWARD for actions in episodes()]).sum()
    return torch.autograd.grad(value, logits)[0]


def test_the_game_has_four_outcomes() -> None:
    assert set(episodes()) == {(0,), (1, 0), (1, 1, 0), (1, 1, 1)}
    probabilities = [logp(actions, ADVANCE).sum().exp().item() for actions in episodes()]
    assert sum(probabilities) == pytest.approx(1.0)


@pytest.mark.parametrize("members", [2, 3])
def test_the_unbiased_baseline_has_the_true_gradient(members: int) -> None:
    torch.testing.assert_close(expected_gradient(members, turn_advantages), true_gradient())


def test_the_paper_baseline_sees_no_reason_to_continue() -> None:
    """Each reward equals the mean of its turn, so continuing is worth nothing, though it earns 1 each time."""
    found = expected_gradient(3, lambda *labels: turn_advantages(*labels, baseline="paper"))
    assert true_gradient()[:2].min() > 0.1
    torch.testing.assert_close(found, torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("baseline", ["unbiased", "paper"])
def test_states_of_the_stopping_game(baseline: TurnBaseline) -> None:
    """The turn is the state. A turn without a comparison has no credit, so each state's gradient shrinks by a factor
    between 0 and 1: the probability that another episode comes there, and with the own turn in the mean
    (n - 1) / n of n turns as well."""

    def credit(rewards: Tensor, groups: Tensor, numbers: Tensor, turns: Tensor) -> Tensor:
        to_go = torch.stack([rewards[(numbers == n) & (turns >= t)].sum() for n, t in zip(numbers, turns, strict=True)])
        return state_advantages(to_go, turns, numbers, baseline=baseline)

    reached = torch.cumprod(torch.cat([torch.ones(1), ADVANCE.sigmoid()[:2]]), 0).double()
    factors = reached if baseline == "unbiased" else reached / 2  # two members: the other one comes there or not
    torch.testing.assert_close(expected_gradient(2, credit), true_gradient() * factors)


def test_process_supervision_as_published() -> None:
    """arXiv 2402.03300, 4.1.3: rewards of all turns normalized together, then summed over the turns that follow."""
    group = torch.zeros(5, dtype=torch.int64)
    number, turn = torch.tensor([0, 0, 1, 1, 2]), torch.tensor([0, 1, 0, 1, 0])
    rewards = torch.tensor([1.0, 4.0, 2.0, 6.0, 3.0], dtype=torch.float64)
    deviation = math.sqrt((2.2**2 + 0.8**2 + 1.2**2 + 2.8**2 + 0.2**2) / 4)  # mean 3.2
    found = turn_advantages(rewards, group, number, turn, baseline="paper", normalize=True, eps=0.0)
    assert found.tolist() == pytest.approx([sums / deviation for sums in (-2.2 + 0.8, 0.8, -1.2 + 2.8, 2.8, -0.2)])


def test_normalized_single_turns_are_grpo() -> None:
    rewards, group = torch.tensor([1.0, 0.0, 4.0, 2.0, 2.5]), torch.tensor([0, 0, 0, 1, 1])
    single = torch.zeros(5, dtype=torch.int64)
    found = turn_advantages(rewards, group, torch.arange(5), single, normalize=True)
    leave_one_out = torch.tensor([3 / 2, 3 / 2, 3 / 2, 2.0, 2.0])  # G / (G - 1) times GRPO's
    torch.testing.assert_close(found, (group_normalized_advantages(rewards, group) * leave_one_out).double())


def test_episodes_alone_and_in_other_groups_do_not_count() -> None:
    rewards = torch.tensor([5.0, 1.0, 3.0])
    found = turn_advantages(rewards, torch.tensor([4, 2, 2]), torch.arange(3), torch.zeros(3, dtype=torch.int64))
    assert found.tolist() == [0.0, -2.0, 2.0]
    empty = torch.zeros(0, dtype=torch.int64)
    assert turn_advantages(torch.zeros(0), empty, empty, empty).shape == (0,)


def test_a_state_visited_twice_is_not_compared_with_itself() -> None:
    """GiGPO's own form subtracts the mean over both visits; each then credits the other."""
    returns, state, episode = torch.tensor([4.0, 2.0, 0.0]), torch.zeros(3, dtype=torch.int64), torch.tensor([0, 0, 1])
    assert state_advantages(returns, state, episode).tolist() == [4.0, 2.0, -3.0]
    assert state_advantages(returns, state, episode, baseline="paper").tolist() == [2.0, 0.0, -2.0]
    normalized = state_advantages(returns, state, episode, baseline="paper", normalize=True, eps=0.0)
    assert normalized.tolist() == pytest.approx([1.0, 0.0, -1.0]), "standard deviation 2"


def test_one_leaf_alone_has_no_advantage() -> None:
    one = torch.zeros(1, dtype=torch.int64)
    found = leaf_advantages(torch.tensor([3.0]), torch.tensor([[9]]), one, one, normalize=True)
    assert found.tolist() == [0.0]


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("baseline", ["unbiased", "paper"])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, 0.7])
def test_equal_returns_have_no_advantage_at_all(reward: float, baseline: TurnBaseline, normalize: bool) -> None:
    rewards, zero = torch.full((11,), reward, dtype=torch.float64), torch.zeros(11, dtype=torch.int64)
    episodes = torch.arange(11)
    kind = {"baseline": baseline, "normalize": normalize}
    assert not turn_advantages(rewards, zero, episodes, zero, **kind).any()  # type: ignore[arg-type]
    assert not state_advantages(rewards, zero, episodes, **kind).any()  # type: ignore[arg-type]
    assert not state_advantages(rewards, zero, episodes // 3, **kind).any()  # type: ignore[arg-type]
