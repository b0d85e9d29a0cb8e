"""ALFWorld's files: the same observations and admissible actions as TextWorld, and files of other forms."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments import AlfWorldEnvironment
from mrlm_environments.alfworld.files import file_game, read_game
from mrlm_environments.alfworld.game import KINDS, NOTHING, Game
from mrlm_environments.alfworld.generated import generated
from mrlm_environments.alfworld.house import listed

from mrlm_pl.environment.check import check_environment
from mrlm_pl.episode import Message
from mrlm_pl.errors import DataError
from tests.support.environments.alfworld_files import PLAYER, game_file, textworld_shows, varied_games, walk
from tests.support.environments.data_sets import SAMPLES, WHOLE

RECORDED = SAMPLES / "alfworld.json.gz"


def recorded() -> list[dict[str, Any]]:
    """Games of the six kinds with what TextWorld showed, in the wording of ALFWorld 0.4 and in the older one."""
    return json.loads(gzip.decompress(RECORDED.read_bytes()))


def written(folder: Path, content: Mapping[str, Any], name: str = "trial/game.tw-pddl") -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))
    return file


def shown(game: Game, actions: list[str]) -> list[list[Any]]:
    """Observation, admissible actions and victory at the beginning and after each action."""
    state = game.start
    opening = f"-= Welcome to TextWorld, ALFRED! =-\n\n{game.opening()}"
    found: list[list[Any]] = [[opening, list(game.actions(state)), game.won(state)]]
    for text in actions:
        known = game.actions(state)
        state, observed = game.act(state, known[text]) if text in known else (state, NOTHING)
        found.append([observed, list(game.actions(state)), game.won(state)])
    return found


def test_observations_and_admissible_actions_are_textworlds(tmp_path: Path) -> None:
    """Recorded with TextWorld 1.7.0 and the domain of ALFWorld 0.4.2."""
    games = recorded()
    for number, own in enumerate(games):
        game = file_game(read_game(str(written(tmp_path, own["file"], f"{number}/game.tw-pddl"))))
        assert shown(game, own["actions"]) == own["shown"], own["file"]["pddl_problem"]
    texts = " ".join(text for own in games for text, _, _ in own["shown"])
    for part in ("You open", "You close", "You pick up", "You put", "You move", "You clean", "You heat", "You cool"):
        assert part in texts, part
    for part in (
        "You sliced",
        "You turn on",
        "This is a normal",
        "cool and clean sliced",
        "a cold",
        "a hot",
        "is closed",
    ):
        assert part in texts, part
    for part in (
        "You are carrying",
        "Next to it, you see a mug",
        "There's nothing special",
        NOTHING,
        "Available commands",
    ):
        assert part in texts, part
    assert {won for own in games for _, _, won in own["shown"]} == {False, True}


@pytest.mark.slow
@pytest.mark.skipif(PLAYER not in os.environ, reason=f"{PLAYER} names no Python with textworld[pddl] and alfworld")
def test_long_walks_are_textworlds(tmp_path: Path) -> None:
    """Here ``MRLM_TEXTWORLD_PYTHON=VENV/bin/python``, after ``VENV/bin/pip install 'textworld[pddl]' alfworld``."""
    folder = WHOLE / "alfworld"
    grammar, domain = ((folder / name).read_text() for name in ("alfred.twl2", "alfred.pddl"))
    for number, (game, contents) in enumerate(varied_games()):
        content = game_file(game, grammar, contents)
        here = file_game(read_game(str(written(tmp_path, content, f"{number}/game.tw-pddl"))))
        actions = walk(here, 100 + number, 120)
        assert shown(here, actions) == textworld_shows([(content, actions)], domain)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_game_is_read_as_it_was_generated(kind: Any, tmp_path: Path) -> None:
    """Through the file's PDDL; places get new numbers."""
    game = generated(AlfWorldEnvironment(kinds=[kind]).tasks("train")[0].data)
    content = game_file(game, recorded()[0]["file"]["grammar"])
    read = file_game(read_game(str(written(tmp_path, content))))
    assert (read.kind, read.target, read.destination) == (game.kind, game.target, game.destination)
    assert list(read.actions(read.start)) == sorted([*game.actions(game.start), "help"])
    assert {name: list(own) for name, own in read.start.inside.items()} == dict(game.start.inside)
    assert listed(read.house.receptacles) == listed(game.house.receptacles)


def test_the_archive_is_played_by_split_without_games_that_alfworld_leaves_out(tmp_path: Path) -> None:
    folder = tmp_path / "removable_disk"
    first, second = (own["file"] for own in recorded()[:2])
    written(folder, first, "train/pick-A/trial_1/game.tw-pddl")
    written(folder, {**second, "solvable": False}, "train/pick-B/trial_2/game.tw-pddl")
    written(folder, second, "train/pick_Sliced-C/trial_3/game.tw-pddl")
    written(folder, second, "train/pick_movable-D/trial_4/game.tw-pddl")
    written(folder, second, "valid_seen/pick-E/trial_5/game.tw-pddl")
    written(folder, recorded()[2]["file"], "valid_unseen/pick-F/trial_6/game.tw-pddl")
    environment = AlfWorldEnvironment(data=str(folder))
    assert [environment.tasks(split).size for split in ("train", "validation", "test")] == [1, 1, 1]
    check_environment(environment).raise_on_failure()
    task = environment.tasks("validation")[0]
    gold = environment.gold(task)
    assert gold is not None
    environment.reset(task)
    steps = [environment.step({"agent": Message("assistant", reply)}) for reply in gold["agent"]]
    assert steps[-1].rewards == {"agent": 1.0}


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("(inReceptacle ?o ?r)", "(inReceptacleObject ?o ?r)", "the goal is not one of pick, look"),
        ("(objectType ?o", "(kind ?o", "the goal is not one of pick, look"),
        ("PutObject.feedback", "Put.feedback", "the grammar has no"),
        ("(atLocation agent1", "(at agent1", "the problem lacks a fact or an object"),
    ],
)
def test_a_file_of_another_form_is_named(old: str, new: str, fault: str, tmp_path: Path) -> None:
    content = {name: str(text).replace(old, new) for name, text in recorded()[0]["file"].items() if name != "solvable"}
    with pytest.raises(DataError, match=f"{tmp_path}.*{fault}"):
        read_game(str(written(tmp_path, content)))


def test_comments_of_a_problem_are_left_out(tmp_path: Path) -> None:
    content = dict(recorded()[0]["file"])
    plain = read_game(str(written(tmp_path, content, "plain/game.tw-pddl")))
    problem = content["pddl_problem"]
    problem = problem.replace("(:goal", "(:goal ; (forall (?re - receptacle) (not (opened ?re)))\n")
    content["pddl_problem"] = problem.replace("(:init", "(:init ; (atLocation agent1 nowhere)\n")
    assert read_game(str(written(tmp_path, content))) == plain


def test_missing_games_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no game of ALFWorld; name a folder"):
        AlfWorldEnvironment(data={"train": str(tmp_path)}).tasks("train")
    (tmp_path / "game.tw-pddl").write_text("{}")
    with pytest.raises(DataError, match="is not a game of ALFWorld: Object missing required field"):
        AlfWorldEnvironment(data={"train": str(tmp_path)}).tasks("train")
