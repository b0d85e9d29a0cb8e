from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest


@pytest.mark.long
def test_it_plays_on_a_server(example: Callable[[str], ModuleType]) -> None:
    assert example("remote_environment.py").main(episodes=6) == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
