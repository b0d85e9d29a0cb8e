"""Wrong answers generated from right ones: plausible, consistent, and never right."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from random import Random

import pytest
from mrlm_environments.answers import read_answer

from mrlm_pl.answers.numbers import extract_answer, number_value
from mrlm_pl.answers.wrong import wrong_answers
from tests.support.environments.data_sets import files_of, rows_of

SOLUTION = "In May she sold 48/2 = <<48/2=24>>24 clips.\nThat is 48+24 = <<48+24=72>>72 clips in all.\n#### 72"


def made(text: str, count: int = 50, seed: int = 0, question: str = "") -> list[str]:
    return wrong_answers(question, [text], count, (), Random(seed))


def test_every_way_to_be_wrong_occurs_and_no_other() -> None:
    # off by one (25, 23), by ten (34, 14), swapped (42), a digit changed by 3 (54, 27, 21), an operand off by one
    expected = {"11+13=25", "11+13=23", "11+13=34", "11+13=14", "11+13=42", "11+13=54", "11+13=27", "11+13=21"}
    expected |= {"12+13=25", "10+13=23", "11+14=25", "11+12=23"}
    assert set(made("11+13=24")) == expected


def test_an_operand_changes_only_in_a_whole_equation_with_a_result_of_zero_or_above() -> None:
    assert all("3*4" in text for text in made("2+3*4=14"))  # 3*4 is 12
    assert set(made("3-3=0")) == {"3-3=1", "3-3=3", "4-3=1", "3-2=1"}


def test_the_number_changes_from_its_result_on_and_nowhere_before() -> None:
    for text in made("12-6=6; 6*2=12"):
        before, _, result = text.rpartition("=")
        assert before.startswith("12-6=6; ")
        assert result != "12"


def test_a_worked_solution_stays_consistent() -> None:
    for text in made(SOLUTION):
        first, _, rest = text.partition("\n")
        assert first == SOLUTION.partition("\n")[0]
        assert "72" not in rest
        stated = rest.rpartition("#### ")[2]
        assert rest.count(stated) == 3
        told, calculated = rest[len("That is ") :].split(" = <<")
        assert calculated.startswith(told + "="), "the sum and its calculation have the same operands"


@pytest.mark.parametrize(
    ("right", "places"),
    [
        ("The answer is 5. I used 3 steps", 5),
        ("costs $1,234.50", Fraction("1234.5")),
        ("x=-3", -3),
        ("50%", Fraction(1, 2)),
    ],
)
def test_what_is_read_as_the_answer_is_another_value(right: str, places: Fraction) -> None:
    texts = made(right)
    assert len(texts) >= 2
    for text in texts:
        answer = extract_answer(text)
        assert answer is not None
        assert number_value(answer) != places


def test_a_text_that_would_still_be_read_as_right_is_not_made() -> None:
    assert made("The answer is 5, as 10-5=5") == []  # the number changes from its result on, and the answer is before


def test_numbers_keep_their_form() -> None:
    assert all(
        text.startswith("costs $") and "," in text and len(text.split(".")[1]) == 2 for text in made("costs $1,234.50")
    )
    assert "-" not in "".join(made("0"))


INFERENCE = "Premise: P\nHypothesis: H\nIs this entailment, neutral or contradiction?"


def test_labels_are_exchanged_throughout() -> None:
    assert set(made("It is not neutral, so Entailment.", question=INFERENCE)) == {
        "It is not entailment, so Contradiction.",
        "It is not contradiction, so Neutral.",
    }
    assert set(made("entailment")) == {"neutral", "contradiction"}


@pytest.mark.parametrize(
    "right",
    [
        "Neutral, not entailment",
        "The label is neutral, for contradiction is ruled out and so is not entailment",
        "3 nuts of 5: entailment",
    ],
)
def test_the_label_that_is_stated_is_never_kept(right: str) -> None:
    stated = read_answer(right, "nli")
    texts = made(right, question=INFERENCE)
    assert {read_answer(text, "nli") for text in texts} == {"entailment", "neutral", "contradiction"} - {stated}


def test_a_number_beside_the_name_of_a_label_is_what_is_changed() -> None:
    texts = made("The soap is neutral.\n7+5=12\n#### 12", question="How many bars of the neutral soap are there?")
    assert texts
    assert not [text for text in texts if extract_answer(text) == "12"]
    assert all(text.startswith("The soap is neutral.\n") for text in texts)


@pytest.mark.parametrize(
    ("right", "question"),
    [
        ("This contradicts the premise, it is no entailment", INFERENCE),
        ("It contradicts that there are 3", INFERENCE),
        ("The soap is neutral, and there are 12", "Which, and how many?"),
    ],
)
def test_where_it_is_not_plain_what_is_meant_nothing_is_made(right: str, question: str) -> None:
    assert made(right, question=question) == []


def test_what_cannot_be_changed_makes_nothing() -> None:
    assert made("I do not know") == made("it entails that") == made("") == []


def test_right_answers_take_turns_and_what_is_there_is_not_made_again() -> None:
    both = wrong_answers("", ["1+1=2", "about 2"], 4, (), Random(0))
    assert [text.startswith("about") for text in both] == [False, True, False, True]
    again = wrong_answers("", ["1+1=2", "about 2"], 4, both, Random(0))
    assert not set(again) & set(both)
    lines = wrong_answers("", ["so\n2"], 4, ["so 1", "so  3"], Random(0))
    assert lines == ["so\n5"], "other whitespace makes no other answer"
    assert len(made("about 2")) == len(set(made("about 2"))) == 3  # 1, 3 and 5


def test_made_answers_depend_on_the_seed_alone() -> None:
    assert made(SOLUTION, 3) == made(SOLUTION, 3)
    assert len({tuple(made(SOLUTION, 3, seed)) for seed in range(5)}) > 1


@pytest.mark.parametrize("path", files_of("gsm8k", "gsm8k_train.jsonl"))
def test_nearly_every_solution_of_gsm8k_has_a_wrong_one(path: Path) -> None:
    rows = rows_of(path)[:400]
    found = [(row["answer"], wrong_answers(row["question"], [row["answer"]], 2, (), Random(0))) for row in rows]
    assert sum(len(texts) == 2 for _, texts in found) > 0.95 * len(rows)
    for right, texts in found:
        expected = number_value(right.rpartition("#### ")[2].replace(",", ""))
        for text in texts:
            assert number_value(text.rpartition("#### ")[2]) != expected
