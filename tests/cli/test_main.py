"""The dispatcher."""

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mrlm_pl.cli import main as main_module
from mrlm_pl.cli.main import COMMANDS, MessageFormat, main
from mrlm_pl.errors import ConfigurationError, EngineError


def ended(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)


def test_help_lists_the_commands_without_importing_anything_heavy():
    code = (
        "import sys\n"
        "from mrlm_pl.cli.main import main\n"
        "status = main(['--help']) or main(['--version'])\n"
        "heavy = {'torch', 'lightning', 'transformers', 'jsonargparse', 'numpy', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else status)\n"
    )
    done = ended(code)
    assert done.returncode == 0, done.stderr
    for command in ("fit", "train", "validate", "test", "predict", "eval", "check-env", "info"):
        assert f"\n  {command} " in done.stdout
    assert "mrlm 0." in done.stdout


def test_a_help_of_a_command_that_plays_imports_no_torch():
    code = (
        "import sys\n"
        "from mrlm_pl.cli.main import PLAYING, main\n"
        "for command in PLAYING:\n"
        "    assert main([command, '--help']) == 0\n"
        "assert main(['eval', 'runs/a', '--environment.help=math']) == 0\n"
        "heavy = {'torch', 'lightning', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = ended(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mrlm_environments.MathEnvironment") >= 9, "each lists the environments"
    assert "--environment.difficulty" in done.stdout


@pytest.mark.parametrize(("words", "status"), [(["--version"], 0), (["fitt"], 2)])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_while_the_interpreter_ends_leaves_the_status(words: list[str], status: int, number: int) -> None:
    """Schedulers send several, and the end of the interpreter takes a second once torch is imported."""
    code = (
        "import atexit, os, sys\n"
        "from mrlm_pl.cli.main import main\n"
        f"atexit.register(os.kill, os.getpid(), {int(number)})\n"
        "sys.exit(main())\n"
    )
    done = ended(code, *words)
    assert done.returncode == status, done.stderr


def test_warnings_of_the_project_have_its_name():
    texts = [
        MessageFormat().format(logging.LogRecord(name, level, "", 0, "%s rows", (3,), None))
        for name, level in (("mrlm_pl.data", logging.WARNING), ("mrlm_environments", logging.ERROR), ("ray", 30))
    ]
    assert texts == ["mrlm: warning: 3 rows", "mrlm: error: 3 rows", "3 rows"]


def test_unknown_command_names_the_nearest(mrlm):
    status, _, err = mrlm("fitt")
    assert status == 2
    assert "'fitt'" in err
    assert "did you mean 'fit'?" in err


def test_option_before_the_command_is_explained(mrlm):
    status, _, err = mrlm("--config", "a.yaml")
    assert status == 2
    assert "must follow a command" in err


@pytest.mark.parametrize("error", [(ConfigurationError("wrong key"), 2), (EngineError("no model"), 1)])
def test_our_errors_become_a_message_and_a_status(mrlm, monkeypatch, error):
    def fail(arguments):
        raise error[0]

    monkeypatch.setitem(main_module.COMMANDS, "info", ("mrlm_pl.cli.commands.info:run", ""))
    monkeypatch.setattr("mrlm_pl.cli.commands.info.run", fail)
    status, _, err = mrlm("info")
    assert (status, err) == (error[1], f"mrlm: error: {error[0]}\n")
    monkeypatch.setenv("MRLM_DEBUG", "1")
    assert "Traceback" in mrlm("info")[2]


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(("reader", "err"), [("full", "mrlm: error: no space is left"), ("ended", "")])
def test_output_that_cannot_be_written_ends_a_command_with_status_1_and_no_traceback(reader, err, unbuffered):
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    command = [sys.executable, "-m", "mrlm_pl.cli.main", "--version"]
    with open("/dev/full", "w") if reader == "full" else os.fdopen(write, "w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr[: len(err) or None]) == (1, err)
    assert done.stderr.count("\n") == bool(err)


def test_characters_that_a_terminal_lacks_are_escaped():
    code = (
        "import sys; from mrlm_pl.cli import main\n"
        "main._dispatch = lambda *_: print('caf\\xe9 \\u2026') or 0\n"
        "sys.argv = ['mrlm', 'info']; sys.exit(main.main())"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"caf\xe9 \\u2026\n", b"")


def test_a_closed_output_is_no_error(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["balance", "answers.jsonl", "--output", "out.jsonl", "--print_config"]) == 0


def test_a_current_folder_that_was_deleted_is_named(mrlm, monkeypatch, tmp_path):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    expected = "mrlm: error: the current folder was deleted; change to another one with `cd`\n"
    assert mrlm("view", "runs") == (2, "", expected)


def test_a_path_whose_name_is_too_long_is_named(mrlm):
    status, _, err = mrlm("balance", "answers.jsonl", "--output", "x" * 300 + ".jsonl")
    assert (status, err[:20]) == (2, "mrlm: error: 'xxxxxx")
    assert err.endswith("xxx.jsonl' is not a path: its name is too long; name a shorter one\n")


@pytest.mark.parametrize(("number", "status", "name"), [("SIGINT", 130, "Ctrl-C"), ("SIGTERM", 143, "SIGTERM")])
@pytest.mark.parametrize("command", ["report", "serve", "view"])
def test_a_signal_ends_every_command_with_a_message(mrlm, monkeypatch, number, status, name, command):
    run = f"mrlm_pl.cli.commands.{command}.run"  # a server before it listens
    monkeypatch.setattr(run, lambda _: signal.raise_signal(getattr(signal, number)))
    found, _, err = mrlm(command, "runs")
    assert found == status
    assert err.endswith(f"\nmrlm: {name} has ended {command}; start again with `mrlm {command} runs`\n")


@pytest.mark.parametrize(("number", "status", "name"), [("SIGINT", 130, "Ctrl-C"), ("SIGTERM", 143, "SIGTERM")])
def test_a_signal_in_the_checks_before_a_fit_is_one_message(mrlm, monkeypatch, number, status, name):
    check = "mrlm_pl.cli.parsing.early_check.check"
    monkeypatch.setattr(check, lambda _: signal.raise_signal(getattr(signal, number)))
    try:
        found, _, err = mrlm("fit", "--config", "run.yaml")
    except KeyboardInterrupt:  # it would end the tests
        pytest.fail("the signal ended the process")
    assert found == status
    again = "mrlm fit --config run.yaml"
    assert err.endswith(f"mrlm: {name} has ended fit before its first batch; start again with `{again}`\n")


def test_errors_of_ours_keep_their_traceback_and_those_of_a_users_file_are_one_line(mrlm, monkeypatch, tmp_path):
    monkeypatch.setattr("mrlm_pl.cli.commands.info.run", json.loads)
    with pytest.raises(TypeError):
        main(["info"])
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "module_of_a_user.py").write_text("def fail(arguments):\n    raise KeyError('bug')\n")
    import module_of_a_user

    monkeypatch.setattr("mrlm_pl.cli.commands.info.run", module_of_a_user.fail)
    status, _, err = mrlm("info")
    assert (status, err) == (
        1,
        "mrlm: error: KeyError: 'bug' (module_of_a_user.py:2); for the traceback set MRLM_DEBUG=1\n",
    )
    monkeypatch.setenv("MRLM_DEBUG", "1")
    with pytest.raises(KeyError):
        main(["info"])


def test_every_command_exists():
    for target, _ in COMMANDS.values():
        module, function = target.split(":")
        assert callable(getattr(__import__(module, fromlist=[function]), function))


@pytest.mark.parametrize(
    "command",
    [
        "eval --model builtin:tiny",
        "eval --model builtin:tiny --compare first.json",
        "arena a=builtin:tiny b=builtin:tiny",
    ],
)
def test_a_report_is_whole_where_the_reader_of_the_output_ends(mrlm, unread, command):
    options = ("--environment", "parrot", "-n", "2", "--max-tokens", "2", "--output")
    assert mrlm("eval", "--model", "builtin:tiny", *options, "first.json")[0] == 0
    assert mrlm(*command.split(), *options, "read.json")[0] == 0
    unread(*command.split(), *options, "unread.json")
    assert Path("unread.json").read_bytes() == Path("read.json").read_bytes()


def test_findings_are_written_before_they_are_printed(unread):
    unread("check-env", "parrot", "--output", "report.json")
    assert json.loads(Path("report.json").read_text())["passed"]
    Path("rows.jsonl").write_text('{"question": "2+2?", "answer": "#### 4"}\n')
    unread("check-env", "math", "--data", "rows.jsonl", "--output", "kept.jsonl")
    assert Path("kept.jsonl").read_text()
