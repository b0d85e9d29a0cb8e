from __future__ import annotations

import importlib.util
from pathlib import Path

PATH = Path(__file__).parents[2] / "examples" / "remote_environment.py"


def test_it_plays_on_a_server() -> None:
    spec = importlib.util.spec_from_file_location("remote_environment", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main(episodes=6) == [1.0, 0.0, 1.0, 0.0, 1.0, 0.0]
