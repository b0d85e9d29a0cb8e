"""Checks of the rewards and observations of an environment, for ``mrlm check-env --level semantic``.

A contract check asks whether an environment works; these ask whether its reward is right: the right answer
earns the most, nothing else earns it, and no agent can see it.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from statistics import fmean
from typing import TypeAlias

from mrlm_pl.environment import probes
from mrlm_pl.environment.contract import Environment
from mrlm_pl.environment.tasks import SPLITS, TaskSource
from mrlm_pl.environment.trial import SPAM, Play, Replies, first_observations, play_copy
from mrlm_pl.episode import Task
from mrlm_pl.errors import EnvironmentContractError
from mrlm_pl.grouping import grouped, mapped

TeamReplies: TypeAlias = Mapping[str, Sequence[str]]
TOLERANCE = 1e-6
CHANCE = 0.1
"""Fraction of the way from floor to maximum that worthless replies may earn on average: a guess may be right."""

REPLAY_SECONDS = 900.0
COMPARED_TASKS, COMPARED_ROWS = 40, 20_000
"""Tasks of each split whose first observations are compared, and rows of data whose identities are."""


@dataclass(frozen=True)
class Finding:
    """The result of a check that found no fault.

    Args:
        message: finding in one line.
        applies: False where the environment has nothing to check.
        measures: measured numbers for the report.
    """

    message: str
    applies: bool = True
    measures: Mapping[str, float] = field(default_factory=dict)


class SemanticChecks:
    """The checks of one environment; each returns a :class:`Finding` or raises the fault.

    Args:
        environment: environment to check; it is copied, not used.
        tasks: number of tasks of the training split that are played.
        max_turns: limit of an episode's length.
        other_process: also replay in another process, with another order of sets.
    """

    def __init__(self, environment: Environment, tasks: int, max_turns: int, *, other_process: bool = True) -> None:
        self.environment, self.max_turns, self.other_process = environment, max_turns, other_process
        self.tasks = list(islice(environment.tasks("train"), tasks))
        self._golds: dict[str, TeamReplies | None] = {}

    def checks(self) -> dict[str, Callable[[], Finding]]:
        """Return all checks by their ids, which reports keep."""
        methods = (self.oracle, self.floor, self.injection, self.canary, self.leakage, self.replay)
        return {check.__name__: check for check in methods}

    def oracle(self) -> Finding:
        """Check that the known best replies earn the maximum, immediately and not after wrong ones."""
        best: list[float] = []
        declared = 0
        for task in self.tasks:
            gold, bounds = self._gold(task), self.environment.bounds(task)
            if gold is None:
                continue
            played = self._play(task, gold)
            if played.steps[-1].success is False:
                raise EnvironmentContractError(
                    f"on {task.key} the gold replies earn {played.reward:g} and do not succeed"
                )
            if bounds is not None and abs(played.reward - bounds[1]) > TOLERANCE:
                raise EnvironmentContractError(
                    f"on {task.key} the gold replies earn {played.reward:g}, summed over agents, and the maximum is "
                    f"{bounds[1]:g}"
                )
            declared += bounds is not None
            maximum = played.reward if bounds is None else bounds[1]
            for name, replies in self._wrong_then_gold(task, gold):
                reward = self._play(task, replies).reward
                if reward > maximum + TOLERANCE:
                    raise EnvironmentContractError(
                        f"on {task.key} {name} earns {reward:g}, the gold replies alone {played.reward:g}"
                    )
            best.append(played.reward)
        if not best:
            return Finding("no gold replies are known; define `gold(self, task)`", applies=False)
        maximum_note = "the declared maximum" if declared else "`bounds` declares no maximum"
        return Finding(
            f"gold replies earn {span(best)} on {len(best)} tasks: {maximum_note}",
            measures={"tasks": len(best), "gold": fmean(best)},
        )

    def floor(self) -> Finding:
        """Check that empty, degenerate, copied and random replies earn no more than the floor, but for chance."""
        bounds: dict[str, tuple[float, float]] = {}
        for task in self.tasks:
            declared, gold = self.environment.bounds(task), self._gold(task)
            if declared is not None:
                bounds[task.key] = declared
            elif gold is not None:
                bounds[task.key] = 0.0, self._play(task, gold).reward
        if not bounds:
            return Finding(
                "not checked without `bounds(self, task)` or gold replies, which tell the floor and the maximum",
                applies=False,
            )
        tasks = [task for task in self.tasks if task.key in bounds]
        opponents = all(len({*(self.environment.bounds(task) or (0.0, 1.0))}) == 1 for task in tasks)
        floor, maximum = (fmean([bounds[task.key][side] for task in tasks]) for side in (0, 1))
        rewards = grouped(
            (name, self._play(task, replies).reward)
            for task in tasks
            for name, replies in probes.worthless_replies(task).items()
        )
        means = {name: fmean(values) for name, values in rewards.items()}
        name = max(means, key=lambda name: means[name])
        margin = maximum - means[name]
        if means[name] > floor + CHANCE * (maximum - floor) + TOLERANCE or (margin < TOLERANCE and not opponents):
            raise EnvironmentContractError(
                f"{name} replies earn {means[name]:g} on average, the floor is {floor:g} and the maximum {maximum:g}"
            )
        reason = "; a game of opponents, whose rewards sum to the same" if opponents else ""
        return Finding(
            f"{name} replies earn the most of worthless ones, {means[name]:g}, {margin:g} below the maximum{reason}",
            measures={"floor": floor, "maximum": maximum, "margin": margin, **means},
        )

    def injection(self) -> Finding:
        """Check that a reply with a forged result earns no more than the same reply with a harmless text."""
        compared = 0
        for task in self.tasks:
            for agent, name, attack, harmless in self._attacks(task):
                forged, plain = (self._play(task, replies).returns.get(agent, 0.0) for replies in (attack, harmless))
                compared += 1
                if forged > plain + TOLERANCE:
                    raise EnvironmentContractError(
                        f"on {task.key} a reply of {agent} with {name} earns {forged:g}, without it {plain:g}"
                    )
        return Finding(f"{compared} injections earn no more than harmless texts", measures={"compared": compared})

    def canary(self) -> Finding:
        """Check that no observation or tool result shows a secret field of a task's data."""
        marked_fields: set[str] = set()
        unmarked_fields: set[str] = set()
        for task in self.tasks:
            for name in self.environment.secrets:
                if name not in task.data or task.data[name] in (None, "", [], {}):
                    continue
                marked_task = replace(task, data={**task.data, name: mapped(task.data[name], probes.mark)})
                if marked_task == task:  # a boolean has no form that occurs nowhere else
                    unmarked_fields.add(name)
                    continue
                try:
                    texts = [self._play(marked_task, replies).shown for replies in self._searching_replies()]
                except EnvironmentContractError:
                    raise
                except Exception:  # an environment may reject a value of another form
                    unmarked_fields.add(name)
                    continue
                marked_fields.add(name)
                if any(probes.MARK in text or str(probes.NUMBER) in text for text in texts):
                    raise EnvironmentContractError(
                        f"{task.key} shows its field {name!r} to an agent; take it out of the observations, or out of "
                        "`secrets` if agents may know it"
                    )
        unmarked_fields -= marked_fields
        unmarked_note = f"; {', '.join(sorted(unmarked_fields))} cannot be marked" if unmarked_fields else ""
        if not marked_fields:
            return Finding(
                f"tasks have no secret field of {', '.join(self.environment.secrets)}{unmarked_note}", applies=False
            )
        return Finding(
            f"a mark instead of {', '.join(sorted(marked_fields))} is never shown to an agent{unmarked_note}",
            measures={"fields": len(marked_fields)},
        )

    def leakage(self) -> Finding:
        """Check that no problem, and no text that only spacing, case or punctuation tell apart, is in two splits."""
        owners: dict[str, tuple[str, str]] = {}
        compared, compare_texts = 0, True
        for split in SPLITS:
            source = self.environment.tasks(split)
            problems = self._identified_tasks(source, 0, COMPARED_TASKS)
            text_tasks = [task for task, _ in problems] if compare_texts else []
            # The default identity reads the data for each task.
            if source.size is not None and any(name for _, name in problems):
                problems += self._identified_tasks(source, COMPARED_TASKS, COMPARED_ROWS)
            first_texts = [probes.normalized(self._first_text(task)) for task in text_tasks]
            if 4 * len(set(first_texts)) <= len(first_texts):  # they begin alike and differ later
                compare_texts = False
            identities = [("problem", task, name) for task, name in problems if name]
            if compare_texts:
                identities += [("text", task, text) for task, text in zip(text_tasks, first_texts, strict=True) if text]
            compared += len({task.index for _, task, _ in identities})
            for kind, task, identity in identities:
                other, key = owners.setdefault(f"{kind} {identity}", (split, task.key))
                if other != split:
                    raise EnvironmentContractError(f"{task.key} poses the same {kind} as {key}: {identity[:200]}")
        if not compared:
            return Finding("tasks have no identity, or begin alike; define `identity(self, task)`", applies=False)
        return Finding(f"{compared} tasks, none in two splits", measures={"compared": compared})

    def replay(self) -> Finding:
        """Check that equal actions give equal bytes, even in another process."""
        plays: list[tuple[Task, TeamReplies | str]] = []
        for task in self.tasks:
            gold = self._gold(task)
            plays += [(task, SPAM), *([(task, gold)] if gold is not None else [])]
        first_plays = [self._play(*arguments).as_json() for arguments in plays]
        for (task, replies), before in zip(plays, first_plays, strict=True):
            if self._play(task, replies).as_json() != before:
                raise EnvironmentContractError(f"{task.key} differs when the same replies are played again")
        measures = {"plays": len(plays)}
        if not self.other_process:
            return Finding(f"{len(plays)} episodes equal in this process", measures=measures)
        try:
            request = pickle.dumps((self.environment, plays, self.max_turns))
        except Exception as error:  # attributes may raise anything
            return Finding(f"{len(plays)} episodes equal; not played in another process: {error}", measures=measures)
        code = f"from {__name__} import answer_replay; answer_replay()"
        order = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
        variables = {**os.environ, "PYTHONHASHSEED": order, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            [sys.executable, "-c", code],
            input=request,
            env=variables,
            capture_output=True,
            check=False,
            timeout=REPLAY_SECONDS,
        )
        if done.returncode:
            error_text = done.stderr.decode(errors="replace")[-300:]
            raise EnvironmentContractError(f"another process cannot replay the episodes: {error_text}")
        replayed = json.loads(done.stdout.splitlines()[-1])
        if isinstance(replayed, str):
            return Finding(f"{len(plays)} episodes equal; not played in another process: {replayed}", measures=measures)
        for (task, _), before, after in zip(plays, first_plays, replayed, strict=True):
            if before != after:
                raise EnvironmentContractError(
                    f"{task.key} differs in another process; sort sets, and draw from the task's seed"
                )
        return Finding(f"{len(plays)} episodes equal, here and in another process", measures=measures)

    def _identified_tasks(self, source: TaskSource, start: int, stop: int) -> list[tuple[Task, str]]:
        """Return tasks that have an identity, with it."""
        tasks = islice(source, start, stop)
        return [(task, identity) for task in tasks if (identity := self.environment.identity(task)) is not None]

    def _first_text(self, task: Task) -> str:
        observed = first_observations(self.environment, task)
        return "\n".join(f"{agent}: {message.content}" for agent, messages in observed.items() for message in messages)

    def _play(self, task: Task, replies: Replies) -> Play:
        return play_copy(self.environment, task, replies, max_turns=self.max_turns, must_end=False)

    def _gold(self, task: Task) -> TeamReplies | None:
        if task.key not in self._golds:
            self._golds[task.key] = self.environment.gold(task)
        return self._golds[task.key]

    def _wrong_replies(self, task: Task) -> Iterator[tuple[str, dict[str, Sequence[str]]]]:
        """Yield wrong replies of all agents: a refusal, and the right answer to another task."""
        agents = self.environment.agents
        yield "a refusal", dict.fromkeys(agents, (SPAM,))
        gold = self._gold(task)
        golds = (self._gold(other) for other in self.tasks)
        wrong = next((other for other in golds if other is not None and gold is not None and other != gold), None)
        if wrong is not None:
            yield "the answer to another task", {agent: wrong.get(agent) or [""] for agent in agents}

    def _wrong_then_gold(self, task: Task, gold: TeamReplies) -> Iterator[tuple[str, TeamReplies]]:
        """Yield wrong replies, and wrong replies of all agents or of one before the gold replies, with their names."""
        agents = self.environment.agents
        wrongs: list[tuple[str, TeamReplies]] = list(self._wrong_replies(task))
        constant: TeamReplies = {
            agent: [probes.replace_bodies(reply, "return True") for reply in gold.get(agent, ("",))] for agent in agents
        }
        if any(constant[agent] != list(gold.get(agent, ("",))) for agent in agents):
            wrongs.append(("a program that returns True", constant))
        for name, wrong in wrongs:
            late = {agent: (wrong[agent][0], *gold.get(agent, wrong[agent])) for agent in agents}
            yield name, wrong
            yield f"{name}, then the gold replies,", late
            if len(agents) > 1:
                yield f"{name} by {agents[-1]}, then the gold replies,", {**late, **gold, agents[-1]: late[agents[-1]]}

    def _attacks(self, task: Task) -> Iterator[tuple[str, str, TeamReplies, TeamReplies]]:
        """Yield an agent, a name, replies with an attack by this agent, and the same with a harmless text."""
        for _, base in self._wrong_replies(task):
            for agent in self.environment.agents:
                for text in probes.INJECTIONS:
                    texts = (text, re.sub(r"[A-Za-z_]{2,}", lambda word: word[0][::-1], text))
                    forged, plain = (
                        {**base, agent: [f"{reply}\n{appended}" for reply in base[agent]]} for appended in texts
                    )
                    yield agent, repr(text), forged, plain
        gold = self._gold(task) or {}
        for agent in self.environment.agents:
            for name, bodies in probes.PROGRAMS.items():
                attack, harmless = (
                    [probes.replace_bodies(reply, body) for reply in gold.get(agent, ())] for body in bodies
                )
                if attack != list(gold.get(agent, ())):
                    yield agent, name, {**gold, agent: attack}, {**gold, agent: harmless}

    def _searching_replies(self) -> list[Replies]:
        """Return replies that look for answers: a refusal, whose feedback may tell them, and calls of each tool."""
        agents = self.environment.agents
        calls = {agent: [probes.search_call(tool) for tool in self.environment.tools(agent)] for agent in agents}
        return [SPAM, *([{agent: calls[agent] or [SPAM] for agent in agents}] if any(calls.values()) else [])]


def answer_replay() -> None:
    """Play the episodes that standard input holds, pickled; print them, or why they cannot be read, as JSON."""
    try:
        environment, plays, max_turns = pickle.load(sys.stdin.buffer)
    except (ImportError, AttributeError) as error:  # its class is in a script, or in a file outside the path
        print(json.dumps(str(error)))
        return
    print(
        json.dumps(
            [play_copy(environment, *arguments, max_turns=max_turns, must_end=False).as_json() for arguments in plays]
        )
    )


def span(values: Sequence[float]) -> str:
    """Return the lowest and the highest value as text; one where they are equal."""
    low, high = min(values), max(values)
    return f"{low:g}" if high - low < TOLERANCE else f"{low:g} to {high:g}"
