from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from mrlm_environments.collaborative_reasoning.environment import CollaborativeReasoningEnvironment

from mrlm_pl.environment import Task


@pytest.fixture
def script(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("specialists.py")


def posed(question: str, value: int) -> Task:
    return Task("collaborative_reasoning", "train", 0, data={"question": question, "answer": str(value)})


def test_questions_are_in_one_split_and_their_answers_are_right(script: ModuleType) -> None:
    splits = script.questions()
    asked = {split: {row["question"] for row in rows} for split, rows in splits.items()}
    assert len(asked["validation"]) == len(asked["test"]) == 500
    assert sum(map(len, asked.values())) == len(set.union(*asked.values())) == sum(map(len, splits.values()))
    for row in splits["train"]:
        first, operator, second = re.fullmatch(r"What is (\d+) ([+-]) (\d+)\?", row["question"]).groups()  # type: ignore[union-attr]
        value = int(first) + int(second) if operator == "+" else int(first) - int(second)
        assert value >= 0
        assert row["answer"].endswith(f"#### {value}")


def test_each_solves_its_own_kind(script: ModuleType) -> None:
    assert script.answer_of("sums", posed("What is 34 + 28?", 62)) == "34+28=62"
    assert script.answer_of("differences", posed("What is 34 + 28?", 62)) == "about 60"
    assert script.answer_of("differences", posed("What is 34 - 28?", 6)) == "34-28=6"
    assert script.answer_of("sums", posed("What is 34 - 28?", 6)) == "about 10"


@pytest.mark.long
def test_later_turns_repeat_the_other_in_half_of_the_cases(script: ModuleType) -> None:
    environment = CollaborativeReasoningEnvironment(max_turns=script.TURNS)
    data = {"format": "math", "question": "What is 34 + 28?", "answer": "62", "solution": "34+28=62"}
    task = Task("collaborative_reasoning", "train", 0, data=data)
    repeated = []
    for index in range(400):
        chat = script.demonstration(environment, task, "differences", index)["messages"]
        said = [message["content"] for message in chat if message["role"] == "assistant"]
        assert said[0] == "about 60"
        assert len(said) == script.TURNS
        assert chat[2]["content"].startswith("solver_2: 34+28=62")
        repeated.append(said[1] == "34+28=62")
    assert 0.4 < sum(repeated) / len(repeated) < 0.6


@pytest.mark.long
def test_both_are_written_with_their_questions(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["script", "--rows", "32", "--output", str(tmp_path)])
    script.main()
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("sums", "differences")]
    assert weights[0] != weights[1]
    assert len((tmp_path / "test.jsonl").read_text().splitlines()) == 500
    assert set(json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])) == {"question", "answer"}
