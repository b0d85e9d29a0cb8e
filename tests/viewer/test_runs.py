"""The viewer's reading of run folders."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import yaml
from tokenizers import Tokenizer, decoders, models

from mrlm_pl.compressed_files import packed
from mrlm_pl.episode import Message, Origin
from mrlm_pl.episode_files import iteration_file, write_episodes, write_lines
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.runs.metrics_file import MetricsFile
from mrlm_pl.runs.state import running, write_state
from mrlm_pl.viewer import logged_numbers
from mrlm_pl.viewer.comparison import compare_runs
from mrlm_pl.viewer.episode_index import EpisodeFile
from mrlm_pl.viewer.records import PREVIEW
from mrlm_pl.viewer.runs import Run, find_runs
from mrlm_pl.viewer.text import SHORTENED
from tests.support.runs.recorded_runs import CONFIGURATION, episode, with_credit, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    first = [episode("0-0", rewards=(0.0, 1.0)), episode("0-1", rewards=(1.0, 1.0)), episode("1-0", task=1)]
    second = [episode("2-0", iteration=1, rewards=(0.5, 1.0)), episode("3-0", iteration=1, rewards=(-0.5, 0.0))]
    return write_run(tmp_path / "runs" / "a", [first, second], rewards=[0.5, 0.25])


def run_of(folder: Path) -> Run:
    return next(iter(find_runs([str(folder)]).values()))


def rows(run: Run) -> list[dict[str, Any]]:
    return [row._asdict() for row in run.index.table()["rows"]]


def test_the_table_has_the_newest_episode_first(folder: Path) -> None:
    found = rows(run_of(folder))
    assert [row["id"] for row in found] == ["3-0", "2-0", "1-0", "0-1", "0-0"]
    row = found[1]
    assert row["reward"] == 0.75  # the mean of the agents' rewards
    assert row["rewards"] == [0.5, 1.0]
    assert (row["turns"], row["tokens"]) == (2, 4)
    assert (row["task"], row["group"], row["policies"]) == ("math/train/0", "2", ["main"])
    assert row["advantage"] is None


def test_the_head_has_the_last_reward_with_its_interval(folder: Path) -> None:
    head = run_of(folder).head()
    assert head["reward"] == 0.25  # of 0.75 and -0.25
    # Student's t with one degree of freedom: 12.706 times the standard error sqrt(0.5) / sqrt(2) = 0.5.
    assert head["ci95"] == pytest.approx((0.25 - 12.706 * 0.5, 0.25 + 12.706 * 0.5), abs=1e-3)
    assert (head["algorithm"], head["environments"]) == ("GRPO", ["MathEnvironment"])
    assert head["policies"] == {"main": "builtin:tiny"}
    assert (head["iterations"], head["episodes"]) == (2.0, 8.0)


def test_the_last_reward_is_the_logged_one(folder: Path) -> None:
    write_run(folder.parent / "b", [[episode("0-0")]], rewards=[0.25])  # of two episodes, one of which is not stored
    head = run_of(folder.parent / "b").head()
    assert (head["reward"], head["ci95"]) == (0.25, None)


def test_branches_are_in_no_mean(tmp_path: Path) -> None:
    branch = episode("0-1", rewards=(1.0, 1.0), origin=Origin("0-0", ("first",), 0))
    run = run_of(write_run(tmp_path / "b", [[episode("0-0", rewards=(0.0, 0.5)), branch]]))
    assert run.head()["reward"] == 0.25
    assert compare_runs(run, run)["own"] == 0.25
    assert len(rows(run)) == 2


def test_episodes_that_are_not_trained_on_are_told_and_count_knowingly(tmp_path: Path) -> None:
    marked = [episode(f"0-{name}", rewards=(1.0, 1.0), excluded=name) for name in ("greedy", "replaced", "left_out")]
    run = run_of(write_run(tmp_path / "b", [[episode("0-0", rewards=(0.0, 0.5)), *marked]]))
    assert run.head()["reward"] == 0.25
    assert compare_runs(run, run)["own"] == (0.25 + 1 + 1) / 3  # the sampled ones
    assert [row["excluded"] for row in rows(run)] == ["left_out", "replaced", "greedy", None]
    assert run.record("0-greedy")["excluded"] == "greedy"


def test_iterations_that_are_not_kept_are_told(folder: Path) -> None:
    run = run_of(folder)
    assert run.index.table()["notes"] == []
    (folder / "episodes" / "iteration-000000.jsonl.zst").unlink()
    for number in (3, 5):
        write_episodes(folder / "episodes" / f"iteration-{number:06d}.jsonl.zst", [episode(f"{number}-0")])
    gone = "the episodes of 3 of 6 iterations are not kept (see `data.save_episodes`)"
    assert run.index.table()["notes"] == [gone]
    with pytest.raises(DataError, match="3 of 6 iterations"):
        run.record("2-5")
    for path in sorted((folder / "episodes").iterdir())[:-1]:
        path.unlink()
    assert run.index.table()["notes"] == [gone.replace("3 of", "5 of")]
    (folder / "metrics.csv").write_text("step,progress/iteration\n0,1\n11,12\n")
    assert run.index.table()["notes"] == ["the episodes of 11 of 12 iterations are not kept (see `data.save_episodes`)"]
    assert run_of(folder / "episodes" / "iteration-000005.jsonl.zst").index.table()["notes"] == []


def test_removed_files_are_forgotten(folder: Path) -> None:
    run = run_of(folder)
    newest = next(run.index.newest_first())
    assert isinstance(newest, EpisodeFile)
    shown = newest.rows[0][0]
    last = sorted((folder / "episodes").iterdir())[-1]
    last.unlink()
    assert newest.record(shown) is None  # read before it was removed
    assert list(newest.newest_heads(1)) == []
    assert newest not in list(run.index.newest_first())
    with pytest.raises(DataError, match="there is no episode"):
        run.record(shown)
    assert run.detail()["resumed"] == []


def test_runs_that_differ_in_their_seed_are_one_family(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(
            tmp_path / "runs" / f"seed{seed}", [], {**CONFIGURATION, "seed_everything": seed, "output": f"s{seed}"}
        )
    write_run(tmp_path / "runs" / "other", [], {**CONFIGURATION, "trainer": {"max_epochs": 2}})
    families = [run.head()["family"] for run in find_runs([str(tmp_path / "runs")]).values()]
    assert families[1] == families[2] != families[0]


def test_older_episodes_are_named_by_their_iteration(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown(run: Run, last: float = math.inf) -> tuple[list[str], int | None, list[str]]:
        found = run.index.table(last)
        return [row[0] for row in found["rows"]], found["older"], found["notes"]

    monkeypatch.setattr("mrlm_pl.viewer.episode_index.NEWEST", 2)
    more = ["iteration 0 has more episodes; its newest 2 are shown"]
    assert shown(run_of(folder)) == (["3-0", "2-0"], 0, [])
    assert shown(run_of(folder), 0) == (["1-0", "0-1"], None, more)
    path = tmp_path / "collected.jsonl"
    path.write_text("".join(episode(f"{n}-0", iteration=n // 3).to_json() + "\n" for n in range(5)))
    assert shown(run_of(path)) == (["4-0", "3-0"], 0, [])
    assert shown(run_of(path), 0) == (["2-0", "1-0"], None, more)


def test_the_health_is_that_of_the_newest_episodes_of_a_file(folder: Path) -> None:
    assert [head.id for head in run_of(folder).index.newest_heads(1)] == ["3-0"]
    assert [head.id for head in run_of(folder).index.newest_heads(4)] == ["2-0", "3-0", "0-1", "1-0"]
    assert [head.id for head in run_of(folder).index.newest_heads(9)] == ["2-0", "3-0", "0-0", "0-1", "1-0"]


def test_a_record_has_the_text_of_tokens_and_the_turn_of_each_message(folder: Path) -> None:
    record = run_of(folder).record("0-1")
    row = record["trajectories"]["first"][0]
    assert row["tokens"] == ["<|user|>", "2", "<|end|>", ".", "<|end|>"]  # the built-in model's tokenizer
    assert [message.get("turn") for message in row["messages"]] == [None, 0]
    assert record["seed"] == str(2**60)  # JavaScript has no integer of this size


def test_tokens_have_text_once_the_tokenizer_is_whole(folder: Path) -> None:
    path = folder / "policies" / "main" / "tokenizer.json"
    path.parent.mkdir(parents=True)
    whole = (resources.files("mrlm_pl") / "policy/tiny_model/tokenizer.json").read_text()
    path.write_text(whole[:100])
    run = run_of(folder)
    assert run.record("0-1")["trajectories"]["first"][0]["tokens"] is None
    path.write_text(whole)
    assert run.record("0-1")["trajectories"]["first"][0]["tokens"][1] == "2"


@pytest.mark.parametrize(
    ("pieces", "texts"),
    [
        ({"x": 4, "ĠÃ": 27, "©": 2, "Ã": 23}, ["x", " \ufffd", "é", "\ufffd", "é"]),
        ({"Ã": 4, "y": 27, "©": 2, "z": 23}, ["\ufffd", "y", "\ufffd", "z", "\ufffd"]),
        ({"Ã": 4, "y": 27, "©z": 2, "ÃÃ": 23}, ["\ufffd", "y", "z", "\ufffd", "éz"]),
        ({"ð": 4, "Ł": 27, "ĺ": 2, "Ģ": 23}, ["\ufffd", "\ufffd", "\ufffd", "😀", "\ufffd"]),
    ],
)
def test_the_last_of_the_tokens_of_a_character_has_it(folder: Path, pieces: dict[str, int], texts: list[str]) -> None:
    """In UTF-8 é is the bytes C3 and A9, which a byte-level tokenizer spells Ã and ©; 😀 is F0 9F 98 80, ð Ł ĺ Ģ."""
    path = folder / "policies" / "main" / "tokenizer.json"
    path.parent.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE(pieces, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
    assert run_of(folder).record("0-1")["trajectories"]["first"][0]["tokens"] == texts


def test_numbers_of_newer_records_are_shown(folder: Path) -> None:
    with_credit(folder / "episodes" / "iteration-000001.jsonl.zst", return_=1.5, baseline=2.0, advantage=-0.5)
    run = run_of(folder)
    assert rows(run)[0]["advantage"] == 0.5
    turn = run.record("3-0")["trajectories"]["second"][0]["turns"][0]
    assert (turn["return"], turn["baseline"], turn["advantage"]) == (1.5, 2.0, -0.5)


def test_measures_of_tokens_are_those_of_the_episodes_turns(folder: Path) -> None:
    def line(of: str, turn: str, **values: Any) -> str:
        return json.dumps({"of": of, "turns": {turn: values}}, separators=(",", ":"))

    path = iteration_file(folder, 1, (1, 2), "tokens")
    ours = line("3-0", "/second/1", ratio=[1.5, None], kl=[0.25], token_ids=[1, 2])
    write_lines(
        path, [line("3-1", "/second/1", ratio=[9.0, 9.0]), '{"of":"3-0",', ours, line("3-0", "/third/1", ratio=[1.0])]
    )
    row = run_of(folder).record("3-0")["trajectories"]["second"][0]
    assert row["ratio"] == [None, None, None, 1.5, None]
    assert row["token_ids"] == [4, 27, 2, 23, 2]
    assert {"ratio"} == set(row["per_token"]) - {"action_mask", "logprobs"}
    outside = folder.parent / "other.jsonl.zst"
    path.rename(outside)
    path.symlink_to(outside)
    assert "ratio" not in run_of(folder).record("3-0")["trajectories"]["second"][0], "a link that leads out"


def test_a_path_of_a_turn_tree_has_all_its_tokens_and_numbers(tmp_path: Path) -> None:
    from mrlm_pl.episode import Episode

    def path(name: str, number: int) -> Episode:
        whole = episode(name)
        (row,) = whole.trajectories["first"]
        turns = (replace(row.turns[0], node="0", sample=number),)
        tokens = (*row.token_ids[:3], 23 + number, 2)
        return replace(whole, trajectories={"first": (replace(row, turns=turns, token_ids=tokens),)}, agents=("first",))

    run = run_of(write_run(tmp_path / "run", [[path("0-0", 0), path("0-1", 1)]]))
    assert [row["tree"] for row in rows(run)] == [True, True]
    record = run.record("0-1")
    assert record["trajectories"]["first"][0]["token_ids"] == [4, 27, 2, 24, 2]
    assert record["tree"] is True


def test_answers_of_whatif_are_part_of_the_record(folder: Path) -> None:
    def report(name: str) -> dict[str, Any]:
        side = {"texts": ["4"], "returns": [1.0], "mean": 1.0, "ci95": [None, None]}
        given = {"episode": name, "agent": "first", "turn": 0, "recorded": side, "other": {**side, "mean": 0.25}}
        return {**given, "advantage": 0.75, "ci95": [0.5, 1.0]}

    broken = json.dumps({**report("0-0"), "recorded": "4"})
    for number, text in enumerate([json.dumps(report("0-0")), json.dumps(report("0-1")), broken, "{}", "no json"]):
        (folder / "whatif").mkdir(exist_ok=True)
        (folder / "whatif" / f"{number}.json").write_text(text)
    (found,) = run_of(folder).record("0-0")["whatif"]
    assert (found["agent"], found["advantage"], found["other"]) == ("first", 0.75, {"mean": 0.25, "ci95": (None, None)})


def test_an_unknown_episode_is_an_error(folder: Path) -> None:
    with pytest.raises(DataError, match="no episode 'x'"):
        run_of(folder).record("x")


def test_the_state_is_what_the_run_wrote(folder: Path) -> None:
    run = run_of(folder)
    assert run.state()[0] == "unknown", "a run of an earlier version"
    (folder / "state.json").write_text('{"state": ')
    assert run.state()[0] == "unknown"
    write_state(folder, running())
    assert run.state() == ("running", "")
    write_state(folder, {"state": "failed", "reason": "NonFiniteError: the loss is nan"})
    assert run.state() == ("failed", "NonFiniteError: the loss is nan")
    assert run.head()["state"] == "failed"


def test_a_deleted_run_stays_in_the_table(folder: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "b", [[episode("0-0")]])
    runs = find_runs([str(tmp_path / "runs")])
    shutil.rmtree(folder)
    assert [run.head()["state"] for run in runs.values()] == ["gone", "unknown"]


def test_a_resumption_is_marked_at_the_next_iteration(folder: Path) -> None:
    (folder / "config-2.yaml").write_text("")
    files = sorted((folder / "episodes").iterdir())
    for at, path in enumerate([files[0], folder / "config-2.yaml", files[1]]):
        os.utime(path, (1000 + at, 1000 + at))
    assert run_of(folder).metrics()["resumed"] == [1]


def test_a_killed_run_opens(folder: Path) -> None:
    last = folder / "episodes" / "iteration-000001.jsonl.zst"
    last.write_bytes(last.read_bytes()[:-40])
    (folder / "episodes" / "iteration-000002.jsonl.zst.part").write_bytes(b"draft")
    with (folder / "metrics.csv").open("a") as file:
        file.write("2,3.0,1")
    run = run_of(folder)
    found = run.index.table()
    assert len(found["rows"]) >= 3
    assert "ends within an episode" in found["notes"][0]
    for missing in (lambda: run.index.iteration(9), lambda: run.index.record("9-0")):
        with pytest.raises(ConfigurationError, match=r"no episode (of iteration 9|.9-0.)") as error:
            missing()
        assert found["notes"][0] in str(error.value)
    assert run.metrics()["columns"]["rollout/reward"] == [0.5, 0.25]


def test_lines_that_are_no_episodes_are_counted(folder: Path) -> None:
    good = episode("9-0").to_json()
    other = '{"id": "7-0", "trajectories": 5}', "no json", "[" * 100_000, "{}", '{"id": "8", "unknown": {"newer": [1]}}'
    text = "\n".join([good, *other]) + "\n"
    path = folder / "episodes" / "iteration-000002.jsonl.zst"
    path.write_bytes(packed(path, text.encode()))
    run = run_of(folder)
    assert [row["id"] for row in rows(run)[:2]] == ["8", "9-0"]
    assert run.index.table()["notes"] == ["iteration-000002.jsonl.zst: 4 lines are not episode records"]
    with pytest.raises(DataError, match="episode '8'"):
        run.record("8")


def test_an_empty_file_is_told(folder: Path) -> None:
    (folder / "episodes" / "iteration-000002.jsonl.zst").touch()
    assert run_of(folder).index.table()["notes"] == ["iteration-000002.jsonl.zst holds no episodes"]


def test_a_running_run_is_followed(folder: Path) -> None:
    run = run_of(folder)
    assert len(rows(run)) == 5
    write_run(folder.parent / "b", [[], [], [episode("4-0", iteration=2)]])
    new = "episodes/iteration-000002.jsonl.zst"
    (folder.parent / "b" / new).rename(folder / new)
    assert [row["id"] for row in rows(run)][:2] == ["4-0", "3-0"]


def test_files_are_looked_up_once_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2, 60):
        shutil.copy(iteration_file(folder, 0), iteration_file(folder, number))
    run = run_of(folder)
    run.index.table()
    calls = {name: Mock(side_effect=getattr(Path, name)) for name in ("__eq__", "resolve")}
    for name, counted in calls.items():
        monkeypatch.setattr(Path, name, lambda *given, counted=counted: counted(*given))
    run.index.table()
    assert calls["__eq__"].call_count <= 4 * 60
    assert calls["resolve"].call_count < 10


def test_a_folder_of_episodes_that_cannot_be_read_has_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One run that failed here would hide all of them from the page."""

    def scandir(path: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("mrlm_pl.viewer.runs.os.scandir", scandir)
    assert run_of(folder).head()["algorithm"] == "GRPO"
    assert rows(run_of(folder)) == []


def test_episodes_outside_the_given_folder_are_not_read(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder / "episodes", tmp_path / "elsewhere")
    (folder / "episodes").symlink_to(tmp_path / "elsewhere")
    assert rows(run_of(folder)) == []


def test_metrics_that_are_rewritten_meanwhile_replace_the_former(folder: Path) -> None:
    """As by a resumed run: the rows of repeated steps are dropped, and the header has a new column."""
    run = run_of(folder)

    def logged(step: int, **metrics: float) -> None:
        file.log_metrics({"a": 1.0, **metrics}, step)

    (folder / "metrics.csv").unlink()
    file = MetricsFile(folder)
    for step in range(8):
        logged(step)
    with file.path.open("a") as half:
        half.write("8")
    assert run.logged()["step"] == [*range(8)]
    file = MetricsFile(folder)
    for step in (5, 6):
        logged(step, a=2.0)
        assert run.logged()["step"] == [*range(step + 1)]
    logged(7, b=3.0)
    assert run.logged() == {"step": [*range(8)], "a": [1.0] * 5 + [2.0] * 2 + [1.0], "b": [None] * 7 + [3.0]}
    (folder / "metrics.csv").write_text(f"step,a\n0,{'9' * 200_000}\n1,2\n")  # damaged: no field is as long
    assert run.logged() == {"step": [1.0], "a": [2.0]}
    run.logged()["a"].clear()
    assert run.logged()["a"] == [2.0]
    (folder / "metrics.csv").write_bytes(b"")
    assert run.logged() == {}


def test_a_viewer_keeps_the_files_of_a_table_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrlm_pl.viewer.episode_index.NEWEST", 3)
    folder = write_run(tmp_path / "a", [[episode(f"{number}-0", iteration=number)] for number in range(12)])
    run = run_of(folder)
    assert [row["id"] for row in rows(run)] == ["11-0", "10-0", "9-0"]
    assert run.record("0-0")["id"] == "0-0"
    assert len(run.index._read) <= 5
    for number in range(12, 20):
        write_episodes(iteration_file(folder, number), [episode(f"{number}-0", iteration=number)])
        assert rows(run)[0]["id"] == f"{number}-0"
    made = Mock(side_effect=EpisodeFile)
    monkeypatch.setattr("mrlm_pl.viewer.episode_index.EpisodeFile", made)
    run.index.last_rewards()
    assert len(rows(run)) == 3
    assert made.call_count == 0  # they are still held
    assert len(run.index._read) <= 5


def test_metrics_are_read_beyond_the_largest_text_and_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrlm_pl.viewer.runs.LARGEST_TEXT", 1000)
    path = folder / "metrics.csv"
    path.write_text("step,progress/iteration\n" + "".join(f"{row},{row + 1}\n" for row in range(1000)))
    run = run_of(folder)
    assert run.logged()["progress/iteration"][-1] == 1000.0
    monkeypatch.setattr(logged_numbers, "_number", number := Mock(side_effect=logged_numbers._number))
    with path.open("a") as file:
        file.write("1000,1001\n1001,10")
    assert run.logged()["progress/iteration"][-1] == 1001.0
    assert number.call_args_list == [call("1000"), call("1001")]
    with path.open("a") as file:
        file.write("02\n")
    assert run.logged()["progress/iteration"][-2:] == [1001.0, 1002.0]


def test_the_table_of_runs_reads_the_end_of_the_metrics_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = "".join(f"{row},{row + 1},{row / 8 if row < 900 else ''}\n" for row in range(1000))
    (folder / "metrics.csv").write_text(f"step,progress/iteration,rollout/reward\n{rows}1000,10")
    run = run_of(folder)
    monkeypatch.setattr(logged_numbers, "_number", number := Mock(side_effect=logged_numbers._number))
    head = run.head()
    assert (head["iterations"], head["reward"], head["episodes"]) == (1000.0, 899 / 8, None)
    assert number.call_args_list == [call(text) for text in [*[""] * 100, "112.375", "1000"]]
    assert run.logged()["rollout/reward"][898:901] == [898 / 8, 899 / 8, None]
    assert run.head()["reward"] == 899 / 8


def test_an_episode_and_an_iteration_are_read_from_their_own_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_episodes(iteration_file(folder, 2), [episode("2-9", iteration=2)])
    update, read = EpisodeFile.update, list[str]()

    def counted(file: EpisodeFile) -> None:
        read.append(file.lines.path.name[:16])
        update(file)

    monkeypatch.setattr(EpisodeFile, "update", counted)
    assert run_of(folder).record("0-1")["id"] == "0-1"
    assert read == ["iteration-000000"]
    assert run_of(folder).record("3-0")["id"] == "3-0"  # in a file that its id does not name
    assert read[1:] == ["iteration-000002", "iteration-000001"]
    assert [row.id for row in run_of(folder).index.table(1, 1)["rows"]] == ["3-0", "2-0"]
    assert read[3:] == ["iteration-000001"]


def test_numbers_that_are_nan_or_infinite_are_counted_and_empty_ones_not(folder: Path) -> None:
    (folder / "metrics.csv").write_text("step,a,b\n0,1,\n1,nan,\n2,-inf,0.5\n")
    found = run_of(folder).metrics()
    assert found["columns"]["a"] == [1.0, None, None]
    assert found["not_finite"] == {"a": 2}


def test_metrics_of_a_new_file_of_the_same_number_replace_the_former(folder: Path) -> None:
    path, run = folder / "metrics.csv", run_of(folder)
    path.write_text("step,a\n0,1\n1,2\n")
    assert run.logged() == {"step": [0.0, 1.0], "a": [1.0, 2.0]}
    path.write_text("step,a,b\n0,1,\n1,2,3\n2,3,4\n")
    assert run.logged() == {"step": [0.0, 1.0, 2.0], "a": [1.0, 2.0, 3.0], "b": [None, 3.0, 4.0]}
    path.unlink()
    assert run.logged() == {}


def test_a_file_of_episodes_opens(tmp_path: Path) -> None:
    path = tmp_path / "collected.jsonl"
    path.write_text(episode("0-0").to_json() + "\n")
    run = run_of(path)
    assert run.state() == ("file", "")
    assert [row["id"] for row in rows(run)] == ["0-0"]
    assert run.record("0-0")["id"] == "0-0"


def test_links_that_lead_out_and_pipes_are_not_read(folder: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl.zst"
    secret.write_bytes(packed(secret, episode("secret").to_json().encode() + b"\n"))
    (folder / "episodes" / "iteration-000005.jsonl.zst").symlink_to(secret)
    os.mkfifo(folder / "episodes" / "iteration-000006.jsonl.zst")
    for name in ("config.yaml", "metrics.csv"):
        (folder / name).unlink()
        (folder / name).symlink_to(secret)
    run = run_of(folder)
    assert len(rows(run)) == 5
    assert run.detail()["configuration"] == ""
    assert run.metrics()["columns"] == {}


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("sql: {database_url: 'mysql://root:sesame@db'}", "sql: {database_url: 'mysql://...@db'}"),
        ("a:\n  env:\n    GITHUB: sesame\n  b: 1\n", "a:\n  env:\n    '...'\n  b: 1\n"),
        ("- headers: {A: sesame}  # of \U0001f600\n- api_key: >-\n    ses\n    ame", None),
        ("\ufefftoken: sesame\nb: 1", "token: '...'\nb: 1"),
        ("a: &a sesame\ntoken: *a\ntoken_file: null", "a: '...'\ntoken: *a\ntoken_file: null"),
        ("a: &a {token: 1, b: sesame}\nenv: *a\nc: 2", "a: '...'\nenv: *a\nc: 2"),
        ("token: sesame\n[", ""),
    ],
)
def test_the_configuration_is_without_secrets(folder: Path, written: str, shown: str | None) -> None:
    """An exported page is made to be shown to others."""
    (folder / "config.yaml").write_text(written, encoding="utf-8")
    run = run_of(folder)
    found = run.detail()["configuration"]
    assert shown is None or found == shown
    assert "ame" not in f"{found}{run.settings()}"


def test_a_configuration_that_expands_is_bounded(folder: Path) -> None:
    names = "abcdefghijklmnop"
    levels = [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in itertools.pairwise(names)]
    (folder / "config.yaml").write_text("\n".join(["a: &a [[], []]", *levels, "z: &z [*z]"]))
    began = time.monotonic()
    assert len(run_of(folder).settings()) <= 20_000
    assert time.monotonic() - began < 60


def test_a_configuration_is_read_as_by_the_run(folder: Path) -> None:
    """A run rejects a key that is there twice, and takes dates for text."""
    (folder / "config.yaml").write_text("seed: 1\nday: 2025-02-30\n")
    assert run_of(folder).settings() == {"seed": 1, "day": "2025-02-30"}
    (folder / "config.yaml").write_text("seed: 1\nseed: 2\n")
    assert run_of(folder).settings() == {}


def test_a_configuration_is_parsed_once_for_all_lines_of_the_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    def read_yaml(text: str) -> dict[str, int]:
        parsed.append(text)
        return {"seed_everything": len(parsed)}

    monkeypatch.setattr("mrlm_pl.viewer.runs.read_yaml", read_yaml)
    run = run_of(folder)
    for text in ("a: of this test", "a: of this test", "a: changed in this test"):
        (folder / "config.yaml").write_text(text)
        heads = [run.head() for _ in range(3)]
        assert {head["seed"] for head in heads} == {len(parsed)}
    assert [text.strip() for text in parsed] == ["a: of this test", "a: changed in this test"]


def test_a_setting_of_very_many_values_is_left_out(folder: Path) -> None:
    (folder / "config.yaml").write_text(f"short: [1, 2]\nempty: []\nlong: {[1] * 20_001}")
    assert run_of(folder).settings() == {"short": [1, 2], "empty": None}


def test_what_cannot_be_opened_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "debate").mkdir()
    with pytest.raises(ConfigurationError, match=r"did you mean '.*debate'"):
        find_runs([str(tmp_path / "debatte")])
    (tmp_path / "run" / "episodes").mkdir(parents=True)
    (tmp_path / "run" / "episodes" / "iteration-000000.jsonl.zst").touch()
    with pytest.raises(ConfigurationError, match=r"is a folder of episodes; name its run, '.*/run', or files in it"):
        find_runs([str(tmp_path / "run" / "episodes")])
    with pytest.raises(ConfigurationError, match="holds no run"):
        find_runs([str(tmp_path / "debate")])


def test_metrics_lack_what_is_not_finite(folder: Path) -> None:
    (folder / "metrics.csv").write_text("step,a,b\n0,nan,1\n1,,inf\n2,0.5,x\n")
    assert run_of(folder).metrics()["columns"] == {
        "step": [0.0, 1.0, 2.0],
        "a": [None, None, 0.5],
        "b": [1.0, None, None],
    }


def test_a_long_run_shows_every_nth_row(folder: Path) -> None:
    text = "step\n" + "".join(f"{step}\n" for step in range(5001))
    (folder / "metrics.csv").write_text(text)
    found = run_of(folder).metrics()
    assert found["every"] == math.ceil(5001 / 2000)
    assert found["columns"]["step"][:2] == [2.0, 5.0]


def test_a_column_with_gaps_is_thinned_over_its_numbers(folder: Path) -> None:
    rows = "".join(f"{2 * row},{row}\n{2 * row + 1},\n" for row in range(1001))
    (folder / "metrics.csv").write_text("step,reward\n" + rows)
    columns = run_of(folder).metrics()["columns"]
    held = [
        (step, reward) for step, reward in zip(columns["step"], columns["reward"], strict=True) if reward is not None
    ]
    assert held == [(2.0 * row, float(row)) for row in range(1001)]
    assert columns["step"][-1] == 2001.0


def test_the_viewer_imports_no_torch(folder: Path) -> None:
    code = """if True:
        import sys, mrlm_pl.cli.commands.view
        run = next(iter(mrlm_pl.cli.commands.view.find_runs(sys.argv[1:]).values()))
        run.head(), run.record("0-0")
        print(sorted({"torch", "transformers", "lightning"} & set(sys.modules)))
    """
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_later_updates_of_a_rollout_stand_at_its_counts(folder: Path) -> None:
    text = "step,progress/episodes,train/loss\n0,8,1.0\n1,,2.0\n2,16,3.0\n3,,4.0\n"
    (folder / "metrics.csv").write_text(text)
    columns = run_of(folder).metrics()["columns"]
    assert columns["progress/episodes"] == [8.0, 8.0, 16.0, 16.0]
    assert columns["train/loss"] == [1.0, 2.0, 3.0, 4.0]


def test_the_viewer_writes_nothing(folder: Path) -> None:
    def state() -> list[Any]:
        return sorted((str(path), path.stat().st_mtime_ns) for path in [folder, *folder.rglob("*")])

    before = state()
    run = run_of(folder)
    run.head(), run.detail(), run.metrics(), rows(run), run.record("0-0")
    assert state() == before
    assert yaml.safe_load((folder / "config.yaml").read_text()) == CONFIGURATION


def test_a_report_of_an_evaluation_opens(tmp_path: Path, mrlm: Any, model_folder: Path) -> None:
    path = tmp_path / "report.json"
    options = ("--environment", "math", "-n", "2", "--max-tokens", "2", "--output", str(path))
    status, out, error = mrlm("eval", "--model", str(model_folder), *options)
    assert status == 0, error
    assert f"`mrlm view {path}`" in out
    run = run_of(path)
    found = rows(run)
    assert len(found) == 2
    record = run.record(found[0]["id"])
    (row,) = next(iter(record["trajectories"].values()))
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert found[0]["reward"] == record["reward"]


def test_a_transcript_has_turns_and_a_reward_and_no_tokens_and_iteration(tmp_path: Path, mrlm: Any) -> None:
    path = tmp_path / "report.json"
    messages = [{"role": role, "content": "2"} for role in ("user", "assistant", "user", "assistant")]
    said = {"task": "math/test/0", "reward": 0.75, "success": True, "stop_reason": "answered", "error": None}
    report = {"seed": 0, "seats": {"solver": "main"}, "transcripts": [{**said, "messages": {"solver": messages}}]}
    path.write_text(json.dumps(report))
    (row,) = rows(run_of(path))
    assert (row["turns"], row["tokens"], row["reward"]) == (2, None, 0.75)
    out = mrlm("view", "--text", str(path))[1].splitlines()
    (line,) = [line for line in out if "math/test" in line]
    assert [cell.strip() for cell in line.split("│")[1:-1]] == [
        "math-0", "math/test/0", "0.75", "2", "answered", "2", "2 | 2"
    ]  # fmt: skip
    assert out[1].replace("┃", " ").split() == ["episode", "task", "reward", "turns", "stop", "prompt", "reply"]
    out = mrlm("view", "--text", str(path), "--episode", "math-0")[1]
    assert "reward 0.75  ended: answered" in out
    assert "-1" not in out


def test_tasks_of_a_problem_are_a_group_and_the_unit_of_intervals(tmp_path: Path) -> None:
    rewards = {"one": (1.0, 1.0, 0.0, 0.0, 1.0), "other": (1.0, 0.0, 0.0, 0.0, 0.0)}
    runs = []
    for name, values in rewards.items():
        said = {"success": True, "stop_reason": "answered", "error": None, "messages": {"agent": []}}
        keys = [f"math/test/{number}" for number in range(5)]
        tasks = [{"task": key, "problem": problem} for key, problem in zip(keys, "aabbc", strict=True)]
        transcripts = [{"task": key, "reward": reward, **said} for key, reward in zip(keys, values, strict=True)]
        report = {"seed": 0, "seats": {}, "tasks": tasks, "transcripts": transcripts}
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
        runs.append(run_of(tmp_path / f"{name}.json"))
    assert [(row["task"][-1], row["group"][-1]) for row in rows(runs[0])] == [*zip("43210", "42200", strict=True)]
    # Problems with 2 of 2, 0 of 2 and 1 of 1: residuals 0.8, -1.2 and 0.4 of the mean 0.6, t(2) = 4.30265
    half = 4.30265 * math.sqrt(3 / 2 * (0.8**2 + 1.2**2 + 0.4**2)) / 5
    assert runs[0].head()["ci95"] == pytest.approx((0.6 - half, 0.6 + half), abs=1e-4)
    compared = compare_runs(*runs)
    # Differences of 0 and 1, 0 and 0, and 1: residuals 0.2, -0.8 and 0.6 of the mean 0.4
    half = 4.30265 * math.sqrt(3 / 2 * (0.2**2 + 0.8**2 + 0.6**2)) / 5
    assert compared["difference"] == pytest.approx(0.4)
    assert compared["ci95"] == pytest.approx((0.4 - half, 0.4 + half), abs=1e-4)


def test_the_table_has_the_prompt_and_the_replies_in_the_order_of_the_turns(tmp_path: Path) -> None:
    one = episode("0-0", "first\nline")
    row, second = (trajectories[0] for trajectories in one.trajectories.values())
    example = (Message("user", "an  example"), Message("assistant", "shown, not said"))
    late = replace(row, messages=(*example, *row.messages), turns=(replace(row.turns[0], index=1),))
    early = replace(second, messages=(Message("assistant", "x" * 200),), turns=(replace(second.turns[0], index=0),))
    agents = [*one.trajectories]
    write_episodes(
        tmp_path / "e.jsonl.zst", [replace(one, trajectories=dict(zip(agents, ((late,), (early,)), strict=True)))]
    )
    (found,) = rows(run_of(tmp_path / "e.jsonl.zst"))
    assert (found["prompt"], found["reply"]) == ("an example", "x" * PREVIEW)
    early = replace(early, messages=(Message("assistant", "yes"),))
    write_episodes(
        tmp_path / "f.jsonl.zst", [replace(one, trajectories=dict(zip(agents, ((late,), (early,)), strict=True)))]
    )
    assert rows(run_of(tmp_path / "f.jsonl.zst"))[0]["reply"] == "yes | first line"


def test_a_reply_is_one_line_that_fills_the_terminal(
    tmp_path: Path, mrlm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"task": "math/test/0", "reward": 1.0, "success": True, "stop_reason": "answered", "error": None}
    messages = {"solver": [{"role": "assistant", "content": "a\nb\x1b" * 100}]}
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"seed": 0, "seats": {}, "transcripts": [{**said, "messages": messages}]}))
    for width, wide in ((120, 120), (40, 56 + SHORTENED["reply"])):
        monkeypatch.setenv("COLUMNS", str(width))
        lines = mrlm("view", "--text", str(path))[1].splitlines()
        assert (len(lines), {len(line) for line in lines}) == (5, {wide})
        assert "a b␛a b␛" in lines[3]
        assert "…" in lines[3]


def test_a_broken_report_says_so(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text('{"a": 5}')
    assert run_of(path).index.table()["notes"] == ["report.json holds no transcripts"]


def test_a_report_whose_transcripts_lack_a_field_shows_none_of_them(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    said = {"task": "math/test/0", "messages": {"solver": [{"role": "user", "content": "1 + 1?"}]}}
    path.write_text(json.dumps({"seed": 0, "seats": {"solver": "main"}, "transcripts": [said]}))
    index = run_of(path).index
    assert index.table()["notes"] == ["report.json holds no transcripts"]
    with pytest.raises(DataError, match="there is no episode 'math-0'"):
        index.record("math-0")


@pytest.mark.parametrize("moment", ["before", "curve", "after"])
def test_an_evaluation_of_another_form_is_left_out(folder: Path, moment: str) -> None:
    forms: list[Any] = [5, {"a": 1}, [], {"math": {"accuracy": "x"}}, {"points": 5}, {"points": [{"step": "x"}]}]
    for content in forms:
        (folder / f"evaluation_{moment}.json").write_text(json.dumps(content))
        assert not any(name.startswith(("held_out/", "curve/")) for name in run_of(folder).curves())
