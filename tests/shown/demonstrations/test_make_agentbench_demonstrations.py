from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from mrlm_pl.episode import Message
from mrlm_pl.policy import Policy
from mrlm_pl.sandbox import strongest
from mrlm_pl.seeding import keyed_random

NAMES = ("shell", "sql", "knowledge_graph", "webshop", "alfworld")
TEAMS = NAMES[2:]
EPISODES = 12
CONFIG = Path(__file__).parents[3] / "configs/tasks/agentbench/five_tasks.yaml"


def needs_namespaces(name: str) -> None:
    if name == "shell" and strongest()[0] != "namespaces":
        pytest.skip("the environment shell needs namespaces")


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


@pytest.mark.parametrize(
    ("name", "changes"), [*((name, {}) for name in NAMES), *((name, {"team": True}) for name in TEAMS)]
)
@pytest.mark.long
def test_the_expert_solves_all_tasks_unless_it_is_hurried(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, bool]
) -> None:
    needs_namespaces(name)
    environment = script.make_environment(name, **changes)
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


@pytest.mark.parametrize("options", [[], *([name] for name in NAMES), *([name, "--team"] for name in TEAMS)], ids=str)
@pytest.mark.long_after(1)
def test_the_untrained_model_reads_and_writes_every_row(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str]
) -> None:
    needs_namespaces((options or ["shell"])[0])
    chosen = ["--environment", *options] if options else []
    monkeypatch.setattr("sys.argv", ["script", *chosen, "--output", str(tmp_path), "--episodes", "40"])
    script.main()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "untrained")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    half = len(rows) // 2
    episodes = 40 if options else 40 * len(NAMES)
    assert half > episodes if "--team" in options else half == episodes, "each agent of a team has a row"
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


def test_the_environments_are_those_of_the_configuration(script: ModuleType) -> None:
    needs_namespaces("shell")
    listed = yaml.safe_load(CONFIG.read_text())["data"]["init_args"]["environment"]
    for name, item in zip(NAMES, listed, strict=True):
        cls, settings = script.ENVIRONMENTS[name]
        given = {key: list(value) if isinstance(value, tuple) else value for key, value in settings.items()}
        assert item == {"class_path": cls.__name__, "init_args": given}


def test_the_longest_call_fits_in_the_configuration(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    needs_namespaces("shell")
    longest = yaml.safe_load(CONFIG.read_text())["data"]["init_args"]["sampling"]["max_tokens"]
    monkeypatch.setattr("sys.argv", ["script", "--output", str(tmp_path), "--episodes", "20"])
    script.main()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "untrained")
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    said = [message["content"] for row in rows for message in row["messages"] if message["role"] == "assistant"]
    assert max(len(tokenizer.encode(text)) for text in said) < longest, "one token ends the turn"
