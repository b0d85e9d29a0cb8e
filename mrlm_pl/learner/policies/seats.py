"""Seats: which policy decides for each agent."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Mapping

from mrlm_pl.errors import ConfigurationError, did_you_mean, nearest

logger = logging.getLogger(__name__)


def seated_policy(agent: str, seats: Mapping[str, str], policies: Collection[str]) -> str | None:
    """Return the policy that acts for an agent: its seat's, else the only policy, else the policy of the agent's name.

    Return None if no policy qualifies.

    >>> seated_policy("critic", {}, ["main"]), seated_policy("critic", {}, ["solver", "main"])
    ('main', None)
    """
    if agent in seats:
        return seats[agent]
    if len(policies) == 1:
        return next(iter(policies))
    return agent if agent in policies else None


def seat_of(agent: str, seats: Mapping[str, str], policies: Collection[str]) -> str:
    """Return the policy that decides for an agent.

    Raises:
        ConfigurationError: the agent has no seat and there are several policies to choose from.
    """
    policy = seated_policy(agent, seats, policies)
    if policy is not None:
        return policy
    alike = [
        f"{name!r} and {near[0]!r} may be one name, misspelled; otherwise "
        for name in policies
        if (near := difflib.get_close_matches(name, set(policies) - {name}, n=1, cutoff=0.75))
    ]
    raise ConfigurationError(
        f"agent {agent!r} has no seat among the policies {sorted(policies)}; {alike[0] if alike else ''}"
        f"bind it with `seats: {{{agent}: POLICY}}`"
    )


def check_seats(seats: Mapping[str, str], policies: Collection[str], owner: str = "") -> None:
    """Validate that each seat names a policy.

    Raises:
        ConfigurationError: a seat names no policy, or the seats are not a mapping.
    """
    if not isinstance(seats, Mapping):
        raise ConfigurationError(f"{owner}seats is {seats!r}; name the policy of each agent, as in {{'agent': 'main'}}")
    for agent, policy in seats.items():
        if policy not in policies:
            hint = did_you_mean(policy, policies, f"the policies are {sorted(policies)}")
            raise ConfigurationError(f"{owner}seat {agent!r} names policy {policy!r}, which does not exist; {hint}")


def seats_of_run(
    agents: Collection[str], seats: Mapping[str, str], trained: Mapping[str, bool], teachers: Collection[str]
) -> dict[str, str]:
    """Return the policy of each agent of a run; warn of a frozen policy without an agent.

    Args:
        agents: agents of the run.
        seats: policies by agent, as the user gives them.
        trained: whether each policy is trained, by name.
        teachers: policies that need no seat.

    Raises:
        ConfigurationError: an agent has no seat (see :func:`seat_of`), a seat is for none of the agents, or a trained
            policy decides for none.
    """
    for agent in seats:
        if agent not in agents:
            choices = f"the agents are {sorted(agents)}; `--model.seats '{{}}'` drops all seats"
            hint = did_you_mean(agent, agents, choices)
            raise ConfigurationError(f"seats: {agent!r} is not an agent of this run; {hint}")
    bound = {agent: seat_of(agent, seats, list(trained)) for agent in agents}
    used = set(bound.values())
    for name in trained:
        if name in used:
            continue
        if not trained[name]:
            if name not in teachers:
                logger.warning("policy %r decides for no agent; name it in `seats`, or leave it out", name)
            continue
        hint = f"did you mean {near!r}? Otherwise name" if (near := nearest(name, bound.values())) else "name"
        raise ConfigurationError(
            f"policies: {name!r} decides for no agent, so nothing would train it; {hint} it in `seats`, or leave "
            f"it out; the policies in seats are {sorted(used)}"
        )
    return bound
