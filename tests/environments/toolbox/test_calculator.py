from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mrlm_environments.toolbox.calculator import Calculator, evaluate, shown

from mrlm_pl.environment.tools import ToolError, argument_fault


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("sqrt(16)", "4"),
        ("sin(pi/2)", "1"),
        ("1e3", "1000"),
        ("15% of 280", "42"),
        ("50%", "0.5"),
        ("200 + 10%", "200.1"),
        ("17 % 5", "2"),
        ("17%(2+3)", "2"),
        ("2^10", "1024"),
        ("2^3^2", "512"),
        ("2**-1", "0.5"),
        ("-2^2", "-4"),
        ("17*23+4=?", "395"),
        ("5!", "120"),
        ("3!!", "720"),
        ("2*5!", "240"),
        ("2^3!", "64"),
        ("-5!", "-120"),
        ("factorial(20)", "2432902008176640000"),
        ("0.1+0.2", "0.3"),
        ("1/7*7", "1"),
        ("10/2", "5"),
        ("7//2", "3"),
        ("1/3", "0.333333333333333"),
        ("sqrt(2)", "1.4142135623731"),
        ("sqrt(1/4)", "0.5"),
        ("max(1,234)", "234"),
        ("SQRT(9) × 2 ÷ 3 − 1", "1"),
        ("round(2.567, 2)", "2.57"),
        ("comb(52, 5)", "2598960"),
        ("log(100, 10)", "2"),
        ("ln(e)", "1"),
        ("(10**500)/(10**499)", "10"),
        ("0.1**500", "1e-500"),
        ("007", "7"),
    ],
)
def test_values(expression: str, value: str) -> None:
    assert Calculator().call({"expression": expression}) == value


def test_whole_numbers_stay_exact() -> None:
    assert evaluate("123456789*987654321*10^20") == 123456789 * 987654321 * 10**20
    assert type(evaluate("6/4*2")) is int
    assert type(evaluate("15% of 280")) is int
    assert evaluate("1/3+1/6") == Fraction(1, 2)
    assert shown(evaluate("2^300")) == str(2**300)


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("9**9**9", "too large"),
        ("9^9^9^9", "too large"),
        ("1e99999999", "1000 digits"),
        ("factorial(1000000)", "too large"),
        ("comb(1000000000, 500000000)", "too large"),
        ("perm(100000, 50000)", "too large"),
        ("exp(1000)", "too large"),
        ("10.5^100000", "too large"),
        ("1/0", "division by zero"),
        ("0^-1", "division by zero"),
        ("5 % 0", "division by zero"),
        ("sqrt(-1)", "no real value"),
        ("(-8)^(1/3)", "no real value"),
        ("log(0)", "no real value"),
        ("2.5!", "not a whole number"),
        ("(-1)!", "no real value"),
        ("", "empty"),
        ("=?", "empty"),
        ("2(3)", "sign between"),
        ("2pi", "not an expression"),
        ("1,234*2", "not 1,234"),
        ("(1).real", "'.' is not allowed"),
        ("__import__('os')", "not allowed"),
        ("_fraction(1, 2)", "not allowed"),
        ("pow(2, 3)", "no function 'pow'"),
        ("x+1", "no name 'x'"),
        ("max()", "1 or more"),
        ("max(1, **2)", "not an expression"),
        ("[1][0]", "not allowed"),
        ("lambda: 1", "not allowed"),
        ("not 1", "not an expression"),
        ("1 < 2", "not allowed"),
        ("1 and 2", "not an expression"),
        ("5 of 3", "per cent"),
        ("1\x002", "not allowed"),
        ("\ud800", "not allowed"),
        ("٣+1", "not allowed"),
        ("1" * 2000, "too long"),
        ("1+" * 3000 + "1", "4000"),
        ("-" * 300 + "1", "deep"),
        ("**".join("2" * 500), "deep"),
        ("sqrt(" * 150 + "1" + ")" * 150, "deep"),
    ],
)
def test_what_has_no_value_is_told_why(expression: str, reason: str) -> None:
    with pytest.raises(ToolError, match=reason):
        evaluate(expression)


def test_a_long_sum_is_no_deep_nesting() -> None:
    assert evaluate("+".join(["1"] * 1000)) == 1000


@settings(max_examples=300)
@given(st.text(alphabet="0123456789.e+-*/%^!(), sqrtfaciolmbpwn", max_size=60))
def test_any_text_has_a_value_or_a_reason_in_bounded_time(expression: str) -> None:
    try:
        text = shown(evaluate(expression))
    except ToolError:
        return
    assert len(text) <= 1003


def test_the_schema_wants_a_text() -> None:
    assert argument_fault(Calculator.schema, {"expression": "1"}) is None
    assert "expression" in (argument_fault(Calculator.schema, {}) or "")
    assert argument_fault(Calculator.schema, {"expression": 3}) is not None
