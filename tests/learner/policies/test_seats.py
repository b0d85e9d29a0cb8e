"""Which policy decides for each agent."""

from __future__ import annotations

import pytest

from mrlm_pl.learner.policies.seats import seated_policy


@pytest.mark.parametrize(
    ("seats", "policies", "policy"),
    [
        ({"critic": "b"}, ["a", "b"], "b"),
        ({}, ["a"], "a"),
        ({}, ["critic", "a"], "critic"),
        ({"solver": "a"}, ["a", "b"], None),
    ],
)
def test_an_agent_s_seat_then_the_only_policy_then_the_one_of_its_name_decides(
    seats: dict[str, str], policies: list[str], policy: str | None
) -> None:
    assert seated_policy("critic", seats, policies) == policy
