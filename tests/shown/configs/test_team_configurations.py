"""The configurations of teams run at a small size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrlm_pl.episode_files import read_episodes

CONFIGS = Path(__file__).parents[3] / "configs"
SMALL = [
    "--data.groups",
    "2",
    "--data.iterations",
    "1",
    "--trainer.limit_val_batches",
    "0",
    "--trainer.logger",
    "false",
]
TREES = {"magrpo": [], "magrpo-coma": ["--model", "COMA"], "magrpo-at_grpo": ["--model", "ATGRPO"]}
"""Configurations with turn trees, and the options that change the algorithm."""


@pytest.mark.parametrize(
    "name", [*TREES, "ippo", "mappo", "maporl", "maporl_by_turn", "dr_mas", "rae", "ccpo", "halves", "word_emission"]
)
@pytest.mark.long_after(2)
def test_it_runs_and_exports_every_policy(name: str, mrlm) -> None:
    path = next(CONFIGS.rglob(f"{name.partition('-')[0]}.yaml"))
    status, _, errors = mrlm("train", "--config", str(path), "--output", "run", *TREES.get(name, []), *SMALL)
    assert status == 0, errors
    policies = {path.name for path in Path("run/policies").iterdir() if (path / "config.json").is_file()}
    assert policies & {"main", "first", "turn_1"}
    episodes = list(read_episodes(Path("run/episodes")))
    assert not any(episode.failed for episode in episodes)
    assert all(len(episode.trajectories) > 1 for episode in episodes)
    nodes = {turn.node for episode in episodes for row in episode.rows() for turn in row.turns}
    assert ("" not in nodes) == (name in TREES)


@pytest.mark.parametrize(
    ("name", "algorithm"), [("knowledge_graph", "MAGRPO"), ("webshop", "MAGRPO"), ("alfworld", "IPPO")]
)
@pytest.mark.long_after(1)
def test_the_teams_of_agentbench_are_trained(name: str, algorithm: str, mrlm) -> None:
    config = str(CONFIGS / "tasks" / "agentbench" / f"{name}.yaml")
    team = ["--model", algorithm, "--data.environment.team", "true", "--data.environment.max_turns", "3"]
    few = ["--data.group_size", "2", "--data.iterations", "2", "--data.sampling.max_tokens", "16"]
    status, _, errors = mrlm("fit", "--config", config, "--output", "run", *team, *SMALL, *few)
    assert status == 0, errors
    episodes = list(read_episodes(Path("run/episodes")))
    assert not any(episode.failed for episode in episodes)
    assert {episode.iteration for episode in episodes} == {0, 1}
    nodes = {turn.node for episode in episodes for row in episode.rows() for turn in row.turns}
    assert ("" not in nodes) == (algorithm == "MAGRPO")


@pytest.mark.long
def test_another_algorithm_takes_over_the_settings_of_a_configuration(mrlm) -> None:
    config = str(CONFIGS / "algorithms" / "teams" / "magrpo.yaml")
    for algorithm in ("MARLOO", "MAREMAX", "MAREINFORCE"):
        status, _, errors = mrlm("train", "--config", config, "--model", algorithm, "--output", algorithm, *SMALL)
        assert status == 0, errors
        assert {path.name for path in Path(algorithm, "policies").iterdir()} == {"first", "second"}


@pytest.mark.long
def test_self_play_runs_and_keeps_its_ratings(mrlm) -> None:
    config = str(CONFIGS / "tasks" / "games" / "self_play.yaml")
    status, _, errors = mrlm("train", "--config", config, "--output", "run", *SMALL)
    assert status == 0, errors
    assert json.loads(next(Path("run").rglob("self_play.json")).read_text())
