"""``mrlm collect``: the file that it writes, and a kill in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.engines import InProcessEngine
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.runs import collection as command


@pytest.fixture
def collect(mrlm, model_folder, monkeypatch):
    monkeypatch.setattr(command, "CHUNK", 4)

    def run(*options: str, status: int = 0) -> str:
        arguments = ("--environment", "parrot", "--environment.difficulty", "[1]", "--max-tokens", "2", *options)
        result = mrlm("collect", "--model", str(model_folder), *arguments)
        assert result[0] == status, result[2]
        return result[1] if status == 0 else result[2]

    return run


def untimed(path: str) -> list[Any]:
    rows = []
    for line in Path(path).read_text().splitlines():
        row = json.loads(line)
        row.pop("timings")
        rows.append(row)
    return rows


def test_episodes_are_whole_records_and_the_same_twice(collect):
    written = collect("-n", "10", "--output", "deep/a.jsonl")
    assert "10 of 10 episodes in deep/a.jsonl; look at them with `mrlm view deep/a.jsonl`" in written
    collect("--num-episodes", "10", "--output", "b.jsonl")
    assert untimed("deep/a.jsonl") == untimed("b.jsonl")
    episodes = list(read_episodes_file("deep/a.jsonl"))
    assert len({episode.id for episode in episodes}) == 10
    assert all(row.logprobs[-1] < 0 for episode in episodes for row in episode.rows())
    assert [path.name for path in Path("deep").iterdir()] == ["a.jsonl"]


def test_the_engine_keeps_its_weights_between_the_parts_of_a_collection(collect, monkeypatch):
    waits, wait = [], InProcessEngine.compute_during
    monkeypatch.setattr(InProcessEngine, "compute_during", lambda *given: waits.append(given) or wait(*given))
    collect("-n", "10", "--output", "a.jsonl")
    assert len(waits) == 1


def test_a_replay_of_collected_episodes_finds_them_equal_to_their_record(collect, mrlm, model_folder):
    collect("-n", "6", "--temperatures", "0.5", "1", "--output", "a.jsonl")
    assert all("temperature" in episode.metrics for episode in read_episodes_file("a.jsonl"))
    named = ("--environment", "parrot", "--environment.difficulty", "[1]", "--episodes", "a.jsonl")
    status, out, _ = mrlm("replay", str(model_folder), *named)
    assert (status, out) == (0, "6 of 6 episodes are equal to their record\n")


def test_progress_in_a_log_file_has_lines(mrlm, model_folder):
    options = ("--environment", "parrot", "--max-tokens", "2", "-n", "2", "--output", "a.jsonl")
    _, _, err = mrlm("collect", "--model", str(model_folder), *options)
    assert "mrlm: playing 2 episodes\n" in err
    assert "\r" not in err


def test_a_filter_that_keeps_nothing_is_a_warning(mrlm, model_folder):
    options = ("--environment", "parrot", "--max-tokens", "2", "-n", "2", "--output", "a.jsonl")
    status, out, err = mrlm("collect", "--model", str(model_folder), *options, "--filter-reward", "9")
    assert (status, "0 of 2 episodes" in out) == (0, True)
    assert "warning: no episode has a reward of 9 or more, so a.jsonl is empty" in err


def test_the_first_failure_is_told(mrlm, model_folder, outside_the_repository):
    Path("half.py").write_text(
        "from mrlm_environments import MathEnvironment\n\n\nclass Half(MathEnvironment):\n"
        "    def begin(self, task):\n        assert task.index % 2, 'the back end is away'\n"
        "        return super().begin(task)\n"
    )
    options = ("--environment", "./half.py:Half", "--max-tokens", "2", "-n", "4", "--output", "a.jsonl")
    status, out, err = mrlm("collect", "--model", str(model_folder), *options)
    assert status == 0, err
    told = "2 of 4 episodes in a.jsonl, 2 failed (the first: AssertionError in reset of math/train/0 at turn 0"
    assert told in out
    assert "the back end is away); look at them with `mrlm view a.jsonl`" in out


def test_an_output_that_cannot_be_written_is_named_before_anything_is_played(collect, monkeypatch):
    monkeypatch.setattr(command, "_play", lambda *_: pytest.fail("it has played"))
    Path("file").touch()
    assert "error: output: 'file/a.jsonl' cannot be written: " in collect(
        "-n", "4", "--output", "file/a.jsonl", status=2
    )


def read_episodes_file(path: str) -> Any:
    from mrlm_pl.episode import Episode

    return [Episode.from_json(line) for line in Path(path).read_text().splitlines()]


def test_a_killed_collection_goes_on_without_losing_or_repeating(collect, monkeypatch):
    collect("-n", "10", "--output", "whole.jsonl")

    class Killed(BaseException):
        pass

    add, calls = command.CollectionFile.add, []

    def die(self: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            with Path("cut.jsonl").open("ab") as file:
                file.write(b'{"half of a line')  # a kill in the middle of the second write
            raise Killed
        add(self, *arguments)

    monkeypatch.setattr(command.CollectionFile, "add", die)
    with pytest.raises(Killed):
        collect("-n", "10", "--output", "cut.jsonl")
    assert Path("cut.jsonl.progress").is_file()
    monkeypatch.setattr(command.CollectionFile, "add", add)
    assert "is half of a collection with other options" in collect("-n", "12", "--output", "cut.jsonl", status=2)
    collect("-n", "10", "--output", "cut.jsonl")
    assert untimed("cut.jsonl") == untimed("whole.jsonl")
    assert not Path("cut.jsonl.progress").exists()


def test_a_kill_before_the_first_note_loses_nothing(collect, monkeypatch):
    class Killed(BaseException):
        pass

    write = command.CollectionFile._write_note

    def die(self: Any) -> None:
        if self.played:
            raise Killed
        write(self)

    monkeypatch.setattr(command.CollectionFile, "_write_note", die)
    with pytest.raises(Killed):
        collect("-n", "4", "--output", "cut.jsonl")
    assert Path("cut.jsonl").stat().st_size > 0
    monkeypatch.setattr(command.CollectionFile, "_write_note", write)
    collect("-n", "4", "--output", "cut.jsonl")
    collect("-n", "4", "--output", "whole.jsonl")
    assert untimed("cut.jsonl") == untimed("whole.jsonl")


def test_a_note_without_its_file_is_no_beginning(collect, monkeypatch):
    monkeypatch.setattr(command.CollectionFile, "finish", lambda self: None)
    collect("-n", "4", "--output", "lost.jsonl")
    Path("lost.jsonl").unlink()
    assert "is shorter than when" in collect("-n", "4", "--output", "lost.jsonl", status=2)


def test_objects_that_an_environment_holds_do_not_make_its_options_others(collect, monkeypatch):
    from mrlm_toy import ParrotEnvironment

    begin, held = ParrotEnvironment.__init__, []

    def built(self: Any, difficulty: list[int] | None = None) -> None:
        begin(self, difficulty)
        self.judge = object()  # whose repr has an address
        held.append(self.judge)

    monkeypatch.setattr(ParrotEnvironment, "__init__", built)
    monkeypatch.setattr(command.CollectionFile, "finish", lambda self: None)
    collect("-n", "4", "--output", "a.jsonl")
    assert "4 of 4 episodes" in collect("-n", "4", "--output", "a.jsonl")
    assert len(held) == 2


def test_a_threshold_keeps_what_reaches_it(collect):
    collect("-n", "12", "--output", "all.jsonl")
    rewards = [episode.reward for episode in read_episodes_file("all.jsonl")]
    threshold = sorted(rewards)[6]
    collect("-n", "12", "--output", "best.jsonl.gz", "--filter-reward", str(threshold))
    kept = [episode.reward for episode in read_episodes("best.jsonl.gz")]
    assert kept == [reward for reward in rewards if reward >= threshold]


def test_files_are_not_overwritten_and_must_be_json_lines(collect):
    Path("mine.jsonl").write_text("precious\n")
    assert "'mine.jsonl' exists" in collect("-n", "1", "--output", "mine.jsonl", status=2)
    assert Path("mine.jsonl").read_text() == "precious\n"
    for name in ("episodes.csv", "episodes.gz", "episodes.jsonl.txt"):
        assert "must be a file that ends in .jsonl" in collect("-n", "1", "--output", name, status=2)
    message = collect("-n", "3", "--samples-per-task", "2", "--output", "a.jsonl", status=2)
    assert "must be a multiple of samples_per_task 2" in message


def test_each_task_is_answered_at_each_temperature(collect):
    options = ("-n", "12", "--samples-per-task", "2", "--temperatures", "0", "1.5")
    collect(*options, "--output", "a.jsonl")
    episodes = read_episodes_file("a.jsonl")
    found = [(episode.task.key, episode.metrics["temperature"]) for episode in episodes]
    tasks = list(dict.fromkeys(task for task, _ in found))
    assert found == [(task, heat) for task in tasks for heat in (0.0, 0.0, 1.5, 1.5)]
    assert len(tasks) == 3
    assert len({episode.id for episode in episodes}) == len({episode.seed for episode in episodes}) == 12
    said = [episode.rows()[0].token_ids for episode in episodes]
    assert all(said[start] == said[start + 1] for start in (0, 4, 8)), "greedy answers are equal"
    assert any(said[start + 2] != said[start + 3] for start in (0, 4, 8)), "warm ones are not"


def test_one_temperature_is_written_down_too(collect):
    collect("-n", "2", "--output", "a.jsonl", "--temperature", "0.5")
    assert [episode.metrics["temperature"] for episode in read_episodes_file("a.jsonl")] == [0.5, 0.5]


def test_a_killed_collection_at_several_temperatures_goes_on(collect, monkeypatch):
    options = ("-n", "16", "--temperatures", "0.5", "1.5")
    collect(*options, "--output", "whole.jsonl")

    class Killed(BaseException):
        pass

    add, calls = command.CollectionFile.add, []

    def die(self: Any, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Killed
        add(self, *arguments)

    monkeypatch.setattr(command.CollectionFile, "add", die)
    with pytest.raises(Killed):
        collect(*options, "--output", "cut.jsonl")
    monkeypatch.setattr(command.CollectionFile, "add", add)
    message = collect("-n", "16", "--temperatures", "0.5", "1.0", "--output", "cut.jsonl", status=2)
    assert "is half of a collection with other options" in message
    collect(*options, "--output", "cut.jsonl")
    assert untimed("cut.jsonl") == untimed("whole.jsonl")


def test_temperatures_that_say_nothing_clear_are_refused(collect):
    both = ("--temperatures", "1", "2", "--output", "a.jsonl")
    assert "both given" in collect("-n", "2", "--temperature", "1", *both, status=2)
    assert "multiple of 6: samples_per_task 3 at each of 2" in collect(
        "-n", "9", "--samples-per-task", "3", *both, status=2
    )
    assert "names one twice" in collect("-n", "2", "--temperatures", "1", "1", "--output", "a.jsonl", status=2)
    said = collect("-n", "2", "--temperatures", "1", "-1", "--output", "a.jsonl", status=2)
    assert "error: temperatures: expected a number >= 0, but the value is -1\n" in said
    said = collect("-n", "2", "--temperatures", "0.5", "x", "--output", "a.jsonl", status=2)
    assert "error: temperatures: expected a number such as 0.5, but the value is 'x'\n" in said
    said = collect("-n", "2", "--temperatures", "[a, 1]", "--output", "a.jsonl", status=2)
    assert "temperatures: ['a', 1] is one word; give its values as words, as in `--temperatures A B`\n" in said


@pytest.mark.parametrize(("number", "status", "name"), [(2, 130, "Ctrl-C"), (15, 143, "SIGTERM")])
def test_a_signal_ends_it_in_order_and_the_same_command_continues(collect, monkeypatch, number, status, name):
    import signal

    add = command.CollectionFile.add

    def interrupted(self, episodes, kept):
        add(self, episodes, kept)
        if self.played == 8:
            signal.raise_signal(number)

    monkeypatch.setattr(command.CollectionFile, "add", interrupted)
    told = collect("-n", "12", "--output", "a.jsonl", status=status)
    assert f"{name} has ended collect; the written episodes are kept; continue with `mrlm collect --model" in told
    assert "Traceback" not in told
    monkeypatch.setattr(command.CollectionFile, "add", add)
    collect("-n", "12", "--output", "a.jsonl")
    assert len(Path("a.jsonl").read_text().splitlines()) == 12
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_interrupt_ends_the_process_at_once():
    import signal
    import subprocess
    import sys

    program = (
        "import signal\nfrom mrlm_pl.runs.interrupts import ending_in_order\n"
        "with ending_in_order():\n"
        "    try:\n        signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n        signal.raise_signal(signal.SIGINT)\n"
        "print('not reached')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == -signal.SIGINT
    assert "press it again to end immediately" in done.stderr
    assert done.stdout == ""
