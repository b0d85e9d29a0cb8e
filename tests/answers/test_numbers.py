"""The bounds of the readers of numbers; tests/environments/test_math.py has their values."""

from __future__ import annotations

from typing import Any

import pytest

from mrlm_pl.answers import numbers


def test_a_reply_of_many_equations_is_read_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of them took seconds."""
    computed: list[Any] = []
    chain_value = numbers._chain_value

    def counted(terms: list[tuple[str, str]]) -> Any:
        computed.append(terms)
        return chain_value(terms)

    monkeypatch.setattr(numbers, "_chain_value", counted)
    assert not numbers.shows_steps("1+1=2 " * 10_000, "What is 7 * 8?", "56")
    assert len(computed) == 1
    many = " ".join(f"{number}+1={number + 2}" for number in range(8, 8_000))
    assert not numbers.shows_steps(many, "What is 7 * 8?", "56")
    assert len(computed) == 1 + numbers.MAX_EQUATIONS
    assert numbers.shows_steps(f"{many}, and 7 * 8 = 56", "What is 7 * 8?", "56")
