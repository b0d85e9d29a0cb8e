"""``mrlm eval`` of several models or environments."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from mrlm_pl.evaluation.score_table import Score, measures, score_of, table
from mrlm_pl.policy import Policy
from mrlm_pl.runs import seated_model

SHORT = ("-n", "4", "--max-tokens", "2", "--device", "cpu")
FLAKY = """
from pathlib import Path

from mrlm_environments import MathEnvironment


class Flaky(MathEnvironment):
    name = "flaky"

    def __init__(self) -> None:
        if Path("away").exists():
            raise OSError("the back end is away")
        super().__init__()
"""
HALF = """
from pathlib import Path

from mrlm_environments import MathEnvironment

from mrlm_pl.environment import TaskSource


class Half(MathEnvironment):
    name = "half"

    def reset(self, task):
        if task.index % 2 and Path("away").exists():
            raise OSError("the back end is away")
        return super().reset(task)


class Nothing(TaskSource):
    size = 0

    def __getitem__(self, index):
        raise IndexError(index)


class Empty(MathEnvironment):
    name = "empty"

    def tasks(self, split):
        return Nothing()
"""


@pytest.fixture
def runs(outside_the_repository: None, model_folder: Path) -> None:
    """Make runs in parrot with words of one letter, and of two; and a model."""
    for name, difficulty in (("run", 1), ("other", 2)):
        environment = {"class_path": "mrlm_toy.ParrotEnvironment", "init_args": {"difficulty": [difficulty]}}
        shutil.copytree(model_folder, Path(name, "policies", "main"))
        Path(name, "config.yaml").write_text(yaml.safe_dump({"data": {"init_args": {"environment": environment}}}))
    shutil.copytree(model_folder, "model")


def counted(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[Any]:
    """Return a list to which every call of a function adds its first argument."""
    calls, function = list[Any](), getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *given, **named: calls.append(given[0]) or function(*given, **named))
    return calls


def cells(file: str = "out/table.json") -> dict[tuple[str, str], dict[str, Any]]:
    return {(item["model"], item["environment"]): item for item in json.loads(Path(file).read_text())["scores"]}


@pytest.mark.long
def test_all_models_play_all_environments_and_each_is_loaded_once(
    runs: None, mrlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = counted(monkeypatch, Policy, "initial_model")
    hard = "{name: hard, class_path: parrot, init_args: {difficulty: [3]}}"
    words = ("--model", "model", "run", "--environment", "parrot", "math", hard, *SHORT)
    status, out, err = mrlm("eval", *words, "--output", "out/table.json")
    assert status == 0, err
    assert [policy.name_or_path for policy in loaded] == ["model", "run/policies/main"]
    assert [*cells()] == [(model, name) for model in ("model", "run") for name in ("parrot", "math", "hard")]
    assert Path("out/table.png").read_bytes().startswith(b"\x89PNG")
    assert "parrot: difficulty [1]\nmath: defaults\nhard: difficulty [3]\n" in out
    lengths = {
        cell: {len(item["messages"]["agent"][0]["content"].split()[-1]) for item in report(score)["transcripts"]}
        for cell, score in cells().items()
    }
    assert [lengths["model", name] for name in ("parrot", "hard")] == [{1}, {3}], "the run's settings, and the given"
    own = ("--output", "one.json", "--compare", "out/table/run--parrot.json")
    status, _, err = mrlm("eval", "--model", "run", *SHORT, *own)
    assert status == 0, err
    one = json.loads(Path("one.json").read_text())
    assert one["comparison"]["gain"] == 0
    cell = cells()["run", "parrot"]
    for name in ("mean_reward", "ci95", "accuracy", "accuracy_ci95", "episodes", "failed"):
        assert cell[name] == one[name]
    low, high = cell["accuracy_ci95"]
    assert f"mrlm: 4 of 6: run on parrot: accuracy {cell['accuracy']:.4f}  95 % [{low:.4f}, {high:.4f}]\n" in out
    table = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]
    assert [row[1] for row in table if row[0] == "run"] == [f"{cell['accuracy']:.4f}"]
    assert f"[{low:.4f}, {high:.4f}]" in [row[1] for row in table]


@pytest.mark.long
def test_single_policies_of_a_table_sample_in_their_own_way(runs: None, mrlm: Callable[..., Any]) -> None:
    words = ("eval", "--model", "model", "run", "--environment", "parrot", *SHORT, "--output", "out/table.json")
    status, _, err = mrlm(*words, "--policy-sampling", "{main: {max_tokens: 1}}")
    assert status == 0, err
    assert [report(score)["agents"]["agent"]["response_tokens"] for score in cells().values()] == [1, 1]


def test_the_table_is_written_before_it_is_printed(
    runs: None, mrlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "print", lambda *_: exit(99))
    assert mrlm("eval", "--model", "model", "run", "--environment", "parrot", *SHORT, "--output", "t.json")[0] == 99
    assert len(cells("t.json")) == 2


def report(score: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("out", score["report"]).read_text())
    return found


@pytest.mark.long
def test_a_failed_cell_is_named_and_the_same_command_plays_what_is_missing(
    runs: None, mrlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("flaky_back_end.py").write_text(FLAKY)
    Path("away").touch()
    played = counted(monkeypatch, seated_model.SeatedModel, "evaluate")
    environments = ["./flaky_back_end.py:Flaky", "math"]
    Path("t.yaml").write_text(yaml.safe_dump({"model": ["model", "run"], "environment": environments, "seed": 3}))
    words = ("eval", "--config", "t.yaml", *SHORT, "--output", "out/table.json")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    status, out, err = mrlm(*words)
    assert status == 1
    assert "mrlm: model on flaky failed: " in err
    assert "the back end is away" in err
    assert "out/table/; no picture: 'out/table.png' needs matplotlib; install it with" in out
    assert "matplotlib" not in err
    assert "mrlm: 4 of 4: run on math: " in out
    assert [score["error"] is None for score in cells().values()] == [False, True] * 2
    assert json.loads(Path("out/table.json").read_text())["seed"] == 3
    assert [seated.name for seated in played] == ["math"] * 2
    played.clear()
    Path("away").unlink()
    assert mrlm(*words)[0] == 0
    assert [seated.name for seated in played] == ["flaky"] * 2
    played.clear()
    later = Path("out/table.json").stat().st_mtime + 60
    os.utime("run/policies/main/config.json", (later, later))
    assert mrlm(*words)[0] == 0
    assert {seated.label for seated in played} == {"run"}, "its weights are others"
    played.clear()
    assert mrlm(*words, "--seed", "4")[0] == 0
    assert len(played) == 4


@pytest.mark.long
def test_a_report_is_kept_only_for_the_same_model_with_the_same_weights_and_settings(
    runs: None, mrlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree("model", "a/b")
    shutil.copytree("model", "a-b")
    played = counted(monkeypatch, seated_model.SeatedModel, "evaluate")

    def labels(*models: str) -> list[str]:
        played.clear()
        environments = ("--environment", "parrot", "math")
        status, _, err = mrlm("eval", "--model", *models, *environments, *SHORT, "--output", "out/table.json")
        assert status == 0, err
        return [seated.label for seated in played]

    assert labels("a/b") == ["a/b"] * 2
    assert labels("a/b") == []
    assert labels("a-b") == ["a-b"] * 2, "its reports have the same files"
    os.utime("a-b/config.json", (1, 1))
    assert labels("a-b") == ["a-b"] * 2, "a copy may keep the time of old weights"
    assert labels("run") == ["run"] * 2
    config = yaml.safe_load(Path("run/config.yaml").read_text())
    seated = {"init_args": {"seats": {"agent": "main"}}}
    Path("run/config.yaml").write_text(yaml.safe_dump({**config, "model": seated}))
    assert labels("run") == ["run"] * 2


@pytest.mark.long
def test_a_report_is_kept_only_for_the_same_precision_and_a_table_of_several_names_each(
    runs: None, mrlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    played = counted(monkeypatch, seated_model.SeatedModel, "evaluate")

    def words(*more: str) -> tuple[str, list[str]]:
        played.clear()
        options = ("--environment", "parrot", *SHORT, "--output", "out/table.json")
        status, out, err = mrlm("eval", "--model", "run", "model", *options, *more)
        assert status == 0, err
        return out, [seated.label for seated in played]

    assert words()[1] == ["run", "model"]
    assert words("--precision", "32-true")[1] == [], "the same, and that of reports that do not name theirs"
    assert words("--precision", "bf16-mixed")[1] == ["run", "model"]
    assert {json.loads(file.read_text())["precision"] for file in Path("out/table").glob("*.json")} == {"bf16-mixed"}
    monkeypatch.setattr(seated_model, "computes_bf16", lambda device: True)
    Path("run/state.json").write_text('{"precision": "bf16-mixed"}')
    out, labels = words()
    assert labels == ["model"], "the run's own precision is the one that it was played in"
    assert "generated in bf16-mixed (run), 32-true (model)\n" in out


def test_a_cell_with_failed_episodes_is_played_again_and_one_without_tasks_is_named(
    runs: None, mrlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("half_back_end.py").write_text(HALF)
    Path("away").touch()
    played = counted(monkeypatch, seated_model.SeatedModel, "evaluate")
    names = ("./half_back_end.py:Empty", "./half_back_end.py:Half")
    words = ("eval", "--model", "model", "--environment", *names, *SHORT, "--output", "out/table.json")
    status, _, err = mrlm(*words)
    assert (status, "model on empty failed: the split test has no tasks" in err) == (1, True), err
    assert [(score["episodes"], score["failed"]) for score in cells().values()] == [(0, 0), (2, 2)]
    Path("away").unlink()
    played.clear()
    mrlm(*words)
    assert [seated.name for seated in played] == ["empty", "half"]
    assert cells()["model", "half"]["episodes"] == 4


@pytest.mark.long
def test_without_an_environment_runs_play_their_own_and_models_those_of_all(
    runs: None, mrlm: Callable[..., Any]
) -> None:
    status, _, err = mrlm("eval", "--model", "run", "model", "other", *SHORT, "--output", "out/table.json")
    assert status == 0, err
    both = ("parrot", "parrot of other")
    assert [*cells()] == [("run", both[0]), *(("model", name) for name in both), ("other", both[1])]
    settings = {
        name: item["init_args"] for name, item in json.loads(Path("out/table.json").read_text())["environments"].items()
    }
    assert settings == {"parrot": {"difficulty": [1]}, "parrot of other": {"difficulty": [2]}}
    assert {report(score)["environment"] for score in cells().values()} == {"parrot"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("model", "model", "--environment", "math"), "model: model, model has the same model twice"),
        (("model", "run", "--environment", "math", "mth"), "there is no environment 'mth'; did you mean 'math'?"),
        (("model", "--environment", "math", "math"), "two are named 'math'; name one, as in `{name: hard,"),
        (("model", "run", "--environment", "math", "{init_args: {}}"), "has no text as class or name; give a name, or"),
        (("model", "--environment", "math", "{class_path: math, name: 3}"), "'name': 3} has no text as class or name"),
        (("model", "--environment", "math", "{class_path: math, nam: y}"), "has no 'nam'; did you mean 'name'?"),
        (("model", "run", "--compare", "x.json"), "compare: it takes one model and one environment"),
        (("model", "run", "-n", "3", "--samples-per-task", "2"), "must be a multiple of samples_per_task 2"),
        (("model", "run", "--output", "table"), "output: 'table' must end in .json"),
        (("model", "model/../model"), "environment missing, and model, model/../model have none"),
        (("model", "run", "--num-episode", "3"), "did you mean '--num_episodes'?"),
        (("model", "run", "--environment", "./none.py:A"), "none.py"),
        (
            ("model", "run", "--seats", "{agent: mian}"),
            "model: seat 'agent' names policy 'mian', which does not",
        ),
        (("model", "run", "--seats", "{agnt: main}"), "no environment of the table has an agent 'agnt'; did you mean"),
        (("model", "run", "--served-by", "{mian: 127.0.0.1:9}"), "'model' has no policy 'mian' to be served; did you"),
        (("model", "run", "--served-by", "{main: 127.0.0.1}"), "policies.main: served_by: the address '127"),
        (("model", "run", "--policy-sampling", "{mian: {top_k: 1}}"), "no policy 'mian'; did you mean 'main'?"),
        (("model", "run", "--temperature", "-1"), "Sampling: temperature is -1.0; it must be 0 or above"),
        (
            ("model", "run", "--output", "run/config.yaml/x.json"),
            "output: 'run/config.yaml/x.json' cannot be written",
        ),
    ],
)
def test_mistakes_are_named_before_anything_is_played(
    words: tuple[str, ...], message: str, runs: None, mrlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    played = counted(monkeypatch, seated_model.SeatedModel, "evaluate")
    status, _, err = mrlm("eval", "--model", *words)
    assert (status, message in err, len(err.splitlines()), played) == (2, True, 1, []), err


def test_a_seat_of_a_team_is_none_of_a_model_with_one_policy(runs: None, mrlm: Callable[..., Any]) -> None:
    settings = {"policies": {"first": {}, "second": {}}}
    for name in settings["policies"]:
        shutil.copytree("model", Path("team", "policies", name))
    Path("team", "config.yaml").write_text(yaml.safe_dump({"model": {"init_args": settings}}))
    words = ("--model", "model", "team", "--environment", "parrot", *SHORT)
    status, _, err = mrlm("eval", *words)
    assert (status, "has no seat among the policies ['first', 'second']; bind it with `--seats" in err) == (1, True), (
        err
    )
    status, _, err = mrlm("eval", *words, "--seats", '{"agent": "first"}')
    assert status == 0, err


def test_a_column_shows_rewards_where_a_score_has_no_accuracy() -> None:
    scores = [Score("a", "x", accuracy=0.5), Score("b", "x", mean_reward=1.0), Score("a", "y", accuracy=0.5)]
    assert measures([*scores, Score("b", "y", error="no room")]) == {"x": "mean_reward", "y": "accuracy"}


def test_names_and_bounds_are_whole_in_a_narrow_table() -> None:
    scores = [
        Score("runs/long-name-of-seed-1", name * 9, accuracy=0.5, accuracy_ci95=(0.125, 0.875)) for name in "abcd"
    ]
    console = Console(width=50)
    with console.capture() as captured:
        console.print(table(scores))
    cells = [line.replace("┃", "│").split("│")[1:-1] for line in captured.get().splitlines()]
    joined = ["".join(row[column].strip() for row in cells if row) for column in range(5)]
    assert "runs/long-name-of-seed-1" in joined[0]
    for number, name in enumerate("abcd", start=1):
        assert joined[number].startswith(name * 9)
        assert joined[number].endswith("0.5000[0.1250,0.8750]")


def test_a_cell_has_the_chance_and_the_majority_of_all_samples() -> None:
    report = {"episodes": 40, "accuracy": 0.5, "pass_at_k": {str(k): k / 16 for k in range(1, 11)}}
    score = score_of("a", "x", {**report, "majority_at_k": {"2": 0.25, "10": 0.75}}, None)
    assert (score.pass_at_k["2"], score.majority_at_k) == (0.125, {"2": 0.25, "10": 0.75})
    single = score_of("b", "x", {"episodes": 4, "accuracy": 0.5, "pass_at_k": {"1": 0.5}, "majority_at_k": {}}, None)
    console = Console(width=50)
    with console.capture() as captured:
        console.print(table([score, single]))
    cells = [line.split("│")[2].strip() for line in captured.get().splitlines() if "│" in line]
    assert cells == ["0.5000", "pass@10 0.6250", "majority@10 0.7500", "0.5000"]
