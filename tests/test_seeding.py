from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning import seed_everything

from mrlm_pl.seeding import derive_seed, keyed_random, run_seed

keys = st.lists(st.text(max_size=3) | st.integers(-5, 5), max_size=4)


@given(keys, keys)
def test_different_keys_give_different_seeds(first: list, second: list) -> None:
    same = [(type(part), part) for part in first] == [(type(part), part) for part in second]
    assert (derive_seed(*first) == derive_seed(*second)) == same
    assert 0 <= derive_seed(*first) < 2**63


def test_the_value_is_the_documented_hash_in_every_process() -> None:
    content = b"s" + (1).to_bytes(8, "little") + b"a" + b"i" + (1).to_bytes(8, "little") + b"7"
    expected = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1
    assert derive_seed("a", 7) == expected
    code = "from mrlm_pl.seeding import derive_seed; print(derive_seed('a', 7))"
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout) == expected


@pytest.mark.parametrize("part", [1.5, True, None, ("a",)])
def test_keys_without_a_stable_text_are_refused(part: object) -> None:
    with pytest.raises(TypeError, match="strings and integers"):
        derive_seed(part)  # type: ignore[arg-type]


def test_generators_are_independent_of_the_global_one() -> None:
    import random

    random.seed(0)
    before = random.getstate()
    assert keyed_random("x").random() == keyed_random("x").random()
    assert random.getstate() == before


def test_a_script_that_seeds_lightning_alone_is_told_of_the_data_module(caplog: pytest.LogCaptureFixture) -> None:
    assert run_seed(None) == 0
    seed_everything(0, verbose=False)
    assert (run_seed(None), run_seed(3)) == (0, 3)
    assert not caplog.records
    seed_everything(7, verbose=False)
    assert (run_seed(5), run_seed(0)) == (5, 0)
    assert not caplog.records
    assert run_seed(None) == 0
    assert "give the data module seed=7" in caplog.text
