"""Records of what happened: messages, turns, trajectories and episodes.

All records are frozen, hold plain data only and survive JSON without loss: ``Episode.from_json(e.to_json()) == e``.
They are the single source from which batches, rewards, credit and transcripts are made; every number in them is keyed
by (run, iteration, task, group, episode, agent, policy, version, turn, token).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


def person_of(agent: str) -> str:
    """The one who acts as an agent: an environment that has an agent for each turn names them ``person@turn``.

    >>> person_of("solver_1@2"), person_of("solver_1")
    ('solver_1', 'solver_1')
    """
    return agent.partition("@")[0]


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool that a message asks for: its id, the tool's name and the arguments as a JSON object."""

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Message:
    """One chat message.

    Args:
        role: ``system``, ``user``, ``assistant`` or ``tool``.
        content: the text.
        tool_calls: calls that an assistant message asks for.
        tool_call_id: for a ``tool`` message, the call that it answers.
        name: for a ``tool`` message, the tool.

    Raises:
        ValueError: the role is not one of the four.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"message role is {self.role!r}; it must be one of {', '.join(ROLES)}")

    def to_chat(self) -> dict[str, Any]:
        """The message in the form that chat templates read (OpenAI's field names).

        >>> Message("user", "2 + 2?").to_chat()
        {'role': 'user', 'content': '2 + 2?'}
        """
        chat: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            chat["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in self.tool_calls
            ]
        if self.tool_call_id is not None:
            chat["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            chat["name"] = self.name
        return chat

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Message:
        """The message stored by :meth:`Episode.to_dict`.

        Raises:
            ValueError: its content is no text.
        """
        if not isinstance(data["content"], str):
            raise ValueError(f"the content of a message is {data['content']!r:.80}; it must be text")
        calls = tuple(ToolCall(**call) for call in data.get("tool_calls", ()))
        return cls(data["role"], data["content"], calls, data.get("tool_call_id"), data.get("name"))


@dataclass(frozen=True)
class Task:
    """One problem instance of an environment.

    Args:
        environment: name of the environment, for example ``math``.
        split: ``train``, ``validation`` or ``test``.
        index: position in the split's task source.
        seed: all randomness of the environment when it plays this task.
        data: what the environment needs to pose and judge the task, as JSON-like data.
    """

    environment: str
    split: str
    index: int
    seed: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Text that identifies the task within a run.

        >>> Task("math", "train", 3).key
        'math/train/3'
        """
        return f"{self.environment}/{self.split}/{self.index}"


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive sampled tokens of a turn that were drawn from the same weights: how many, of which version, where."""

    tokens: int
    version: int
    engine: str


@dataclass(frozen=True)
class Turn:
    """One decision of one agent.

    Args:
        agent: who decided.
        index: how many times the environment had been stepped before this decision; agents that act at the same
            time share it.
        start: first sampled token in the trajectory's row.
        stop: one past the last sampled token.
        reward: what the environment paid for it.
        components: named parts of ``reward``; they sum to it.
        finish_reason: ``stop`` or ``length``, from the engine.
        policy: name of the weights that decided.
        version: their version, counted in optimizer steps; the oldest of them where ``spans`` has several.
        engine: the engine that sampled the first token.
        node: the state of the turn tree that it was decided in; empty where a state has one decision of each agent.
        sample: which of the decisions that the agent was asked for in this state. Turns of several episodes with the
            same group, node, agent and sample are one and the same decision.
        spans: the turn's tokens in stretches, where weights or engine changed while it was sampled; empty where all
            tokens are of ``version`` and ``engine``.
    """

    agent: str
    index: int
    start: int
    stop: int
    reward: float
    components: Mapping[str, float]
    finish_reason: str
    policy: str
    version: int
    engine: str
    node: str = ""
    sample: int = 0
    spans: tuple[TokenSpan, ...] = ()

    def token_spans(self) -> tuple[TokenSpan, ...]:
        """The stretches of all the turn's tokens; one where nothing changed.

        >>> Turn("solver", 0, 5, 9, 1.0, {}, "stop", "main", 3, "in_process").token_spans()
        (TokenSpan(tokens=4, version=3, engine='in_process'),)
        """
        return self.spans or (TokenSpan(self.stop - self.start, self.version, self.engine),)


@dataclass(frozen=True)
class Trajectory:
    """One agent's token row in an episode.

    An agent has several rows only when its chat template rewrites history; each row then stands alone.

    Args:
        agent: whose row it is.
        policy: name of the weights that the agent's seat is bound to.
        token_ids: the whole conversation as the agent's policy saw it, length T.
        action_mask: True where the policy sampled the token, length T.
        logprobs: log-probability under the distribution sampled from; 0.0 where ``action_mask`` is False, length T.
        turns: the decisions in this row, in order.
        messages: the same conversation as text.
    """

    agent: str
    policy: str
    token_ids: tuple[int, ...]
    action_mask: tuple[bool, ...]
    logprobs: tuple[float, ...]
    turns: tuple[Turn, ...]
    messages: tuple[Message, ...] = ()

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.action_mask) == len(self.logprobs):
            raise ValueError(
                f"trajectory of {self.agent!r}: token_ids, action_mask and logprobs have lengths "
                f"{len(self.token_ids)}, {len(self.action_mask)}, {len(self.logprobs)}; they must be equal"
            )

    @property
    def reward(self) -> float:
        """Sum of the turns' rewards."""
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def num_actions(self) -> int:
        """How many tokens the policy sampled."""
        return sum(self.action_mask)


@dataclass(frozen=True)
class Episode:
    """One play of a task by all agents.

    Args:
        id: unique in the run.
        task: the problem instance.
        group: episodes with the same group share a task and are compared with each other.
        seed: the key from which all of the episode's sampling seeds are derived.
        iteration: the collection it belongs to; -1 outside training.
        trajectories: rows by agent, in the order in which they began.
        stop_reason: why it ended, as the environment named it; ``error`` for a failed one.
        truncated: True when a limit cut it short, so that the state it ended in still had value.
        success: whether the task was solved, or None where the environment does not say.
        metrics: named numbers of the environment, for the log.
        step_rewards: what each agent was paid at each step of the environment, whenever it had decided.
        agents: all agents of the environment, also those that never acted; empty in records of other origin.
        error: the failure that ended it, or None. A failed episode is counted and never enters the loss.
        attempts: how many times it was started.
        row_restarts: how many times a chat template rewrote history, so that a new row was begun.
        timings: seconds by phase (``generate``, ``environment``). They are measurements: no computation reads them.
    """

    id: str
    task: Task
    group: str
    seed: int
    iteration: int
    trajectories: Mapping[str, tuple[Trajectory, ...]]
    stop_reason: str
    truncated: bool = False
    success: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    step_rewards: tuple[Mapping[str, float], ...] = ()
    agents: tuple[str, ...] = ()
    error: str | None = None
    attempts: int = 1
    row_restarts: int = 0
    timings: Mapping[str, float] = field(default_factory=dict)

    @property
    def failed(self) -> bool:
        """Whether an infrastructure error ended the episode."""
        return self.error is not None

    def rows(self) -> Sequence[Trajectory]:
        """All trajectories, agent after agent."""
        return [row for rows in self.trajectories.values() for row in rows]

    def rewards(self) -> dict[str, float]:
        """Total reward of each agent."""
        return {agent: math.fsum(row.reward for row in rows) for agent, rows in self.trajectories.items()}

    @property
    def team_size(self) -> int:
        """How many agents a mean over the agents is over: all, or those that acted where all are unknown."""
        return len(self.agents) or len(self.trajectories)

    @property
    def reward(self) -> float:
        """Mean over the agents of their total rewards; for one agent, its return. 0.0 when nobody acted."""
        return math.fsum(self.rewards().values()) / self.team_size if self.trajectories else 0.0

    def components(self) -> dict[str, float]:
        """Mean over the agents of each reward component, summed over the turns."""
        sums: dict[str, float] = {}
        for row in self.rows():
            for turn in row.turns:
                for name, value in turn.components.items():
                    sums[name] = sums.get(name, 0.0) + value
        return {name: value / self.team_size for name, value in sums.items()}

    def to_dict(self) -> dict[str, Any]:
        """The episode as JSON-like data; mappings and sequences of the record are shared, not copied."""
        data = _shallow(self)
        data["task"] = _shallow(self.task)
        data["trajectories"] = {
            agent: [
                {
                    **_shallow(row),
                    "turns": [
                        {**_shallow(turn), "spans": [_shallow(span) for span in turn.spans]} for turn in row.turns
                    ],
                    "messages": [asdict(message) for message in row.messages],
                }
                for row in rows
            ]
            for agent, rows in self.trajectories.items()
        }
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Episode:
        """The episode stored by :meth:`to_dict`.

        Raises:
            ValueError: a field is missing or unknown; the message names it.
        """
        known = {item.name for item in fields(cls)}
        missing = {"id", "task", "group", "seed", "iteration", "trajectories", "stop_reason"} - set(data)
        unknown = set(data) - known
        if missing or unknown:
            raise ValueError(
                f"episode record {data.get('id', '?')!r}: missing fields {sorted(missing)}, unknown {sorted(unknown)}"
            )
        for name in ("id", "group", "stop_reason"):
            if not isinstance(data[name], str):
                raise ValueError(f"episode record {data['id']!r:.80}: {name} is {data[name]!r:.80}; it must be text")
        values = dict(data)
        values["task"] = Task(**data["task"])
        values["step_rewards"] = tuple(data.get("step_rewards", ()))
        values["agents"] = tuple(data.get("agents", ()))
        values["trajectories"] = {
            agent: tuple(_trajectory_from_dict(row) for row in rows) for agent, rows in data["trajectories"].items()
        }
        return cls(**values)

    def to_json(self) -> str:
        """One line of JSON; floats keep all their digits.

        Raises:
            ValueError: a number is NaN or infinite.
        """
        return json.dumps(self.to_dict(), ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Episode:
        """The episode that :meth:`to_json` wrote.

        >>> e = Episode("0", Task("math", "train", 0), "g", 1, 0, {}, "answered", success=True)
        >>> Episode.from_json(e.to_json()) == e
        True
        """
        return cls.from_dict(json.loads(text))


def _shallow(record: Any) -> dict[str, Any]:
    """Fields of a record by name, without the recursion of ``asdict``, which costs a call for every token."""
    return {item.name: getattr(record, item.name) for item in fields(record)}


def _trajectory_from_dict(data: Mapping[str, Any]) -> Trajectory:
    made = Trajectory(
        agent=data["agent"],
        policy=data["policy"],
        token_ids=tuple(data["token_ids"]),
        action_mask=tuple(data["action_mask"]),
        logprobs=tuple(data["logprobs"]),
        turns=tuple(
            Turn(**{**turn, "spans": tuple(TokenSpan(**span) for span in turn.get("spans", ()))})
            for turn in data["turns"]
        ),
        messages=tuple(Message.from_dict(message) for message in data["messages"]),
    )
    _check_kinds(made)
    return made


def _check_kinds(row: Trajectory) -> None:
    """Refuse a row of a file whose fields hold other kinds of values than a row has.

    Raises:
        ValueError: the field is named.
    """
    wanted: dict[str, set[type]] = {"token_ids": {int}, "action_mask": {bool}, "logprobs": {float, int}}
    for name, kinds in wanted.items():
        strange = set(map(type, getattr(row, name))) - kinds
        if strange:
            raise ValueError(
                f"{name} of {row.agent!r} holds a {strange.pop().__name__}, not only {kinds.pop().__name__}"
            )
    if row.token_ids and min(row.token_ids) < 0:
        raise ValueError(f"token_ids of {row.agent!r} hold {min(row.token_ids)}; a token is 0 or above")
    for turn in row.turns:
        if not (isinstance(turn.start, int) and isinstance(turn.stop, int)):
            raise ValueError(f"a turn of {row.agent!r} goes from {turn.start!r} to {turn.stop!r}; give positions")
        if not isinstance(turn.reward, (int, float)):
            raise ValueError(f"the reward of a turn of {row.agent!r} is {turn.reward!r}; it must be a number")


def question_to(episode: Episode, agent: str) -> str | None:
    """The first user message of an episode: the person's own, if it acted in the first step, else that of who did.

    So it is the question also for who begins with what others made of it, such as a leader. None where the record
    lacks the messages.
    """
    begins = min(turn.index for row in episode.rows() for turn in row.turns)
    first = [row for row in episode.rows() if row.turns and row.turns[0].index == begins]
    shown = next((row for row in first if person_of(row.agent) == person_of(agent)), first[0])
    return next((message.content for message in shown.messages if message.role == "user"), None)
