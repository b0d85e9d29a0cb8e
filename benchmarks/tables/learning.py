"""Tables of learning."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.few_values import mean_and_half
from benchmarks.tables.markdown import between, pivot, plus_minus, table
from benchmarks.tables.results import grouped


def against(means: Mapping[str, Sequence[float]], name: str, gap: str) -> str:
    """Return a mean and, in parentheses, a difference unless it is missing or 0 for certain."""
    return plus_minus(means[name]) + (f" ({plus_minus(means[gap], '+')})" if any(means.get(gap, ())) else "")


def seeds(runs: Mapping[Any, Sequence[Any]]) -> str:
    """Return the number of seeds of each row.

    >>> seeds({"a": [1, 2], "b": [1, 2]}), seeds({"a": [1, 2], "b": [1]})
    ('2 seeds', '1 or 2 seeds')
    """
    return f"{' or '.join(map(str, sorted({len(each) for each in runs.values()})))} seeds"


def arms(title: str, found: Any, numbers: Iterable[str], other: str) -> str:
    """Return the numbers of each arm, in parentheses minus those of another."""
    cells = (
        (arm, name, against(means, name, f"{name} minus {other}"))
        for arm, means in found["summary"].items()
        for name in numbers
    )
    return pivot(f"`{title}`, {seeds(found['runs'])}", cells)


def quickstart(found: Any) -> str:
    """Return accuracies by seed, and their means."""
    means = [("mean over the seeds", moment, plus_minus(mean)) for moment, mean in found["summary"].items()]
    return pivot("seed", accuracies(found["rows"]) + means)


def pretrained(found: Any) -> str:
    """Return accuracies by seed, and the CPU time of a run."""
    minutes = [(row["seed"], "CPU minutes", f"{row['cpu_s'] / 60:.0f}") for row in found["rows"]]
    return pivot("seed", accuracies(found["rows"]) + minutes)


def pretrained_team(found: Any) -> str:
    """Return reward and success by seed with their means, and the numbers behind them."""
    rows, moments = found["rows"], ("before", "after")
    totals = {"reward": "ci95", "success": "success ci95"}
    cells: list[tuple[object, str, str]] = [
        (row["seed"], f"{name} {moment}", between(row[moment][name], row[moment][interval]))
        for row in rows
        for name, interval in totals.items()
        for moment in moments
    ]
    cells += [(row["seed"], "CPU minutes", f"{row['cpu_s'] / 60:.0f}") for row in rows]
    cells += [
        (
            "mean over the seeds",
            f"{name} {moment}",
            plus_minus(mean_and_half([row[moment][name] for row in rows])),
        )
        for name in totals
        for moment in moments
    ]
    behind = (
        (name, f"seed {row['seed']} {moment}", f"{value:.3f}")
        for row in rows
        for moment in moments
        for name, value in behind_reward(row[moment]).items()
    )
    return f"{pivot('seed', cells)}\n{pivot('component, or mean over the replies', behind)}"


def behind_reward(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the components of a team's reward, and the numbers of each agent's replies."""
    components = {f"`{name}`": value for name, value in report["components"].items()}
    replies = {
        f"{measure}, `{agent}`": numbers[measure]
        for measure in next(iter(report["agents"].values()))
        for agent, numbers in report["agents"].items()
    }
    return components | replies


def accuracies(rows: Iterable[Mapping[str, Any]]) -> list[tuple[Any, str, str]]:
    """Return the accuracy of each seed before and after the run, with its interval."""
    return [
        (row["seed"], moment, between(row[moment]["accuracy"], row[moment]["ci95"]))
        for row in rows
        for moment in ("before", "after")
    ]


def over_seeds(found: Any, title: str, name: str) -> str:
    """Return means over the seeds before and after, by the rows' names in this format."""
    runs = grouped(found["rows"], name.format_map)
    cells = (
        (key, moment, plus_minus(mean_and_half([run[moment] for run in each])))
        for key, each in runs.items()
        for moment in ("before", "after")
    )
    return pivot(f"{title}, {seeds(runs)}", cells)


def learning(found: Any) -> str:
    """Return accuracies before and after by configuration, and the ends of the curves of given data and teachers."""
    accuracies = over_seeds(found, "configuration", "`{config}`")
    rows = []
    for config, measures in measured_curves(found).items():
        for axis, (steps, curves) in measures.items():
            ends = (plus_minus(mean_and_half([curve[end] for curve in curves])) for end in (0, -1))
            rows.append([f"`{config}`", len(curves), axis, *ends, f"{steps[0]:.0f} to {steps[-1]:.0f}"])
    return f"{accuracies}\n{table(['configuration', 'seeds', 'measure', 'first', 'last', 'steps'], rows)}"


def team_algorithms(found: Any) -> str:
    """Return mean rewards before and after by algorithm and environment."""
    return over_seeds(found, "algorithm and environment", "{algorithm}, `{environment}`")


def small_model(found: Any) -> str:
    """Return accuracies of the small and the tiny model by difficulty."""
    cells = ((row["difficulty"], row["model"], between(row["accuracy"], row["ci95"])) for row in found["rows"])
    return pivot("difficulty", cells)


def measured_curves(found: Any) -> dict[str, dict[str, tuple[list[float], list[list[float]]]]]:
    """Return the steps and each seed's values of the measures during training, by configuration and axis.

    Runs differ by a step or two in their last one where their files have as many answers but not as many pairs: a point
    is at the mean of its steps.

    >>> runs = [[[0, 7, 9], [0.1, 0.2, 0.4]], [[0, 7, 8], [0.3, 0.4, 0.6]]]
    >>> measured = ({"accuracy": {"steps": steps, "values": values}} for steps, values in runs)
    >>> measured_curves({"curves": {"rows": [{"config": "dpo", "measured": found} for found in measured]}})
    {'dpo': {'accuracy': ([0, 7, 8.5], [[0.1, 0.2, 0.4], [0.3, 0.4, 0.6]])}}
    """
    curves: dict[str, dict[str, tuple[list[float], list[list[float]]]]] = {}
    for config, rows in grouped(found["curves"]["rows"], lambda row: row["config"]).items():
        curves[config] = {}
        for axis in rows[0]["measured"]:
            runs = [row["measured"][axis] for row in rows]
            steps = [statistics.mean(same) for same in zip(*(run["steps"] for run in runs), strict=True)]
            curves[config][axis] = steps, [run["values"] for run in runs]
    return curves


def parity(found: Any) -> str:
    """Return the rewards of both sides by pair, at the end and over the run, and their differences."""
    shown = [f"{part} {side}" for part in ("end", "run") for side in ("ours", "peer", "difference")]
    rows = [
        [name, pair["peer"], len(pair["rows"])]
        + [plus_minus(pair["summary"][key], "+" * key.endswith("difference")) for key in shown]
        for name, pair in found["pairs"].items()
    ]
    titles = [f"{part}: {side}" for part in ("last tenth", "whole run") for side in ("mrlm", "peer", "difference")]
    return table(["algorithm", "peer", "seeds", *titles], rows)


def token_losses(found: Any) -> str:
    """Return accuracies by token loss, and their differences to PPO's."""
    rows = []
    for name, row in found["summary"].items():
        means = {key: (row[key], row[f"{key}_half"]) for key in ("accuracy", "difference") if key in row}
        weights = ([run[key] for run in found["runs"][name]] for key in ("loss_weight", "clip_fraction"))
        averages = [f"{statistics.fmean(values):.3f}" for values in weights]
        rows.append([f"`{name}`", against(means, "accuracy", "difference"), *averages])
    return table(
        [
            f"loss or option, {seeds(found['runs'])}",
            "held-out accuracy (minus `ppo`)",
            "`loss_weight`",
            "`clip_fraction`",
        ],
        rows,
    )


def turn_credit(found: Any) -> str:
    """Return held-out returns and those of the run by credit of turns, and minus those of GRPO."""
    return arms("wheels", found["tasks"]["wheels"], ("reward", "rollouts"), "GRPO")


def team_distillation(found: Any) -> str:
    """Return accuracies of a student, its team and the team's majority, and the student's minus the others."""
    row = found["rows"][-1]["all seeds"]
    cells = []
    for name in ("student before", "student", "team", "majority"):
        cells.append((name, "held-out accuracy", between(**row[name])))
        if gap := row.get(f"student - {name}"):
            cells.append((name, "student minus it", between(**gap, sign="+")))
    return pivot(f"{len(found['rows']) - 1} seeds", cells)


def branches(found: Any) -> str:
    """Return rewards of counterfactual credit at equal generated tokens."""
    cells = []
    for row in found["rows"]:
        if "mean" in row:
            gap = between(row["minus MAGRPO"], row["ci95 of it"], "+")
            mean = between(row["mean"], row["ci95"]) + (f" ({gap})" if row["arm"] != "MAGRPO" else "")
            cells.append((row["arm"], f"`{row['experiment']}`", mean))
    runs = grouped((row for row in found["rows"] if "seed" in row), lambda row: (row["experiment"], row["arm"]))
    return pivot(f"algorithm, {seeds(runs)}", cells)


def pairs(found: Any) -> str:
    """Return held-out numbers of algorithms and their differences to GRPO."""
    return "\n".join(arms(pair, part, ("reward", "success"), "GRPO") for pair, part in found["pairs"].items())


def effects(found: Any) -> str:
    """Return the numbers of each effect's arms, except their tokens, and their differences to its first arm."""
    tables = []
    for effect, part in found["effects"].items():
        first = next(iter(part["summary"]))
        tables.append(arms(effect, part, [name for name in part["summary"][first] if name != "tokens"], first))
    return "\n".join(tables)


def budget(found: Any) -> str:
    """Return accuracies by arm, and their differences to a majority of one policy with as many tokens of a problem."""
    rows = []
    for name, means in found["summary"].items():
        majorities = (against(means, of, f"minus {of}") if of in means else "" for of in ("untrained", "trained"))
        rows.append([name, f"{means['tokens'][0]:.1f}", plus_minus(means["accuracy"]), *majorities])
    titles = [f"majority, {of} (team minus it)" for of in ("untrained", "trained")]
    return table([seeds(found["runs"]), "tokens per problem", "accuracy", *titles], rows)


def marginal(found: Any) -> str:
    """Return rewards of credit from replays without an agent by generated tokens."""
    runs = grouped((row for row in found["rows"] if "seed" in row), lambda row: (row["arm"], row["budget"]))
    cells = (
        (arm, f"{tokens:,} tokens", plus_minus(mean_and_half([run["reward"] for run in each])))
        for (arm, tokens), each in runs.items()
    )
    return pivot(f"algorithm, {seeds(runs)}", cells)


def agentbench(found: Any) -> str:
    """Return rewards and success on held-out tasks of AgentBench by algorithm."""
    tables = []
    for environment, part in found["environments"].items():
        names = ["reward", "success"]
        if all(row["reward after"] == row["success after"] for row in part["summary"].values()):
            names = ["success"]
        rows = []
        for arm, row in part["summary"].items():
            changes = (
                f"{plus_minus(row[f'{name} before'])} to {against(row, f'{name} after', f'{name} gained')}"
                for name in names
            )
            gap = next((name for name in row if name.startswith("success minus")), "")
            beside = f"{plus_minus(row[gap], '+')} ({gap.removeprefix('success minus ')})" if gap else ""
            rows.append([arm, *changes, beside])
        title = f"`{environment}`, {part['tokens']:,} tokens, {seeds(part['runs'])}"
        tables.append(table([title, *(f"{name} (gain)" for name in names), "success minus a peer's"], rows))
    return "\n".join(tables)


def five_tasks(found: Any) -> str:
    """Return the first and last rewards of AgentBench's five tasks by setting, and success where it differs."""
    cells = []
    for run in found["runs"]:
        setting = f"`{run['task_normalization']}`, stale turns {run['cross_policy_share']}"
        for name, task in run["tasks"].items():
            ends = [task["first"], task["last"]]
            cells.append((f"`{name}`", setting, " to ".join(between(end["mean"], end["ci95"]) for end in ends)))
            if any(abs(end["mean"] - end["success"]) > 0.005 for end in ends):
                success = " to ".join(f"{end['success']:.2f}" for end in ends)
                cells.append((f"`{name}`, success", setting, success))
    return pivot("environment", cells)
