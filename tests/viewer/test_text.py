"""Runs and episodes in a terminal."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mrlm_pl.episode import Message
from mrlm_pl.runs.state import running, write_state
from mrlm_pl.viewer.runs import find_runs
from mrlm_pl.viewer.text import print_episode, print_episodes, print_runs, visible
from tests.support.runs.recorded_runs import HOSTILE, episode, with_credit, write_run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "140")
    return write_run(tmp_path / "runs" / "a", [[episode("0-0", "it is 4", rewards=(0.25, 1.0))]], rewards=[0.5])


def test_an_episode_by_agent_and_turn(folder: Path, mrlm) -> None:
    with_credit(folder / "episodes" / "iteration-000000.jsonl.zst", advantage=-0.125, return_=0.5)
    status, out, error = mrlm("view", "--text", str(folder), "--episode", "0-0")
    assert (status, error) == (0, "")
    first, second = out.index("first  policy main"), out.index("second  policy main")
    assert first < second
    assert (
        "turn 0  reward 0.25 (score 0.25)  return 0.5  advantage -0.125  2 tokens  version 0  stop" in out[first:second]
    )
    assert "it is 4" in out[second:]


@pytest.mark.parametrize(
    ("advantage", "shown"),
    [(-0.46875, "advantage -0.4688  2 tokens"), (-1.171875, "advantage -1.172 (x 2.5)  2 tokens")],
)
def test_the_factor_of_a_weighted_advantage_is_shown(folder: Path, mrlm, advantage: float, shown: str) -> None:
    path = folder / "episodes" / "iteration-000000.jsonl.zst"
    with_credit(path, return_=0.625, baseline=1.09375, advantage=advantage)  # a difference of -0.46875
    assert f"return 0.625  baseline 1.094  {shown}" in mrlm("view", "--text", str(folder), "--episode", "0-0")[1]


def test_an_unknown_id_is_answered_with_the_nearest(folder: Path, mrlm) -> None:
    status, _, error = mrlm("view", "--text", str(folder), "--episode", "0-0-1")
    assert status == 2
    assert "there is no episode '0-0-1' in this run; did you mean '0-0'? `mrlm view RUN` lists them" in error


def test_large_numbers_are_shown_in_full(folder: Path, mrlm) -> None:
    (folder / "metrics.csv").write_text("step,progress/episodes\n0,15360\n")
    write_run(folder.parent / "b", [])
    assert " 15,360 " in mrlm("view", "--text", str(folder.parent))[1]


def test_a_narrow_terminal_gets_whole_names(folder: Path, mrlm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    name = "a_run_with_a_name_as_long_as_researchers_choose_them"
    write_run(folder.parent / name, [[episode(f"{name}-0")]])
    assert name in mrlm("view", "--text", str(folder.parent))[1]
    assert f"{name}-0" in mrlm("view", "--text", str(folder.parent / name))[1]


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_gets_whole_lines_and_numbers(tmp_path: Path, width: int) -> None:
    name = "a_run_with_a_name_as_long_as_researchers_choose_them"
    texts = [episode(f"0-{number}", "word " * 20, iteration=number, task=10**6) for number in range(3)]
    run = write_run(tmp_path / name, [texts], rewards=[0.5])
    with_credit(run / "episodes" / "iteration-000000.jsonl.zst", advantage=-0.46875)
    other = write_run(tmp_path / "other", [])
    (other / "metrics.csv").write_text("step,progress/episodes\n0,1234567\n")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=width)
    runs = find_runs([str(run), str(other)])
    print_runs(runs, console)
    print_episodes(next(iter(runs.values())), console)
    lines = [line for line in out.getvalue().splitlines() if line.startswith(" ")]
    assert max(map(len, lines)) <= width
    assert name in "".join(line.split()[0] for line in lines if line[1] != " ")
    assert {"1,234,567", "-0.4688"} <= set(out.getvalue().split())


def test_a_narrow_terminal_lacks_columns_before_it_folds_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    texts = [episode(f"0-{number}", task=10**6, iteration=number) for number in range(3)]
    for name in ("question-answering", "other"):
        write_run(tmp_path / "runs" / name, [texts], rewards=[0.5])
    runs = find_runs(["runs"])
    printed = {}
    for width in (80, 160):
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, color_system=None, width=width)
        print_runs(runs, console)
        print_episodes(runs["runs/other"], console)
        printed[width] = out.getvalue()
        assert "runs/question-answering" in printed[width]
        assert "math/train/1000000" in printed[width]
    assert ("algorithm" in printed[80], "iteration " in printed[80]) == (False, False)
    assert ("algorithm" in printed[160], "iteration " in printed[160]) == (True, True)


def test_a_very_narrow_terminal_gets_names_and_numbers(folder: Path) -> None:
    out = io.StringIO()
    print_runs(find_runs([str(folder)]), Console(file=out, force_terminal=True, color_system=None, width=40))
    lines = [line for line in out.getvalue().splitlines() if line.startswith(" ")]
    assert str(folder) in "".join(line[1:7].strip() for line in lines[2:])
    assert "…" not in out.getvalue()


def test_the_help_has_plain_words(mrlm) -> None:
    for command in ("view", "info", "sessions", "consolidate"):
        assert "``" not in mrlm(command, "--help")[1]


def test_the_runs_and_the_episodes_of_one(folder: Path, mrlm) -> None:
    out = mrlm("view", "--text", str(folder))[1]
    assert "0-0" in out
    assert "0.625" in out
    write_run(folder.parent / "b", [])
    out = mrlm("view", "--text", str(folder.parent))[1]
    assert out.count("GRPO") == 2
    write_run(folder.parent / "d", [[episode("0-0", rewards=(0.5, 0.5))]], rewards=[0.5])
    out = mrlm("view", "--text", str(folder.parent))[1]
    assert "0.500" in out
    assert "inf" not in out.replace(str(folder.parent), ""), "one task has no interval"
    greedy = write_run(folder.parent / "c", [[episode("0-greedy", excluded="greedy")]])
    assert "greedy" in mrlm("view", "--text", str(greedy))[1].replace("0-greedy", "")
    assert "not trained on: greedy" in mrlm("view", "--text", str(greedy), "--episode", "0-greedy")[1]


def test_a_list_of_episodes_tells_the_course_of_the_rewards_and_the_signs_of_the_advantages(
    tmp_path: Path, mrlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    run = write_run(tmp_path / "run", [[episode("0-0")]], rewards=[0.0, 0.25, 0.5, 1.0, 0.5])
    with_credit(run / "episodes" / "iteration-000000.jsonl.zst", advantage=-0.125)
    out = mrlm("view", "--text", str(run))[1]
    assert "\nmean reward 0.125 in the first 2, 0.75 in the last 2 of 5 iterations\n" in out
    (line,) = [line for line in out.splitlines() if "math/train" in line]
    assert " -0.125 " in line
    assert "mean reward" not in mrlm("view", "--text", str(run), "--iteration", "0")[1]


def test_replies_stand_by_step_and_not_by_agent(tmp_path: Path, mrlm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    once = episode("0-0")
    twice = {}
    for agent, (row,) in once.trajectories.items():
        (turn,) = row.turns
        said = [Message("assistant", f"it is {index}") for index in (turn.index, turn.index + 2)]
        twice[agent] = (
            replace(
                row,
                token_ids=2 * row.token_ids,
                action_mask=2 * row.action_mask,
                logprobs=2 * row.logprobs,
                turns=(turn, replace(turn, index=turn.index + 2, start=8, stop=10)),
                messages=(Message("user", "first?"), said[0], Message("user", "again?"), said[1]),
            ),
        )
    played = replace(once, trajectories=twice)
    out = mrlm("view", "--text", str(write_run(tmp_path / "run", [[played]])))[1]
    assert "it is 0 | it is 1 | it is 2 | it is 3" in out


def test_a_run_on_files_tells_the_course_of_its_loss(tmp_path: Path, mrlm) -> None:
    run = write_run(tmp_path / "run", [])
    columns = "step,train/loss,train/pair_accuracy,val/pair_accuracy"
    (run / "metrics.csv").write_text(f"{columns}\n0,4,0.25,\n1,2,0.5,\n2,1,0.75,\n2,,,0.625\n")
    out = mrlm("view", "--text", str(run))[1]
    assert "\nmean loss 4 in the first 1, 1 in the last 1 of 3 logged updates\n" in out
    assert "\nlast train/pair_accuracy 0.75, val/pair_accuracy 0.625\n" in out


def test_a_list_of_episodes_begins_with_the_state(folder: Path, mrlm) -> None:
    write_state(folder, {**running(), "began": "another process"})
    assert mrlm("view", "--text", str(folder))[1].startswith(f"{folder}: stopped without an end\n")
    write_state(folder, {"state": "failed", "reason": "NonFiniteError: the loss is nan"})
    out = mrlm("view", "--text", str(folder), "--iteration", "0")[1]
    assert out.startswith(f"{folder}: failed: NonFiniteError: the loss is nan\n")


def test_the_episodes_of_an_iteration(tmp_path: Path, mrlm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    iterations = [[episode(f"{number}-{member}", iteration=number) for member in range(30)] for number in range(3)]
    run = str(write_run(tmp_path / "run", iterations))
    status, out, _ = mrlm("view", "--text", run, "--iteration", "1")
    assert status == 0
    ids = [line.split()[1] for line in out.splitlines() if "math/train" in line]
    assert ids == [f"1-{number}" for number in reversed(range(30))], "the newest first"
    assert "the newest 50 of 90 episodes; `--iteration N` lists" in mrlm("view", "--text", run)[1]
    status, _, error = mrlm("view", "--text", run, "--iteration", "7")
    assert (status, "no episode of iteration 7" in error) == (2, True)
    assert "iteration: 1 does nothing without text or export; leave it out" in mrlm("view", run, "--iteration", "1")[2]
    words = ("--text", "--iteration", "1", "--episode", "1-0")
    assert "`--episode ID` is shown alone" in mrlm("view", run, *words)[2]


def test_a_list_of_episodes_begins_with_the_largest_advantage_and_names_the_number_of_the_run(
    tmp_path: Path, mrlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    iterations = [[episode(f"{n}-0", iteration=n)] for n in range(4)]
    run = write_run(tmp_path / "run", iterations, rewards=[0.5] * 4)
    for number, advantage in enumerate((0.5, -2.0, 1.0)):
        with_credit(run / "episodes" / f"iteration-{number:06d}.jsonl.zst", advantage=advantage)
    out = mrlm("view", "--text", str(run))[1]
    assert [line.split()[1] for line in out.splitlines() if "math/train" in line] == ["1-0", "2-0", "0-0", "3-0"]
    monkeypatch.setattr("mrlm_pl.viewer.text.ROWS", 2)
    assert "the 2 largest advantages of 4 episodes; " in mrlm("view", "--text", str(run))[1]
    monkeypatch.setattr("mrlm_pl.viewer.episode_index.NEWEST", 3)
    assert "the 2 largest advantages of the newest 3 of 16 episodes; " in mrlm("view", "--text", str(run))[1]
    (run / "metrics.csv").unlink()
    assert "of the newest 3 of more than 3 episodes; " in mrlm("view", "--text", str(run))[1]


def test_a_single_token_and_the_reward_of_an_episode(tmp_path: Path, mrlm) -> None:
    whole = episode("0-0", rewards=(0.25, 1.0))
    cut = {
        agent: (replace(row, turns=(replace(row.turns[0], start=4),)),) for agent, (row,) in whole.trajectories.items()
    }
    run = write_run(tmp_path / "run", [[replace(whole, trajectories=cut)]])
    out = mrlm("view", "--text", str(run), "--episode", "0-0")[1]
    assert "reward 0.625  ended: answered" in out
    assert "  1 token  version" in out


def test_failed_episodes_have_their_error_in_place_of_a_reward(tmp_path: Path, mrlm) -> None:
    error = "RuntimeError in step (grader.py:4): it has no answer\nfor this reply, " + "as it is too long " * 5
    failed = episode("0-1", "I refuse", rewards=(0.0, 0.0), error=error)
    run = write_run(tmp_path / "run", [[episode("0-0", "so it is\n4"), failed]], rewards=[0.0, 0.5])
    (run / "evaluation_after.json").write_text('{"math": {"mean_reward": 1, "accuracy": 0.75}}')
    out = mrlm("view", "--text", str(run))[1]
    assert "\nlast held_out/math/accuracy 0.75, held_out/math/reward 1\n" in out
    bad, good = ([cell.strip() for cell in line.split("│")] for line in out.splitlines() if "math/train" in line)
    assert (good[-3:-1], good[5]) == (["question 0", "so it is 4 | so it is 4"], "0.5")
    assert (bad[1], bad[5], bad[-4][-1], bad[-4][:20]) == ("0-1", "", "…", error[:20])
    status, out, _ = mrlm("view", "--text", str(run), "--failed")
    (line,) = [line for line in out.splitlines() if "math/train" in line]
    assert status == 0
    assert f"│ {' '.join(error.split())} │" in line
    assert "reward" not in mrlm("view", "--text", str(run), "--episode", "0-1")[1].partition("turn 0")[0]
    assert mrlm("view", "--text", str(write_run(tmp_path / "good", [[episode("0-0")]])), "--failed")[1].endswith(
        "no episode failed\n"
    )
    assert "failed: True does nothing without text" in mrlm("view", str(run), "--failed")[2]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_cannot_steer_a_terminal(text: str) -> None:
    out = io.StringIO()
    Console(file=out, force_terminal=True, color_system=None, width=100, legacy_windows=False).print(visible(text))
    written = out.getvalue()
    assert not {"\x1b", "\x07", "\u202e", "\u2066", "\u200b"} & set(written)
    assert written.encode()


def test_markup_stays_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [[episode("0-0", "[bold]x[/bold] [/nothing]")]])
    out = io.StringIO()
    print_episode(next(iter(find_runs([str(run)]).values())).record("0-0"), Console(file=out, width=100))
    assert "[bold]x[/bold] [/nothing]" in out.getvalue()


def test_mistakes(folder: Path, mrlm) -> None:
    assert "episode: '0-0' does nothing without text or export" in mrlm("view", str(folder), "--episode", "0-0")[2]
    assert "check the path" in mrlm("view", str(folder)[:-1] + "c")[2]
    status, _, error = mrlm("view", str(folder), "--text", "--episode", "none")
    assert status == 2
    assert "no episode 'none'" in error
    assert "set a token" in mrlm("view", str(folder), "--host", "0.0.0.0")[2]
    write_run(folder.parent / "b", [])
    assert "name one run" in mrlm("view", str(folder.parent), "--text", "--episode", "0-0")[2]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--export", "/dev/null/x.html"), "'/dev/null/x.html' cannot be written: "),
        (("--export", "x.html", "--text"), "name one of them"),
        (("--port", "99999"), "99999 is not a port; name one of 0 to 65535"),
        (("--port", "-1"), "-1 is not a port"),
        (("--port=",), "--port: expected an integer such as 2, but the value is ''\n"),
        (("--text", "--port", "3"), "port: 3 is for served pages; leave this option out"),
        (("--export", "x.html", "--token-file", "t"), "token_file: 't' is for served pages; leave this option out"),
        (("--host", "nosuch.invalid", "--port", "0"), "choose another `--host`"),
    ],
)
def test_impossible_options(
    options: tuple[str, ...], told: str, folder: Path, mrlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MRLM_TOKEN", "s3cret")
    status, _, error = mrlm("view", str(folder), *options)
    assert status in (1, 2)
    assert told in error
    assert not (tmp_path / "x.html").exists()
