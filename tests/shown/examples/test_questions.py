"""The examples of ``QuestionEnvironment``: as in the document, as short as their originals, and they learn."""

from __future__ import annotations

import csv
import math
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.environment.check import check_environment
from tests.support.documents import ROOT, blocks

FOLDER = ROOT / "examples" / "questions"
LINES = {
    "different_letters": 10,  # TRL, docs/source/quickstart.md: imports, reward function, trainer with data, train
    "length_ratio": 17,  # CoMLRL, README.md: imports, tokenizer, data, trainer with its reward function, train
}
"""Lines of code of the quick starts of TRL (GRPO) and CoMLRL (two agents, MAGRPO)."""


def code(name: str) -> str:
    """Return an example's code, without its two lines for ``--help``."""
    text = (FOLDER / f"{name}.py").read_text().split('"""', 2)[2]
    return re.sub(r".*ArgumentParser.*\n\n?", "", text).strip()


def reward(name: str) -> str:
    """Return the source of an example's reward function."""
    return "def " + code(name).partition("def ")[2].partition("\n\nrows = ")[0]


@pytest.mark.parametrize("name", LINES)
def test_the_documents_show_the_example(name: str) -> None:
    """The first in full, of the second the reward."""
    shown = code(name) if name == "different_letters" else reward(name)
    assert any(shown in text for _, text in blocks("python"))
    assert len([line for line in code(name).splitlines() if line.strip()]) <= LINES[name]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (0, 0, 0.0),
        (0, 2, 0.0),
        (0, 3, 0.0),
        (4, 0, 0.0),
        (1, 2, 1.0),
        (4, 12, 1.0),
        (4, 4, math.exp(-1)),
        (2, 8, math.exp(-1)),
    ],
)
def test_the_ratio_of_lengths_earns_nothing_with_an_empty_text(first: int, second: int, expected: float) -> None:
    names: dict[str, Any] = {}
    exec("import math\n" + reward("length_ratio"), names)
    assert names["length_ratio"]({"first": "a" * first, "second": "b" * second}, {}) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "gain"), [("different_letters", 5.0), ("length_ratio", 0.3)])
def test_it_learns(name: str, gain: float, outside_the_repository: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name])
    script = runpy.run_path(str(FOLDER / f"{name}.py"))
    check_environment(script["data"].environments["question"]).raise_on_failure()
    rewards = logged(next(Path("runs").iterdir()))
    assert len(rewards) == 30
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + gain


@pytest.mark.slow
def test_the_configuration_learns(mrlm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    run = str(tmp_path / "run")
    status, _, errors = mrlm("fit", "--config", "configs/tasks/questions.yaml", "--output", run)
    assert status == 0, errors
    rewards = logged(Path(run))
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


@pytest.mark.long
def test_the_search_configuration_runs(mrlm, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    run = tmp_path / "run"
    sizes = ("--data.iterations", "1", "--data.groups", "2", "--data.sampling.max_tokens", "4")
    status, _, errors = mrlm("fit", "--config", "configs/tasks/search.yaml", "--output", str(run), *sizes)
    assert status == 0, errors
    (row,) = csv.DictReader((run / "metrics.csv").open())
    names = ("question/exact_match", "question/token_f1", "question/tool_calls", "failed_episodes")
    assert {name: float(row[f"rollout/{name}"]) for name in names} == dict.fromkeys(names, 0.0)


def logged(run: Path) -> list[float]:
    """Return the mean reward of each rollout of a run."""
    with (run / "metrics.csv").open() as file:
        return [float(row["rollout/reward"]) for row in csv.DictReader(file) if row["rollout/reward"]]
