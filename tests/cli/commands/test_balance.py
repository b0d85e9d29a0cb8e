"""``mrlm balance``: its files, output and refusals, and its quick start."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def rows_of(path: str) -> list[dict[str, Any]]:
    raw = Path(path).read_bytes()
    return [json.loads(line) for line in (gzip.decompress(raw) if path.endswith(".gz") else raw).decode().splitlines()]


def write(path: str, rows: list[Any]) -> str:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answers(questions: int = 10) -> list[dict[str, Any]]:
    """Two right answers and a wrong one to each question."""
    texts = [("{0}+{0}={1}", True), ("about {1}", True), ("about 1{1}", False)]
    return [
        {"question": f"{n}+{n}?", "answer": text.format(n, 2 * n), "correct": correct}
        for n in range(1, questions + 1)
        for text, correct in texts
    ]


def test_answers_are_balanced_split_paired_and_reported(mrlm: Any) -> None:
    write("answers.jsonl", answers())
    options = ("--output", "b.jsonl.gz", "--pairs", "p.jsonl", "--report", "r.json", "--validation-share", "0.3")
    status, out, err = mrlm("balance", "answers.jsonl", *options)
    assert status == 0, err
    train, held_out = rows_of("b.jsonl.gz"), rows_of("b.validation.jsonl.gz")
    assert (len(train), len(held_out)) == (14, 6)
    assert not {row["question"] for row in train} & {row["question"] for row in held_out}
    assert sum(row["correct"] for row in train) == 7
    pairs = rows_of("p.jsonl")
    assert len(pairs) == 7
    assert len(rows_of("p.validation.jsonl")) == 3
    for pair in pairs:
        (question,), (right,), (wrong,) = (pair[name] for name in ("prompt", "chosen", "rejected"))
        labels = {row["answer"]: row["correct"] for row in train if row["question"] == question["content"]}
        assert labels[right["content"]] is True
        assert labels[wrong["content"]] is False
    report = json.loads(Path("r.json").read_text())
    assert report["balance"]["max_difference"] == 0
    assert report["right_share"] == {"before": 2 / 3, "after": 0.5}
    assert report["answers"]["dropped"] == 10
    assert "10 of 10 kept" in out
    assert "0.6667 before, 0.5000 after" in out
    assert "7 questions, 14 answers in b.jsonl.gz" in out


def test_files_are_equal_for_equal_seeds(mrlm: Any) -> None:
    write("answers.jsonl", answers())
    for name, seed in (("a", "0"), ("b", "0"), ("c", "1")):
        assert mrlm("balance", "answers.jsonl", "--output", f"{name}.jsonl", "--fill-wrong", "--seed", seed)[0] == 0
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes() != Path("c.jsonl").read_bytes()
    made = [row for row in rows_of("a.jsonl") if row.get("generated")]
    assert made
    assert not any(row["correct"] for row in made)


def test_references_are_right_answers_of_the_questions_that_were_answered(mrlm: Any) -> None:
    write("answers.jsonl", [{"question": "3+4?", "answer": "8", "correct": False}])
    rows = [
        {"question": "3+4?", "answer": "3+4=<<3+4=7>>7\n#### 7", "task": 7, "temperature": "warm", "generated": "no"},
        {"question": "5+5?", "answer": "#### 10", "correct": "the data set's own column"},
    ]
    write("gsm8k.jsonl", rows)
    options = ("--references", "gsm8k.jsonl", "--output", "b.jsonl", "--validation-share", "0")
    assert mrlm("balance", "answers.jsonl", *options)[0] == 0
    assert [(row["answer"], row["correct"]) for row in rows_of("b.jsonl")] == [(rows[0]["answer"], True), ("8", False)]
    assert not Path("b.validation.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("answers.jsonl", "--output", "answers.jsonl"), "output: 'answers.jsonl' exists; name another, or remove it"),
        (("answers.jsonl", "--output", "b.csv"), "must be a file that ends in .jsonl"),
        (("answers.jsonl", "--output", "b.gz"), "must be a file that ends in .jsonl"),
        (("answers.jsonl", "--output", "b.jsonl", "--pairs", "b.jsonl"), "name one file twice"),
        (("answers.jsonl", "--output", "b.jsonl", "--validation-share", "2"), "validation_share is 2.0"),
        (("answers.jsonl", "--output", "b.jsonl", "--per-question", "0"), "per_question"),
        (("answers.jsonl", "--output", "b.jsonl", "--per-questions", "1"), "did you mean '--per_question'?"),
        (("bad.jsonl", "--output", "b.jsonl"), "bad.jsonl, row 2: 'correct' is 'yes'; it must be true or false"),
        (("broken.jsonl.gz", "--output", "b.jsonl"), "incorrect header check; restore it from a copy"),
        (("away.jsonl", "--output", "b.jsonl"), "away.jsonl does not exist"),
        (("half.jsonl", "--output", "b.jsonl"), "'half.jsonl' is half of a collection"),
        (
            ("answers.jsonl", "--references", "numbers.jsonl", "--output", "b.jsonl"),
            "numbers.jsonl, row 1: 'answer' is 1; it must be text",
        ),
    ],
)
def test_mistakes_are_told_in_one_message_and_nothing_is_written(mrlm: Any, options: Any, fault: str) -> None:
    write("answers.jsonl", answers(2))
    write("half.jsonl", answers(2))
    write("half.jsonl.progress", [])
    Path("broken.jsonl.gz").write_bytes(b"no gzip")
    write("bad.jsonl", [answers(1)[0], {**answers(1)[0], "correct": "yes"}])
    write("numbers.jsonl", [{"question": "1?", "answer": 1}])
    before = {path.name: path.read_bytes() for path in Path().iterdir()}
    status, _, err = mrlm("balance", *options)
    assert status == 2
    assert fault in err
    assert {path.name: path.read_bytes() for path in Path().iterdir()} == before


def test_it_starts_without_torch() -> None:
    write("answers.jsonl", answers())
    code = (
        "import sys; from mrlm_pl.cli.main import main; "
        "status = main(['balance', 'answers.jsonl', '--output', 'b.jsonl', '--fill-wrong']); "
        "print(status, sorted({'torch', 'transformers', 'lightning'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "0 []"
