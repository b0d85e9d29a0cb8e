"""Records of what happened: messages, turns, trajectories and episodes.

All records are frozen, hold plain data only and survive JSON without loss: ``Episode.from_json(e.to_json()) == e``.
Batches, rewards, credit and transcripts are all computed from them. Every number is keyed
by (run, iteration, task, group, episode, agent, policy, version, turn, token).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec

from mrlm_pl.errors import EnvironmentContractError
from mrlm_pl.grouping import grouped, summed

SCHEMA = 4
"""Version of the records in files. Readers ignore fields that they do not know, and take records without a version.

2: ``Episode.excluded``. Older files hold greedy and replaced episodes without a mark.
3: ``Turn.return_``, and the baselines of algorithms without a critic.
4: ``Episode.retried_decisions`` and ``retried_tokens``. Older files have none.
"""

TurnKey = tuple[str, str, str, int]
"""(group, state, agent, number) of a decision in a turn tree, whose paths share it; else (episode, "", agent, step)."""

CREDIT = ("return_", "baseline", "advantage")
"""Fields of a turn that the learner sets."""

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")


def base_agent(agent: str) -> str:
    """Return an agent's name without its turn: environments with one agent per turn name them ``AGENT@TURN``.

    >>> base_agent("solver_1@2"), base_agent("solver_1")
    ('solver_1', 'solver_1')
    """
    return agent.partition("@")[0]


@dataclass(frozen=True)
class ToolCall:
    """A tool call in a message: its id, the tool's name and the arguments as a JSON object."""

    id: str
    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


REASONING = "<think>"
"""The tag before a model's reasoning."""

_REASONING_END = re.compile(r"""</think>(?!(?<=(["'`])</think>)\1)""")


def final_text(reply: str) -> str:
    """Return a reply's text after the model's reasoning, which ``</think>`` ends; empty if the reasoning has no end.

    A quoted tag does not count: it is text about tags, as in a program that removes the reasoning.

    >>> final_text("<think>7 or 8?</think>\\n8"), final_text("\\n8")
    ('8', '\\n8')
    >>> final_text("<think>8</think>"), final_text("<think>8, so")
    ('', '')
    >>> final_text("<think>Split.</think>text.split('</think>')")
    "text.split('</think>')"
    """
    start = max((match.end() for match in _REASONING_END.finditer(reply)), default=0)
    text = reply[start:].lstrip("\n") if start else reply
    return "" if text.lstrip().startswith(REASONING) else text


def reasoning_text(reply: str) -> str:
    """Return the model's reasoning before its :func:`final_text`, without the tags.

    >>> reasoning_text("<think>\\n7 or 8?\\n</think>\\n\\n8"), reasoning_text("<think>8, so"), reasoning_text("8")
    ('7 or 8?', '8, so', '')
    """
    begun = reply[: len(reply) - len(final_text(reply))].strip()
    return begun.removeprefix(REASONING).removesuffix("</think>").strip()


def with_reasoning(reasoning: str, text: str) -> str:
    """Return a reply's text after reasoning, if there is any, as :func:`reasoning_text` reads it.

    >>> with_reasoning("7 or 8?", "8"), with_reasoning("", "8")
    ('<think>\\n7 or 8?\\n</think>\\n\\n8', '8')
    """
    return f"{REASONING}\n{reasoning}\n</think>\n\n{text}" if reasoning else text


@dataclass(frozen=True)
class Message:
    """One chat message.

    Args:
        role: role of the author: ``system``, ``user``, ``assistant`` or ``tool``.
        content: text of the message.
        tool_calls: the tool calls of an assistant message.
        tool_call_id: id of the call that a ``tool`` message answers.
        name: name of the tool that a ``tool`` message is from.

    Raises:
        ValueError: the role is none of the four.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"message role is {self.role!r}; it must be one of {', '.join(ROLES)}")

    @property
    def final_text(self) -> str:
        """The content after the reasoning; see :func:`final_text`."""
        return final_text(self.content)

    def to_chat(self) -> dict[str, Any]:
        """Return the message in the form that chat templates read (OpenAI's field names).

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


@dataclass(frozen=True)
class Task:
    """One problem instance of an environment.

    Args:
        environment: name of the environment, such as ``math``.
        split: ``train``, ``validation`` or ``test``.
        index: position in the split's task source.
        seed: seed of all randomness in the environment while it plays this task.
        data: JSON-like data from which the environment poses and judges the task.
    """

    environment: str
    split: str
    index: int
    seed: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Return text that identifies the task within a run.

        >>> Task("math", "train", 3).key
        'math/train/3'
        """
        return f"{self.environment}/{self.split}/{self.index}"


@dataclass(frozen=True)
class TokenSpan:
    """Consecutive tokens of a turn sampled by one engine from one policy version."""

    tokens: int
    version: int
    engine: str


@dataclass(frozen=True)
class Turn:
    """One decision of one agent.

    Args:
        agent: the agent that acted.
        index: number of environment steps before this turn; agents that act simultaneously share it.
        start: position of the first sampled token in the trajectory.
        stop: one past the last sampled token.
        reward: reward of this turn from the environment.
        components: named parts of ``reward``, which is their sum.
        finish_reason: ``stop`` or ``length``, as the engine reports it.
        policy: policy that sampled the turn.
        version: version of the policy in optimizer steps; the oldest one if ``spans`` has several.
        engine: engine that sampled the first token.
        node: state in the turn tree; empty outside turn trees.
        sample: index of the decision among those that the agent made in this state. Turns of several episodes with
            equal group, node, agent and sample are the same decision.
        spans: tokens of the turn by version and engine, if either changed while it was sampled; else empty.
        scripted: True if the turn was given rather than sampled for this episode: a turn of the episode that it
            branches from, or a written one. It generated no tokens.
        return_: return that the learner credits the turn with, such as the return of the episode or of the joint
            actions that contain the turn; None if it was not trained on.
        baseline: baseline of the return, such as the mean of the group or a critic's value; None if the algorithm has
            none.
        advantage: advantage as the loss reads it, with all scaling; None if the turn was not trained on. With a critic
            all three are means over the turn's tokens.
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
    scripted: bool = False
    return_: float | None = None
    baseline: float | None = None
    advantage: float | None = None

    def token_spans(self) -> tuple[TokenSpan, ...]:
        """Return the spans of all the turn's tokens: one if neither version nor engine changed.

        >>> Turn("solver", 0, 5, 9, 1.0, {}, "stop", "main", 3, "in_process").token_spans()
        (TokenSpan(tokens=4, version=3, engine='in_process'),)
        """
        return self.spans or (TokenSpan(self.stop - self.start, self.version, self.engine),)


@dataclass(frozen=True)
class Trajectory:
    """The tokens of one agent in an episode.

    An agent has several trajectories only if its chat template rewrites history, or if a program that calls it does not
    extend its conversation; each is then trained separately.

    Args:
        agent: name of the agent.
        policy: policy that the agent's seat is bound to.
        token_ids: token ids of the whole conversation as the policy saw it, length T.
        action_mask: True where the policy sampled the token, length T.
        logprobs: log-probabilities under the distribution sampled from; 0.0 where ``action_mask`` is False, length T.
        turns: decisions of the agent, in order.
        messages: the same conversation as text.
    """

    agent: str
    policy: str
    token_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
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
        """Return the sum of the turns' rewards."""
        return math.fsum(turn.reward for turn in self.turns)

    @property
    def replies(self) -> tuple[int, ...]:
        """Return the indices of its turns among the messages, which are the last messages of the assistant.

        Examples in the prompt, and turns of another row that a template has repeated, may precede them.
        """
        spoken = [index for index, message in enumerate(self.messages) if message.role == "assistant"]
        return tuple(spoken[max(len(spoken) - len(self.turns), 0) :])

    @property
    def num_actions(self) -> int:
        """Return the number of sampled tokens."""
        return sum(self.action_mask)


@dataclass(frozen=True)
class Origin:
    """The place where an episode branches from another one of its group.

    Args:
        episode: id of the other episode.
        agents: agents whose decisions may differ there.
        step: number of environment steps before them; everything before is the same.
    """

    episode: str
    agents: tuple[str, ...]
    step: int


@dataclass(frozen=True)
class Episode:
    """One play of a task by all agents.

    Args:
        id: id that is unique in the run.
        task: the problem instance.
        group: key of the episodes that are compared with each other; they share a task.
        seed: seed from which all sampling seeds of the episode derive.
        iteration: iteration in which it was collected; -1 outside training.
        trajectories: trajectories by agent, in order of their start.
        stop_reason: reason for the end, in the environment's words; ``error`` for a failed episode.
        truncated: whether a limit ended it; critics then bootstrap from its last state.
        success: whether the task was solved; None if the environment does not judge.
        metrics: named numbers of the environment, for the log.
        step_rewards: each agent's reward at each step of the environment, whether it acted there or not.
        agents: all agents of the environment, including those that never acted; empty if unknown.
        error: failure that ended it, or None. Failed episodes are counted and never enter the loss.
        attempts: number of times that it was started.
        retried_decisions, retried_tokens: numbers of decisions and tokens sampled in the earlier, failed attempts.
        row_restarts: number of times that a chat template, or a program that makes the calls, rewrote history, so that
            a new trajectory began.
        timings: seconds by phase: ``generate``, ``environment``, and ``queue`` for a thread that calls the environment.
            No computation reads them.
        origin: place where it branches from another episode; None for an ordinary one.
        excluded: reason for which the learner does not train on it: ``greedy`` (a baseline), ``replaced`` (another
            episode or task took its place) or ``left_out`` (too many failures in its group); None for others.
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
    retried_decisions: int = 0
    retried_tokens: int = 0
    row_restarts: int = 0
    timings: Mapping[str, float] = field(default_factory=dict)
    origin: Origin | None = None
    excluded: str | None = None

    @property
    def failed(self) -> bool:
        """Return True if an infrastructure error ended the episode."""
        return self.error is not None

    def rows(self) -> Sequence[Trajectory]:
        """Return all trajectories, agent by agent."""
        return [row for rows in self.trajectories.values() for row in rows]

    def turns(self) -> Sequence[Turn]:
        """Return all decisions, agent by agent."""
        return [turn for row in self.rows() for turn in row.turns]

    def key_of(self, turn: Turn) -> TurnKey:
        """Return the key of one of its turns."""
        if turn.node:
            return self.group, turn.node, turn.agent, turn.sample
        return self.id, "", turn.agent, turn.index

    def with_rows(self, change: Callable[[Trajectory], Trajectory]) -> Episode:
        """Return the episode with each trajectory replaced by ``change`` of it."""
        changed = {agent: tuple(map(change, rows)) for agent, rows in self.trajectories.items()}
        return replace(self, trajectories=changed)

    def with_turns(self, change: Callable[[Turn], Turn]) -> Episode:
        """Return the episode with each turn replaced by ``change`` of it."""
        return self.with_rows(lambda row: replace(row, turns=tuple(map(change, row.turns))))

    def rewards(self) -> dict[str, float]:
        """Return the return of each agent: the sum of its rewards."""
        return {agent: math.fsum(row.reward for row in rows) for agent, rows in self.trajectories.items()}

    @property
    def team_size(self) -> int:
        """Return the number of agents; of those that acted if ``agents`` is unknown."""
        return len(self.agents) or len(self.trajectories)

    @property
    def reward(self) -> float:
        """Return the mean of the agents' returns; 0.0 if no agent acted."""
        return math.fsum(self.rewards().values()) / self.team_size if self.trajectories else 0.0

    def components(self) -> dict[str, float]:
        """Return each reward component: summed over the turns, averaged over the agents."""
        sums = summed(pair for turn in self.turns() for pair in turn.components.items())
        return {name: value / self.team_size for name, value in sums.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the episode as JSON-like data.

        Raises:
            TypeError: the task's data holds something that JSON does not have, such as a set.
        """
        json.dumps(self.task.data, default=_plain)  # msgspec would turn sets into lists and bytes into text
        return {"schema": SCHEMA, **msgspec.to_builtins(self, enc_hook=_plain)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Episode:
        """Return the episode that :meth:`to_dict` stored; fields of newer versions are ignored.

        Raises:
            ValueError: a field is missing or has another type; names its place.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"an episode record is a mapping, and not {data!r:.80}")
        try:
            return msgspec.convert(data, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"episode record {data.get('id', '?')!r:.80}: {error}") from error

    def to_json(self) -> str:
        """Return one line of JSON; floats keep all digits.

        Raises:
            ValueError: a number is NaN or infinite.
        """
        return json_line([self], self._record, self.to_dict)

    def _record(self) -> dict[str, Any]:
        """Return :meth:`to_dict` for msgspec."""
        form: dict[str, Any] = {"default": _plain, "ensure_ascii": False, "separators": (",", ":")}
        try:
            data = json.dumps(self.task.data, allow_nan=False, **form)
        except ValueError as error:
            remedy = "give None for a missing number"
            raise ValueError(f"the data of task {self.task.key} is not JSON: {error}; {remedy}") from error
        return {"schema": SCHEMA, **vars(self), "task": {**vars(self.task), "data": msgspec.Raw(data.encode())}}

    @classmethod
    def from_json(cls, text: str) -> Episode:
        """Return the episode that :meth:`to_json` wrote.

        >>> e = Episode("0", Task("math", "train", 0), "g", 1, 0, {}, "answered", success=True)
        >>> Episode.from_json(e.to_json()) == e
        True
        """
        return cls.from_dict(json.loads(text))


def json_line(
    episodes: Sequence[Episode], record: Callable[[], Mapping[str, Any]], plain: Callable[[], Mapping[str, Any]]
) -> str:
    """Return the record of episodes as one line of JSON.

    Args:
        episodes: episodes of the record.
        record: function that returns the record for msgspec.
        plain: function that returns the record as JSON-like data, for values that msgspec does not write like JSON:
            lone surrogates, and keys other than text in the arguments of a tool call.

    Raises:
        ValueError: a number is NaN or infinite.
    """
    written_alike = [_calls_are_plain(episode) for episode in episodes]
    if all(written_alike):
        with suppress(UnicodeEncodeError):  # a lone surrogate
            return msgspec.json.encode(record(), enc_hook=_plain).decode()
    return json.dumps(plain(), separators=(",", ":"))


def _calls_are_plain(episode: Episode) -> bool:
    """Return whether the arguments of tool calls are plain JSON, with strings as keys.

    Raises:
        ValueError: a number is NaN or infinite, which JSON lacks and msgspec would write as null.
    """
    numbers: list[Iterable[float | None]] = [episode.metrics.values(), episode.timings.values()]
    numbers += [step.values() for step in episode.step_rewards]
    for row in episode.rows():
        if not math.isfinite(sum(row.logprobs)):  # in one call: an episode has thousands
            numbers.append(row.logprobs)
        for turn in row.turns:
            numbers += [(turn.reward, *(getattr(turn, name) for name in CREDIT)), turn.components.values()]
    calls = [call.arguments for row in episode.rows() for message in row.messages for call in message.tool_calls]
    written = json.dumps(calls, default=_plain, allow_nan=False)
    if not all(math.isfinite(number) for number in itertools.chain.from_iterable(numbers) if number is not None):
        raise ValueError(f"episode {episode.id!r} holds a number that is NaN or infinite, which is not JSON compliant")
    return bool(json.loads(written) == calls)


def _plain(value: Any) -> Any:
    """Return a value of a subclass of a JSON type, such as ``numpy.float64``, as that type."""
    kinds: tuple[Any, ...] = (str, int, float, list, dict)
    for kind in kinds:
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return dict(value)
    raise EnvironmentContractError(
        f"an episode holds {value!r:.80}, a {type(value).__name__}; JSON has no such value; let the data of its task "
        "hold strings, numbers, lists and mappings"
    )


def question_to(episode: Episode, agent: str) -> str | None:
    """Return the first user message of an episode: the agent's if it acted in the first step, or of one that did.

    For a leader that first sees the others' answers this is the question too. None if the record lacks messages.
    """
    begins = min(turn.index for turn in episode.turns())
    first = [row for row in episode.rows() if row.turns and row.turns[0].index == begins]
    shown = next((row for row in first if base_agent(row.agent) == base_agent(agent)), first[0])
    return next((message.content for message in shown.messages if message.role == "user"), None)


def by_group(episodes: Iterable[Episode]) -> dict[str, list[Episode]]:
    """Return the episodes of each group."""
    return grouped((episode.group, episode) for episode in episodes)


def judging_environments(episodes: Iterable[Episode]) -> set[str]:
    """Return the names of the environments that judged at least one episode."""
    return {episode.task.environment for episode in episodes if episode.success is not None}


def is_tree_path(episode: Episode) -> bool:
    """Return True if an episode is a path of a turn tree."""
    return any(turn.node for turn in episode.turns())


def turns_by_step(episode: Episode) -> dict[int, dict[str, tuple[Turn, Trajectory]]]:
    """Return the turn of each agent, with its trajectory, by step, in order."""
    by_step: dict[int, dict[str, tuple[Turn, Trajectory]]] = {}
    for row in episode.rows():
        for turn in row.turns:
            by_step.setdefault(turn.index, {})[turn.agent] = (turn, row)
    return dict(sorted(by_step.items()))
