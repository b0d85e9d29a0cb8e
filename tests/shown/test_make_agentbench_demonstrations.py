from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from transformers import AutoTokenizer

from mrlm_pl.episode import Message
from mrlm_pl.policy import Policy
from mrlm_pl.seeding import keyed_random

NAMES = ("webshop", "knowledge_graph", "alfworld")
EPISODES = 12


@pytest.fixture
def script(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("tiny_model/make_agentbench_demonstrations.py")


def replayed(environment: Any, task: Any, rows: list[dict[str, Any]]) -> bool:
    """Say what the rows' agents say, compare what they see, and return whether the task was solved."""
    waiting = [list(row["messages"]) for row in rows]
    left: dict[str, list[Any]] = {}
    observations, step = environment.reset(task), None
    while waiting or any(left.values()):
        ((agent, messages),) = observations.items()
        own = left.setdefault(agent, [] if agent in left else waiting.pop(0))
        assert [message.to_chat() for message in messages] == own[: len(messages)]
        del own[: len(messages)]
        step = environment.step({agent: Message("assistant", own.pop(0)["content"])})
        observations = step.observations
    assert step is not None
    assert step.done or environment.name == "alfworld", "the other tasks end with a wrong answer"
    return bool(step.success)


@pytest.mark.parametrize("team", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_expert_solves_all_tasks_unless_it_is_hurried(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, team: bool
) -> None:
    environment = script.make_environment(name, team=team)
    solved = {}
    for hurry in (0.0, 0.5):
        monkeypatch.setitem(script.HURRY, name, hurry)
        solved[hurry] = 0
        for index in range(EPISODES):
            task = environment.tasks("train")[index]
            rows = list(script.demonstrations(environment, task, keyed_random("demonstration", index)))
            solved[hurry] += replayed(environment, task, rows)
    assert solved[0.0] == EPISODES
    assert 0 < solved[0.5] < EPISODES


@pytest.mark.parametrize("options", [[], ["--team"]], ids=["alone", "team"])
@pytest.mark.parametrize("name", NAMES)
def test_the_untrained_model_reads_and_writes_every_row(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, options: list[str]
) -> None:
    command = ["script", "--environment", name, *options, "--output", str(tmp_path), "--episodes", "40"]
    monkeypatch.setattr("sys.argv", command)
    script.main()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "untrained")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    half = len(rows) // 2
    assert half > 40 if options else half == 40, "each agent of a team has a row"
    for row in rows[half:]:
        assert [message["role"] == "assistant" for message in row["messages"]].count(True) == 1
        assert row["messages"][-1]["role"] == "assistant"
    for row in rows:
        text = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
        assert tokenizer.unk_token_id not in ids
        assert len(ids) <= script.CONTEXT_LENGTH
    policy = Policy(str(tmp_path / "untrained"), random_init_seed=0)
    policy.load()
    assert policy.model.get_input_embeddings().num_embeddings == len(tokenizer)
    assert policy.chat.describes_tools(rows[0]["tools"])
