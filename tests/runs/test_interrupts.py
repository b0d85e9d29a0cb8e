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
