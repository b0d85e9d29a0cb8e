from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
from mrlm_environments.writing.environment import WritingEnvironment
from mrlm_environments.writing.words import TRANSITIONS

ROOT = Path(__file__).parents[3]


def load() -> ModuleType:
    path = ROOT / "examples" / "tiny_model" / "make_writing_demonstrations.py"
    spec = importlib.util.spec_from_file_location("make_writing_demonstrations", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_rows_have_prompts_of_both_agents_and_words_of_the_post(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, output = load(), tmp_path / "new" / "rows.jsonl"
    monkeypatch.setattr("sys.argv", ["script", "--output", str(output), "--rows", "40"])
    script.main()
    rows = [json.loads(line)["messages"] for line in output.read_text().splitlines()]
    assert len(rows) == 40
    environment = WritingEnvironment()
    links = {word for phrases in TRANSITIONS.values() for word in phrases[0].split()}
    for index, (order, part) in enumerate(rows):
        agent = environment.agents[index % 2]
        task = environment.tasks("train")[index // 2]
        assert order == {"role": "user", "content": environment.reset(task)[agent][0].content}
        assert part["role"] == "assistant"
        known = set(task.data["text"].lower().replace(".", "").replace(",", "").replace("?", "").split()) | links
        assert set(part["content"].split()) <= known
    first = output.read_text()
    script.main()
    assert output.read_text() == first, "a function of the index alone"
