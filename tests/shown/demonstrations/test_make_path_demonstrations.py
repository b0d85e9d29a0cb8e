from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from mrlm_environments import PlanPath

from mrlm_pl.episode import Task


@pytest.fixture
def script(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("tiny_model/make_path_demonstrations.py")


def test_most_replies_go_the_right_way(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for number in range(2):
        path = tmp_path / "folder" / f"{number}.jsonl"
        monkeypatch.setattr("sys.argv", ["script", "--episodes", "100", "--output", str(path)])
        script.main()
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    chats = [json.loads(line)["messages"] for line in texts[0].splitlines()]
    assert len(chats) == 200
    game, right, replies, posed = PlanPath(), 0, 0, set()
    for chat in chats:
        assert [message["role"] for message in chat] == ["user", "assistant"] * (len(chat) // 2)
        posed.add(chat[0]["content"].split()[4])
        for asked, answered in zip(chat[::2], chat[1::2], strict=True):
            (grid,) = (word for word in asked["content"].split() if "/" in word)
            right += answered["content"] == game.gold(Task("plan_path", "train", 0, 0, {"grid": grid}))["planner"][0]
            replies += 1
    # 0.5, and a quarter of the random ones; four standard errors of 600 replies are below 0.08
    assert replies > 600
    assert right / replies == pytest.approx(0.5 + 0.5 / 4, abs=0.08)
    assert posed.isdisjoint(game.tasks("test")[index].data["grid"] for index in range(200))
