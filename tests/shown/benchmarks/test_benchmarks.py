"""The scripts of the benchmarks: their modules, their seeds, their options and their commands on the results page."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from benchmarks import results_page
from benchmarks.few_values import mean_and_half
from benchmarks.learning import learning
from benchmarks.tables.results import read
from tests.support.documents import ROOT

SCRIPTS = {path.stem: path for path in sorted((ROOT / "benchmarks").rglob("*.py"))}


def not_found(script: Path, folders: list[str], known: set[str]) -> Iterator[str]:
    """Yield the benchmarks that a script imports, itself or by others, before their folder is on the path."""
    names = {"sys": SimpleNamespace(path=folders), "Path": Path, "__file__": str(script)}
    for node in ast.parse(script.read_text()).body:
        if ast.unparse(node).startswith(("ROOT = ", "sys.path.insert(")):
            exec(ast.unparse(node), names)
        found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
        for name in {*found} & {*SCRIPTS} - known:
            known.add(name)
            if not any((Path(folder) / f"{name}.py").is_file() for folder in folders):
                yield name
            else:
                yield from not_found(SCRIPTS[name], folders, known)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=lambda path: path.stem)
def test_a_script_finds_the_modules_that_it_imports(script: Path) -> None:
    assert [*not_found(script, [str(script.parent)], set())] == []


def test_the_commands_of_the_page_write_no_file_of_results() -> None:
    assert [path for path, text in results_page.pages().items() if "--json benchmarks/results" in text] == []


@pytest.mark.parametrize("name", results_page.CHAPTERS["Learning"])
def test_learning_is_shown_with_its_number_of_seeds_or_runs(name: str) -> None:
    section = results_page.CHAPTERS["Learning"][name]
    heads = [table.strip().splitlines()[0] for table in section.tables(read(name)).split("\n\n")]
    assert re.search(r"\bone (run|seed)\b", section.text) or [head for head in heads if "seed" not in head] == []


def test_a_file_without_its_command_says_so() -> None:
    sections = [name for chapter in results_page.CHAPTERS.values() for name in chapter]
    without = {name for name in sections if "command" not in read(name)}
    told = {name for name in sections if "these are not known" in results_page.source(name, read(name))}
    assert told == without == {"shared_machine", "earlier"}


def test_the_curve_of_a_policy_has_the_name_of_the_split_that_the_callback_plays() -> None:
    axes = {axis for curve in learning.CURVES.values() for name, axis in curve.measures.items() if name == "accuracy"}
    assert axes == {"validation accuracy", "validation success"}


def test_intervals_of_any_number_of_seeds_have_their_quantile() -> None:
    assert mean_and_half([0.0, 1.0]) == (0.5, pytest.approx(12.706 / 2))
    assert mean_and_half([0.0, 1.0] * 6) == (0.5, pytest.approx(2.201 * 0.522233 / 12**0.5, rel=1e-5))


def test_branches_ask_for_the_arm_that_others_are_compared_with(
    learning_benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["branches.py", "--experiments", "halves", "--arms", "C3", "--tokens", "1"])
    with pytest.raises(SystemExit):
        learning_benchmark("branches").main()
    assert "--arms lacks MAGRPO" in capsys.readouterr().err


def test_a_team_of_writers_is_kept_with_its_replies_and_what_they_have_of_the_post(
    learning_benchmark: Callable[[str], ModuleType],
) -> None:
    replies = [("The mower is broken.", "A uncle's cake and a mower"), ("And it was.", "The mower of an uncle")]
    agents = {"brief": {"response_tokens": 5.0, "truncated_turns": 0.0}}
    agents["detailed"] = {"response_tokens": 8.0, "truncated_turns": 0.5}
    rows = []
    for pair in replies:
        asked = {"role": "user", "content": "Summarize this.\n\nAn uncle gave me a mower."}
        said = [[asked, {"role": "assistant", "content": reply}] for reply in pair]
        rows.append({"messages": dict(zip(agents, said, strict=True))})
    report = {"mean_reward": 1.5, "ci95": [1.0, 2.0], "accuracy": 0.5, "accuracy_ci95": [0.0, 1.0]}
    kept = learning_benchmark("pretrained").writing(
        {**report, "components": {"words": 0.5}, "agents": agents, "transcripts": rows}
    )
    # mower of (mower, broken), and nothing; uncle and mower of (uncle, cake, mower), and both
    assert {name: agent["from the post"] for name, agent in kept["agents"].items()} == {
        "brief": pytest.approx((1 / 2 + 0) / 2),
        "detailed": pytest.approx((2 / 3 + 1) / 2),
    }
    assert kept["replies"][1] == {
        "post": "An uncle gave me a mower.",
        "brief": "And it was.",
        "detailed": "The mower of an uncle",
    }
