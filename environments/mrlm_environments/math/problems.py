"""Procedural mathematics problems of five difficulties, each with its exact answer and a short worked solution.

Every generator draws from a ``random.Random`` and returns a :class:`Problem`. Difficulty 1 is written for
character-level models of a few hundred thousand weights (numbers up to 20, about 15 to 35 characters); difficulty 5
asks for several steps, percentages, decimals and fractions. All texts are plain ASCII.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from random import Random
from typing import Literal, get_args

from mrlm_environments.toolbox.calculator import evaluate

Kind = Literal["arithmetic", "algebra", "word", "multistep"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_DIFFICULTY = 5

NAMES = ("Ann", "Ben", "Eva", "Ida", "Leo", "Mia", "Sam", "Tom")
THINGS = ("cups", "eggs", "hats", "keys", "nuts", "pens", "toys")

_value = lru_cache(2**14)(evaluate)
"""The value of a step; easy problems repeat steps, and a task of a held-out split takes ten problems on average."""


@dataclass(frozen=True)
class Problem:
    """One problem.

    Args:
        question: text that poses it.
        answer: exact answer, an integer, a decimal or a fraction such as ``7/3``.
        solution: steps such as ``7*8=56; 56-5=51``; the last number is the answer.
        key: key that is equal for problems that differ in wording only (names and things).
    """

    question: str
    answer: str
    solution: str
    key: str


def generate_problem(rng: Random, kind: Kind, difficulty: int) -> Problem:
    """Return a problem of one kind and difficulty.

    Args:
        rng: source of all choices.
        kind: kind of the problem, which selects the generator.
        difficulty: difficulty from 1 (easiest) to 5.

    >>> generate_problem(Random(0), "arithmetic", 1)
    Problem(question='What is 14 - 2?', answer='12', solution='14-2=12', key='14-2')
    """
    return _GENERATORS[kind](rng, difficulty)


def decimal_text(value: Fraction) -> str:
    """Return the value as an integer, as a finite decimal if it has one, else as a fraction.

    >>> decimal_text(Fraction(6, 2)), decimal_text(Fraction(-7, 4)), decimal_text(Fraction(7, 3))
    ('3', '-1.75', '7/3')
    """
    decimals = next((decimals for decimals in range(13) if 10**decimals % value.denominator == 0), 0)
    return f"{Decimal(f'{value * 10**decimals}e-{decimals}'):f}" if decimals else str(value)


def _problem(question: str, answer: int | Fraction, steps: Sequence[str], key: str) -> Problem:
    return Problem(question, decimal_text(Fraction(answer)), "; ".join(steps), key)


def _problem_from_steps(question: str, key: str, *steps: str) -> Problem:
    """Return a problem whose answer is the value of the last step; each step is an expression of numbers.

    >>> _problem_from_steps("3 bags of 4 nuts, 2 lost?", "bags", "3*4", "12-2").solution
    '3*4=12; 12-2=10'
    """
    values = [Fraction(_value(step)) for step in steps]
    equations = [f"{step}={decimal_text(value)}" for step, value in zip(steps, values, strict=True)]
    return _problem(question, values[-1], equations, key)


def _expression_problem(expression: str, *steps: str) -> Problem:
    """Return the problem that asks for an expression's value, in one step by default."""
    key = expression.replace(" ", "")
    return _problem_from_steps(f"What is {expression}?", key, *(steps or [key]))


def _arithmetic(rng: Random, difficulty: int) -> Problem:
    operator = rng.choice("+-" if difficulty == 1 else "+-*/")
    if operator in "+-":
        return _sum_or_difference(rng, difficulty, operator)
    return _product(rng, difficulty) if operator == "*" else _quotient(rng, difficulty)


def _sum_or_difference(rng: Random, difficulty: int, operator: str) -> Problem:
    low, high = ((1, 20), (10, 99), (100, 999), (1000, 9999), (1000, 99999))[difficulty - 1]
    a, b = Fraction(rng.randint(low, high)), Fraction(rng.randint(low, high))
    if operator == "-" and difficulty < 4:
        a, b = max(a, b), min(a, b)
    if difficulty == MAX_DIFFICULTY:
        a, b = a / 100, b / 100
    return _expression_problem(f"{decimal_text(a)} {operator} {decimal_text(b)}")


def _product(rng: Random, difficulty: int) -> Problem:
    (a_low, a_high), (b_low, b_high) = (
        ((2, 12), (2, 9)),
        ((11, 99), (2, 9)),
        ((11, 99), (11, 99)),
        ((101, 999), (11, 99)),
    )[difficulty - 2]
    a, b = rng.randint(a_low, a_high), rng.randint(b_low, b_high)
    steps: list[str] = []
    if difficulty == 3 and a % 10:
        tens, ones = a - a % 10, a % 10
        steps = [f"{tens}*{b}", f"{ones}*{b}", f"{tens * b}+{ones * b}"]
    elif difficulty > 3 and b % 10:
        tens, ones = b - b % 10, b % 10
        steps = [f"{a}*{tens}", f"{a}*{ones}", f"{a * tens}+{a * ones}"]
    return _expression_problem(f"{a} * {b}", *steps)


def _quotient(rng: Random, difficulty: int) -> Problem:
    if difficulty == MAX_DIFFICULTY:
        divisor = rng.choice((4, 8, 16, 20, 25, 40))
        dividend = rng.randint(101, 999)
    else:
        (d_low, d_high), (q_low, q_high) = (((2, 9), (2, 12)), ((2, 9), (11, 99)), ((11, 49), (11, 99)))[difficulty - 2]
        divisor = rng.randint(d_low, d_high)
        dividend = divisor * rng.randint(q_low, q_high)
    return _expression_problem(f"{dividend} / {divisor}")


def _algebra(rng: Random, difficulty: int) -> Problem:
    if difficulty == 1:
        return _shifted_unknown(rng)
    return _inequality(rng, difficulty) if rng.random() < 0.3 else _linear_equation(rng, difficulty)


def _shifted_unknown(rng: Random) -> Problem:
    x, a = rng.randint(1, 20), rng.randint(1, 10)
    if rng.choice("+-") == "+":
        equation, step = f"x + {a} = {x + a}", f"{x + a}-{a}={x}"
    else:
        x = max(x, a)
        equation, step = f"x - {a} = {x - a}", f"{x - a}+{a}={x}"
    return _problem(f"Solve {equation}", x, [f"x={step}"], equation)


def _linear_equation(rng: Random, difficulty: int) -> Problem:
    """Return ``ax + b = c``, from difficulty 4 with x on both sides, at 5 with a bracket or a fraction as solution."""
    low, high = (2, 9) if difficulty < 4 else (2, 15)
    a, b = rng.randint(low, high), rng.randint(1, 10 * (difficulty - 1))
    x = rng.randint(1, 12) if difficulty == 2 else rng.randint(-12, 12)
    if difficulty < 4:
        c = a * x + b
        steps = [f"{c}-{b}={c - b}", f"x={c - b}/{a}={x}"]
        return _problem(f"Solve {a}x + {b} = {c}", x, steps, f"{a}x+{b}={c}")
    d = rng.randint(1, a - 1)
    dx = "x" if d == 1 else f"{d}x"
    if difficulty == 4:
        c = (a - d) * x + b
        equation = f"{a}x + {b} = {dx} {'-' if c < 0 else '+'} {abs(c)}"
        value, inner = Fraction(x), b
        steps = []
    else:
        c = rng.randint(1, 99)
        equation = f"{a}(x + {b}) = {dx} + {c}"
        inner = a * b
        value = Fraction(c - inner, a - d)
        steps = [f"{a}*{b}={inner}"]
    steps += [f"{a}-{d}={a - d}", f"{c}-{inner}={c - inner}", f"x={c - inner}/{a - d}"]
    if decimal_text(value) != f"{c - inner}/{a - d}":
        steps[-1] += f"={decimal_text(value)}"
    return _problem(f"Solve {equation}", value, steps, equation)


def _inequality(rng: Random, difficulty: int) -> Problem:
    """Return the smallest integer with ``ax + b > c``, or from difficulty 4 the largest with ``c - ax > b``."""
    b = rng.randint(1, 10 * (difficulty - 1))
    if difficulty == 2:
        x = rng.randint(1, 20)
        relation = f"x + {b} > {x + b - 1}"
        step = f"{x + b - 1}-{b}={x - 1}"
        return _problem(f"Smallest integer x with {relation}?", x, [step, f"{x - 1}+1={x}"], relation)
    a, bound = rng.randint(2, 3 * difficulty), rng.randint(10, 30 * difficulty)
    if difficulty == 3:
        extreme, relation, x = "Smallest", f"{a}x + {b} > {bound}", (bound - b) // a + 1
    else:
        extreme, relation, x = "Largest", f"{bound} - {a}x > {b}", -((b - bound) // a) - 1
    steps = [f"{bound}-{b}={bound - b}", f"{a}*{x}={a * x}", f"x={x}"]
    return _problem(f"{extreme} integer x with {relation}?", x, steps, relation)


def _word(rng: Random, difficulty: int) -> Problem:
    story = rng.choice(_STORIES[difficulty - 1])
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    return story(rng, name, thing)


def _gains(rng: Random, name: str, thing: str) -> Problem:
    a, b = rng.randint(1, 20), rng.randint(1, 10)
    return _problem_from_steps(f"{name} has {a} {thing}, gets {b}. Total?", f"gains {a} {b}", f"{a}+{b}")


def _loses(rng: Random, name: str, thing: str) -> Problem:
    a, b = rng.randint(2, 20), rng.randint(1, 10)
    a, b = max(a, b), min(a, b)
    return _problem_from_steps(f"{name} has {a} {thing}, loses {b}. Left?", f"loses {a} {b}", f"{a}-{b}")


def _bags(rng: Random, name: str, thing: str) -> Problem:
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    return _problem_from_steps(f"{name} has {a} bags of {b} {thing}. Total?", f"bags {a} {b}", f"{a}*{b}")


def _shares(rng: Random, name: str, thing: str) -> Problem:
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    question = f"{name} puts {a * b} {thing} evenly in {a} bags. How many per bag?"
    return _problem_from_steps(question, f"shares {a} {b}", f"{a * b}/{a}")


def _bags_less(rng: Random, name: str, thing: str) -> Problem:
    a, b = rng.randint(2, 12), rng.randint(3, 20)
    c = rng.randint(1, a * b - 1)
    question = f"{name} buys {a} bags of {b} {thing} and gives away {c}. How many are left?"
    return _problem_from_steps(question, f"bags less {a} {b} {c}", f"{a}*{b}", f"{a * b}-{c}")


def _times_as_many(rng: Random, name: str, thing: str) -> Problem:
    a, b = rng.randint(3, 40), rng.randint(2, 6)
    friend = rng.choice([other for other in NAMES if other != name])
    question = f"{name} has {a} {thing}. {friend} has {b} times as many. How many do they have together?"
    return _problem_from_steps(question, f"times as many {a} {b}", f"{a}*{b}", f"{a}+{a * b}")


def _discount(rng: Random, name: str, thing: str) -> Problem:
    percent, price = rng.choice((5, 10, 15, 20, 25, 30, 40, 50)), rng.randint(2, 50) * 20
    off = price * percent // 100
    question = f"A box of {thing} costs ${price}. {name} gets {percent}% off. How many dollars does {name} pay?"
    return _problem_from_steps(question, f"discount {percent} {price}", f"{price}*{percent}/100", f"{price}-{off}")


def _journey(rng: Random, name: str, thing: str) -> Problem:
    first, second = rng.randint(4, 30), rng.randint(4, 30)
    hours, more = rng.randint(2, 9), rng.randint(2, 9)
    question = (
        f"{name} rides {first} km per hour for {hours} hours, then {second} km per hour for {more} hours. "
        f"How many km is that?"
    )
    steps = f"{first}*{hours}", f"{second}*{more}", f"{first * hours}+{second * more}"
    return _problem_from_steps(question, f"journey {first} {hours} {second} {more}", *steps)


def _savings(rng: Random, name: str, thing: str) -> Problem:
    wage, hours, days = rng.randint(2, 12) * 5, rng.randint(2, 9), rng.choice((2, 4, 6, 8, 10))
    percent, price = rng.choice((10, 20, 30, 40, 60)), rng.randint(5, 60)
    earned = wage * hours * days
    spent = earned * percent // 100
    question = (
        f"{name} earns ${wage} per hour and works {hours} hours a day for {days} days. {name} spends {percent}% of it "
        f"on rent and ${price} on {thing}. How many dollars are left?"
    )
    steps = f"{wage}*{hours}", f"{wage * hours}*{days}", f"{earned}*{percent}/100", f"{earned}-{spent}"
    key = f"savings {wage} {hours} {days} {percent} {price}"
    return _problem_from_steps(question, key, *steps, f"{earned - spent}-{price}")


def _ratio(rng: Random, name: str, thing: str) -> Problem:
    a, b, unit, given = rng.randint(2, 9), rng.randint(2, 9), rng.randint(3, 30), rng.randint(1, 9)
    friend = rng.choice([other for other in NAMES if other != name])
    total, mine = (a + b) * unit, a * unit
    question = (
        f"{name} and {friend} share {total} {thing} in the ratio {a}:{b}. Then {friend} gives {given} {thing} to "
        f"{name}. How many {thing} does {name} have?"
    )
    steps = f"{a}+{b}", f"{total}/{a + b}", f"{a}*{unit}", f"{mine}+{given}"
    return _problem_from_steps(question, f"ratio {a} {b} {unit} {given}", *steps)


_STORIES: tuple[tuple[Callable[[Random, str, str], Problem], ...], ...] = (
    (_gains, _loses),
    (_bags, _shares),
    (_bags_less, _times_as_many),
    (_discount, _journey),
    (_savings, _ratio),
)


def _multistep(rng: Random, difficulty: int) -> Problem:
    """Return a sum at difficulty 1; then one with a product, brackets, two brackets, and a division."""
    if difficulty == 1:
        a, b, c = (rng.randint(1, 9) for _ in range(3))
        operator = rng.choice("+-")
        if operator == "-":
            c = min(c, a + b)
        return _expression_problem(f"{a} + {b} {operator} {c}", f"{a}+{b}", f"{a + b}{operator}{c}")
    low, high = ((2, 9), (2, 12), (11, 30), (11, 60))[difficulty - 2]
    a, b, c, d = (rng.randint(low, high) for _ in range(4))
    if difficulty == 2:
        operator = rng.choice("+-")
        c = min(c, a * b)
        return _expression_problem(f"{a} * {b} {operator} {c}", f"{a}*{b}", f"{a * b}{operator}{c}")
    if difficulty == 3:
        return _expression_problem(f"({a} + {b}) * {c} - {d}", f"{a}+{b}", f"{a + b}*{c}", f"{(a + b) * c}-{d}")
    if difficulty == 4:
        steps = f"{a}+{b}", f"{c}-{d}", f"{a + b}*{c - d}", f"{(a + b) * (c - d)}+{a}"
        return _expression_problem(f"({a} + {b}) * ({c} - {d}) + {a}", *steps)
    k = rng.randint(2, 9)
    parts = f"{k * b}/{k}", f"{b}+{c}", f"{b + c}*{d}", f"{a}*{k}", f"{(b + c) * d}-{a * k}"
    return _expression_problem(f"({k * b} / {k} + {c}) * {d} - {a} * {k}", *parts)


_GENERATORS: dict[Kind, Callable[[Random, int], Problem]] = {
    "arithmetic": _arithmetic,
    "algebra": _algebra,
    "word": _word,
    "multistep": _multistep,
}
