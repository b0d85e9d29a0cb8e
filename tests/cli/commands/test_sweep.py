"""``mrlm sweep`` with a stand-in for ``mrlm train``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from mrlm_pl.cli.commands import sweep
from mrlm_pl.cli.commands.sweep import Cell, Member, plan_members
from mrlm_pl.durable_files import write_json
from mrlm_pl.runs.state import Training, running, try_lock
from tests.support.documents import ROOT
from tests.support.servers.environment_servers import eventually

TRAIN = """
import csv, json, os, pathlib, signal, sys, time

split = [part for word in sys.argv[1:] for part in word.split("=", 1)]
words = {**dict(zip(sys.argv[1:], sys.argv[2:])), **dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)}
run, seed = pathlib.Path(words["--output"]), int(words["--seed_everything"])
run.mkdir(parents=True, exist_ok=True)

def end(number, frame):
    time.sleep(1)
    (run / "ended").write_text("")
    sys.exit(143)

def until(condition):
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < 100
        time.sleep(0.01)

mode = pathlib.Path("mode").read_text()
signal.signal(signal.SIGTERM, signal.SIG_IGN if mode == "ignore" else end)
(run / "process").write_text(str(os.getpid()))
with open(run / "calls", "a") as file:
    file.write(os.environ["OMP_NUM_THREADS"] + "\\n")
if mode == "meet":  # both seeds of a setting run at once
    until(lambda: all((run.parent / f"seed-{seed}" / "calls").exists() for seed in (0, 1)))
if mode in ("wait", "ignore"):
    until(lambda: False)
if mode == "refuse" or (mode == "fail" and seed == 1):
    sys.exit("out of memory")
rate = words.get("--model.kl.coefficient", "1")
model = {"class_path": "mrlm_pl.GRPO", "init_args": {"kl": {"coefficient": rate}}}
settings = {"seed_everything": seed, "model": model}
(run / "config.yaml").write_text(json.dumps(settings))
with open(run / "metrics.csv", "w", newline="") as file:
    csv.writer(file).writerows([["progress/episodes", "rollout/reward"], [8, float(rate) + seed]])
(run / "state.json").write_text(json.dumps({"state": "finished", "reason": ""}))
"""

CONFIG = str(ROOT / "configs" / "quickstart.yaml")
RUNS = [Path("s", f"seed-{seed}") for seed in (0, 1)]
WORDS = ("--config", CONFIG, "--seeds", "2", "--output", "s", "--jobs", "2")


@pytest.fixture
def train(outside_the_repository: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace ``mrlm train``, and return a setter of its behavior: ``meet``, ``fail``, ``wait``, ``ignore`` or none."""
    Path("train.py").write_text(TRAIN)
    Path("mode").write_text("")
    monkeypatch.setattr(sweep, "COMMAND", (sys.executable, "train.py"))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return lambda mode: Path("mode").write_text(mode) and None


def start_sweep(words: Sequence[str] = WORDS, grace: float = 100.0) -> subprocess.Popen[str]:
    """Start a sweep in its own process."""
    program = (
        "import signal, sys; from mrlm_pl.cli.commands import sweep; from mrlm_pl.cli.main import main; "
        "signal.signal(signal.SIGHUP, signal.SIG_DFL); "  # ignored where the tests run under nohup
        f"sweep.GRACE_SECONDS = {grace}; sweep._check = print; "  # their parser imports Lightning
        f"sweep.COMMAND = (sys.executable, 'train.py'); sys.exit(main({['sweep', *words]!r}))"
    )
    return subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True)


@contextmanager
def sweep_of_two(grace: float = 100.0) -> Iterator[subprocess.Popen[str]]:
    """Start a sweep of two runs in its own process; they have begun."""
    process = start_sweep(grace=grace)
    try:
        eventually(lambda: all((run / "calls").exists() for run in RUNS), 100)
        yield process
    finally:
        process.kill()


def calls(folder: str) -> int:
    return len(Path(folder, "calls").read_text().splitlines())


def test_all_combinations_are_planned_with_all_seeds() -> None:
    found = list(
        plan_members(
            Path("s"), ["--config", "c"], 2, ["model.policies.main.learning-rate=1e-4,1e-3", "model=GRPO,RLOO"]
        )
    )
    assert [str(member.folder) for member in found[::2]] == [
        "s/learning_rate=1e-4,model=GRPO/seed-0",
        "s/learning_rate=1e-4,model=RLOO/seed-0",
        "s/learning_rate=1e-3,model=GRPO/seed-0",
        "s/learning_rate=1e-3,model=RLOO/seed-0",
    ]
    assert found[3].words == ("--config", "c", "--model.policies.main.learning_rate=1e-4", "--model=RLOO")
    own = ("--seed_everything", "1", "--output", "s/learning_rate=1e-4,model=RLOO/seed-1", "--resume")
    assert found[3].own == own


def test_values_are_handed_on_as_they_are_written() -> None:
    (item,) = ['data.environment.prompt={qestion},"1",2024-01-01,[1, 1],null']
    found = list(plan_members(Path("s"), [], 1, [item]))
    written = ["{qestion}", '"1"', "2024-01-01", "[1, 1]", "null"]
    assert [member.words for member in found] == [(f"--data.environment.prompt={value}",) for value in written]


def test_settings_that_differ_have_folders_that_differ() -> None:
    grids = [
        ["model.policies.a.model=builtin:tiny,builtin_tiny"],
        ["model.policies.a.learning_rate=1,2", "model.policies.b.learning_rate=1,2"],
        [f"model.x={'a' * 300}b,{'a' * 300}c"],
    ]
    for grid in grids:
        folders = [member.folder.parent.name for member in plan_members(Path("s"), [], 1, grid)]
        assert len(set(folders)) == len(folders) > 1
        assert all(len(name) < 200 for name in folders)
    assert "s/model.policies.a.learning_rate=1,model.policies.b.learning_rate=2/seed-0" in [
        str(member.folder) for member in plan_members(Path("s"), [], 1, grids[1])
    ]


def test_the_runs_go_side_by_side_and_end_with_the_report(
    train: Callable[[str], None], mrlm, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("meet")
    words = (*WORDS, "--trainer.limit_val_batches", "1.0")  # Lightning logs it, here once for each setting
    status, out, err = mrlm("sweep", *words, "--grid", "model.kl.coefficient=1,2", "--grid", "data.groups=8")
    assert (status, caplog.text) == (0, ""), err
    # Rewards 1 and 2, and 2 and 3: t(1) = 12.706 times the standard error 0.5; the pairs differ by 1 both.
    assert "| coefficient=1,groups=8 | 2 | 1.5 [-4.853, 7.853] | 1.5 [-4.853, 7.853] | 1.5 [-4.853, 7.853] |  |" in out
    assert "| coefficient=2,groups=8 | 2 | 2.5 [-3.853, 8.853] |" in out
    assert "| 1, 2 pairs of seeds |" in out
    assert Path("s/report.md").read_text() in out
    assert Path("s/curves.csv").is_file()
    monkeypatch.setattr(sweep, "_check", lambda words: pytest.fail("finished runs need no server and no file again"))
    assert mrlm("sweep", *words, "--grid", "model.kl.coefficient=1,2", "--grid", "data.groups=8")[0] == 0


def test_a_metric_without_a_name_is_refused_before_any_training(train: Callable[[str], None], mrlm) -> None:
    status, _, err = mrlm("sweep", *WORDS, "--metric", "")
    assert (status, Path("s").exists()) == (2, False)
    assert err == "mrlm: error: metric is ''; name a column of metrics.csv, as in `--metric rollout/reward`\n"


@pytest.mark.long
def test_a_repeated_call_trains_the_unfinished_runs_alone(train: Callable[[str], None], mrlm) -> None:
    train("fail")
    status, out, err = mrlm("sweep", *WORDS)
    assert status == 1
    assert "s/seed-1 failed: exit status 1: out of memory; see s/logs/s-seed-1.log" in err
    assert "next:\n  mrlm sweep --config" in out
    assert "s/seed-1 is left out: it failed." in Path("s/report.md").read_text()
    assert "out of memory" in Path("s/logs/s-seed-1.log").read_text()
    assert "| s/seed-0 | 1 | 1 | 1 |" in out
    train("")
    status, out, err = mrlm("sweep", *WORDS)
    assert status == 0, err
    assert (calls("s/seed-0"), calls("s/seed-1")) == (1, 2)
    assert mrlm("sweep", *(word if word != "2" else "3" for word in WORDS))[0] == 0, "further seeds are added"
    assert (calls("s/seed-1"), calls("s/seed-2")) == (2, 1)
    status, _, err = mrlm("sweep", *WORDS, "--model.kl.coefficient", "0.5")
    assert (status, "holds a sweep with other options" in err) == (2, True), err


@pytest.mark.long
def test_runs_that_another_process_trains_are_left_to_it(train: Callable[[str], None], mrlm) -> None:
    train("fail")  # seed 1
    assert mrlm("sweep", *WORDS)[0] == 1
    Path("s/seed-1/calls").unlink()
    train("")
    write_json("s/seed-1/state.json", running())
    status, out, err = mrlm("sweep", *WORDS)
    assert (status, "- s/seed-1 is left out: it is still running.\n" in out) == (0, True), err
    assert "mrlm: s/seed-1 is left to another process, which trains it or has trained it\n" in out
    write_json("s/seed-1/state.json", {"state": "interrupted", "reason": ""})
    other = Training(Path("s/seed-1"))  # as `mrlm train` does
    assert mrlm("sweep", *WORDS)[0] == 0
    other.release()
    assert not Path("s/seed-1/calls").exists()
    with Path("s/logs/s-seed-1.log").open() as log:
        assert try_lock(log.fileno())  # as another sweep's run that is about to train
        assert mrlm("sweep", *WORDS)[0] == 0
        assert not Path("s/seed-1/calls").exists()
        status, _, err = mrlm("sweep", *WORDS, "--data.groups", "8")
        assert (status, "holds a sweep with other options" in err) == (2, True), err
    assert mrlm("sweep", *WORDS)[0] == 0
    assert (calls("s/seed-0"), calls("s/seed-1")) == (1, 1)


@pytest.mark.long
def test_processes_share_a_sweep(train: Callable[[str], None], mrlm) -> None:
    train("meet")  # the runs wait for each other, and a process has one at a time
    processes = [start_sweep((*WORDS[:-1], "1")) for _ in range(2)]
    errors = [process.communicate(timeout=100)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert (calls("s/seed-0"), calls("s/seed-1")) == (1, 1)
    assert "| s | 2 | 1.5 [" in Path("s/report.md").read_text()


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        (signal.SIGKILL, -9),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),  # they act as SIGTERM does
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
)
@pytest.mark.long_after(1)
def test_a_signal_ends_all_runs_in_order(number: signal.Signals, status: int, train: Callable[[str], None]) -> None:
    train("wait")
    with sweep_of_two() as process:
        process.send_signal(number)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == status, errors
    if number == signal.SIGKILL:
        eventually(lambda: all((run / "ended").exists() for run in RUNS), 100)
        return
    assert all((run / "ended").exists() for run in RUNS), "the command waits for its runs"
    assert "its runs have ended; continue with `mrlm sweep" in errors


@pytest.mark.long
def test_a_stopped_run_continues_and_ends_with_the_others(train: Callable[[str], None]) -> None:
    train("wait")
    with sweep_of_two() as process:
        os.kill(int((RUNS[0] / "process").read_text()), signal.SIGSTOP)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 143, errors
    assert all((run / "ended").exists() for run in RUNS)


@pytest.mark.parametrize("fault", ["", "sleep length must be non-negative"])
def test_a_sweep_in_a_thread_ends_as_in_any_other_place(
    fault: str, train: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    train("wait" if fault else "")
    options = (("--output", str(run), "--seed_everything", str(seed)) for seed, run in enumerate(RUNS))
    members = [Member(run, Cell("", ()), (), own) for run, own in zip(RUNS, options, strict=True)]
    monkeypatch.setattr(sweep, "POLL_SECONDS", -1.0 if fault else 0.01)
    with ThreadPoolExecutor(1) as thread:
        failed = thread.submit(sweep.train_members, members, 2, Path("logs"))
    if fault:
        with pytest.raises(ValueError, match=fault):
            failed.result()
    else:
        assert failed.result() == {}


@pytest.mark.parametrize(
    ("numbers", "grace"), [((signal.SIGTERM,), 0.5), ((signal.SIGINT, signal.SIGINT), 1000.0)], ids=["late", "again"]
)
@pytest.mark.long
def test_a_run_that_does_not_end_is_named_and_killed(
    numbers: tuple[signal.Signals, ...], grace: float, train: Callable[[str], None]
) -> None:
    train("ignore")
    with sweep_of_two(grace) as process:
        for number in numbers:
            process.send_signal(number)
            time.sleep(1)
        _, errors = process.communicate(timeout=100)
    assert process.returncode == 128 + numbers[0], errors
    assert "mrlm: s/seed-1 had not ended cleanly and was killed\n" in errors
    assert "its runs have ended; continue with `mrlm sweep" in errors
    assert not any(Path("/proc", (run / "process").read_text()).exists() for run in RUNS), "no orphan"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--grid", "model.gamma"], "grid: 'model.gamma' must be KEY=VALUE,VALUE"),
        (["--grid", "model.gamma=[1"], "grid: 'model.gamma=[1' must be KEY=VALUE,VALUE"),
        (["--grid", "model.gamma=1", "model.gamma=2"], "grid: model.gamma is given twice"),
        (["--grid", "model.gamma=1", "--grid", "model.gamma=2"], "grid: model.gamma is given twice"),
        (["--grid", "model.gamma=1,1"], "grid: model.gamma has the value 1 twice"),
        (["--grid", "model.gamma=1,,2"], "grid: 'model.gamma=1,,2' must be KEY=VALUE,VALUE"),
        (["--grid", "learning_rate=1e-3,1e-4"], "there is no option '--learning_rate'"),
        (["--grid", "model.policies.main.learning_rate=1e-3,abc"], "model.policies.main.learning_rate"),
        (["--grid", "seed_everything=1,2"], "seed_everything: `mrlm sweep` sets it for each run"),
        (["--grid", "output=a,b"], "output: `mrlm sweep` sets it for each run"),
        (["--grid", "trainer.output=a,b"], "trainer.output: `mrlm sweep` sets it for each run"),
        (["--grid", "model.gama=1,2"], "did you mean 'gamma'"),
        (["--data.gruops", "3"], "did you mean 'groups'"),
        (["--grid", "model.seats={agent: main},{agent: mian}"], "policy 'mian', which does not exist; did you mean"),
        (["--grid", "model.policies.main.model=builtin:tiny,builtin:tny"], "policies.main: model 'builtin:tny'"),
        (["--grid", "data.environment.difficulty=[1,1],[3,1]"], "math: difficulty is (3, 1)"),
        (["--trainer.devices", "0"], "trainer: "),
        (["--grid", "data.group_size=8,1"], "data.group_size is 1, but GRPO compares at least 2 episodes of each task"),
        (["--grid", "model.seats={},{agnt: main}"], "seats: 'agnt' is not an agent of this run; did you mean 'agent'?"),
        (["--seed_everything", "3"], "seed_everything: `mrlm sweep` sets it for each run"),
        (["--output", ""], "output is ''; name a folder, as in `--output runs/sweep`"),
        (["--output=", "--jobs", "1"], "output is ''; name a folder, as in `--output runs/sweep`"),
        (["--seeds", "9" * 20], "seeds is 99999999999999999999; it must be from 1 to 10000"),
        (["--jobs", "0"], "jobs is 0; it must be 1 or above"),
        (["--jobs", "many"], "error: --jobs: expected an integer such as 2, but the value is 'many'\n"),
    ],
)
def test_mistakes_are_named_before_anything_is_written(
    words: list[str], message: str, train: Callable[[str], None], mrlm
) -> None:
    status, _, err = mrlm("sweep", *WORDS, *words)
    assert (status, message in err) == (2, True), err
    assert not Path("s").exists()


@pytest.mark.long
def test_the_record_holds_the_options_and_the_files(train: Callable[[str], None], mrlm) -> None:
    status, _, err = mrlm("sweep", *WORDS)
    assert status == 0, err
    record = json.loads(Path("s/sweep.json").read_text())
    files = {CONFIG: Path(CONFIG).read_text()}
    assert record == {"options": ["--config", CONFIG], "files": files, "settings": {"": []}}
    status, _, err = mrlm("sweep", *WORDS, "--grid", "model.kl.coefficient=0.5")
    assert status == 0, err
    record = json.loads(Path("s/sweep.json").read_text())
    assert record["settings"] == {"": [], "coefficient=0.5": [["model.kl.coefficient", "0.5"]]}


@pytest.mark.long
def test_a_folder_of_other_settings_is_refused(train: Callable[[str], None], mrlm) -> None:
    assert mrlm("sweep", *WORDS, "--grid", "model.kl.coefficient=0.5")[0] == 0
    record = json.loads(Path("s/sweep.json").read_text())
    other = {"coefficient=0.5": [["model.policies.main.coefficient", "0.5"]]}
    write_json("s/sweep.json", {**record, "settings": other})
    status, _, err = mrlm("sweep", *WORDS, "--grid", "model.kl.coefficient=0.5")
    assert (status, "other settings under a folder's name" in err) == (2, True), err
    assert json.loads(Path("s/sweep.json").read_text())["settings"] == other
    Path("s/sweep.json").unlink()
    status, _, err = mrlm("sweep", *WORDS, "--grid", "model.kl.coefficient=0.5")
    assert (status, "'s/coefficient=0.5' holds runs of no sweep" in err) == (2, True), err
    assert calls("s/coefficient=0.5/seed-0") == 1


@pytest.mark.long
def test_a_sweep_that_trained_nothing_is_replaced(train: Callable[[str], None], mrlm) -> None:
    train("refuse")
    assert mrlm("sweep", *WORDS, "--data.groups", "3")[0] == 1
    train("")
    assert mrlm("sweep", *WORDS, "--data.groups", "4")[0] == 0
    assert json.loads(Path("s/sweep.json").read_text())["options"][-1] == "4"
    assert calls("s/seed-0") == 2


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"options": [], "files": 1, "settings": {}}'])
@pytest.mark.long_after(1)
def test_a_broken_record_is_named(content: str, train: Callable[[str], None], mrlm) -> None:
    Path("s").mkdir()
    Path("s/sweep.json").write_text(content)
    status, _, err = mrlm("sweep", *WORDS)
    told = "'s/sweep.json' is not the record of a sweep; remove it, or name another --output"
    assert (status, told in err) == (2, True), err


def test_an_output_that_is_a_file_is_named(train: Callable[[str], None], mrlm) -> None:
    Path("s").write_text("")
    status, _, err = mrlm("sweep", *WORDS)
    assert (status, "output: 's' cannot be written" in err, err.count("\n")) == (2, True, 1), err
