from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

from mrlm_pl.environment_check import check_environment

PATH = Path(__file__).parents[2] / "examples" / "number_guessing.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("number_guessing", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_its_environment_keeps_the_contract() -> None:
    check_environment(load().NumberGuessing()).raise_on_failure()


def test_it_trains_with_hints_over_several_turns(tmp_path: Path) -> None:
    from mrlm_pl.data import read_episodes

    load().main(iterations=2, folder=str(tmp_path))
    episodes = list(read_episodes(tmp_path / "episodes"))
    assert len(episodes) == 2 * 64
    assert max(len(episode.rows()[0].turns) for episode in episodes) > 1
    assert (tmp_path / "policies" / "main" / "model.safetensors").is_file()
