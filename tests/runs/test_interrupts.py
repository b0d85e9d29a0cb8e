from __future__ import annotations

import signal

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
