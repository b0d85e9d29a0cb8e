"""ALFWorld's own games: files ``game.tw-pddl``, each a problem in PDDL and a grammar of texts."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from mrlm_environments.alfworld.game import KINDS, TREATMENTS, Game
from mrlm_environments.alfworld.house import kind_of
from mrlm_pl.environment import Task, TaskSource
from mrlm_pl.errors import DataError
from mrlm_pl.grouping import grouped
from mrlm_pl.seeding import derive_seed
from mrlm_pl.settings import one_of

FOLDERS = {"train": "train", "validation": "valid_seen", "test": "valid_unseen"}
"""Folders of the splits in ALFWorld's archive."""

LEFT_OUT = ("movable", "Sliced")
"""Parts of the names of tasks that ALFWorld does not play."""

TRAITS = ("pickupable", "cleanable", "heatable", "coolable", "sliceable", "toggleable", "isreceptacleobject")
FACTS = ("isclean", "ishot", "iscool", "issliced", "istoggled")
_OTHER_GOALS = ("issliced", "inreceptacleobject", "forall")
_COMMENT = re.compile(r";.*")
_FACT = re.compile(r"\((\w+)((?:\s+\w+)*)\s*\)")
_OBJECT_TYPE = re.compile(r"\(objecttype \?(\w+) (\w+)type\)")
_RECEPTACLE_TYPE = re.compile(r"\(receptacletype \?\w+ (\w+)type\)")
_TOGGLED = re.compile(r"\(istoggled \?(\w+)\)")


class _File(msgspec.Struct):
    pddl_problem: str
    grammar: str
    solvable: bool | None = None


class GameTasks(TaskSource):
    """The solvable games of a split, each read when it is first asked for.

    Args:
        environment: name of the environment.
        split: name of the split.
        data: the folder of ALFWorld's archive, with ``train``, ``valid_seen`` and ``valid_unseen``; or a folder or a
            file for each split. Folders are searched for files ``game.tw-pddl``.

    Raises:
        ConfigurationError: the data has no such split.
        DataError: there is no game, or a file is of another form.
    """

    def __init__(self, environment: str, split: str, data: str | Mapping[str, str]) -> None:
        folders = {name: f"{data}/{own}" for name, own in FOLDERS.items()} if isinstance(data, str) else data
        one_of(folders, f"{environment}: ", split=split)
        self.environment, self.split = environment, split
        folder = Path(folders[split])
        found = [folder] if folder.is_file() else sorted(folder.rglob("game.tw-pddl"))
        usual = [str(file) for file in found if not any(part in str(file.relative_to(folder)) for part in LEFT_OUT)]
        self.files = [file for file in usual if _decode(file).solvable is not False]
        if not self.files:
            raise DataError(f"{folder} holds no game of ALFWorld; name a folder with files game.tw-pddl")
        self.size = len(self.files)

    def __getitem__(self, index: int) -> Task:
        self._check_index(index)
        seed = derive_seed("task", self.environment, self.split, index)
        return Task(self.environment, self.split, index, seed, read_game(self.files[index]))


@functools.lru_cache(maxsize=1024)
def read_game(file: str) -> Mapping[str, Any]:
    """Return the data of a game, of which :func:`file_game` makes it.

    Raises:
        DataError: the file has another form, or its goal is not one of the six kinds.
    """
    decoded = _decode(file)
    try:
        return {**_texts(decoded.grammar, file), **_problem(_COMMENT.sub("", decoded.pddl_problem.lower()), file)}
    except (IndexError, KeyError, ValueError) as error:
        raise DataError(f"{file}: the problem lacks a fact or an object ({type(error).__name__}: {error})") from error


def _problem(text: str, file: str) -> dict[str, Any]:
    """Return the goal, the house and the state at the beginning of a problem in PDDL."""
    _, declared, init, goal = (*re.split(r"\(:(?:objects|init|goal)\b", text), "", "", "")[:4]
    types = dict(re.findall(r"\b(\w+)\s+-\s+(\w+)", declared))
    stated = [(name, arguments.split()) for name, arguments in _FACT.findall(init)]
    facts = [(name, own) for name, own in stated if all(part in types for part in own)]
    names = _names(dict.fromkeys(part for _, own in facts for part in own))

    def having(predicate: str) -> list[str]:
        return [names[own[-1]] for name, own in facts if name == predicate]

    def related(predicate: str) -> dict[str, list[str]]:
        return grouped((names[own[0]], names[own[1]]) for name, own in facts if name == predicate)

    for name, own in (related("objecttype") | related("receptacletype")).items():
        if own != [f"{kind_of(name)}type"]:
            raise DataError(f"{file}: {name} is of type {', '.join(own)}")
    openable = having("openable")
    objects = [names[own] for own in names if types[own] == "object"]
    return {
        **_goal(goal, file),
        "house": {
            "receptacles": {name: [own[0], name in openable] for name, own in related("receptacleatlocation").items()},
            "holds": {
                own.removesuffix("type"): [kind.removesuffix("type") for kind in kinds]
                for own, kinds in related("cancontain").items()
            },
            "traits": {trait: having(trait) for trait in TRAITS},
            "contents": grouped((outer[0], inner) for inner, outer in related("inreceptacleobject").items()),
        },
        "start": {
            "place": having("atlocation")[0],
            "inside": {**{name: [] for name in objects}, **related("inreceptacle")},
            "near": {**{name: [] for name in objects}, **related("objectatlocation")},
            "held": next(iter(having("holds")), None),
            "opened": having("opened"),
            "facts": [[fact, name] for fact in FACTS for name in having(fact)],
        },
    }


def file_game(data: Mapping[str, Any]) -> Game:
    """Return the game that the data of :func:`read_game` describes."""
    return msgspec.convert(data, Game)


def _names(ids: Collection[str]) -> dict[str, str]:
    """Return ALFWorld's names of objects: the kind and a number, the largest for the first identifier."""
    kinds = {own: own.partition("_bar_")[0] + "basin" * ("basin" in own) for own in sorted(ids) if "_bar_" in own}
    left = Counter(kinds.values())
    names = {own: own for own in ids}
    for own, kind in kinds.items():
        names[own] = f"{kind} {left[kind]}"
        left[kind] -= 1
    return names


def _goal(text: str, file: str) -> dict[str, Any]:
    """Return kind, target and destination of a goal in PDDL."""
    types = dict(_OBJECT_TYPE.findall(text))
    destinations = _RECEPTACLE_TYPE.findall(text)
    toggled = _TOGGLED.search(text)
    if toggled:
        kind, destinations = "look", [types.pop(toggled[1], "")]
    elif re.search(r"\(not\s+\(=", text):
        kind = "pick_two"
    else:
        kind = next((own for own, (_, _, fact) in TREATMENTS.items() if fact in text), "pick")
    targets = set(types.values())
    if len(targets) != 1 or len(set(destinations)) != 1 or any(part in text for part in _OTHER_GOALS):
        raise DataError(f"{file}: the goal is not one of {', '.join(KINDS)}: {' '.join(text.split())}")
    return {"kind": kind, "target": targets.pop(), "destination": destinations[0]}


def _texts(grammar: str, file: str) -> dict[str, Any]:
    """Return the instruction and the wording of a grammar."""

    def found(pattern: str) -> str:
        match = re.search(pattern, grammar)
        if match is None:
            raise DataError(f"{file}: the grammar has no {pattern!r}")
        return match[1].replace(".name}", "}").replace("\\n", "\n")

    feedback = r'"{}\.feedback": \[\s*\{{\s*"rhs": "([^"]*)"'
    wording = {
        "move": found(r'action PutObject \{\s*template :: "([^"]*)"'),
        "moved": found(feedback.format("PutObject")),
        "arrived": found(feedback.format("GotoLocation")).removesuffix(" #examineReceptacle.feedback#"),
        "help": found(feedback.format("help")).lstrip() if "action help" in grammar else None,
    }
    return {"instruction": found(r'Your task is to: ([^"]*?)\.?"'), "wording": wording}


def _decode(file: str) -> _File:
    try:
        return msgspec.json.decode(Path(file).read_bytes(), type=_File)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"{file} is not a game of ALFWorld: {error}") from error
