"""Turn trees: groups of episodes that branch, and records of files that hold an episode or such a group."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mrlm_pl.episode import SCHEMA, Episode, Trajectory, Turn, json_line, turns_by_step
from mrlm_pl.grouping import grouped


@dataclass(frozen=True)
class JointAction:
    """One decision of each agent that was due in a state.

    Attributes:
        node: id of the state, which is the parent of the joint action in the tree.
        depth: number of environment steps that led to the state.
        decisions: index of each agent's decision.
        path: first episode that contains the joint action.
        failed: whether its step failed.
    """

    node: str
    depth: int
    decisions: Mapping[str, int]
    path: Episode
    failed: bool

    @property
    def rewards(self) -> Mapping[str, float] | None:
        """Rewards of the step by agent; None if it failed."""
        return None if self.failed else self.path.step_rewards[self.depth]


@dataclass(frozen=True)
class TurnTree:
    """A group of episodes that branch: every path from the root to a leaf is an episode.

    In a file, the tokens of each decision are stored once, with those of the observations before it.

    Attributes:
        paths: episodes of the tree. Turns that they share have the same ``node`` and ``sample`` in all of them.
        actions: joint actions by the id of the state that they lead to, or of the path that they end; a parent comes
            before its children.
        decisions: turn of each decision, and the first row that contains it, by (state, agent, number).
    """

    paths: tuple[Episode, ...]
    actions: Mapping[str, JointAction]
    decisions: Mapping[tuple[str, str, int], tuple[Turn, Trajectory]]

    @classmethod
    def of(cls, paths: Sequence[Episode]) -> TurnTree:
        """Return the tree of a group's paths."""
        actions: dict[str, JointAction] = {}
        decisions: dict[tuple[str, str, int], tuple[Turn, Trajectory]] = {}
        for path in paths:
            steps = turns_by_step(path)
            states = [next(iter(by_agent.values()))[0].node for by_agent in steps.values()]
            for (step, by_agent), node, leads_to in zip(steps.items(), states, [*states[1:], path.id], strict=True):
                if leads_to in actions:
                    continue
                numbers = {agent: turn.sample for agent, (turn, _) in by_agent.items()}
                # The last step of a failed path has no outcome, whatever rewards it has.
                failed = leads_to == path.id and path.failed
                actions[leads_to] = JointAction(node, step, numbers, path, failed)
                for agent, (turn, row) in by_agent.items():
                    decisions.setdefault((node, agent, turn.sample), (turn, row))
        return cls(tuple(paths), actions, decisions)

    @property
    def team_size(self) -> int:
        """Return the number of agents."""
        return max(path.team_size for path in self.paths)

    def to_dict(self) -> dict[str, Any]:
        """Return the tree as JSON-like data.

        Raises:
            ValueError: the paths are of several trees: their tokens differ where the decisions are said to be the same.
        """
        decisions: dict[str, dict[str, Any]] = {}
        paths = [path.to_dict() for path in self.paths]
        for row, keys in _decided_rows(paths):
            start = 0
            for key, turn in zip(keys, row["turns"], strict=True):
                tokens = {name: row[name][start : turn["stop"]] for name in _PER_TOKEN}
                if decisions.setdefault(key, tokens) != tokens:
                    raise ValueError(f"group {self.paths[0].group!r} has two decisions {key!r} with other tokens")
                start = turn["stop"]
            row.update({name: row[name][start:] for name in _PER_TOKEN})
        return {"schema": SCHEMA, "decisions": decisions, "paths": paths}

    def to_json(self) -> str:
        """Return one line of JSON; see :meth:`Episode.to_json`."""
        return json_line(self.paths, self.to_dict, self.to_dict)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TurnTree:
        """Return the tree that :meth:`to_dict` stored; fields of newer versions are ignored.

        Raises:
            ValueError: a field is missing or has another type.
        """
        try:
            paths = copy.deepcopy(data["paths"])
            for row, keys in _decided_rows(paths):
                records = [*(data["decisions"][key] for key in keys), dict(row)]
                row.update({name: [value for record in records for value in record[name]] for name in _PER_TOKEN})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"turn tree: {type(error).__name__}: {error}") from error
        return cls.of([Episode.from_dict(path) for path in paths])

    def children(self) -> dict[str, list[str]]:
        """Return the names of each state's joint actions."""
        return grouped((action.node, name) for name, action in self.actions.items())


_PER_TOKEN = ("token_ids", "action_mask", "logprobs")


def _decided_rows(paths: Sequence[Mapping[str, Any]]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Yield each row of stored paths, with the keys of its decisions in order."""
    for path in paths:
        for rows in path["trajectories"].values():
            for row in rows:
                yield row, [f"{turn['node']}/{turn['agent']}/{turn['sample']}" for turn in row["turns"]]


def episodes_of(record: Mapping[str, Any]) -> Sequence[Episode]:
    """Return the episodes of a record from a file: one, or the paths of a turn tree.

    Raises:
        ValueError: it is no such record.
    """
    is_tree = isinstance(record, Mapping) and "paths" in record
    return TurnTree.from_dict(record).paths if is_tree else [Episode.from_dict(record)]


def holds_episodes(record: Mapping[str, Any]) -> bool:
    """Return True for the record of an episode or a turn tree, False for another data row."""
    return "trajectories" in record or "paths" in record
