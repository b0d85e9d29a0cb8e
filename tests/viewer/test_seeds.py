"""Runs compared over their seeds at equal cost."""

from __future__ import annotations

import copy
import csv
import json
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.runs.state import write_state
from mrlm_pl.viewer.runs import find_runs
from mrlm_pl.viewer.seeds import SeedComparison, compare_seeds, plot
from tests.support.runs.recorded_runs import CONFIGURATION, write_run

LAST, WHOLE = slice(-10, None), slice(None)


def run(folder: Path, seed: int | None, rewards: Sequence[float], per_row: int = 10, **settings: Any) -> None:
    """Write a run that logs a reward after every ``per_row`` episodes of 2 decisions, 20 tokens and half a second."""
    configuration = {**copy.deepcopy(CONFIGURATION), "seed_everything": seed}
    configuration["model"]["init_args"] |= settings
    write_run(folder, [], configuration)
    with (folder / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        costs = (f"progress/{name}" for name in ("episodes", "decisions", "generated_tokens", "seconds"))
        writer.writerow(["step", *costs, "rollout/reward"])
        for number, reward in enumerate(rewards, start=1):
            done = per_row * number
            writer.writerows([[number, done, 2 * done, 20 * done, done / 2, reward], [number, "", "", "", "", ""]])


def compared(folder: Path, **options: Any) -> SeedComparison:
    return compare_seeds(find_runs([str(folder)]), **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with constant rewards 1, 2, 3 at gamma 1, and 2, 4, 6 at gamma 0.5, of three seeds each."""
    for seed in range(3):
        run(tmp_path / "runs" / f"a{seed}", seed, [1.0 + seed] * 4, gamma=1.0)
        run(tmp_path / "runs" / f"b{seed}", seed, [2.0 + 2 * seed] * 4, gamma=0.5)
    return tmp_path / "runs"


def test_the_table_has_the_last_value_of_each_run_beyond_the_common_cost(tmp_path: Path) -> None:
    run(tmp_path / "a", 0, [1.0, 1.0], gamma=1.0)
    run(tmp_path / "b", 0, [1.0, 1.0, 7.0], gamma=0.5)
    lines = compared(tmp_path).markdown().splitlines()
    assert [line.split(" | ")[4] for line in (lines[0], *lines[2:4])] == ["last value of each run", "1", "7"]


def test_values_at_one_cost_count_as_their_mean(tmp_path: Path) -> None:
    run(tmp_path / "a", 0, [3.0, 0.0])
    with (tmp_path / "a" / "metrics.csv").open("a", newline="") as file:
        csv.writer(file).writerows(
            [[3, "", "", "", "", 1.0], [4, "", "", "", "", 5.0]]
        )  # further updates after 20 episodes
    found = compared(tmp_path)
    # 3 at 10 episodes, the mean of 0, 1 and 5 at 20; at 15 half of each.
    assert found.families[0].curves[0][[49, 74, 99]] == pytest.approx([3.0, 2.5, 2.0])
    assert found.families[0].last == {0: 2.0}


def test_rounding_is_no_number(tmp_path: Path) -> None:
    for seed, reward in enumerate((1.67e-17, -2e-17, -1.67e-17)):
        run(tmp_path / "runs" / f"a{seed}", seed, [reward] * 2)
    line = compared(tmp_path).markdown().splitlines()[2]
    assert [cell.strip() for cell in line.split("|")][3:6] == ["0"] * 3


def test_groups_differ_in_more_than_the_seed_and_are_paired_by_it(folder: Path) -> None:
    found = compared(folder)
    assert [(family.label, sorted(family.curves)) for family in found.families] == [
        ("gamma=1.0", [0, 1, 2]),
        ("gamma=0.5", [0, 1, 2]),
    ]
    # Means 2 and 4, standard deviations 1 and 2; t(2) = 4.3027, divided by sqrt(3): 2.4842.
    mean, bounds = found.families[0].estimate(LAST)
    assert (mean, *bounds) == pytest.approx((2, 2 - 2.4842, 2 + 2.4842), abs=1e-3)
    mean, bounds = found.families[1].estimate(WHOLE)
    assert (mean, *bounds) == pytest.approx((4, 4 - 4.9683, 4 + 4.9683), abs=1e-3)
    (mean, bounds), seeds = found.difference(found.families[1], LAST)  # of 1, 2 and 3
    assert (mean, *bounds) == pytest.approx((2, 2 - 2.4842, 2 + 2.4842), abs=1e-3)
    assert seeds == [0, 1, 2]


def test_seeds_that_do_not_match_are_not_paired(folder: Path, tmp_path: Path) -> None:
    for seed in range(3):
        run(tmp_path / "other" / f"c{seed}", 10 + seed, [2.0 + 2 * seed] * 4, gamma=0.5)
    runs = find_runs([*(str(folder / f"a{seed}") for seed in range(3)), str(tmp_path / "other")])
    found = compare_seeds(runs)
    (mean, bounds), seeds = found.difference(found.families[1], LAST)
    half = math.hypot(2.4842, 4.9683)  # Newcombe's method 10 with symmetric intervals
    assert (mean, *bounds) == pytest.approx((2, 2 - half, 2 + half), abs=1e-3)
    assert not seeds
    assert "2 [-3.555, 7.555], seeds not paired" in found.markdown()


def test_of_seeds_that_match_in_part_the_paired_ones_are_named(tmp_path: Path) -> None:
    for seed in range(4):
        run(tmp_path / f"a{seed}", seed, [1.0 + seed] * 4, gamma=1.0)
    for seed in range(1, 3):
        run(tmp_path / f"b{seed}", seed, [4.0 + 2 * seed] * 4, gamma=0.5)
    # Of 4 and 5, with t(1) = 12.7062 and a standard deviation of sqrt(0.5): 4.5 +- 6.3531.
    assert "4.5 [-1.853, 10.85], 2 pairs of seeds (1, 2) |" in compared(tmp_path).markdown()


def test_one_seed_of_each_is_one_pair(tmp_path: Path) -> None:
    run(tmp_path / "a", 0, [1.0] * 4, gamma=1.0)
    run(tmp_path / "b", 0, [4.0] * 4, gamma=0.5)
    assert "| 3, 1 pair of seeds |" in compared(tmp_path).markdown()


def test_all_numbers_of_a_long_run_count(tmp_path: Path) -> None:
    run(tmp_path / "run", 0, range(1, 1002), per_row=1)  # 1001 rows, each with a row without the number
    found = compared(tmp_path)
    assert found.points[-1] == 1001
    # The reward is the number of episodes: the mean of 10.01 k for k of 91 to 100.
    assert found.families[0].estimate(LAST)[0] == pytest.approx(10.01 * 95)


def test_a_run_that_ends_early_is_named_with_its_state(tmp_path: Path) -> None:
    run(tmp_path / "long", 0, [1.0] * 100)
    run(tmp_path / "short", 1, [1.0] * 10)
    run(tmp_path / "as long", 2, [1.0] * 95)
    write_state(tmp_path / "short", {"state": "failed", "reason": "NonFiniteError: the loss\nis nan"})
    assert compared(tmp_path).notes == [
        f"{tmp_path / 'short'} ends at 100 episodes (failed: NonFiniteError: the loss is nan); others reached 1,000."
    ]


def test_a_run_whose_first_value_is_late_is_named_since_it_stands_for_all_before(tmp_path: Path) -> None:
    run(tmp_path / "late", 0, [1.0, 5.0], per_row=55, gamma=1.0)
    run(tmp_path / "early", 0, [3.0, 3.0], per_row=50, gamma=0.5)
    found = compared(tmp_path)
    assert found.notes == [
        f"{tmp_path / 'late'} has its first value at 55 episodes, which stands for all costs before it."
    ]
    late = next(family for family in found.families if family.label == "gamma=1.0")
    # Up to 55 of 100 episodes the first value, then 1 + 4 (x - 55) / 55.
    assert late.means(slice(55)) == {0: 1.0}
    assert late.curves[0][-1] == pytest.approx(1 + 4 * 45 / 55)


def test_a_failed_run_without_numbers_says_why(folder: Path, tmp_path: Path) -> None:
    write_run(folder / "empty", [], CONFIGURATION)
    write_state(folder / "empty", {"state": "failed", "reason": "EngineError: no room"})
    because = r"empty is left out: it has no `rollout/reward` at its episodes \(failed: EngineError: no room\)\."
    assert any(re.search(because, note) for note in compared(folder).notes)
    with pytest.raises(ConfigurationError, match=r"no metrics\.csv; \S+empty \(failed: EngineError: no room\)"):
        compared(folder / "empty")


def test_names_and_settings_of_any_form_keep_the_table_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("[x]", "{}"):
        run(Path(name), 0, [1.0])
        (Path(name) / "config.yaml").unlink()
    assert [family.label for family in compare_seeds(find_runs(["[x]", "{}"])).families] == ["[x]", "{}"]
    for name, rate in (("a", 1e-3), ("b", 1e-4)):
        policies = {key: {"learning_rate": own} for key, own in (("solver", rate), ("critic", 2 * rate))}
        run(Path("runs", name), 0, [1.0], policies=policies, prompt=f"Think.\n{name}")
    assert [family.label for family in compared(Path("runs")).families] == [
        "critic.learning_rate=0.002, solver.learning_rate=0.001, prompt=Think. a",
        "critic.learning_rate=0.0002, solver.learning_rate=0.0001, prompt=Think. b",
    ]


@pytest.mark.parametrize(("axis", "scale"), [("episodes", 1), ("decisions", 2), ("tokens", 20), ("seconds", 0.5)])
def test_runs_are_compared_up_to_the_cost_that_all_have_reached(axis: str, scale: float, tmp_path: Path) -> None:
    run(tmp_path / "long", 0, [float(n) for n in range(1, 201)], per_row=1, gamma=1.0)
    run(tmp_path / "short", 0, [20.0 * n for n in range(1, 6)], per_row=20, gamma=0.5)
    found = compared(tmp_path, axis=axis)
    assert found.points[-1] == 100 * scale
    long, short = (family.curves[0] for family in found.families)
    assert long == pytest.approx(range(1, 101))  # the reward is the number of episodes
    assert short == pytest.approx([20.0] * 20 + list(range(21, 101)))  # 20 before the first row, then linear
    assert found.families[0].estimate(LAST)[0] == pytest.approx(95), "from 90 to 100"
    assert found.families[0].estimate(WHOLE)[0] == pytest.approx((1 + (100**2 - 1) / 2) / 100), "1 up to the first row"
    assert found.families[0].estimate(LAST)[1] == (-math.inf, math.inf)


def test_repeated_runs_and_runs_without_the_metric_are_left_out_with_a_note(folder: Path) -> None:
    run(folder / "z", 2, [9.0] * 4, gamma=1.0)
    write_run(folder / "empty", [], CONFIGURATION)
    found = compared(folder)
    assert found.families[0].curves[2][0] == 3.0
    assert any("z is left out: its settings and its seed are those of" in note for note in found.notes)
    assert any("empty is left out: it has no `rollout/reward`" in note for note in found.notes)


def test_of_a_run_and_its_resumed_copy_the_longer_one_counts(tmp_path: Path) -> None:
    run(tmp_path / "killed", 0, [1.0] * 2)
    run(tmp_path / "resumed", 0, [1.0] * 2 + [5.0] * 6)
    run(tmp_path / "later", 0, [1.0] * 4)
    found = compared(tmp_path)
    assert [(family.label, list(family.curves)) for family in found.families] == [(str(tmp_path / "resumed"), [0])]
    assert found.points[-1] == 80.0
    assert found.families[0].curves[0][-1] == 5.0
    left = [f"{tmp_path / name} is left out" for name in ("killed", "later")]
    assert sorted(note.partition(":")[0] for note in found.notes) == left
    assert all(note.endswith(f" those of {tmp_path / 'resumed'}.") for note in found.notes), "the run that counts"


def test_runs_without_settings_or_seeds_stand_alone(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run(tmp_path / name, 0, [1.0])
        (tmp_path / name / "config.yaml").unlink()
    run(tmp_path / "three", None, [1.0])
    run(tmp_path / "three-2", None, [2.0])
    found = compared(tmp_path)
    assert sorted(len(family.curves) for family in found.families) == [1, 1, 2]
    assert [family.label for family in found.families] == [str(tmp_path / name) for name in ("one", "three", "two")]


def test_a_family_without_a_label_has_the_name_of_the_folder_of_its_seeds(tmp_path: Path) -> None:
    for sweep, settings in (("one", {"gamma": 0.5}), ("two", {})):
        for seed in range(2):
            run(tmp_path / sweep / f"seed-{seed}", seed, [1.0], **settings, **dict.fromkeys("abcd", sweep))
    run(tmp_path / "alone", 0, [1.0])
    labels = [family.label for family in compared(tmp_path).families]
    assert labels == [str(tmp_path / name) for name in ("alone", "one", "two")]


def test_runs_of_different_tasks_are_named(tmp_path: Path) -> None:
    configuration = copy.deepcopy(CONFIGURATION)
    run(tmp_path / "a", 0, [1.0, 1.0])
    assert compared(tmp_path).notes == []
    configuration["data"]["init_args"]["environment"] = {"class_path": "CodeEnvironment", "init_args": {"cases": 3}}
    write_run(tmp_path / "b", [], configuration)
    (tmp_path / "b" / "metrics.csv").write_text((tmp_path / "a" / "metrics.csv").read_text())
    settings = "data.environment.cases, data.environment.class_path"
    warning = f"Warning: the rows were trained on different tasks ({settings}); their `rollout/reward` may not be"
    assert f"\n- {warning} comparable.\n" in compared(tmp_path).markdown()


def test_the_command_writes_the_table_and_the_curves(folder: Path, tmp_path: Path, mrlm: Any, unread: Any) -> None:
    unread("report", str(folder), "--output", "unread.md")
    assert Path("unread.md").read_text().startswith("| ")
    files = [str(tmp_path / "out" / name) for name in ("table.md", "curves.csv", "a.png", "a.pdf", "a.svg")]
    status, out, err = mrlm("report", str(folder), "--at", "tokens", "--output", *files)
    assert status == 0, err
    table = Path(files[0]).read_text()
    assert out == table
    assert table.splitlines()[2:4] == [
        "| gamma=1.0 | 3 | 2 [-0.4841, 4.484] | 2 [-0.4841, 4.484] | 2 [-0.4841, 4.484] |  |",
        "| gamma=0.5 | 3 | 4 [-0.9683, 8.968] | 4 [-0.9683, 8.968] | 4 [-0.9683, 8.968] "
        "| 2 [-0.4841, 4.484], 3 pairs of seeds |",
    ]
    with open(files[1], newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 200
    assert (rows[-1]["runs"], rows[-1]["tokens"], float(rows[-1]["mean"])) == ("gamma=0.5", "800.0", 4.0)
    assert Path(files[2]).read_bytes().startswith(b"\x89PNG")
    assert Path(files[3]).read_bytes().startswith(b"%PDF")
    assert "<svg" in Path(files[4]).read_text()


@pytest.mark.parametrize("name", ["curves.csv", "a.png"])
def test_a_file_that_cannot_be_written_whole_leaves_the_former(
    name: str, folder: Path, tmp_path: Path, mrlm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / name).write_text("former")
    monkeypatch.setattr("mrlm_pl.durable_files.os.replace", fail)
    status, _, error = mrlm("report", str(folder), "--output", str(tmp_path / name))
    assert (status, "No space left" in error) == (2, True)
    assert (tmp_path / name).read_text() == "former"
    assert not list(tmp_path.glob("*.part"))


def test_the_table_fits_into_a_terminal(folder: Path, mrlm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    status, out, err = mrlm("report", str(folder))
    assert status == 0, err
    out = re.sub(r"\x1b\[[\d;]*m", "", out)
    assert "---" not in out
    assert all(text in out for text in ("gamma=0.5", "last tenth of", "rollout/reward"))
    assert max(map(len, out.splitlines())) <= 80


def test_a_terminal_that_would_cut_numbers_gets_markdown(
    folder: Path, mrlm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected, _ = mrlm("report", str(folder))
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert mrlm("report", str(folder))[1] == expected


def test_characters_of_markdown_in_a_label_are_shown(
    tmp_path: Path, mrlm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, text in enumerate([r"In <answer>, *bold* _x_ __y__ `z` a|b \*", "max_tokens"]):
        run(tmp_path / str(number), 0, [1.0, 2.0], prompt=text)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    _, out, _ = mrlm("report", str(tmp_path))
    shown = re.sub(r"\x1b\[[\d;]*m", "", out)
    assert r"prompt=In <answer>, *bold* _x_ __y__ `z` a|b \*" in shown
    assert "prompt=max_tokens" in compared(tmp_path).markdown()


def test_several_metrics_have_a_table_a_picture_and_rows_each(folder: Path, tmp_path: Path, mrlm: Any) -> None:
    names = ["step", "rollout/reward"]
    files = [str(tmp_path / name) for name in ("table.md", "curves.csv", "a.svg")]
    asked = [word for name in (*names, names[0]) for word in ("--metric", name)]
    status, out, err = mrlm("report", *asked, str(folder), "--output", *files)  # a run may follow a metric
    assert status == 0, err
    assert out == Path(files[0]).read_text() == "\n".join(compared(folder, metric=name).markdown() for name in names)
    with open(files[1], newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["metric"] for row in rows[::200]] == names
    assert Path(files[2]).read_text().count('id="axes_') == 2


def test_runs_on_files_are_compared_by_updates_and_their_held_out_evaluations_are_columns(
    tmp_path: Path, mrlm: Any
) -> None:
    folder = tmp_path / "sft"
    write_run(folder, [], CONFIGURATION)
    (folder / "metrics.csv").write_text("step,train/nll\n0,4\n1,3\n2,2\n3,1\n")
    for moment, accuracy in (("before", 0.25), ("after", 0.75)):
        report = {"math": {"mean_reward": 1.0, "accuracy": accuracy}}
        (folder / f"evaluation_{moment}.json").write_text(json.dumps(report))
    points = [{"step": 0, "environments": {"math": {"accuracy": 0.25}}}]
    points += [{"step": 2, "environments": {"math": {"accuracy": 0.5}}}]
    (folder / "evaluation_curve.json").write_text(json.dumps({"points": points}))
    found = compared(folder, metric="train/nll")
    assert (found.axis, found.points[-1], *found.families[0].last.values()) == ("updates", 4, 1)
    for metric, values in (("held_out", [0.375, 0.5, 0.625, 0.75]), ("curve", [0.375, 0.5, 0.5, 0.5])):
        measured = compared(folder, metric=f"{metric}/math/accuracy")
        (curve,) = measured.families[0].curves.values()
        np.testing.assert_allclose(np.interp([1, 2, 3, 4], measured.points, curve), values)
    assert find_runs([str(folder)])[str(folder)].metrics()["columns"]["held_out/math/reward"] == [1, None, None, 1]
    status, _, err = mrlm("report", str(folder), "--metric", "train/nll", "--at", "episodes")
    assert (status, "no run has 'train/nll' by episodes; compare it with `--at updates`" in err) == (2, True), err


def test_of_evaluations_before_and_after_training_the_last_ones_are_compared(folder: Path, mrlm: Any) -> None:
    for seed in range(3):
        for name, before, after in (("a", 0.0, 0.5), ("b", 0.5, 0.75 + 0.125 * seed)):
            for moment, accuracy in (("before", before), ("after", after)):
                report = {"math": {"accuracy": accuracy}}
                (folder / f"{name}{seed}" / f"evaluation_{moment}.json").write_text(json.dumps(report))
            write_state(folder / f"{name}{seed}", {"state": "finished", "reason": ""})
    status, out, err = mrlm("report", str(folder), "--metric", "held_out/math/accuracy")
    assert status == 0, err
    # 0.25, 0.375 and 0.5: t(2) = 4.3027 times the standard error 0.125 / sqrt(3)
    assert out.startswith(
        """| runs | seeds | last value of each run | last value minus the first row's |
| --- | --- | --- | --- |
| gamma=1.0 | 3 | 0.5 |  |
| gamma=0.5 | 3 | 0.875 [0.5645, 1.186] | 0.375 [0.06448, 0.6855], 3 pairs of seeds |
"""
    )


@pytest.mark.parametrize(
    ("state", "drawn"), [("finished", True), ("unknown", True), ("interrupted", False), ("failed", False)]
)
def test_the_evaluation_after_a_former_end_is_no_point_of_a_run_that_went_on(
    state: str, drawn: bool, tmp_path: Path
) -> None:
    folder = write_run(tmp_path / "run", [], CONFIGURATION)
    (folder / "metrics.csv").write_text("step,train/nll\n0,4\n1,3\n")
    for moment, accuracy in (("before", 0.25), ("after", 0.75)):
        (folder / f"evaluation_{moment}.json").write_text(json.dumps({"math": {"accuracy": accuracy}}))
    if state != "unknown":  # a run of Lightning's own trainer has written none
        (folder / "state.json").write_text(json.dumps({"state": state}))
    (run,) = find_runs([str(folder)]).values()
    assert run.state()[0] == state
    assert run.curves()["held_out/math/accuracy"] == [0.25, 0.75 if drawn else None]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--metric", "rollout/rewrad"],
            "metric: no run has 'rollout/rewrad' by episodes; did you mean 'rollout/reward'",
        ),
        (["--at", "iterations"], "metric: no run has 'rollout/reward' by iterations"),
        (["--metric", "zzz"], "metric: no run has 'zzz' by episodes; choose `--metric` from "),
        (
            ["--at", "hours"],
            "error: --at: expected one of 'episodes', 'decisions', 'tokens', 'iterations', 'updates', 'seconds', but",
        ),
        (["--ouput", "a.md"], "error: there is no option '--ouput'; did you mean '--output'?\n"),
        (["--output", "a.jpg"], "output: 'a.jpg' must end in .md, .csv, .png, .pdf, .svg"),
    ],
)
def test_mistakes_are_named(words: list[str], message: str, folder: Path, mrlm: Any) -> None:
    status, _, err = mrlm("report", str(folder), *words)
    assert (status, message in err, len(err.splitlines())) == (2, True, 1), err


def test_the_help_has_no_markup(mrlm: Any) -> None:
    out = mrlm("report", "--help")[1]
    assert "Compare runs over their seeds at equal cost." in out
    assert "``" not in out


def test_an_argument_that_is_left_out_is_named(mrlm: Any) -> None:
    assert mrlm("report") == (2, "", "mrlm: error: RUN missing; see `mrlm report --help`\n")
    assert mrlm("sweep")[2] == "mrlm: error: --seeds, --output missing; see `mrlm sweep --help`\n"
    assert mrlm("view", "--prot", "1")[2] == "mrlm: error: there is no option '--prot'; did you mean '--port'?\n"


def test_the_band_is_drawn_where_the_interval_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    axes = pytest.importorskip("matplotlib.axes").Axes
    drawn: list[Any] = []
    monkeypatch.setattr(axes, "fill_between", lambda self, *_, where, **__: drawn.append(list(where)))
    for seed in range(3):
        run(tmp_path / "same" / str(seed), seed, [1.0, 1.0 + seed], per_row=50)
    plot([compared(tmp_path / "same")], tmp_path / "a.png")
    assert drawn == [[False] * 50 + [True] * 50], "equal up to 50 of 100 episodes, then apart"


def test_a_picture_without_matplotlib_names_the_extra(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"needs matplotlib; install it with `pip install 'mrlm\[plot\]'`"):
        plot([compared(folder)], tmp_path / "a.png")
