"""The calls of one episode: they wait here until the player has sampled their replies."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mrlm_pl.concurrency.calls import wait_awake
from mrlm_pl.concurrency.event_loop import END_SECONDS, mark_read, shared_fault
from mrlm_pl.environment.contract import ToolSchema
from mrlm_pl.environment.prompts import Prompt, Reply
from mrlm_pl.environment.tools import requested_calls, with_written_calls
from mrlm_pl.episode import Message, ToolCall, reasoning_text
from mrlm_pl.errors import ProgramError
from mrlm_pl.serving.gateway.protocol import Call, ProtocolError, Served, served_form

COUNTS = ("calls", "refused", "disconnected", "changed_tools", "retries", "edited_histories", "new_conversations")
"""Counters of an episode: accepted calls, rejected ones, replies that a program did not wait for, and prompts by what
they are where they do not continue a trajectory: other tools, an earlier prompt again, another past, no past.
"""

MOST_REWARD = 1e30
"""Largest number that may be posted; the sum of many must stay finite."""

LEFT, TOO_LONG = "episode_left", "context_length_exceeded"
"""Codes of the refusals of calls that wait when their episode is left: all of them, and prompts beyond the context."""


@dataclass(frozen=True)
class Limits:
    """Bounds of an episode.

    Args:
        calls: maximum number of calls; a call for several replies counts once per reply.
        tokens: maximum number of sampled tokens, after which calls are rejected; None has no bound.
        lease_seconds: longest time without a call of a running program; then the episode fails.
    """

    calls: int = 64
    tokens: int | None = None
    lease_seconds: float = 60.0


@dataclass
class _Past:
    """A place in an agent's conversations, as a tree of their messages.

    Args:
        next: messages that came next, the newest last, and the places after them.
        replied: tools of the prompts whose reply is the message before.
    """

    next: list[tuple[Message, _Past]] = field(default_factory=list)
    replied: list[tuple[ToolSchema, ...]] = field(default_factory=list)

    def after(self, message: Message) -> _Past | None:
        """Return the place after a message, None if it never came next."""
        return next((place for told, place in self.next if told == message), None)

    def add(self, messages: Sequence[Message], tools: tuple[ToolSchema, ...]) -> None:
        """Add a conversation that ends with a reply."""
        place = self
        for message in messages:
            after = place.after(message) or _Past()
            place.next = [item for item in place.next if item[1] is not after] + [(message, after)]
            place = after
        place.replied.append(tools)


class Session:
    """An episode of a program. All methods but the constructor run on the gateway's event loop.

    Args:
        agents: agents that calls can be made as.
        limits: see :class:`Limits`.
        row: row of the data.
        ignore: parameters of calls that are accepted without an effect.

    Attributes:
        id: secret id, part of the key.
        counts: see :data:`COUNTS`.
        rewards: rewards by agent and component since they were last taken.
        posted: sum of the posted rewards by agent.
        program: future of the program's output; set when it starts.
        rewarded: whether a reward has been posted.
        refusal: reason of the last refusal; empty if none.
    """

    def __init__(
        self, agents: tuple[str, ...], limits: Limits, row: Mapping[str, Any], ignore: tuple[str, ...]
    ) -> None:
        self.id = secrets.token_hex(8)
        self.agents, self.limits, self.row, self.ignore = agents, limits, row, ignore
        self.counts: Counter[str] = Counter()
        self.rewards: dict[str, dict[str, float]] = {}
        self.posted: defaultdict[str, float] = defaultdict(float)
        self.program: asyncio.Future[Any]
        self.rewarded, self.refusal = False, ""
        self.acted: set[str] = set()
        self._queues: dict[str, deque[tuple[Call, asyncio.Future[list[Served]]]]] = {agent: deque() for agent in agents}
        self._past = {agent: _Past() for agent in agents}
        self._sampled: defaultdict[str, dict[str, Message]] = defaultdict(dict)
        self._calls: dict[str, ToolCall] = {}
        self._arrived = asyncio.Event()
        self._tokens = self._replies = 0
        self._ended = False

    async def ask(self, agent: str, call: Call) -> list[Served]:
        """Wait for the replies to a call, in the form in which they are served.

        Raises:
            ProtocolError: the episode has ended, or its budget is used up.
        """
        limits, used = self.limits, self.counts["calls"]
        if self._ended:
            raise ended()
        if used + call.count > limits.calls or (limits.tokens is not None and self._tokens >= limits.tokens):
            bound = "" if limits.tokens is None else f" of {limits.tokens}"
            text = f"the episode has used {used} of {limits.calls} calls and {self._tokens} tokens{bound}"
            # Not 429, which clients repeat.
            raise ProtocolError(403, "budget_exhausted", f"{text}; end the program or raise the bound")
        self.counts["calls"] += call.count
        call.prompt = self._restore(agent, call.prompt)
        served: asyncio.Future[list[Served]] = asyncio.get_running_loop().create_future()
        self._queues[agent].append((call, served))
        self._arrived.set()
        return await served

    async def next(self) -> dict[str, Prompt]:
        """Wait for calls and return the first one of each agent that has one; empty when the program has ended.

        Raises:
            ProgramError: the program failed, or made no call within its lease.
        """
        arrived = asyncio.ensure_future(self._arrived.wait())
        try:
            await wait_awake((arrived, self.program), self.limits.lease_seconds)
        finally:
            arrived.cancel()
        if self.program.done():
            self.program.result()  # raises its error
            return {}
        if not self._arrived.is_set():
            raise ProgramError(
                f"the program made no call within {self.limits.lease_seconds:g} s and has not ended; "
                f"mend it, or raise `lease_seconds`{shared_fault()}"
            )
        return {agent: queue[0][0].prompt for agent, queue in self._queues.items() if queue}

    def answer(self, actions: Mapping[str, Message]) -> None:
        """Give the first call of each agent a reply."""
        for agent, action in actions.items():
            reply = action if isinstance(action, Reply) else Reply(**vars(action))
            call, served = self._queues[agent][0]
            call.replies.append(reply)
            self.acted.add(agent)
            self._tokens += reply.tokens
            self._past[agent].add((*call.prompt.messages, reply.message), call.prompt.tools)
            if len(call.replies) == call.count:
                self._queues[agent].popleft()
                replies = [self._serve(agent, reply, call.prompt) for reply in call.replies]
                if not served.done():
                    served.set_result(replies)
        if not any(self._queues.values()):
            self._arrived.clear()

    def reward(self, values: Mapping[str, Any]) -> None:
        """Add rewards of agents: numbers, or numbers by component.

        Raises:
            ProtocolError: an agent does not exist or has made no call, or a value is not a number or beyond
                :data:`MOST_REWARD`.
        """
        if self._ended:
            raise ended()
        by_agent = {agent: reward_parts(value) for agent, value in values.items()}
        for agent, components in by_agent.items():
            if components is None:
                text = (
                    f"the reward of {agent!r} is {values[agent]!r:.60}; give a finite number, or numbers by component"
                )
                raise ProtocolError(400, "invalid_reward", text, agent)
            if agent not in self.agents or (agent not in self.acted and any(components.values())):
                actors = ", ".join(sorted(self.acted)) or "none"
                text = f"agent {agent!r} has made no call; reward those that have: {actors}"
                raise ProtocolError(409, "unknown_agent", text, agent)
        self.rewarded = self.rewarded or any(value != {} for value in values.values())
        for agent in filter(self.acted.__contains__, by_agent):
            sums = self.rewards.setdefault(agent, {})
            for name, value in (by_agent[agent] or {}).items():
                sums[name] = sums.get(name, 0.0) + value
                self.posted[agent] += value

    async def end(self) -> None:
        """Reject all waiting and later calls, and stop the program."""
        self._ended = True
        for queue in self._queues.values():
            for call, served in queue:
                if not served.done():
                    text = (
                        "the run has left the episode before its end: it is over, the episode has reached `max_turns`, "
                        "or another prompt is longer than the context window of its policy; end the program"
                    )
                    refusal = ProtocolError(410, LEFT, text)
                    for reason in call.prompt.refusals:
                        refusal = ProtocolError(400, TOO_LONG, f"{reason}; send a shorter conversation")
                    served.set_exception(refusal)
                    mark_read(served)  # the program may be gone
            queue.clear()
        if hasattr(self, "program"):  # it has none where its start was cancelled
            self.program.add_done_callback(mark_read)
            self.program.cancel()
            await asyncio.wait((self.program,), timeout=END_SECONDS)

    def _restore(self, agent: str, prompt: Prompt) -> Prompt:
        """Return a prompt in which replies and calls that were served are as they were sampled; count its kind."""
        past: _Past | None = self._past[agent]
        messages, extended, begun = list[Message](), list[bool](), bool(self._past[agent].next)
        for message in prompt.messages:
            messages.append(self._as_sampled(agent, message, [told for told, _ in past.next] if past else ()))
            past = past.after(messages[-1]) if past else None
            extended += [tools == prompt.tools for tools in past.replied] if past else []
        if not any(extended):
            if extended:
                self.counts["changed_tools"] += 1
            elif past and any(reply.replied for _, reply in past.next):
                self.counts["retries"] += 1
            elif begun:
                replied = any(message.role == "assistant" for message in messages)
                self.counts["edited_histories" if replied else "new_conversations"] += 1
        return replace(prompt, messages=tuple(messages))

    def _as_sampled(self, agent: str, message: Message, told: Sequence[Message]) -> Message:
        """Return a message as it was sampled, of replies that were served alike the one that continues a trajectory.

        An agent's own reply has its reasoning, even if the program does not send it; another's only if it does.

        Args:
            agent: agent of the prompt.
            message: message of the prompt.
            told: messages that follow the messages before it in the agent's trajectories.
        """
        if message.role == "assistant":
            said = reasoning_text(message.content), message.final_text, message.tool_calls
            alike = self._sampled[_served_key(agent, *said)] or self._sampled[_served_key("", *said)]
            sent = with_written_calls(message)  # an example in the prompt stays as it is in a trajectory
            continued = [reply.content for reply in told if reply.content in alike or reply == sent]
            return alike.get([sent.content, *alike, *continued][-1], sent)  # by content, newest last
        if message.role == "tool" and (call := self._calls.get(message.tool_call_id or "")) is not None:
            return replace(message, tool_call_id=call.id, name=call.name)
        return message

    def _serve(self, agent: str, reply: Reply, prompt: Prompt) -> Served:
        self._replies += 1
        served = served_form(reply, prompt, self._replies)
        reasoning, text, calls, _ = served
        for sent in {reasoning, ""}:  # many programs send the text and the calls alone
            own = reply.message if sent else replace(reply.message, content=reply.final_text)
            self._sampled[_served_key(agent, sent, text, calls)][reply.content] = reply.message
            self._sampled[_served_key("", sent, text, calls)][own.content] = own
        for call, sampled_call in zip(calls, requested_calls(reply.message), strict=False):
            if isinstance(sampled_call, ToolCall):
                self._calls[call.id] = sampled_call
        return served


def reward_parts(value: Any) -> dict[str, float] | None:
    """Return a reward as numbers by component; None if it is neither a finite number nor a mapping to such.

    >>> reward_parts(1), reward_parts(0), reward_parts({"style": 0.5}), reward_parts("1")
    ({'reward': 1.0}, {}, {'style': 0.5}, None)
    """
    components = value if isinstance(value, Mapping) else {"reward": value} if value != 0 else {}
    valid = all(isinstance(number, (int, float)) and abs(number) <= MOST_REWARD for number in components.values())
    return {str(name): float(number) for name, number in components.items()} if valid else None


def ended() -> ProtocolError:
    """Return the refusal of a call after the end of its episode."""
    return ProtocolError(410, "episode_ended", "the episode of this key has ended; end the program")


def _served_key(agent: str, reasoning: str, text: str, calls: tuple[ToolCall, ...]) -> str:
    """Return a key by which a served reply is recognized: the arguments of its calls count as JSON values."""
    found = [agent, reasoning, text, [[call.id, call.name, call.arguments] for call in calls]]
    return json.dumps(found, sort_keys=True, default=dict)
