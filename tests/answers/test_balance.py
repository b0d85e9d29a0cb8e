"""Balanced answers: the numbers that remain, independent of chance and order."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from mrlm_pl.answers.balance import balance
from mrlm_pl.answers.records import Answer
from mrlm_pl.errors import ConfigurationError, DataError


def some(question: str, right: int, wrong: int) -> list[Answer]:
    """Return ``right`` distinct right answers and ``wrong`` wrong ones."""
    made = [Answer(question, f"{question}: 1+{n}={n + 1}", 1.0) for n in range(right)]
    return made + [Answer(question, f"{question}: no {n}", 0.0) for n in range(wrong)]


def counts(answers: list[Answer]) -> dict[str, list[int]]:
    found = Counter((answer.question, answer.correct) for answer in answers)
    return {question: [found[question, 1.0], found[question, 0.0]] for question, _ in found}


def everything(balanced: Any) -> list[Answer]:
    return [answer for answers in balanced.splits.values() for answer in answers]


def test_each_question_has_equally_many_and_the_report_adds_up() -> None:
    answers = some("a", 5, 2) + some("b", 1, 9) + some("c", 3, 0) + some("d", 0, 4) + some("e", 2, 2)
    answers += some("a", 2, 0)  # two duplicates
    answers += [Answer("e", " both  ways", 1.0), Answer("e", "both ways", 0.0)]
    answers += [Answer("f", "both", 1.0), Answer("f", "both", 0.0)]
    balanced = balance(answers, validation_share=0.0)
    assert counts(everything(balanced)) == {"a": [2, 2], "b": [1, 1], "e": [2, 2]}
    report = balanced.report
    assert report["questions"]["read"] == 6
    assert report["questions"]["kept"] == 3
    assert report["questions"]["dropped"]["only right answers"] == 1
    assert report["questions"]["dropped"]["only wrong answers"] == 1
    assert report["answers"] == {
        "read": 34,
        "duplicates": 2,
        "contradicted": 4,
        "dropped": 18,  # 3 of a, 8 of b, 3 of c, 4 of d
        "generated": 0,
        "kept": 10,
    }
    assert report["right_share"] == {"before": (5 + 1 + 3 + 2 + 2 + 1 + 1) / 34, "after": 0.5}
    assert report["balance"] == {"max_difference": 0, "fewest_answers": 2, "most_answers": 4}
    assert report["dropped_questions"] == [
        {"question": "c", "why": "only right answers", "answers": 3},
        {"question": "d", "why": "only wrong answers", "answers": 4},
        {"question": "f", "why": "only contradicted answers", "answers": 2},
    ]


def test_a_question_may_keep_at_most_so_many_of_each_kind() -> None:
    balanced = balance(some("a", 5, 4) + some("b", 1, 3), per_question=2, validation_share=0.0)
    assert counts(everything(balanced)) == {"a": [2, 2], "b": [1, 1]}


def test_wrong_answers_are_made_where_they_lack_and_marked() -> None:
    answers = [
        Answer("7*8?", "7*8=56", 1.0, "math/train/0", 0.7),
        Answer("1+1?", "1+1=2", 1.0),
        Answer("x?", "no", 0.0),
    ]
    answers += [Answer("1+1?", "about 2", 1.0), Answer("1+1?", "1+1=3", 0.0)]
    balanced = balance(answers, fill_wrong=True, validation_share=0.0)
    kept = everything(balanced)
    assert counts(kept) == {"7*8?": [1, 1], "1+1?": [2, 2]}
    made = [answer for answer in kept if answer.generated]
    assert len(made) == balanced.report["answers"]["generated"] == 2
    assert (made[0].task, made[0].temperature, made[0].to_row()["generated"]) == ("math/train/0", None, True)
    assert made[0].answer.startswith("7*8=") or made[0].answer.split("*")[0] in ("6", "8", "7")
    assert "1+1=3" not in [answer.answer for answer in made], "it is there already"
    assert balanced.report["questions"]["dropped"]["only right answers"] == 0


def test_no_question_is_in_both_splits_whatever_its_white_space() -> None:
    answers = [answer for n in range(50) for answer in some(f"q {n}", 1, 1)]
    answers += [Answer(f"q  {n}\n", "another", 0.0) for n in range(50)] + [
        Answer(f" q {n}", "third", 1.0) for n in range(50)
    ]
    balanced = balance(answers, validation_share=0.3)
    train, held_out = ({answer.question for answer in answers} for answers in balanced.splits.values())
    assert len(train) == 35
    assert len(held_out) == 15
    assert not train & held_out
    assert {tuple(found) for found in counts(everything(balanced)).values()} == {(2, 2)}


def test_the_outcome_depends_on_the_seed_and_not_on_the_order() -> None:
    answers = [answer for n in range(20) for answer in some(f"q{n}", 4, 2)]
    mixed = random.Random(0).sample(answers, len(answers))
    found = [balance(given, seed=seed) for given, seed in ((answers, 0), (mixed, 0), (answers, 1))]
    first, same, other = ({name: set(part) for name, part in one.splits.items()} for one in found)
    assert first == same != other
    assert first["train"] | first["validation"] != other["train"] | other["validation"], "other answers are dropped"
    assert balance(answers, fill_wrong=True).splits == balance(answers, fill_wrong=True).splits


def test_one_question_at_least_is_held_out() -> None:
    few = some("a", 1, 1) + some("b", 1, 1)
    assert [len(part) for part in balance(few, validation_share=0.01).splits.values()] == [2, 2]
    assert [len(part) for part in balance(some("a", 1, 1)).splits.values()] == [2, 0]


def test_what_cannot_be_balanced_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"none of 2 questions .* 1 have only right answers, 1 have only wrong .*fill-wrong"
    ):
        balance(some("a", 1, 0) + some("b", 0, 1))
    with pytest.raises(DataError, match=r"'correct' is 0\.5"):
        balance([*some("a", 1, 1), Answer("a", "?", 0.5)])
    with pytest.raises(ConfigurationError, match="per_question is 0"):
        balance(some("a", 1, 1), per_question=0)
    for share in (1.0, -0.1, float("nan")):
        with pytest.raises(ConfigurationError, match="validation_share is"):
            balance(some("a", 1, 1), validation_share=share)


def test_what_was_called_both_right_and_wrong_is_not_made_again() -> None:
    both = [Answer("q", f"about {n}", correct) for n in (1, 3) for correct in (1.0, 0.0)]
    answers = [Answer("q", "about 2", 1.0), Answer("q", "About 2", 1.0), *both]
    made = [answer.answer for answer in everything(balance(answers, fill_wrong=True, validation_share=0.0))]
    assert not {"about 1", "about 3"} & set(made)
    assert "about 5" in made  # the only other wrong answer


@pytest.mark.parametrize(("questions", "share", "held_out"), [(5, 0.95, 4), (1, 0.6, 0), (2, 0.01, 1)])
def test_there_is_always_something_to_train_on(questions: int, share: float, held_out: int) -> None:
    answers = [answer for number in range(questions) for answer in some(f"q{number}", 1, 1)]
    splits = balance(answers, validation_share=share).splits
    assert {name: len(kept) // 2 for name, kept in splits.items()} == {
        "train": questions - held_out,
        "validation": held_out,
    }
