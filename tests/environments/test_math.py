from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments.math.environment import MathEnvironment
from mrlm_environments.math.problems import KINDS, generate_problem

from mrlm_pl.answers.numbers import MAX_DIGITS, equal_answers, extract_answer, number_value
from mrlm_pl.environment.tasks import split_of
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.seeding import keyed_random
from tests.support.environments.data_sets import files_of, rows_of

FORMATS = json.loads((Path(__file__).parents[1] / "data" / "samples" / "answer_formats.json").read_text())


def graded(reply: str, answer: str = "7", **options: Any):
    """Return the outcome of a reply to a task with a known answer."""
    environment = MathEnvironment(**options)
    task = environment.tasks("train")[0]
    known = type(task)(task.environment, task.split, task.index, task.seed, {**task.data, "answer": answer})
    environment.reset(known)
    return environment.step({"agent": Message("assistant", reply)})


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (r"so \boxed{5} or rather \boxed{7}", "7"),
        (r"\boxed{\frac{1}{2}}", "0.5"),
        ("#### 42", "42"),
        ("I think 3.\n#### 1,234", "1234"),
        ("The answer is 12, not 13 or 14", "12"),
        ("The answer is 25 or 5*5", "25"),
        ("The answer is 5 * 5, or 25.", "25"),
        ("#### 25 (or 20+5)", "25"),
        ("3 apples and 4 pears, so 7", "7"),
        ("x=7-4=3", "3"),
        ("-5", "-5"),
        (r"\boxed{60\,\text{km}/\text{h}}, not 90", "60"),
        (r"so \boxed{5^{\text{th}}} of 9", "5"),
        (r"\boxed{\boldsymbol{5}}: 2 and 3", "5"),
    ],
)
def test_where_the_answer_is_found(reply: str, answer: str) -> None:
    found = extract_answer(reply)
    assert found is not None
    assert equal_answers(found, answer)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1,234", "1234"),
        ("$1,234.00", "1234"),
        ("1.234e3", "1234"),
        ("2468/2", "1234"),
        (r"\frac{1}{2}", "0.5"),
        ("50%", "0.5"),
        ("07", "7"),
    ],
)
def test_answers_are_equal_by_value(first: str, second: str) -> None:
    assert equal_answers(first, second)
    assert not equal_answers(first, "17")


@pytest.mark.parametrize("row", FORMATS, ids=[f"{row['reply'][:40]!a} {row['expected']}" for row in FORMATS])
def test_replies_in_odd_formats_are_judged_as_a_reader_would(row: dict[str, Any]) -> None:
    """The expected judgements are by common sense."""
    found = extract_answer(row["reply"])
    assert (found is not None and equal_answers(found, row["expected"])) is row["right"], found


@pytest.mark.parametrize(
    "text",
    [
        "(",
        "1 1/1",
        "1,111",
        "\\frac{1",
        "<answer>",
        "\\boxed{",
        "\\text{",
        "answer: 5 * ",
        "\u2009",
        "1.1.1",
        "{5",
        "####",
    ],
)
def test_long_replies_of_anything_are_read(text: str) -> None:
    found = extract_answer(text * (100_000 // len(text)))
    assert found is None or number_value(found) is not None or len(found) > MAX_DIGITS


@pytest.mark.parametrize("text", ["answer: 1+1 ", "#### 1+1 "])
def test_one_of_many_stated_operations_is_worked_out(text: str) -> None:
    started = time.thread_time()
    assert extract_answer(text * (100_000 // len(text))) == "2"
    assert time.thread_time() - started < 1.0, "working out all of them takes 4 s"


def test_powers_and_operations_are_bounded() -> None:
    for reply in (r"\boxed{9^{9^{9}}}", r"\boxed{9^99999}", r"\boxed{0^{-1}}", r"\boxed{1/0}"):
        found = extract_answer(reply)
        assert found is None or number_value(found) is None
    assert extract_answer("\\boxed{" + "1+" * 400 + "1}") is None


@pytest.mark.parametrize("hedge", ["25 or 5*6", "25, or 5*6", "5*6 or 25", "25 or 5*5 or 26"])
def test_operations_with_other_values_are_no_answer(hedge: str) -> None:
    assert extract_answer(f"The answer is {hedge}.") is None


@pytest.mark.parametrize("reply", ["", "no idea", "\\boxed{}", "∞", "e", "...", "\x00"])
def test_nothing_to_parse_costs(reply: str) -> None:
    step = graded(reply)
    assert step.rewards["agent"] == pytest.approx(-0.3)
    assert step.success is False
    assert step.metrics["parsed"] == 0.0


def test_scores() -> None:
    assert graded("7").rewards["agent"] == 1.0
    assert graded("8").rewards["agent"] == 0.0
    assert graded("7").components["agent"] == {"correct": 1.0, "unparsed": 0.0}


def test_the_bonus_for_steps_is_paid_only_with_a_right_answer() -> None:
    environment = MathEnvironment(steps_bonus=0.2, difficulty=(1, 1), kinds=["arithmetic"])
    task = environment.tasks("train")[0]
    thought = f"<think>{task.data['solution']}</think>{task.data['answer']}"
    for reply, paid in ((task.data["solution"], 1.2), (task.data["answer"], 1.0), (thought, 1.0), ("1+1=2", 0.0)):
        environment.reset(task)
        assert environment.step({"agent": Message("assistant", reply)}).rewards["agent"] == pytest.approx(paid)


def test_a_retry_says_only_that_the_answer_was_wrong() -> None:
    environment = MathEnvironment(max_attempts=2, difficulty=(5, 5))
    task = environment.tasks("train")[1]
    environment.reset(task)
    step = environment.step({"agent": Message("assistant", "-987654")})
    assert not step.done
    (message,) = step.observations["agent"]
    assert task.data["answer"] not in message.content
    assert not any(letter.isdigit() for letter in message.content)
    assert environment.step({"agent": Message("assistant", task.data["answer"])}).success


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("difficulty", range(1, 6))
def test_worked_solutions_end_in_the_answer(kind: Any, difficulty: int) -> None:
    for index in range(40):
        problem = generate_problem(keyed_random("test", index), kind, difficulty)
        found = extract_answer(problem.solution)
        assert found is not None
        assert equal_answers(found, problem.answer), problem
        assert problem.question.isascii()


def test_arithmetic_is_right_by_pythons_own() -> None:
    environment = MathEnvironment(difficulty=(1, 1), kinds=["arithmetic", "multistep"])
    for index in range(100):
        data = environment.tasks("train")[index].data
        expression = data["question"].removeprefix("What is ").removesuffix("?")
        assert equal_answers(data["answer"], str(eval(expression)))


def test_generated_splits_share_no_problem() -> None:
    environment = MathEnvironment(difficulty=(1, 2))
    keys = {split: {environment.tasks(split)[n].data["key"] for n in range(300)} for split in ("train", "test")}
    assert not keys["train"] & keys["test"]
    assert environment.tasks("test")[5] == MathEnvironment(difficulty=(1, 2)).tasks("test")[5]


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_file_in_gsm8ks_format_is_divided_by_content(tmp_path: Path) -> None:
    rows = [{"question": f"Question {n}?", "answer": f"Steps.\n#### {n}"} for n in range(200)]
    path = write(tmp_path / "data.jsonl", rows)
    environment = MathEnvironment(data=path)
    questions = {split: {task.data["question"] for task in environment.tasks(split)} for split in ("train", "test")}
    assert all(split_of(question) == "train" for question in questions["train"])
    assert not questions["train"] & questions["test"]
    task = environment.tasks("train")[0]
    environment.reset(task)
    assert environment.step({"agent": Message("assistant", f"#### {task.data['answer']}")}).success


def test_faults_of_a_file_are_named(tmp_path: Path) -> None:
    rows = [{"question": "R?"}]
    with pytest.raises(DataError, match=r"1.*answer"):
        list(MathEnvironment(data=write(tmp_path / "d.jsonl", rows)).tasks("train"))
    with pytest.raises(DataError, match=r"d\.jsonl"):
        MathEnvironment(data=str(tmp_path / "d.json")).tasks("train")


@pytest.mark.parametrize(
    "options", [{"difficulty": (3, 1)}, {"difficulty": (0, 9)}, {"kinds": ["art"]}, {"max_attempts": 0}]
)
def test_settings_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        MathEnvironment(**options)


@pytest.mark.parametrize("path", files_of("gsm8k", "gsm8k_train.jsonl"))
def test_every_gold_answer_of_gsm8k_earns_the_maximum(path: Path) -> None:
    for row in rows_of(path):
        value = row["answer"].rpartition("####")[2].strip()
        found = extract_answer(row["answer"])
        assert found is not None
        assert equal_answers(found, value), row
        assert float(value.replace(",", "")) == pytest.approx(float(found.replace(",", "").replace("$", "")))


@pytest.mark.parametrize("answer", ["12", 12, " 12 ", "12.0", "24/2", "Six and six.\n#### 12"])
def test_an_answer_may_be_the_number_alone(tmp_path: Path, answer: object) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"question": f"Q{n}?", "answer": answer}) + "\n" for n in range(40)))
    environment = MathEnvironment(data=str(file))
    task = environment.tasks("train")[0]
    environment.reset(task)
    assert environment.step({"agent": Message("assistant", "It is 12.")}).success


@pytest.mark.parametrize("answer", ["twelve", None, True, "about 12 #", "1e400", "9" * 5000, "inf"])
def test_an_answer_without_a_number_is_refused_with_its_row(tmp_path: Path, answer: object) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"question": "Q?", "answer": answer}) + "\n")
    with pytest.raises(DataError, match=r"row 1: .* must be a number or end in '#### N'"):
        MathEnvironment(data=str(file)).tasks("train")
