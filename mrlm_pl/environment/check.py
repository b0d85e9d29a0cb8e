"""Checks of an environment, for ``mrlm check-env``: its contract here, its rewards in :mod:`~.semantics`.

Every check plays real episodes on copies of the environment. They are torch-free.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Literal, get_args

from mrlm_pl.concurrency.calls import DeadlineError
from mrlm_pl.environment import Task
from mrlm_pl.environment.contract import Environment
from mrlm_pl.environment.schemas import schema_fault
from mrlm_pl.environment.semantics import Finding, SemanticChecks, span
from mrlm_pl.environment.tasks import SPLITS, DatasetTasks
from mrlm_pl.environment.trial import (
    SPAM,
    Play,
    Replies,
    as_plain,
    call_with_deadline,
    close,
    first_observations,
    new_copy,
    play,
    play_copy,
)
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, DataError, EnvironmentContractError, MRLMError, source_line_of_error
from mrlm_pl.settings import check_instance, one_of

HOSTILE_REPLIES = (
    "",
    " \n\t ",
    "\u0000\u0007\u202e\ud83d\ude00" + "é" * 20,
    "<tool_call>{not json</tool_call>",
    '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>',
    "9" * 100_000,
    "a b " * 250_000,
    "\\boxed{" * 2_000,
)
"""Replies that no environment may crash on: empty, control characters, broken tool calls, a megabyte, deep nesting."""

Level = Literal["contract", "semantic"]

FEW_PROBLEMS = 10
"""A split with fewer different problems scores little more than these."""

MOST_DRAWN = 64
"""Tasks of a split that are drawn in search of :data:`FEW_PROBLEMS` different problems."""


@dataclass(frozen=True)
class Check:
    """Result of one check.

    Args:
        name: id of the check, which stays the same in later versions.
        passed: whether the check found no fault.
        message: finding of the check.
        applies: False where the environment has nothing to check.
        measures: measured numbers by name.
    """

    name: str
    passed: bool
    message: str
    applies: bool = True
    measures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckReport:
    """Results of all checks of an environment."""

    environment: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """True if every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def summary(self) -> str:
        """The number of checks that passed and, where there are any, of those that do not apply."""
        applied = [check for check in self.checks if check.applies]
        inapplicable = len(self.checks) - len(applied)
        passed = f"{sum(check.passed for check in applied)} of {len(applied)} checks passed"
        return passed + (f", {inapplicable} {'does' if inapplicable == 1 else 'do'} not apply" if inapplicable else "")

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON-like data."""
        return {
            "environment": self.environment,
            "passed": self.passed,
            "checks": {check.name: {k: v for k, v in asdict(check).items() if k != "name"} for check in self.checks},
        }

    def raise_on_failure(self) -> None:
        """Raise on the first check that did not hold.

        Raises:
            EnvironmentContractError: with the check's name and message.
        """
        for check in self.checks:
            if not check.passed:
                raise EnvironmentContractError(f"environment {self.environment!r}, {check.name}: {check.message}")


class _Checker:
    def __init__(self, environment: Environment, tasks_per_split: int, max_turns: int) -> None:
        self.environment, self.count, self.max_turns = environment, tasks_per_split, max_turns

    def tasks(self, split: str) -> list[Task]:
        return list(islice(self.environment.tasks(split), self.count))

    def play(self, task: Task, replies: Replies, environment: Environment | None = None) -> Play:
        """Play one episode, by default on a new copy."""
        if environment is None:
            return play_copy(self.environment, task, replies, max_turns=self.max_turns)
        return play(environment, task, replies, max_turns=self.max_turns)

    # Each check returns its finding, or raises the fault.

    def splits(self) -> Finding:
        """Check that every split has tasks, and none is posed in two of them; measure each split's problems."""
        owners: dict[str, str] = {}
        for split in SPLITS:
            for number, task in enumerate(islice(self.environment.tasks(split), MOST_DRAWN)):
                if number >= self.count and list(owners.values()).count(split) >= FEW_PROBLEMS:
                    break
                identity = self.environment.identity(task)
                if identity is None:
                    continue
                if not identity:
                    identity = json.dumps(as_plain(first_observations(self.environment, task)))
                if owners.setdefault(identity, split) != split:
                    other = f"{task.key} is also in split {owners[identity]!r}: {identity[:200]}; "
                    raise EnvironmentContractError(
                        f"{other}{self._other_rows(split)}where every task begins alike, define "
                        "`identity(self, task)`, None if nothing tells tasks apart"
                    )
        if not owners:
            return Finding("tasks have no identity", applies=False)
        counts = {split: list(owners.values()).count(split) for split in SPLITS}  # counting ends at FEW_PROBLEMS
        or_more = {split: " or more" * (count >= FEW_PROBLEMS) for split, count in counts.items()}
        shown = ", ".join(f"{count}{or_more[split]} in {split}" for split, count in counts.items())
        return Finding(f"different problems found: {shown}; none in two splits", measures=counts)

    def _other_rows(self, split: str) -> str:
        """Return the remedy for rows of a data set in two splits; empty for other tasks."""
        if not isinstance(self.environment.tasks(split), DatasetTasks):
            return ""
        option = f"--environment.data '{{train: FILE, {split}: OTHER}}'"
        by_option = "data" in inspect.signature(type(self.environment)).parameters
        return f"pass other rows to {split} (`{option if by_option else f'tasks({split!r})'}`), or "

    def task_data(self) -> Finding:
        """Check that tasks are JSON-like data, and the same index gives the same task."""
        for task, again in zip(self.tasks("train"), self.tasks("train"), strict=True):
            if json.loads(json.dumps(asdict(task), allow_nan=False)) != json.loads(json.dumps(asdict(again))):
                raise EnvironmentContractError(f"{task.key} is another task when it is read again")
        return Finding("tasks are JSON and a function of their index")

    def determinism(self) -> Finding:
        """Check that equal replies give equal episodes on two copies, even after other episodes."""
        with new_copy(self.environment) as played_before:
            for task in self.tasks("train"):
                first, second = self.play(task, SPAM), self.play(task, SPAM, played_before)
                if first.as_json() != second.as_json():
                    raise EnvironmentContractError(f"{task.key} differs on a copy that has played before")
        return Finding("equal replies give equal episodes")

    def independence(self) -> Finding:
        """Check that copies played at the same time are independent."""
        tasks = self.tasks("train")[:2]
        alone = [self.play(task, SPAM).as_json() for task in tasks]
        with ExitStack() as stack:
            copies = [stack.enter_context(new_copy(self.environment)) for _ in tasks]
            for copy, task in zip(copies, reversed(tasks), strict=True):
                call_with_deadline(copy.reset, task)
            mixed = [self.play(task, SPAM, copy).as_json() for copy, task in zip(copies, tasks, strict=True)]
        if alone != mixed:
            raise EnvironmentContractError("copies share state: an episode changed while another one was under way")
        return Finding("episodes of one do not change those of the other")

    def forks(self) -> Finding:
        """Check that a copy in the middle of an episode continues like the original."""
        if not self.environment.forks:
            return Finding("the environment's `forks` is False", applies=False)
        for task in self.tasks("train")[:2]:
            with new_copy(self.environment) as environment:
                due = list(call_with_deadline(environment.reset, task))
                for _ in range(self.max_turns):
                    actions = {agent: Message("assistant", SPAM) for agent in due}
                    with new_copy(environment) as forked:
                        forked_step = call_with_deadline(forked.step, actions)
                        original_step = call_with_deadline(environment.step, actions)
                    if forked_step != original_step:
                        raise EnvironmentContractError(f"{task.key} differs on a copy made in mid-episode")
                    if original_step.done:
                        break
                    due = list(original_step.observations)
        return Finding("copies continue in mid-episode")

    def hostile_replies(self) -> Finding:
        """Check that empty, huge, broken and strange replies are judged without a crash."""
        for task in self.tasks("train")[:2]:
            for reply in HOSTILE_REPLIES:
                try:
                    self.play(task, reply)
                except Exception as error:  # an environment may raise anything
                    raise EnvironmentContractError(
                        f"the reply {reply[:40]!r} ({len(reply)} characters) on {task.key} ended in "
                        f"{describe_error(error)}"
                    ) from error
        return Finding(f"{len(HOSTILE_REPLIES)} hostile replies are judged")

    def order_of_calls(self) -> Finding:
        """Check that a step before reset, after the end or by the wrong agents is rejected."""
        task = self.tasks("train")[0]
        with new_copy(self.environment) as environment:
            everybody = {agent: Message("assistant", SPAM) for agent in environment.agents}
            self._check_refused(environment, everybody, "step before reset")
            call_with_deadline(environment.reset, task)
            self._check_refused(environment, {"no-such-agent": Message("assistant", SPAM)}, "step by an unknown agent")
            self.play(task, SPAM, environment)
            self._check_refused(environment, everybody, "step after the end")
        return Finding("calls out of order are refused")

    def tools(self) -> Finding:
        """Check that calls can be checked by the schemas of the tools."""
        names = set[str]()
        with new_copy(self.environment) as environment:
            call_with_deadline(environment.reset, self.tasks("train")[0])
            for agent in environment.agents:
                for tool in environment.tools(agent):
                    names.add(tool.name)
                    if fault := schema_fault(tool.parameters):
                        raise EnvironmentContractError(
                            f"the parameters of tool {tool.name!r} of agent {agent!r} are no JSON schema: {fault}"
                        )
        if not names:
            return Finding("there are no tools", applies=False)
        return Finding(f"calls of {', '.join(sorted(names))} can be checked")

    def gold(self) -> Finding:
        """Check that the known best replies earn more than empty, spamming and hostile ones."""
        best = []
        for task in self.tasks("train"):
            replies = self.environment.gold(task)
            if replies is None:
                return Finding("no best replies are known", applies=False)
            gold_play = self.play(task, replies)
            worst = max(self.play(task, reply).reward for reply in (SPAM, *HOSTILE_REPLIES[:5]))
            if not gold_play.reward > worst or gold_play.steps[-1].success is False:
                raise EnvironmentContractError(
                    f"on {task.key} the best replies earn {gold_play.reward}, empty or hostile ones {worst}"
                )
            best.append(gold_play.reward)
        return Finding(f"best replies earn {span(best)}, above empty and hostile ones")

    def close(self) -> Finding:
        """Check that an environment may be closed twice."""
        with new_copy(self.environment) as environment:
            close(environment)
        return Finding("may be closed twice")

    def _check_refused(self, environment: Environment, actions: Mapping[str, Message], what: str) -> None:
        fault = "was accepted"
        try:
            call_with_deadline(environment.step, actions)
        except EnvironmentContractError:
            return
        except Exception as error:  # an environment may raise anything
            fault = f"raised {type(error).__name__} ({error})"
        raise EnvironmentContractError(f"{what} {fault}; leave the order of calls to the base class")


def check_environment(
    environment: Environment, level: Level = "contract", *, tasks_per_split: int = 8, max_turns: int = 64
) -> CheckReport:
    """Return the results of all checks, failed ones included.

    Args:
        environment: environment to check; it is copied, not used.
        level: ``contract``, or ``semantic`` for the contract, rewards and observations.
        tasks_per_split: number of checked tasks of each split.
        max_turns: limit of an episode's length.

    Raises:
        ConfigurationError: the level is unknown.
        DataError: the environment's data cannot be read, so that there is nothing to check.
    """
    check_instance(Environment, environment, "check_environment", "an environment")
    one_of(get_args(Level), "check_environment: ", level=level)
    checker = _Checker(environment, tasks_per_split, max_turns)
    checks: dict[str, Callable[[], Finding]] = {
        "task data": checker.task_data,
        "splits are disjoint": checker.splits,
        "determinism": checker.determinism,
        "copies are independent": checker.independence,
        "copies in mid-episode": checker.forks,
        "hostile replies": checker.hostile_replies,
        "order of calls": checker.order_of_calls,
        "tools": checker.tools,
        "best replies": checker.gold,
        "close": checker.close,
    }
    results = _results(checks)
    if level == "semantic":
        results += check_semantics(environment, tasks=tasks_per_split, max_turns=max_turns).checks
    return CheckReport(environment.name, results)


def check_semantics(
    environment: Environment, *, tasks: int = 8, max_turns: int = 64, other_process: bool = True
) -> CheckReport:
    """Return the results of the checks of rewards and observations alone.

    Args:
        environment: environment to check; it is copied, not used.
        tasks: number of played tasks.
        max_turns: limit of an episode's length.
        other_process: also replay episodes in another process.

    Raises:
        DataError: the environment's data cannot be read.
    """
    checks = SemanticChecks(environment, tasks, max_turns, other_process=other_process).checks()
    return CheckReport(environment.name, _results(checks))


def _results(checks: Mapping[str, Callable[[], Finding]]) -> tuple[Check, ...]:
    results: list[Check] = []
    for name, check in checks.items():
        try:
            results.append(Check(name, True, **vars(check())))
        except DataError:
            raise
        except (Exception, SystemExit) as error:  # an environment may raise anything
            message = str(error) if isinstance(error, MRLMError) else describe_error(error)
            earlier = [result.name for result in results if result.message == message]
            results.append(Check(name, False, f"as in {earlier[0]!r}" if earlier else message))
            if isinstance(error, DeadlineError):
                break  # each of the others would take as long
    return tuple(results)


@dataclass(frozen=True)
class DataReport:
    """The rewards of a data set's reference solutions.

    Args:
        solved: numbers of the rows whose reference succeeds.
        failed: numbers of the rows whose reference does not succeed, each with the reason.
        without: numbers of the rows that have no reference.
        rewards: rewards of the references in ``solved``, each the mean over the agents.
    """

    solved: tuple[int, ...]
    failed: Mapping[int, str]
    without: tuple[int, ...]
    rewards: tuple[float, ...]

    @property
    def usable(self) -> tuple[int, ...]:
        """Numbers of the rows that are solved or have no reference, in order."""
        return tuple(sorted((*self.solved, *self.without)))


def check_data(environment: Environment, split: str, *, max_turns: int = 64) -> DataReport:
    """Play the reference solution of every task of a split.

    A reference fails if it cannot be played, if its episode does not succeed, or, without ``success``, if its reward is
    0 or below. Rows that the environment skipped are in none of the lists.

    Args:
        environment: environment whose tasks are rows of data; it is copied, not used.
        split: name of the split.
        max_turns: limit of an episode's length.

    Raises:
        DataError: the environment's data cannot be read.
        ConfigurationError: the split is unknown, or its tasks are generated without end.
    """
    source = environment.tasks(split)
    if source.size is None:
        raise ConfigurationError(f"environment {environment.name!r} generates its tasks; give it data to check")
    numbers = getattr(source, "numbers", None) or range(1, source.size + 1)
    solved: dict[int, float] = {}
    failed: dict[int, str] = {}
    without: list[int] = []
    for number, task in zip(numbers, source, strict=True):
        try:
            replies = environment.gold(task)
            if replies is None:
                without.append(number)
                continue
            played = play_copy(environment, task, replies, max_turns=max_turns)
        except Exception as error:  # an environment may raise anything
            failed[number] = f"{type(error).__name__}: {error}"
            continue
        success, reward = played.steps[-1].success, played.reward / len(environment.agents)
        if success or (success is None and reward > 0):
            solved[number] = reward
        else:
            failed[number] = f"its reference earns {reward:g} ({played.steps[-1].stop_reason or 'no success'})"
    return DataReport(tuple(solved), failed, tuple(without), tuple(solved.values()))


def describe_error(error: BaseException) -> str:
    """Return class, text and place of an error; the place is the innermost line outside installed packages."""
    source = source_line_of_error(error)
    return f"{type(error).__name__}: {error}{f' ({source})' if source else ''}"
