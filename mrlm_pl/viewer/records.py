"""Stored episodes as the viewer shows them: a summary of each for the table, the whole record for its page."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import msgspec

from mrlm_pl.episode import Episode
from mrlm_pl.turn_tree import TurnTree, episodes_of


class TurnHead(msgspec.Struct):
    """The parts of a stored turn that the summary reads."""

    agent: str = ""
    index: int = 0
    start: int = 0
    stop: int = 0
    reward: float = 0.0
    finish_reason: str = ""
    version: int = 0
    advantage: float | None = None
    node: str = ""
    sample: int = 0


class _MessageHead(msgspec.Struct):
    role: str = ""
    content: str = ""


class _RowHead(msgspec.Struct):
    policy: str = ""
    turns: list[TurnHead] = []
    messages: list[_MessageHead] = []


class _TaskHead(msgspec.Struct):
    environment: str = ""
    split: str = ""
    index: int = 0
    seed: int = 0


class EpisodeHead(msgspec.Struct):
    """The parts of a stored episode that the summary reads; tokens are skipped."""

    id: str = ""
    task: _TaskHead = msgspec.field(default_factory=_TaskHead)
    group: str = ""
    seed: int = 0
    iteration: int = -1
    trajectories: dict[str, list[_RowHead]] = {}
    stop_reason: str = ""
    truncated: bool = False
    success: bool | None = None
    metrics: dict[str, float] = {}
    agents: list[str] = []
    error: str | None = None
    attempts: int = 1
    row_restarts: int = 0
    timings: dict[str, float] = {}
    origin: dict[str, Any] | None = None
    excluded: str | None = None

    @property
    def tool_failure(self) -> bool:
        """Return True if the environment counted a tool error."""
        return any(value > 0 for name, value in self.metrics.items() if name.rpartition("/")[2] == "tool_errors")

    def turns(self) -> list[TurnHead]:
        """Return all turns, in order."""
        turns = [turn for rows in self.trajectories.values() for row in rows for turn in row.turns]
        return sorted(turns, key=lambda turn: turn.index)


class _RecordHead(EpisodeHead):
    paths: list[EpisodeHead] | None = None


TEXT, PREVIEW = 200, 120
"""Characters of a decision in a turn tree, and of the prompt and the replies in the table."""

_HEAD = msgspec.json.Decoder(_RecordHead)

Summary = namedtuple("Summary", (
    "id", "iteration", "task", "group", "agents", "policies", "reward", "rewards", "turns", "tokens", "advantage",
    "success", "truncated", "length", "tool_failure", "error", "stop", "seed", "branch",
    "tree", "excluded", "signed_advantage", "prompt", "reply",
))  # fmt: skip
"""A row of the table of episodes.

``prompt`` is the beginning of the first user message, ``reply`` that of all replies in order, each on one line.
``advantage`` is the largest absolute one of a turn, ``signed_advantage`` the same with its sign; None where none is
stored. ``branch`` is True for an episode that branches from another one.
"""


def episode_heads(line: bytes) -> list[EpisodeHead]:
    """Return the episodes in a line of a file: one, or the paths of a turn tree.

    Raises:
        ValueError: the line is not an episode record.
    """
    record = _HEAD.decode(line)
    if record.paths is None and not record.id:
        raise ValueError("a record without an id")
    return [record] if record.paths is None else record.paths


def summarize(head: EpisodeHead, tree: bool) -> Summary:
    """Return the summary of an episode."""
    turns = head.turns()
    rewards = {
        agent: math.fsum(turn.reward for row in rows for turn in row.turns) for agent, rows in head.trajectories.items()
    }
    team = len(head.agents) or len(rewards)
    advantages = [turn.advantage for turn in turns if turn.advantage is not None]
    largest = max(advantages, key=abs, default=None)
    task, rows = head.task, [row for rows in head.trajectories.values() for row in rows]
    replies = [(turn.index, text) for row in rows for turn, text in zip(row.turns[::-1], _said(row), strict=False)]
    return Summary(
        head.id, head.iteration, f"{task.environment}/{task.split}/{task.index}", head.group, list(rewards),
        sorted({row.policy for row in rows}),
        math.fsum(rewards.values()) / team if team else 0.0, list(rewards.values()), len(turns),
        sum(turn.stop - turn.start for turn in turns), None if largest is None else abs(largest), head.success,
        head.truncated,
        any(turn.finish_reason == "length" for turn in turns),
        head.tool_failure,
        head.error, head.stop_reason, f"{task.seed}/{head.seed}", head.origin is not None, tree,
        head.excluded, largest, _asked(rows), _preview(" | ".join(text for _, text in sorted(replies))),
    )  # fmt: skip


def _asked(rows: Iterable[_RowHead]) -> str:
    """Return the beginning of the first user message."""
    messages = (message.content for row in rows for message in row.messages if message.role == "user")
    return _preview(next(messages, ""))


def _said(row: _RowHead) -> list[str]:
    """Return the replies of a row, the last first; examples in the prompt may precede them."""
    return [message.content for message in reversed(row.messages) if message.role == "assistant"]


def _preview(text: str) -> str:
    return " ".join(text[: 4 * PREVIEW].split())[:PREVIEW]


def whole_record(line: bytes, episode: str) -> dict[str, Any]:
    """Return the record of an episode in a line with every stored field, of newer versions too, and its ``reward``.

    The messages that the agent sampled have the number of their ``turn``, and the ``step`` of the environment.

    Raises:
        ValueError: the line is not an episode record, or holds no such episode.
    """
    data = msgspec.json.decode(line)
    records = data.get("paths", [data])
    number = [path.get("id") for path in records].index(episode)
    parsed = _episodes(line)[number]
    record = {**records[number], "tree": "paths" in data, "reward": parsed.reward}
    for row, trajectory in zip(stored_rows(record), parsed.rows(), strict=True):
        # A turn tree holds the tokens by decision.
        row.update({name: [*getattr(trajectory, name)] for name in ("token_ids", "action_mask", "logprobs")})
        messages = row.setdefault("messages", [])
        for turn, index in zip(reversed(range(len(trajectory.turns))), reversed(trajectory.replies), strict=False):
            messages[index].update(turn=turn, step=trajectory.turns[turn].index)
        for turn in row["turns"]:
            turn["return"] = turn.pop("return_", None)
    return record


@lru_cache(maxsize=1)
def _episodes(line: bytes) -> Sequence[Episode]:
    """Return the episodes of a line; the paths of a turn tree are asked for one after another."""
    return episodes_of(msgspec.json.decode(line))


def branches_of(line: bytes) -> dict[str, Any]:
    """Return the joint actions of a turn tree, parents first, and its decisions with the beginning of their text.

    Raises:
        ValueError: the line is not a turn tree.
    """
    tree = TurnTree.from_dict(msgspec.json.decode(line))
    actions = [
        {**vars(action), "name": name, "rewards": action.rewards, "path": action.path.id}
        for name, action in tree.actions.items()
    ]
    decisions = []
    for turn, row in tree.decisions.values():
        from_end = len(row.turns) - row.turns.index(turn)
        has_reply = from_end <= len(row.replies)  # records may lack them
        text = row.messages[row.replies[-from_end]].content if has_reply else ""
        decisions.append({**vars(turn), "return": turn.return_, "text": text[:TEXT]})
    return {"actions": actions, "decisions": decisions}


MEASURES = ("ratio", "entropy", "kl")
"""The learner's measures of individual tokens, in the files of ``RUN/tokens``."""


class _TokenMeasures(msgspec.Struct):
    turns: dict[str, dict[str, list[float | None]]]


_MEASURED = msgspec.json.Decoder(_TokenMeasures)


def add_measures(record: dict[str, Any], lines: Iterable[bytes]) -> None:
    """Add the learner's measures to the tokens of an episode's turns.

    Args:
        record: whole record of the episode.
        lines: lines of a file of ``RUN/tokens``; those of other episodes and broken ones are skipped.
    """
    prefixes = [b'{"of":%b,' % msgspec.json.encode(record[name]) for name in ("id", "group")]
    for line in lines:
        if not line.startswith(tuple(prefixes)):
            continue
        with suppress(ValueError, RecursionError):
            measured = _MEASURED.decode(line).turns
            for row in stored_rows(record):
                for turn in row["turns"]:
                    number = turn.get("sample", 0) if turn.get("node") else turn["index"]
                    token_measures = measured.get(f"{turn.get('node', '')}/{turn['agent']}/{number}", {})
                    for name in MEASURES:
                        if len(values := token_measures.get(name, ())) == turn["stop"] - turn["start"]:
                            table = row.setdefault(name, [None] * len(row["token_ids"]))
                            table[turn["start"] : turn["stop"]] = values


def report_records(text: bytes) -> Iterator[dict[str, Any]]:
    """Yield the transcripts of an evaluation as records; they have no turns and no tokens.

    The tasks of a problem are a group, named by the first of them: intervals rest on problems.

    Raises:
        ValueError: the text is no such report.
    """
    data = msgspec.json.decode(text)
    try:
        for report in [data] if "transcripts" in data else data.values():
            firsts: dict[str, str] = {}
            tasks = report.get("tasks", ())
            groups = {item["task"]: firsts.setdefault(item["problem"], item["task"]) for item in tasks}
            for number, transcript in enumerate(report["transcripts"]):
                environment, split, index = [*transcript["task"].split("/"), "", ""][:3]
                rows = {
                    agent: [{"agent": agent, "policy": report["seats"].get(agent, ""), "turns": [], "token_ids": [],
                             "messages": [*map(dict, messages)]}]
                    for agent, messages in transcript["messages"].items()
                }  # fmt: skip
                yield {
                    **transcript,
                    "id": f"{environment}-{number}",
                    "task": {"environment": environment, "split": split, "index": index, "seed": "", "data": {}},
                    "group": groups.get(transcript["task"], transcript["task"]),
                    "seed": report["seed"],
                    "iteration": -1,
                    "trajectories": rows,
                    "tree": False,
                }
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no report of an evaluation: {type(error).__name__}: {error}") from error


def report_summary(record: Mapping[str, Any]) -> Summary:
    """Return the summary of a transcript; each message of an agent is a turn."""
    rows = msgspec.convert([*stored_rows(record)], list[_RowHead])
    replies = [text for row in rows for text in reversed(_said(row))]
    agents = list(record["trajectories"])
    values = {
        **{name: record[name] for name in ("id", "iteration", "group", "reward", "success", "error")},
        "task": "{environment}/{split}/{index}".format(**record["task"]), "agents": agents,
        "policies": sorted({row.policy for row in rows}),
        "rewards": [None] * len(agents), "turns": len(replies), "truncated": False, "length": False,
        "tool_failure": False, "stop": record["stop_reason"], "seed": "", "branch": False, "tree": False,
        "prompt": _asked(rows), "reply": _preview(" | ".join(replies)),
    }  # fmt: skip
    return Summary(*map(values.get, Summary._fields))


def stored_rows(record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the trajectories of a whole record."""
    for rows in record["trajectories"].values():
        yield from rows


def token_values(row: Mapping[str, Any]) -> Sequence[str]:
    """Return the names of a trajectory's numbers per token; newer records may hold more of them."""
    length = len(row["token_ids"])
    return [
        name
        for name, values in row.items()
        if name != "token_ids" and isinstance(values, (list, tuple)) and len(values) == length > 0
        if all(isinstance(value, (int, float, type(None))) for value in values)
    ]
