"""A report as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

from mrlm_pl.engines.base import Sampling
from mrlm_pl.evaluation.report import EvaluationReport, Measured, played_episodes

_PART_COLUMNS = ("reward", "turns", "first turn", "opens", "tokens/turn", "at max_tokens", "components")


def report_table(report: EvaluationReport, sampling: Sampling, settings: str | None = None) -> str:
    """Return the numbers of a report, one on each line, and tables of agents and policies where there are several.

    Args:
        report: whose numbers are shown.
        sampling: how its turns were sampled.
        settings: of the environment.
    """
    lines = [
        ("environment", f"{report.environment} ({report.split}, seed {report.seed})"),
        *([("settings", settings)] if settings is not None else []),
        ("model", report.model),
        *([("checkpoint", report.checkpoint)] if report.checkpoint else []),
        ("sampling", sampling_text(sampling)),
        *([("precision", report.precision)] if report.precision else []),
        ("episodes", played_episodes(report)),
    ]
    if report.episodes:
        lines.append(("mean reward", f"{report.mean_reward:.4f}{interval_text(report.ci95)}"))
    if report.accuracy is not None:
        lines.append(("accuracy", f"{report.accuracy:.4f}" + interval_text(report.accuracy_ci95)))
    lines += [(f"pass@{k}", f"{value:.4f}") for k, value in report.pass_at_k.items()]
    lines += [(f"majority@{k}", f"{value:.4f}") for k, value in report.majority_at_k.items()]
    lines += [(f"  {name}", f"{value:.4f}") for name, value in report.components.items()]
    lines += [(f"  {name}", _measured(measured, report.episodes)) for name, measured in report.metrics.items()]
    if report.episodes:
        reasons = ", ".join(f"{name} {count}" for name, count in sorted(report.stop_reasons.items()))
        lines.append(("stop reasons", f"{reasons}; {report.truncated:.4f} truncated by a limit"))
    if len(report.agents) == 1:
        (part,) = report.agents.values()
        told = f"{_shown(part.turns, 2)} an episode, of {_shown(part.response_tokens, 1)} tokens"
        lines.append(("turns", f"{told}; {_shown(part.truncated_turns, 4)} cut at max_tokens"))
    width = max(14, *(len(name) for name, _ in lines))
    text = "\n".join(f"{name:<{width}} {text}" for name, text in lines)
    tables = [_parts("agent", report), _parts("policy", report)] if len(report.agents) > 1 else []
    return "\n\n".join([text, *tables])


def sampling_text(sampling: Sampling) -> str:
    """Return the settings in one line, those of single policies behind the others.

    >>> sampling_text(Sampling(policies={"solver": {"temperature": 0.7}}))
    'temperature 1, top_p 1, top_k 0, max_tokens 128; solver: temperature 0.7'
    """

    def shown(settings: Mapping[str, float]) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in settings.items())

    of_all = {name: value for name, value in asdict(sampling).items() if name != "policies"}
    return "; ".join([shown(of_all), *(f"{name}: {shown(own.given())}" for name, own in sampling.policies.items())])


def _parts(kind: str, report: EvaluationReport) -> str:
    """Return a table of the agents, in the order in which they act, or of the policies."""
    parts = report.agents if kind == "agent" else report.policies
    seats = report.seats.items()
    rows = [(kind, "policy" if kind == "agent" else "agents", *_PART_COLUMNS)]
    for name, part in parts.items():
        agents = [agent for agent, policy in seats if policy == name]
        own = [report.seats[name]] if kind == "agent" and name in report.seats else agents if kind == "policy" else []
        rows.append(
            (
                name,
                ", ".join(own) or "-",
                f"{part.reward:.4f}{interval_text(part.ci95)}",
                _shown(part.turns, 2),
                _shown(part.first_turn, 2),
                _shown(part.opens, 2),
                _shown(part.response_tokens, 1),
                _shown(part.truncated_turns, 4),
                ", ".join(f"{key} {value:.4f}" for key, value in part.components.items()),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _shown(value: float, digits: int) -> str:
    return "-" if math.isnan(value) else f"{value:.{digits}f}"


def _measured(measured: Measured, episodes: int) -> str:
    """Return the value, with the number of cases where it differs from that of the episodes."""
    if measured.value is None:
        return "-  of 0"
    return f"{measured.value:.4f}{interval_text(measured.ci95)}" + (
        f"  of {measured.of}" if measured.of != episodes else ""
    )


def interval_text(bounds: tuple[float, float] | None) -> str:
    """Return an interval as text; empty for None, and words where no spread is known to estimate it from.

    >>> interval_text((0.25, 0.5)), interval_text((-math.inf, math.inf)), interval_text(None)
    ('  95 % [0.2500, 0.5000]', '  no 95 % interval (equal values or one task)', '')
    """
    if bounds is None or any(map(math.isnan, bounds)):
        return ""
    if any(map(math.isinf, bounds)):
        return "  no 95 % interval (equal values or one task)"
    return f"  95 % [{bounds[0]:.4f}, {bounds[1]:.4f}]"
