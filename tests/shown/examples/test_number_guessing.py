from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from mrlm_pl.environment.check import check_environment


@pytest.fixture
def script(example: Callable[[str], ModuleType]) -> ModuleType:
    return example("number_guessing.py")


def test_its_environment_keeps_the_contract(script: ModuleType) -> None:
    check_environment(script.NumberGuessing()).raise_on_failure()


def test_it_trains_with_hints_over_several_turns(script: ModuleType, tmp_path: Path) -> None:
    from mrlm_pl.episode_files import read_episodes

    script.main(iterations=2, output=str(tmp_path))
    episodes = list(read_episodes(tmp_path / "episodes"))
    assert len(episodes) == 2 * 64
    assert max(len(episode.rows()[0].turns) for episode in episodes) > 1
    assert (tmp_path / "policies" / "main" / "model.safetensors").is_file()
