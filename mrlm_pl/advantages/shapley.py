"""Shapley values: the contribution of each agent of a team to the team's return."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from random import Random


def marginal_values(agents: Sequence[str], value: Callable[[frozenset[str]], float]) -> dict[str, float]:
    """Return the marginal contribution of each agent: the team's value minus its value without the agent.

    Args:
        agents: names of the A agents; ``value`` is called for A + 1 coalitions.
        value: function that returns the return of a coalition, whose other agents are absent.

    >>> marginal_values(["a", "b"], {frozenset("a"): 1.0, frozenset("b"): 0.0, frozenset("ab"): 4.0}.__getitem__)
    {'a': 4.0, 'b': 3.0}
    """
    team = frozenset(agents)
    whole = value(team)
    return {agent: whole - value(team - {agent}) for agent in agents}


def shapley_values(agents: Sequence[str], value: Callable[[frozenset[str]], float]) -> dict[str, float]:
    """Return the Shapley value of each agent; they sum to the value of the team less that of no agent.

    Args:
        agents: names of the A agents; ``value`` is called once for each of the 2^A coalitions.
        value: function that returns the return of a coalition, whose other agents are absent.

    Source: L. Shapley, "A value for n-person games" (1953).

    >>> shapley_values(["a", "b"], {frozenset(): 0.0, frozenset("a"): 1.0, frozenset("b"): 0.0,
    ...                             frozenset("ab"): 4.0}.__getitem__)
    {'a': 2.5, 'b': 1.5}
    """
    coalitions = {
        frozenset(members): value(frozenset(members))
        for size in range(len(agents) + 1)
        for members in itertools.combinations(agents, size)
    }
    weights = [1 / (len(agents) * math.comb(len(agents) - 1, size)) for size in range(len(agents))]
    return {
        agent: math.fsum(
            weights[len(members)] * (coalitions[members | {agent}] - found)
            for members, found in coalitions.items()
            if agent not in members
        )
        for agent in agents
    }


def sampled_shapley_values(
    agents: Collection[str], value: Callable[[frozenset[str]], float], orders: int, random: Random
) -> dict[str, float]:
    """Return unbiased estimates of the Shapley values, from random orders in which the agents join.

    Each order is followed by its reverse, which lowers the variance. ``value`` is called once for each coalition.

    Args:
        agents: names of the A agents.
        value: function that returns the return of a coalition.
        orders: number of orders, each with its reverse; at most ``2 (A - 1) orders + 2`` coalitions.
        random: source of the orders.

    >>> sampled_shapley_values("abc", lambda members: float(len(members)), 2, Random(0))
    {'a': 1.0, 'b': 1.0, 'c': 1.0}
    """
    value, gains = functools.cache(value), {agent: list[float]() for agent in agents}
    for _ in range(orders):
        order = random.sample(sorted(agents), len(agents))
        for joining in (order, order[::-1]):
            members: frozenset[str] = frozenset()
            for agent in joining:
                gains[agent].append(value(members | {agent}) - value(members))
                members |= {agent}
    return {agent: math.fsum(found) / (2 * orders) for agent, found in gains.items()}
