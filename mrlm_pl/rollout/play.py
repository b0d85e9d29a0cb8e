"""An unfinished episode: its seats, conversations and decisions, and the record that it becomes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mrlm_pl.engines.base import Sample, SampleRequest, Sampling
from mrlm_pl.environment import Environment, Observations, Step
from mrlm_pl.environment.prompts import Prompt, Reply
from mrlm_pl.environment.steps import TurnOrder
from mrlm_pl.episode import Episode, Message, Origin, Task, Trajectory, Turn
from mrlm_pl.errors import EngineError
from mrlm_pl.grouping import summed
from mrlm_pl.policy.chat import ChatFormat, Conversation
from mrlm_pl.rollout.cross_policy import CrossPolicy, slot_name, snapshot_name
from mrlm_pl.seeding import derive_seed

TURN_STOP, CONTEXT_STOP = "turn_limit", "context_window"
"""Stop reasons of episodes that reached a limit."""

EVERY_STEP = -1
"""Step of a script entry that applies to each step without another entry for the agent."""


@dataclass(frozen=True)
class Seat:
    """The policy that decides for an agent, and its sampling.

    Args:
        policy: name of the weights.
        chat: the policy's chat format.
        sampling: distribution that turns are sampled from.
        context_window: number of tokens that fit into the policy's context.
        cross_policy: division of turns with snapshots of the policy; None never uses one.
        vocabulary: number of tokens that the model knows; None does not check samples.
    """

    policy: str
    chat: ChatFormat
    sampling: Sampling
    context_window: int
    cross_policy: CrossPolicy | None = None
    vocabulary: int | None = None

    def decision(self, request: SampleRequest, sample: Sample, node: str = "", number: int = 0) -> Decision:
        """Return the decision from the sample of a request, with the name of its weights in records.

        Raises:
            EngineError: the sample holds a token that the model does not know.
        """
        ids = sample.token_ids
        if self.vocabulary and ids and not 0 <= min(ids) <= max(ids) < self.vocabulary:
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise EngineError(
                f"engine {sample.engine!r} gave the token id {wrong}, which is outside the vocabulary of policy "
                f"{self.policy!r} of {self.vocabulary} tokens; let it generate with that policy's model"
            )
        stale = request.policy != self.policy
        policy = snapshot_name(self.policy, sample.version) if stale else self.policy
        return Decision(sample, policy, node, number, session=request.session)


@dataclass(frozen=True)
class Decision:
    """A sampled turn.

    Args:
        sample: sampled tokens.
        policy: name of the weights that decided, for the record.
        node: state of the turn tree in which the decision was made; empty outside turn trees.
        number: index of the decision among those requested from the agent in this state.
        scripted: see :attr:`mrlm_pl.episode.Turn.scripted`.
        session: name under which the engine keeps its context for the next turn.
    """

    sample: Sample
    policy: str
    node: str = ""
    number: int = 0
    scripted: bool = False
    session: str = ""


@dataclass(frozen=True)
class EpisodeSpec:
    """An episode to be played.

    Args:
        id: id that is unique in the run.
        task: the problem instance.
        group: key of the episodes that are compared with each other.
        seed: seed of all sampling in the episode.
        iteration: iteration in which the episode is collected.
        script: decisions that are given rather than sampled, by agent and number of environment steps before them, or
            :data:`EVERY_STEP`.
        origin: place where the episode branches from another one.
    """

    id: str
    task: Task
    group: str
    seed: int
    iteration: int = -1
    script: Mapping[tuple[str, int], Decision] = field(default_factory=dict)
    origin: Origin | None = None

    def scripted(self, agent: str, step: int) -> Decision | None:
        """Return the decision that is given rather than sampled, or None."""
        return self.script.get((agent, step), self.script.get((agent, EVERY_STEP)))


class Play:
    """An unfinished episode.

    Args:
        spec: spec of the episode.
        environment: instance that plays only this episode.
        attempt: number of times that the episode was started, including this one.
        retried: numbers of decisions and tokens that were sampled in earlier attempts.

    Attributes:
        order: checker of the environment's observations and steps, set by :meth:`begin`.
    """

    order: TurnOrder

    def __init__(
        self, spec: EpisodeSpec, environment: Environment, attempt: int, retried: tuple[int, int] = (0, 0)
    ) -> None:
        self.spec, self.environment, self.attempt = spec, environment, attempt
        self.retried = retried
        self.id = spec.id
        self.conversations: dict[str, Conversation] = {}
        self.sessions: dict[str, str] = {}  # of each agent's last decision
        self.turns: dict[str, list[tuple[int, Turn]]] = {}  # of each agent that acted, with the number of the row
        self.steps = 0
        self.observed: Observations = {}
        self.actions: dict[str, Message] = {}
        self.history: list[dict[str, Message]] = []
        self.step_rewards: list[dict[str, float]] = []
        self.stop_reason, self.truncated, self.ended_early = "", False, False
        self.success: bool | None = None
        self.metrics: dict[str, float] = {}
        self.error: str | None = None
        self.generate_seconds = self.environment_seconds = self.queue_seconds = 0.0
        self.waits_for, self.waits_since = "", 0.0

    @property
    def over(self) -> bool:
        """True if the episode has ended, for any reason."""
        return bool(self.stop_reason) or self.error is not None

    @property
    def sampled(self) -> tuple[int, int]:
        """Numbers of decisions and tokens sampled for the episode, in all attempts."""
        turns = [turn for turns in self.turns.values() for _, turn in turns if not turn.scripted]
        decisions, tokens = self.retried
        return decisions + len(turns), tokens + sum(turn.stop - turn.start for turn in turns)

    @property
    def due(self) -> list[str]:
        """Agents that decide next, in the environment's order."""
        return [agent for agent in self.environment.agents if agent in self.observed]

    def length(self, agent: str) -> int:
        """Return the number of tokens in an agent's context."""
        return len(self.conversations[agent].row.token_ids)

    def limit(self, max_turns: int | Mapping[str, int], windows: Mapping[str, int]) -> str:
        """Return the stop reason if it has reached a limit, else an empty text.

        Args:
            max_turns: maximum number of steps; by environment where they differ.
            windows: number of tokens that fit into each agent's context.
        """
        if self.steps >= (max_turns if isinstance(max_turns, int) else max_turns[self.spec.task.environment]):
            return TURN_STOP
        return CONTEXT_STOP if any(self.length(agent) >= windows[agent] for agent in self.due) else ""

    def refuse_long_prompts(self, windows: Mapping[str, int]) -> None:
        """Add a refusal to each prompt of a program that is beyond the context window."""
        for agent in self.due:
            length, window, prompt = self.length(agent), windows[agent], self.observed[agent]
            if isinstance(prompt, Prompt) and length >= window:
                prompt.refusals.append(
                    f"prompt is too long: {length} tokens, and this model's maximum context length is {window}"
                )

    @property
    def program_waits(self) -> bool:
        """True if a program waits for replies: ended now, it gives no reward."""
        return any(isinstance(prompt, Prompt) for prompt in self.observed.values())

    def begin(self, observations: Observations, seats: Mapping[str, Seat]) -> None:
        """Give each agent its observations from the environment's reset."""
        self.order = TurnOrder(self.environment.name, self.environment.agents)
        self.order.record_reset(observations)
        self.observe(observations, seats)

    def observe(self, observations: Observations, seats: Mapping[str, Seat]) -> None:
        """Add each agent's observations to its conversation."""
        self.observed = observations
        for agent, messages in observations.items():
            if agent not in self.conversations:
                tools = [tool.to_chat() for tool in self.environment.tools(agent)]
                self.conversations[agent] = Conversation(seats[agent].chat, tools)
            if isinstance(messages, Prompt):
                self.conversations[agent].resume(messages, [tool.to_chat() for tool in messages.tools])
            else:
                self.conversations[agent].observe(messages)

    def request(self, agent: str, seat: Seat, *branch: int | str, session: str = "") -> SampleRequest:
        """Return the request for an agent's next decision; ``branch`` is part of the key of its seed.

        A snapshot may sample it; see :meth:`CrossPolicy.drawn`.
        """
        seed, division = self.spec.seed, seat.cross_policy
        snapshot = None if division is None else division.drawn(seed, agent, self.steps, *branch)
        sampling, prompt = seat.sampling, self.observed[agent]
        if isinstance(prompt, Prompt) and prompt.max_tokens is not None:
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, prompt.max_tokens))
        if sampling.max_context is not None:
            room = sampling.max_context - self.length(agent)
            sampling = replace(sampling, max_tokens=min(sampling.max_tokens, room))
        return SampleRequest(
            token_ids=tuple(self.conversations[agent].row.token_ids),
            policy=seat.policy if snapshot is None else slot_name(seat.policy, snapshot),
            seed=derive_seed("turn", seed, agent, self.steps, *branch),
            sampling=sampling,
            stop_ids=seat.chat.stop_ids,
            session=session,
        )

    def record(self, agent: str, decision: Decision) -> None:
        """Record the decision of an agent."""
        conversation, prompt = self.conversations[agent], self.observed[agent]
        sample, start = decision.sample, len(conversation.row.token_ids)
        if isinstance(prompt, Prompt) and prompt.stop:
            count = conversation.chat.tokens_until(sample.token_ids, prompt.stop)
            sample = sample if count is None else _truncate(sample, count)
        action = conversation.act(sample.token_ids, sample.logprobs)
        if isinstance(prompt, Prompt):
            texts = conversation.chat.token_texts(sample.token_ids) if prompt.logprobs else []
            action = Reply(
                **vars(action),
                finish_reason=sample.finish_reason,
                prompt_tokens=start,
                tokens=len(sample.token_ids),
                reasoning_tokens=conversation.chat.reasoning_tokens(sample.token_ids, action.content),
                sampled=tuple(zip(texts, sample.logprobs, strict=False)),
            )
        self.actions[agent], self.sessions[agent] = action, decision.session
        turn = Turn(
            agent=agent,
            index=self.steps,
            start=start,
            stop=len(conversation.row.token_ids),
            reward=0.0,
            components={},
            finish_reason=sample.finish_reason,
            policy=decision.policy,
            version=sample.version,
            engine=sample.engine,
            node=decision.node,
            sample=decision.number,
            spans=sample.spans,
            scripted=decision.scripted,
        )
        self.turns.setdefault(agent, []).append((conversation.row_index, turn))

    def take(self, step: Step, seats: Mapping[str, Seat]) -> None:
        """Add a step's rewards to each agent's latest turn, and give each agent its observations."""
        self.order.record_step(step)
        rewards = _floats(step.rewards)
        for agent, reward in rewards.items():
            if agent in self.turns:
                # A reward of 0 without named parts is not a component: it would be reported next to the named ones.
                named_rewards = _floats(step.components.get(agent, {})) or ({"reward": reward} if reward else {})
                row, turn = self.turns[agent][-1]
                components = summed([*turn.components.items(), *named_rewards.items()])
                self.turns[agent][-1] = row, replace(turn, reward=turn.reward + reward, components=components)
        self.metrics.update(_floats(step.metrics))
        self.step_rewards.append(rewards)
        self.history.append(self.actions)
        self.steps += 1
        self.actions = {}
        if step.done:
            self.stop_reason, self.truncated, self.success = step.stop_reason, step.truncated, step.success
        else:
            self.observe(step.observations, seats)

    def end_early(self, reason: str, truncated: bool = True) -> None:
        """End the episode before its environment does."""
        self.stop_reason, self.truncated, self.ended_early = reason, truncated, True

    def fork(self, id: str, environment: Environment) -> Play:
        """Return a copy of the episode up to here, with its own environment in the same state."""
        child = copy.copy(self)
        child.id, child.environment, child.order = id, environment, copy.copy(self.order)
        child.conversations = {agent: conversation.fork() for agent, conversation in self.conversations.items()}
        child.turns = {agent: [*turns] for agent, turns in self.turns.items()}
        child.history, child.step_rewards = [*self.history], [*self.step_rewards]
        child.metrics, child.actions, child.sessions = dict(self.metrics), {}, dict(self.sessions)
        return child

    def episode(self, seats: Mapping[str, Seat]) -> Episode:
        """Return the record of the episode."""
        return Episode(
            id=self.id,
            task=self.spec.task,
            group=self.spec.group,
            seed=self.spec.seed,
            iteration=self.spec.iteration,
            trajectories={
                agent: self._rows(agent, seats[agent]) for agent in self.environment.agents if agent in self.turns
            },
            stop_reason=self.stop_reason if self.error is None else "error",
            truncated=self.truncated,
            success=self.success,
            metrics=dict(self.metrics),
            step_rewards=tuple(self.step_rewards),
            agents=tuple(self.environment.agents),
            error=self.error,
            attempts=self.attempt,
            retried_decisions=self.retried[0],
            retried_tokens=self.retried[1],
            row_restarts=sum(len(conversation.rows) - 1 for conversation in self.conversations.values()),
            timings={
                "generate": self.generate_seconds,
                "environment": self.environment_seconds,
                "queue": self.queue_seconds,
            },
            origin=self.spec.origin,
        )

    def _rows(self, agent: str, seat: Seat) -> tuple[Trajectory, ...]:
        return tuple(
            Trajectory(
                agent=agent,
                policy=seat.policy,
                token_ids=tuple(row.token_ids),
                action_mask=tuple(row.action_mask),
                logprobs=tuple(row.logprobs),
                turns=tuple(turn for row_number, turn in self.turns[agent] if row_number == number),
                messages=tuple(row.messages),
            )
            for number, row in enumerate(self.conversations[agent].rows)
        )


def _floats(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return numbers, which may be booleans or another library's, as floats."""
    return {name: float(number) for name, number in numbers.items()}


def _truncate(sample: Sample, count: int) -> Sample:
    """Return the first tokens of a sample, which a text in them has ended."""
    spans, tokens_left = [], count
    for span in sample.spans:
        if tokens_left > 0:
            spans.append(replace(span, tokens=min(tokens_left, span.tokens)))
        tokens_left -= span.tokens
    return replace(
        sample,
        token_ids=sample.token_ids[:count],
        logprobs=sample.logprobs[:count],
        finish_reason="stop",
        version=min((span.version for span in spans), default=sample.version),
        spans=tuple(spans) if len(spans) > 1 else (),
    )
