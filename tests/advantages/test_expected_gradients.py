"""Expected gradients of the baselines, summed over all outcomes of games of one decision."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from mrlm_pl.advantages import (
    component_normalized_advantages,
    counterfactual_advantages,
    decision_returns,
    group_centered_advantages,
    group_max_advantages,
    group_normalized_advantages,
    leave_one_out_advantages,
    remax_advantages,
    role_baselines,
    turn_advantages,
)
from mrlm_pl.losses import Reduction, policy_gradient_loss, reduce_tokens

WORTH = (1.0, -0.5, 4.0)
PROBABILITIES = (0.5, 0.2, 0.3)
GROUP = 3


def group_sum(advantages: Callable[[Tensor], Sequence[float]]) -> list[float]:
    """Return the expected gradient of a group of three episodes by the logits of the three actions."""
    total = [0.0] * 3
    for actions in itertools.product(range(3), repeat=GROUP):
        weight = math.prod(PROBABILITIES[action] for action in actions) / GROUP
        credit = advantages(torch.tensor([WORTH[action] for action in actions], dtype=torch.float64))
        for action, advantage in zip(actions, credit, strict=True):
            for logit in range(3):
                total[logit] += weight * float(advantage) * ((action == logit) - PROBABILITIES[logit])
    return total


VALUE = sum(map(float.__mul__, PROBABILITIES, WORTH))
TRUE = [probability * (worth - VALUE) for probability, worth in zip(PROBABILITIES, WORTH, strict=True)]


def grouped(function: Callable[..., Tensor]) -> Callable[[Tensor], list[float]]:
    return lambda rewards: function(rewards, torch.zeros(GROUP, dtype=torch.int64)).tolist()


@pytest.mark.parametrize(
    ("advantages", "factor"),
    [
        pytest.param(grouped(leave_one_out_advantages), 1.0, id="leave one out"),
        pytest.param(grouped(group_centered_advantages), (GROUP - 1) / GROUP, id="the own reward is in the mean"),
        pytest.param(lambda r: remax_advantages(r, torch.full_like(r, 4.0)).tolist(), 1.0, id="greedy episode"),
        pytest.param(
            lambda r: (r - role_baselines(r, ["first"] * GROUP, {}, decay=0.5)[0]).tolist(),
            1.0,
            id="running baseline of a role",
        ),
    ],
)
def test_baselines_that_do_not_depend_on_the_decision_have_the_true_gradient(
    advantages: Callable[[Tensor], list[float]], factor: float
) -> None:
    assert group_sum(advantages) == pytest.approx([factor * value for value in TRUE])


def ratios_of_reduced_gradient(reduction: Reduction) -> list[float]:
    """Return RLOO's expected gradient over the true one, by the logits of replies of one and of two tokens."""
    logits = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)
    log_one, log_zero = (torch.nn.functional.logsigmoid(sign * logits) for sign in (1, -1))
    nothing = torch.zeros((), dtype=torch.float64)
    replies = [(log_one[0], nothing), (log_zero[0], log_one[1]), (log_zero[0], log_zero[1])]
    chances = [(first + second).exp() for first, second in replies]
    found = nothing
    for drawn in itertools.product(range(3), repeat=2):
        logp = torch.stack([torch.stack(replies[reply]) for reply in drawn])
        mask = torch.tensor([[True, reply > 0] for reply in drawn])
        returns = torch.tensor([WORTH[reply] for reply in drawn], dtype=torch.float64)
        advantages = leave_one_out_advantages(returns, torch.zeros(2, dtype=torch.int64))[:, None].expand(2, 2)
        losses = policy_gradient_loss(logp, advantages, mask)
        loss = reduce_tokens(losses, mask, reduction, max_length=2 if reduction == "constant_length" else None)
        found = found - math.prod(chances[reply].item() for reply in drawn) * loss
    value = sum((worth * chance for worth, chance in zip(WORTH, chances, strict=True)), nothing)
    gradients = [torch.autograd.grad(part, logits, retain_graph=True)[0] for part in (found, value)]
    return (gradients[0] / gradients[1]).tolist()


@pytest.mark.parametrize(("reduction", "factor"), [("sequence_sum", 1.0), ("constant_length", 0.5)])
def test_sums_over_replies_have_the_true_gradient(reduction: Reduction, factor: float) -> None:
    assert ratios_of_reduced_gradient(reduction) == pytest.approx([factor, factor])


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_means_over_tokens_have_another_gradient(reduction: Reduction) -> None:
    one, two = ratios_of_reduced_gradient(reduction)
    assert abs(one - two) > 0.05


def normalized_by_component(rewards: Tensor, groups: Tensor) -> Tensor:
    """Return GDPO's advantages of two components that sum to the rewards."""
    bonus = (rewards > 0).double()
    return component_normalized_advantages(torch.stack([rewards - bonus, bonus], -1), groups)


@pytest.mark.parametrize("function", [group_normalized_advantages, group_max_advantages, normalized_by_component])
def test_a_deviation_or_a_maximum_of_the_group_biases_the_gradient(function: Callable[..., Tensor]) -> None:
    """It is not a multiple of the true one."""
    ratios = [found / true for found, true in zip(group_sum(grouped(function)), TRUE, strict=True)]
    assert max(ratios) - min(ratios) > 0.1


JOINT = {(0, 0): 1.0, (0, 1): -2.0, (1, 0): 0.5, (1, 1): 3.0}
"""The team's reward by the actions of two agents."""
ONE, OTHER = 0.3, 0.6
"""Probabilities of action 1."""
SAMPLES = 2


def squares() -> Iterator[tuple[float, tuple[int, ...], Mapping[tuple[int, int], float]]]:
    """The probability of two decisions of each agent, the first agent's, and the returns of all four combinations."""
    for drawn in itertools.product((0, 1), repeat=2 * SAMPLES):
        own, others = drawn[:SAMPLES], drawn[SAMPLES:]
        probability = math.prod(ONE if x else 1 - ONE for x in own) * math.prod(
            OTHER if x else 1 - OTHER for x in others
        )
        pairs = itertools.product(range(SAMPLES), repeat=2)
        yield probability, own, {(i, j): JOINT[own[i], others[j]] for i, j in pairs}


def by_decision(compare: Callable[..., Tensor]) -> Callable[[Mapping[tuple[int, int], float]], list[float]]:
    def advantages(returns: Mapping[tuple[int, int], float]) -> list[float]:
        found = torch.tensor(list(decision_returns(returns, 0).values()), dtype=torch.float64)
        return compare(found, torch.zeros(SAMPLES, dtype=torch.int64)).tolist()

    return advantages


def coma(returns: Mapping[tuple[int, int], float]) -> list[float]:
    found = counterfactual_advantages(returns, 0)
    return [(found[number, 0] + found[number, 1]) / 2 for number in range(SAMPLES)]


@pytest.mark.parametrize(
    ("advantages", "factor"),
    [
        pytest.param(by_decision(lambda returns, _: returns), 1.0, id="MAREINFORCE"),
        pytest.param(by_decision(leave_one_out_advantages), 1.0, id="MARLOO"),
        pytest.param(by_decision(group_centered_advantages), (SAMPLES - 1) / SAMPLES, id="MAGRPO"),
        pytest.param(coma, (SAMPLES - 1) / SAMPLES, id="COMA"),
    ],
)
def test_crossed_decisions_have_the_gradient_of_the_team(
    advantages: Callable[[Mapping[tuple[int, int], float]], list[float]], factor: float
) -> None:
    total = 0.0
    for probability, own, returns in squares():
        for action, advantage in zip(own, advantages(returns), strict=True):
            total += probability * advantage * (action - ONE) / SAMPLES
    gain = sum((OTHER if other else 1 - OTHER) * (JOINT[1, other] - JOINT[0, other]) for other in (0, 1))
    assert total == pytest.approx(factor * ONE * (1 - ONE) * gain)


def test_rewards_of_the_turn_alone_miss_what_follows() -> None:
    """Each turn earns 1, and one action leads to another turn: returns credit it, AT-GRPO does not."""
    alone = returned = 0.0
    for choices in itertools.product((0, 1), repeat=2):
        probability = math.prod(ONE if continues else 1 - ONE for continues in choices)
        turns = [(n, turn) for n, continues in enumerate(choices) for turn in range(1 + continues)]
        episodes, numbers = torch.tensor(turns).T
        credit = turn_advantages(torch.ones(len(turns)), torch.zeros_like(episodes), episodes, numbers)
        first = leave_one_out_advantages(torch.ones(2), torch.zeros(2, dtype=torch.int64)).tolist()
        for n, continues in enumerate(choices):
            alone += probability * first[n] * (continues - ONE) / 2
            returned += probability * float(credit[turns.index((n, 0))]) * (continues - ONE) / 2
    assert alone == 0.0
    assert returned == pytest.approx(ONE * (1 - ONE))
