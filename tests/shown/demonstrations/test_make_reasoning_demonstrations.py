from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from mrlm_environments.collaborative_reasoning.environment import CollaborativeReasoningEnvironment

from mrlm_pl.answers.numbers import equal_answers, extract_answer

ROWS = 300


@pytest.fixture
def script(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("tiny_model/make_reasoning_demonstrations.py")


@pytest.mark.long
def test_rows_have_three_turns_and_the_stated_fraction_of_worked_solutions(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = []
    for number in range(2):
        path = tmp_path / "folder" / f"{number}.jsonl"
        monkeypatch.setattr("sys.argv", ["script", "--rows", str(ROWS), "--output", str(path)])
        script.main()
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    chats = [json.loads(line)["messages"] for line in texts[0].splitlines()]
    environment = CollaborativeReasoningEnvironment()
    tasks = environment.tasks("train")
    right = 0
    for index, chat in enumerate(chats):
        assert [message["role"] for message in chat] == ["user", "assistant"] * 3
        question, said = chat[0]["content"], [message["content"] for message in chat[1::2]]
        assert question == tasks[index].data["question"]
        assert all(later["content"].startswith("solver_2: ") for later in chat[2::2])
        assert all(later["content"].endswith(f"\n\n{question}") for later in chat[2::2])
        right += sum(equal_answers(extract_answer(text) or "", tasks[index].data["answer"]) for text in said)
    # 0.35 worked solutions, and a tenth of the estimates, multiples of 10; four standard errors of 900 are 0.07
    assert right / (3 * ROWS) == pytest.approx(0.35 + 0.65 * 0.1, abs=0.07)
    held_out = {environment.tasks("test")[index].data["question"] for index in range(200)}
    assert held_out.isdisjoint(chat[0]["content"] for chat in chats)
