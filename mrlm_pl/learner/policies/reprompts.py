"""The conversations in which a teacher reads a student's answer: the student's own, with more information."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from mrlm_pl.episode import Episode, Message, Trajectory
from mrlm_pl.errors import ConfigurationError


@dataclass(frozen=True)
class Attempt:
    """A student's trajectory and everything known after its group was played.

    Attributes:
        episode: episode of the trajectory.
        trajectory: conversation of the student.
        siblings: other episodes of the same task, without failed ones and those that branch from another episode.
    """

    episode: Episode
    trajectory: Trajectory
    siblings: Sequence[Episode]

    @property
    def opening(self) -> tuple[Message, ...]:
        """Messages before the first turn of the trajectory."""
        replies = self.trajectory.replies
        return self.trajectory.messages[: replies[0]] if replies else ()

    def reprompted(self, hint: str | None) -> tuple[Message, ...] | None:
        """Return the opening with a hint at the end of its last message; None without a hint."""
        if not hint or not self.opening:
            return None
        *before, last = self.opening
        return (*before, replace(last, content=f"{last.content}\n\n{hint}"))


Reprompt = Callable[[Attempt], "Sequence[Message] | None"]
"""Returns the teacher's messages before the student's first turn; None leaves the trajectory without this teacher."""


def last_reply(episode: Episode, agent: str) -> str | None:
    """Return the text of an agent's last turn in an episode; None if it never acted."""
    replies = [m.content for row in episode.trajectories.get(agent, ()) for m in row.messages if m.role == "assistant"]
    return replies[-1] if replies else None


def sibling(attempt: Attempt) -> Sequence[Message] | None:
    """Return the reprompt with the answer of the first successful sibling (SDPO, arXiv 2601.20802)."""
    agent = attempt.trajectory.agent
    reply = next((last_reply(episode, agent) for episode in attempt.siblings if episode.success), None)
    return attempt.reprompted(reply and f"A correct answer: {reply}")


def demonstration(attempt: Attempt) -> Sequence[Message] | None:
    """Return the reprompt with the task's own ``solution``, ``answer`` or ``reference`` (SDFT, arXiv 2601.19897).

    Raises:
        ConfigurationError: the task has none of them.
    """
    data = attempt.episode.task.data
    for name in ("solution", "answer", "reference"):
        if data.get(name) is not None:
            return attempt.reprompted(f"A correct answer: {data[name]}")
    raise ConfigurationError(
        f"reprompt demonstration: the task {attempt.episode.task.key!r} has the fields {sorted(data)}, and no "
        "solution, answer or reference; give a function of yours by its import path"
    )


def feedback(attempt: Attempt) -> Sequence[Message] | None:
    """Return the reprompt with all environment messages after the student's first turn; None if there are none."""
    rest = attempt.trajectory.messages[len(attempt.opening) :]
    observations = "\n".join(message.content for message in rest if message.role != "assistant")
    return attempt.reprompted(observations and f"Feedback on an earlier attempt: {observations}")


def team(attempt: Attempt) -> Sequence[Message] | None:
    """Return the reprompt with the last answers of the other agents of the episode."""
    others = [agent for agent in attempt.episode.trajectories if agent != attempt.trajectory.agent]
    return attempt.reprompted("\n".join(f"{agent}: {last_reply(attempt.episode, agent)}" for agent in others))


def majority(attempt: Attempt) -> Sequence[Message] | None:
    """Return the reprompt with the most frequent last answer of the other agents in all episodes of the task."""
    votes = Counter(
        reply
        for episode in (attempt.episode, *attempt.siblings)
        for agent in episode.trajectories
        if agent != attempt.trajectory.agent and (reply := last_reply(episode, agent)) is not None
    )
    return attempt.reprompted(f"The team's answer: {votes.most_common(1)[0][0]}" if votes else None)


REPROMPTS: dict[str, Reprompt] = {
    reprompt.__name__: reprompt for reprompt in (sibling, demonstration, feedback, team, majority)
}
