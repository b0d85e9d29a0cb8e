from __future__ import annotations

import signal
import sys

import pytest

from mrlm_pl.runs.interrupts import ending_in_order


@pytest.mark.parametrize("ignored", [False, True])
def test_a_process_that_ignores_interrupts_goes_on_ignoring_them(ignored: bool) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        if ignored:
            try:
                with ending_in_order(sigterm=True) as found:
                    signal.raise_signal(signal.SIGINT)
            except KeyboardInterrupt:  # it would end the tests
                pytest.fail("the signal was not ignored")
            assert found.received is None
        else:
            with pytest.raises(KeyboardInterrupt), ending_in_order(sigterm=True) as found:
                signal.raise_signal(signal.SIGINT)
            assert found.received == signal.SIGINT
        assert signal.getsignal(signal.SIGINT) is (signal.SIG_IGN if ignored else signal.default_int_handler)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("notebook", [True, False])
def test_a_second_interrupt_keeps_a_notebook_alive(monkeypatch: pytest.MonkeyPatch, notebook: bool) -> None:
    """The default action of the signal ends the kernel, with all of its variables, or a script at once."""
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    if not notebook:
        monkeypatch.delattr(sys, "ps1")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ending_in_order(sigterm=False):
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
    former = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        with ending_in_order(sigterm=True) as found:
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
        assert capsys.readouterr().err.count("Ctrl-C: ending in order; press it again to end at once") == 1
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def test_an_interrupted_trainer_leaves_no_handler() -> None:
    """Lightning restores the handler of SIGTERM in its teardown, which a second Ctrl-C skips."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with ending_in_order(sigterm=False):
            signal.signal(signal.SIGTERM, lambda *_: None)
        assert signal.getsignal(signal.SIGTERM) is before
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_end_of_the_terminal_acts_as_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrlm_pl.runs.interrupts._leave_terminal", lambda: None)  # the tests' own
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(KeyboardInterrupt), ending_in_order(sigterm=True) as found:
            signal.raise_signal(signal.SIGHUP)
        assert (found.received, found.status) == (signal.SIGHUP, 129)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` has it
        with ending_in_order(sigterm=True) as found:
            signal.raise_signal(signal.SIGHUP)
        assert found.received is None
    finally:
        signal.signal(signal.SIGHUP, before)
