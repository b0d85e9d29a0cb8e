from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.runs.interrupts import ending_in_order


@pytest.mark.parametrize("ignored", [False, True])
def test_a_process_that_ignores_interrupts_goes_on_ignoring_them(ignored: bool) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        if ignored:
            try:
                with ending_in_order() as found:
                    signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:  # it would end the tests
                pytest.fail("the signal was not ignored")
            assert found.received is None
        else:
            with pytest.raises(KeyboardInterrupt), ending_in_order() as found:
                signal.raise_signal(signal.SIGINT)
            assert found.received == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is (signal.SIG_IGN if ignored else signal.default_int_handler)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("notebook", [True, False])
def test_a_second_interrupt_keeps_a_notebook_alive(monkeypatch: pytest.MonkeyPatch, notebook: bool) -> None:
    """The default action of the signal ends the kernel, with all of its variables, or a script immediately."""
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    if not notebook:
        monkeypatch.delattr(sys, "ps1")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ending_in_order():
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
            again = signal.getsignal(signal.SIGINT)
            assert again is (signal.default_int_handler if notebook else signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_in_order_and_only_ctrl_c_ends_at_once(
    first: signal.Signals, capsys: pytest.CaptureFixture[str]
) -> None:
    """Schedulers send SIGTERM more than once, to a group and to its processes."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    former = {number: signal.signal(number, handler) for number, handler in usual.items()}
    try:
        with ending_in_order() as found:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(first)
            try:
                signal.raise_signal(signal.SIGTERM)
                if first == signal.SIGTERM:
                    signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:  # it would end the tests
                pytest.fail("the end was interrupted")
            assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
        assert found.received == first
        assert capsys.readouterr().err.count("Ctrl-C: shutting down; press it again to end immediately") == 1
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("within", [True, False])
def test_sigterm_has_one_end_whether_its_own_handler_came_before_or_later(within: bool) -> None:
    """A script may have one, and a trainer installs one that calls the one before it too; Ctrl-C raises SIGTERM."""
    calls: list[int] = []
    former = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}

    def install() -> None:
        before = signal.getsignal(signal.SIGTERM)
        inner = before if within and callable(before) else lambda *_: None
        signal.signal(signal.SIGTERM, lambda number, frame: (calls.append(number), inner(number, frame)))

    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not within:
            install()
        with ending_in_order() as outer, ending_in_order() as found:
            if within:
                install()
            try:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:  # it would end the tests
                pytest.fail("the handler did not decide how to end")
        assert calls == [signal.SIGTERM, signal.SIGTERM]
        received = signal.SIGTERM if within else signal.SIGINT
        assert (found.received, outer.received) == (received, received)
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def test_what_a_handler_raised_is_raised_once() -> None:
    """A trainer's block in a command's: the script catches the exception between them."""

    def raising(number: int, frame: Any) -> None:
        raise SystemExit(7)

    def train() -> None:
        with ending_in_order():
            before: Any = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda number, frame: before(number, frame))
            signal.raise_signal(signal.SIGTERM)

    former = signal.signal(signal.SIGTERM, raising)
    try:
        with ending_in_order(), pytest.raises(SystemExit):
            train()
    finally:
        signal.signal(signal.SIGTERM, former)


def test_a_command_whose_trainer_was_interrupted_ends_once() -> None:
    former = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with ending_in_order() as command:
            with pytest.raises(KeyboardInterrupt), ending_in_order():
                signal.raise_signal(signal.SIGTERM)
            assert command.received == signal.SIGTERM
            try:
                signal.raise_signal(signal.SIGTERM)  # a scheduler's second, before the command has returned
            except KeyboardInterrupt:
                pytest.fail("the end was interrupted")
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def test_an_interrupted_trainer_leaves_no_handler() -> None:
    """Lightning restores the handler of SIGTERM in its teardown, which a second Ctrl-C skips."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with ending_in_order():
            signal.signal(signal.SIGTERM, lambda *_: None)
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_end_of_the_terminal_acts_as_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrlm_pl.runs.interrupts._leave_terminal", lambda: None)  # the tests' own
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), ending_in_order() as found:
            signal.raise_signal(signal.SIGHUP)
        assert (found.received, found.status) == (signal.SIGHUP, 129)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` has it
        with ending_in_order() as found:
            signal.raise_signal(signal.SIGHUP)
        assert found.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interrupted_exec_leaves_the_exit_status_to_the_command(tmp_path: Path) -> None:
    """Imports run `exec`; `python -m` ends by SIGINT after a KeyboardInterrupt in one, even a caught one."""
    program = (
        "import signal, sys\nfrom mrlm_pl.runs.interrupts import ending_in_order\n"
        "try:\n    with ending_in_order() as found:\n        exec('signal.raise_signal(signal.SIGTERM)')\n"
        "except KeyboardInterrupt:\n    sys.exit(found.status)\n"
    )
    (tmp_path / "interrupted.py").write_text(program)
    command = [sys.executable, "-m", "interrupted"]
    path = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    assert subprocess.run(command, env=path, check=False, timeout=250).returncode == 143
