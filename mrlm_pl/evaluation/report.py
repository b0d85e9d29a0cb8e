"""The report of an evaluation, as data and as text."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mrlm_pl.durable_files import finite
from mrlm_pl.engines.base import Sampling
from mrlm_pl.errors import counted
from mrlm_pl.evaluation.agents import Part

_PART_COLUMNS = ("reward", "turns", "first turn", "opens", "tokens/turn", "at max_tokens", "components")


@dataclass(frozen=True)
class Measured:
    """A number about many cases.

    Args:
        value: mean, or fraction of the cases in which it holds; None without a case.
        ci95: 95 % interval, clustered by problem: Wilson's where cases are counted or every value is 0 or 1, else
            Student's t, within [0, 1] where every value is; None without a case.
        of: number of cases: the episodes that have the metric, or all cases that these episodes count.
    """

    value: float | None
    ci95: tuple[float, float] | None
    of: int


@dataclass(frozen=True)
class EvaluationReport:
    """Result of an evaluation.

    Args:
        environment: name of the environment.
        model: name of the model.
        split: split of the tasks.
        seed: seed of the order of the tasks and of the sampling.
        requested: maximum number of episodes; a split with fewer tasks gives fewer.
        episodes: number of episodes that ended without an infrastructure error; all numbers are over these.
        failed: number of episodes that an infrastructure error ended.
        mean_reward: mean over episodes of the mean over agents of their returns; NaN if all failed, as is ``ci95``.
        ci95: 95 % interval of ``mean_reward`` by Student's t, with tasks (not their repeated samples) as the unit;
            infinite if no spread is known: a single task, or equal rewards everywhere. It ends at the bounds that the
            environment declares of its tasks, unless an episode is beyond them.
        accuracy: fraction of episodes that the environment called a success; None if it does not judge. An episode that
            a limit truncated before it was judged counts as a failure.
        accuracy_ci95: 95 % interval of ``accuracy``, clustered by problem; see
            :func:`mrlm_pl.evaluation.intervals.share_interval`; None if ``accuracy`` is.
        pass_at_k: for each k up to the samples per task, the chance that one of k samples succeeds (unbiased, arXiv
            2107.03374); empty if ``accuracy`` is None.
        components: mean of each reward component; see :class:`mrlm_pl.evaluation.agents.Components`.
        metrics: the environment's own numbers. A metric that counts cases among ``NAME_of`` is their fraction of the
            cases of all episodes; any other is the mean over the episodes that have it.
        majority_at_k: for each k above 1 up to the samples per task, the frequency with which the majority of k samples
            of a task is right; empty without votes or with several agents.
        decisions_per_task: number of decisions for one task, in all of its samples: the budget.
        truncated: fraction of the episodes that a limit truncated; NaN if all failed.
        stop_reasons: number of episodes by stop reason.
        seats: policy of each agent.
        settings: arguments of the environment; None for one that was given as an instance, and within a run.
        changed_settings: arguments that differ from their defaults, in words; empty if there is no record of them.
        sampling: sampling settings of the turns; None for an evaluation within a run.
        code: digest of each module of the environment; empty within a run.
        precision: precision in which turns were generated, as Lightning names it; empty for an evaluation within a run.
        checkpoint: iteration or update of the weights, in words, of a run that had not finished; empty for others.
        agents: rewards and turns of each agent, in the order in which they act.
        policies: rewards and turns of each policy, in all of its seats.
        tasks: key of each task, digest of its problem, episodes, mean reward, fraction of successes and majority.
        transcripts: messages, episode after episode.
    """

    environment: str
    model: str
    split: str
    seed: int
    requested: int
    episodes: int
    failed: int
    mean_reward: float = math.nan
    ci95: tuple[float, float] = (math.nan, math.nan)
    accuracy: float | None = None
    accuracy_ci95: tuple[float, float] | None = None
    pass_at_k: Mapping[str, float] = field(default_factory=dict)
    components: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, Measured] = field(default_factory=dict)
    majority_at_k: Mapping[str, float] = field(default_factory=dict)
    decisions_per_task: float = 0.0
    truncated: float = math.nan
    stop_reasons: Mapping[str, int] = field(default_factory=dict)
    seats: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] | None = None
    changed_settings: str = ""
    sampling: Sampling | None = None
    code: Mapping[str, str] = field(default_factory=dict, repr=False)
    precision: str = ""
    checkpoint: str = ""
    agents: Mapping[str, Part] = field(default_factory=dict)
    policies: Mapping[str, Part] = field(default_factory=dict)
    tasks: Sequence[Mapping[str, Any]] = field(default_factory=list, repr=False)
    transcripts: Sequence[Mapping[str, Any]] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        """Return the numbers, one on each line, and tables of agents and policies where there are several."""
        accuracy = self.accuracy
        reward = f"{self.mean_reward:z.4f}{interval_text(self.ci95)}"
        texts: dict[str, str | None] = {
            "environment": f"{self.environment} ({self.split}, seed {self.seed})",
            "settings": self.changed_settings,
            "model": self.model,
            "checkpoint": self.checkpoint,
            "sampling": None if self.sampling is None else sampling_text(self.sampling),
            "precision": self.precision,
            "episodes": played_episodes(self),
            "mean reward": reward if self.episodes else None,
            "accuracy": None if accuracy is None else f"{accuracy:z.4f}{interval_text(self.accuracy_ci95)}",
        }
        lines = [(name, text) for name, text in texts.items() if text]
        lines += [(f"pass@{k}", f"{value:z.4f}") for k, value in self.pass_at_k.items()]
        lines += [(f"majority@{k}", f"{value:z.4f}") for k, value in self.majority_at_k.items()]
        lines += [(f"  {name}", f"{value:z.4f}") for name, value in self.components.items()]
        lines += [(f"  {name}", _measured_text(measured, self.episodes)) for name, measured in self.metrics.items()]
        if self.episodes:
            reasons = ", ".join(f"{name} {count}" for name, count in sorted(self.stop_reasons.items()))
            lines.append(("stop reasons", f"{reasons}; {self.truncated:z.4f} truncated by a limit"))
        if len(self.agents) == 1:
            (part,) = self.agents.values()
            turns, tokens = _number_text(part.turns, 2), _number_text(part.response_tokens, 1)
            cut = f"{_number_text(part.truncated_turns, 4)} truncated at max_tokens"
            lines.append(("turns", f"{turns} an episode, of {tokens} tokens; {cut}"))
        width = max(14, *(len(name) for name, _ in lines))
        text = "\n".join(f"{name:<{width}} {text}" for name, text in lines)
        if len(self.agents) < 2:
            return text
        seats = [(policy, agent) for agent, policy in self.seats.items()]
        agents = _parts_table("agent", "policy", self.agents, self.seats.items())
        return f"{text}\n\n{agents}\n\n{_parts_table('policy', 'agents', self.policies, seats)}"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the same in a notebook."""
        printer.text(str(self))

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON-like data; it holds no time and no path, so that equal runs give equal files.

        The bounds of an interval that no spread is known for (a single task, equal rewards) are None, and so is the
        mean of no episode: JSON has no infinity and no NaN.
        """
        return dict(finite(asdict(self)))


def played_episodes(report: EvaluationReport) -> str:
    """Return the number of episodes of a report in words, with those requested, their problems and failures."""
    missing = report.requested - report.episodes - report.failed
    counts = str(report.episodes) + (f" and {report.failed} failed" if report.failed else "")
    counts += f" of up to {report.requested} (no more tasks)" if missing > 0 else ""
    problems = len({task["problem"] for task in report.tasks})  # intervals rest on these
    return f"{counts}; {counted(problems, 'different problem')}" if problems < report.episodes else counts


def sampling_text(sampling: Sampling) -> str:
    """Return the settings in one line, those of individual policies last.

    >>> sampling_text(Sampling(policies={"solver": {"temperature": 0.7}}))
    'temperature 1, top_p 1, top_k 0, max_tokens 128; solver: temperature 0.7'
    """

    def shown(settings: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in settings.items())

    for_all = {name: value for name, value in asdict(sampling).items() if name != "policies" and value is not None}
    return "; ".join(
        [shown(for_all), *(f"{name}: {shown(settings.given())}" for name, settings in sampling.policies.items())]
    )


def _parts_table(kind: str, partners: str, parts: Mapping[str, Part], seats: Collection[tuple[str, str]]) -> str:
    """Return a table of the agents, in the order in which they act, with their policies; or the other way round."""
    rows = [[kind, partners, *_PART_COLUMNS]]
    for name, part in parts.items():
        partner_names = ", ".join(partner for seat, partner in seats if seat == name) or "-"
        steps = [_number_text(value, 2) for value in (part.turns, part.first_turn, part.opens)]
        tokens = [_number_text(part.response_tokens, 1), _number_text(part.truncated_turns, 4)]
        components = ", ".join(f"{key} {value:z.4f}" for key, value in part.components.items())
        rows.append([name, partner_names, f"{part.reward:z.4f}{interval_text(part.ci95)}", *steps, *tokens, components])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _number_text(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:z.{digits}f}"


def _measured_text(measured: Measured, episodes: int) -> str:
    """Return the value, with the number of cases where it differs from that of the episodes."""
    if measured.value is None:
        return "-  of 0"
    cases = f"  of {measured.of}" if measured.of != episodes else ""
    return f"{measured.value:z.4f}{interval_text(measured.ci95)}{cases}"


def interval_text(bounds: tuple[float, float] | None) -> str:
    """Return an interval as text; empty for None, and words where no spread is known to estimate it from.

    >>> interval_text((-1e-5, 0.5)), interval_text((-math.inf, math.inf)), interval_text(None)
    ('  95 % [0.0000, 0.5000]', '  no 95 % interval (equal values or one task)', '')
    """
    if bounds is None or any(map(math.isnan, bounds)):
        return ""
    if any(map(math.isinf, bounds)):
        return "  no 95 % interval (equal values or one task)"
    return f"  95 % [{bounds[0]:z.4f}, {bounds[1]:z.4f}]"
