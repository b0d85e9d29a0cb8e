import pytest

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.rewards import overlong_penalties, overlong_penalty


def test_the_penalty_begins_at_the_buffer_and_ends_at_the_limit() -> None:
    # The paper's numbers: 16384 expected tokens and a buffer of 4096.
    limit, buffer = 16384 + 4096, 4096
    assert [overlong_penalty(n, limit, buffer) for n in (1, 16384, 16384 + 1024, limit, limit + 1)] == [
        0,
        0,
        -0.25,
        -1,
        -1,
    ]


@pytest.mark.parametrize("buffer", [0, 101])
def test_a_buffer_out_of_range_is_refused(buffer: int) -> None:
    with pytest.raises(ConfigurationError, match=f"overlong_buffer is {buffer}"):
        overlong_penalty(1, 100, buffer)
    with pytest.raises(ConfigurationError, match=f"overlong_buffer is {buffer}"):
        overlong_penalties({"main": 100}, 200, buffer)
