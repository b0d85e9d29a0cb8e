from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest


def test_moves_are_random_free_cells(
    example: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, texts = example("tiny_model/make_move_demonstrations.py"), []
    for number in range(2):
        path = tmp_path / "folder" / f"{number}.jsonl"
        monkeypatch.setattr("sys.argv", ["script", "--games", "100", "--output", str(path)])
        script.main()
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    chats = [[message["content"] for message in json.loads(line)["messages"]] for line in texts[0].splitlines()]
    assert len(chats) == 200, "a row for each player"
    assert all(reply in board.split()[-1] for chat in chats for board, reply in zip(chat[::2], chat[1::2], strict=True))
    first = Counter(chat[1] for chat in chats if chat[0].endswith(" X 123/456/789"))
    assert first.total() == 100
    assert {*first} == {*"123456789"}
    assert max(first.values()) < 27, "100/9 expected, five standard deviations of 3.1 more"
