"""Advantages, returns and shaped rewards: our functions and the papers' equations in plain Python."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.robustness.conformance import vectors as v
from benchmarks.robustness.conformance.cases import MASK, ROWS, Case, Values, table
from mrlm_pl import advantages as adv
from mrlm_pl.rewards import incentives, influence_rewards, information_gains, overlong_penalty


def by_group(formula: Callable[[float, list[float]], float], rewards: Sequence[float] = v.REWARDS) -> list[float]:
    members = [[r for r, g in zip(rewards, v.GROUPS, strict=True) if g == group] for group in v.GROUPS]
    return [formula(reward, group) for reward, group in zip(rewards, members, strict=True)]


def normalized(reward: float, group: list[float]) -> float:
    mean = sum(group) / len(group)
    return (reward - mean) / (math.sqrt(sum((r - mean) ** 2 for r in group) / (len(group) - 1)) + 1e-6)


def gdpo() -> list[float]:
    parts = [by_group(normalized, [row[place] for row in v.COMPONENTS]) for place in range(2)]
    totals = [one + 0.5 * other for one, other in zip(*parts, strict=True)]
    tokens = [total for total, length in zip(totals, v.LENGTHS, strict=True) for _ in range(length)]
    mean = sum(tokens) / len(tokens)
    deviation = math.sqrt(sum((x - mean) ** 2 for x in tokens) / (len(tokens) - 1))
    return [(total - mean) / (deviation + 1e-8) for total in totals]


def our_gdpo() -> list[float]:
    found = adv.component_normalized_advantages(table(v.COMPONENTS), torch.tensor(v.GROUPS), [1.0, 0.5])
    spread = found[:, None].expand(4, 5)
    return adv.whiten(spread, MASK, adv.masked_moments(spread, MASK))[:, 0].tolist()


def grouped(function: Callable[..., Tensor]) -> Callable[[], Values]:
    return lambda: function(table(v.REWARDS), torch.tensor(v.GROUPS)).tolist()


def worth(members: frozenset[str]) -> float:
    """Return the value of a coalition: the rewards of a, b and c, and another one of a and c together."""
    return sum(v.REWARDS["abc".index(agent)] for agent in members) + v.REWARDS[3] * ({"a", "c"} <= members)


def shapley() -> list[float]:
    """Return what each agent adds to those before it, as a mean over all orders."""
    orders = list(itertools.permutations("abc"))
    gains = [
        [
            worth(frozenset(order[: order.index(agent) + 1])) - worth(frozenset(order[: order.index(agent)]))
            for order in orders
        ]
        for agent in "abc"
    ]
    return [sum(found) / len(orders) for found in gains]


LEAF_TURNS = [(leaf, step) for leaf in range(4) for step in range(2)]


def leaf_turn(leaf: int, step: int) -> float:
    others = [reward for reward, common in zip(v.REWARDS, v.COMMON[leaf], strict=True) if common <= step]
    return v.REWARDS[leaf] - sum(others) / len(others)


def spread(rewards: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the unbiased standard deviation."""
    mean = sum(rewards) / len(rewards)
    return mean, math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))


def whitened(advantages: list[list[float]]) -> list[float]:
    """Return the first row of values [B][T] whitened over all tokens."""
    mean, deviation = spread([advantages[row][token] for row, length in ROWS for token in range(length)])
    return [(x - mean) / (deviation + 1e-8) for x in advantages[0]]


def our_whitened(advantages: Tensor) -> list[float]:
    return adv.whiten(advantages, MASK)[0].tolist()


def gae(gamma: float, lam: float, values: list[list[float]], rewards: list[list[float]]) -> list[list[float]]:
    found = [[0.0] * 5 for _ in v.LENGTHS]
    for row, length in ROWS:
        for token in range(length):
            for later in range(token, length):
                following = values[row][later + 1] if later + 1 < length else 0.0
                difference = rewards[row][later] + gamma * following - values[row][later]
                found[row][token] += (gamma * lam) ** (later - token) * difference
    return found


def our_gae(gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    return adv.token_gae(table(v.TOKEN_REWARDS), table(v.VALUES), MASK, gamma=gamma, lam=lam)


def steps_gae() -> list[float]:
    """Return the advantages of the first two rows as episodes of steps; the second is truncated at 0.7."""
    found = []
    for row, last in ((0, 0.0), (1, 0.7)):
        length, values, rewards = v.LENGTHS[row], v.VALUES[row], v.TOKEN_REWARDS[row]
        for step in range(length):
            total = 0.0
            for later in range(step, length):
                following = values[later + 1] if later + 1 < length else last
                total += (0.9 * 0.8) ** (later - step) * (rewards[later] + 0.9 * following - values[later])
            found.append(total)
    return found


def our_steps_gae() -> list[float]:
    values = [*v.VALUES[0], *v.VALUES[1][:4]]
    rewards, end = [*v.TOKEN_REWARDS[0], *v.TOKEN_REWARDS[1][:4]], torch.arange(9)
    return adv.transition_gae(
        table(rewards), table(values), table([*values[1:], 0.7]), end == 4, end == 8, gamma=0.9, lam=0.8
    )[0].tolist()


TURN_PLACES = range(len(v.TURNS))
GAMMA = 0.9


def to_go(place: int) -> float:
    same = [p for p in TURN_PLACES if v.TURN_EPISODES[p] == v.TURN_EPISODES[place] and v.TURNS[p] >= v.TURNS[place]]
    return sum(GAMMA ** (v.TURNS[p] - v.TURNS[place]) * v.TURN_REWARDS[p] for p in same)


def unbiased_turn(place: int) -> float:
    """Return the return less the mean of both other episodes, 0 for one that has ended."""
    others = [p for p in TURN_PLACES if v.TURNS[p] == v.TURNS[place] and v.TURN_EPISODES[p] != v.TURN_EPISODES[place]]
    return to_go(place) - sum(to_go(p) for p in others) / 2


def paper_turn(place: int) -> float:
    found, mean = 0.0, sum(v.TURN_REWARDS) / len(v.TURN_REWARDS)
    for later in TURN_PLACES:
        if v.TURN_EPISODES[later] == v.TURN_EPISODES[place] and v.TURNS[later] >= v.TURNS[place]:
            found += GAMMA ** (v.TURNS[later] - v.TURNS[place]) * (v.TURN_REWARDS[later] - mean)
    return found


def our_turns(baseline: adv.TurnBaseline) -> Callable[[], Values]:
    numbers = torch.tensor(v.TURN_EPISODES), torch.tensor(v.TURNS)
    return lambda: adv.turn_advantages(
        table(v.TURN_REWARDS), torch.zeros(6, dtype=torch.int64), *numbers, gamma=GAMMA, baseline=baseline
    ).tolist()


def state(place: int) -> float:
    others = [
        to_go(p) for p in TURN_PLACES if v.STATES[p] == v.STATES[place] and v.TURN_EPISODES[p] != v.TURN_EPISODES[place]
    ]
    return to_go(place) - sum(others) / len(others)


def paper_state(place: int) -> float:
    mean, deviation = spread([to_go(p) for p in TURN_PLACES if v.STATES[p] == v.STATES[place]])
    return (to_go(place) - mean) / (deviation + 1e-6)


def our_states(baseline: adv.TurnBaseline, normalize: bool) -> Callable[[], Values]:
    states, episodes, turns = (torch.tensor(numbers) for numbers in (v.STATES, v.TURN_EPISODES, v.TURNS))

    def value() -> list[float]:
        returns = adv.returns_to_go(table(v.TURN_REWARDS), episodes, turns, GAMMA)
        return adv.state_advantages(returns, states, episodes, baseline=baseline, normalize=normalize).tolist()

    return value


def by_step() -> list[float]:
    found = []
    for row, group in enumerate(v.GROUPS):
        steps = [v.REWARDS[r] for r in range(4) if v.GROUPS[r] == group for _ in range(v.STEPS[r])]
        mean, deviation = spread(steps)
        found.append((v.REWARDS[row] - mean) / (deviation + 1e-6))
    return found


def running() -> list[float]:
    baselines, found = {"first": 0.5, "second": 0.0}, []
    for reward, role in zip(v.REWARDS, ["first", "second"] * 2, strict=True):
        found.append(reward - baselines[role])
        baselines[role] = 0.95 * baselines[role] + 0.05 * reward
    return found


def our_running() -> list[float]:
    roles = ["first", "second"] * 2
    return (table(v.REWARDS) - adv.role_baselines(table(v.REWARDS), roles, {"first": 0.5}, decay=0.95)[0]).tolist()


SQUARE = {joint: v.REWARDS[2 * joint[0] + joint[1]] for joint in itertools.product(range(2), repeat=2)}
"""Returns of the joint actions of two agents with two decisions each."""


def influence() -> list[float]:
    found = []
    for turn, answers in enumerate(v.SCORES):
        for score in answers.values():
            total, weights = score, 1.0
            for later in range(turn + 1, 3):
                total += 0.3 ** (later - turn) * sum(v.SCORES[later].values()) / 2
                weights += 0.3 ** (later - turn)
            found.append(total / weights)
    return found


def flat(rows: Sequence[dict[str, float]]) -> list[float]:
    return [value for row in rows for value in row.values()]


def tree_return() -> list[float]:
    """Two joint actions, each followed by two."""
    r = [*v.REWARDS, *v.GREEDY[1:3]]
    return [r[0] + 0.5 * (r[2] + r[3]) / 2, r[1] + 0.5 * (r[4] + r[5]) / 2]


def in_one_group(function: Callable[..., Tensor]) -> Callable[[], Values]:
    return lambda: function(table(v.REWARDS), torch.zeros(4, dtype=torch.int64)).tolist()


MEAN, WITHOUT = sum(v.REWARDS) / 4, [(sum(v.REWARDS) - reward) / 3 for reward in v.REWARDS]


CASES = [
    Case(
        "group_normalized",
        "`group_normalized_advantages`",
        grouped(adv.group_normalized_advantages),
        lambda: by_group(normalized),
    ),
    Case(
        "group_centered",
        "`group_centered_advantages`",
        grouped(adv.group_centered_advantages),
        lambda: by_group(lambda reward, group: reward - sum(group) / len(group)),
    ),
    Case(
        "leave_one_out",
        "`leave_one_out_advantages`",
        grouped(adv.leave_one_out_advantages),
        lambda: by_group(lambda reward, group: reward - (sum(group) - reward) / (len(group) - 1)),
    ),
    Case(
        "tree leaves",
        "`leaf_advantages`",
        lambda: adv.leaf_advantages(table(v.REWARDS), torch.tensor(v.COMMON), *torch.tensor(LEAF_TURNS).T).tolist(),
        lambda: [leaf_turn(leaf, step) for leaf, step in LEAF_TURNS],
    ),
    Case("gdpo", "`component_normalized_advantages`, `whiten`", our_gdpo, gdpo),
    Case("shapley", "`shapley_values`", lambda: list(adv.shapley_values("abc", worth).values()), shapley),
    Case(
        "ccpo",
        "`history_normalized_advantages`",
        lambda: adv.history_normalized_advantages(
            table(v.REWARDS), "aabb", {"a": adv.Moments(3, 1.0, 8.0), "b": adv.Moments(2, 0.5, 0.25)}
        ).tolist(),
        lambda: [
            (reward - mean) / (deviation + 1e-6)
            for reward, mean, deviation in zip(v.REWARDS, [1, 1, 0.5, 0.5], [2, 2, 0.5, 0.5], strict=True)
        ],
    ),
    Case(
        "igpo gains",
        "`information_gains`",
        lambda: information_gains(table(v.REWARDS), torch.tensor(v.GROUPS)).tolist(),
        lambda: [v.REWARDS[1] - v.REWARDS[0], 0.0, v.REWARDS[3] - v.REWARDS[2], 0.0],
    ),
    Case(
        "turns unbiased",
        "`turn_advantages`",
        our_turns("unbiased"),
        lambda: [unbiased_turn(place) for place in TURN_PLACES],
    ),
    Case(
        "turns paper",
        "`turn_advantages`, `paper`",
        our_turns("paper"),
        lambda: [paper_turn(place) for place in TURN_PLACES],
    ),
    Case(
        "states unbiased",
        "`state_advantages`",
        our_states("unbiased", normalize=False),
        lambda: [state(place) for place in TURN_PLACES],
    ),
    Case(
        "states paper",
        "`state_advantages`, `paper`, `normalize`",
        our_states("paper", normalize=True),
        lambda: [paper_state(place) for place in TURN_PLACES],
    ),
    Case(
        "gae",
        "`token_gae`, `whiten`",
        lambda: our_whitened(our_gae(0.9, 0.8)[0]),
        lambda: whitened(gae(0.9, 0.8, v.VALUES, v.TOKEN_REWARDS)),
    ),
    Case(
        "gae returns",
        "`token_gae`",
        lambda: our_gae(0.9, 0.8)[1][0].tolist(),
        lambda: [a + b for a, b in zip(gae(0.9, 0.8, v.VALUES, v.TOKEN_REWARDS)[0], v.VALUES[0], strict=True)],
    ),
    Case("gae of steps", "`transition_gae`", our_steps_gae, steps_gae),
    Case(
        "reinforce++",
        "`token_gae`, `whiten`",
        lambda: our_whitened(
            adv.token_gae(table(v.TOKEN_REWARDS), torch.zeros(4, 5, dtype=torch.float64), MASK, gamma=0.9, lam=1.0)[0]
        ),
        lambda: whitened(gae(0.9, 1.0, [[0.0] * 5] * 4, v.TOKEN_REWARDS)),
    ),
    Case(
        "reinforce++ baseline",
        "`group_centered_advantages`, `whiten`",
        lambda: our_whitened(
            adv.group_centered_advantages(table(v.REWARDS), torch.tensor(v.GROUPS))[:, None].expand(4, 5)
        ),
        lambda: whitened([[x] * 5 for x in by_group(lambda reward, group: reward - sum(group) / len(group))]),
    ),
    Case(
        "rollout mean",
        "`masked_moments`",
        lambda: (
            table(v.REWARDS) - adv.masked_moments(table(v.REWARDS), torch.ones(4, dtype=torch.bool)).mean
        ).tolist(),
        lambda: [reward - MEAN for reward in v.REWARDS],
    ),
    Case(
        "remax",
        "`remax_advantages`",
        lambda: adv.remax_advantages(table(v.REWARDS), table(v.GREEDY)).tolist(),
        lambda: [reward - greedy for reward, greedy in zip(v.REWARDS, v.GREEDY, strict=True)],
    ),
    Case(
        "joint mean",
        "`group_centered_advantages`",
        in_one_group(adv.group_centered_advantages),
        lambda: [reward - MEAN for reward in v.REWARDS],
    ),
    Case(
        "joint leave one out",
        "`leave_one_out_advantages`",
        in_one_group(adv.leave_one_out_advantages),
        lambda: [reward - others for reward, others in zip(v.REWARDS, WITHOUT, strict=True)],
    ),
    Case(
        "joint maximum",
        "`group_max_advantages`",
        in_one_group(adv.group_max_advantages),
        lambda: [reward - max(v.REWARDS) for reward in v.REWARDS],
    ),
    Case(
        "tree returns",
        "`tree_returns`",
        lambda: adv.tree_returns(table([*v.REWARDS, *v.GREEDY[1:3]]), [-1, -1, 0, 0, 1, 1], 0.5)[:2].tolist(),
        tree_return,
    ),
    Case(
        "crossed decisions",
        "`decision_returns`",
        lambda: list(adv.decision_returns(SQUARE, 0).values()),
        lambda: [(SQUARE[number, 0] + SQUARE[number, 1]) / 2 for number in range(2)],
    ),
    Case(
        "coma",
        "`counterfactual_advantages`",
        lambda: list(adv.counterfactual_advantages(SQUARE, 0).values()),
        lambda: [value - (SQUARE[0, other] + SQUARE[1, other]) / 2 for (_, other), value in SQUARE.items()],
    ),
    Case(
        "dr.mas",
        "`step_normalized_advantages`",
        lambda: adv.step_normalized_advantages(
            table(v.REWARDS), torch.tensor(v.GROUPS), torch.tensor(v.STEPS)
        ).tolist(),
        by_step,
    ),
    Case("rae", "`role_baselines`", our_running, running),
    Case(
        "marginal",
        "`marginal_values`",
        lambda: list(adv.marginal_values("abc", worth).values()),
        lambda: [worth(frozenset("abc")) - worth(frozenset("abc") - {agent}) for agent in "abc"],
    ),
    Case("influence", "`influence_rewards`", lambda: flat(influence_rewards(v.SCORES, 0.3)), influence),
    Case(
        "incentives",
        "`incentives`",
        lambda: flat(incentives(v.SCORES, alpha0=1.0, alpha1=0.5, beta0=0.25, beta1=0.125)[0]),
        # First a is wrong and b right. a then follows b, which rewards both; at last b turns wrong beside a, who is
        # right, which costs both.
        lambda: [0.0, 0.125, 0.5 - 0.125, 0.0, 0.0, -0.5],
    ),
    Case(
        "overlong penalty",
        "`overlong_penalty`",
        lambda: [overlong_penalty(tokens, 100, 20) for tokens in (80, 85, 100)],
        lambda: [0.0, (100 - 20 - 85) / 20, -1.0],
    ),
]
