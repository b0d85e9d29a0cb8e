"""Tables of the files ``benchmarks/results/*.json``, for the results page and the README."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.few_values import mean_and_half

RESULTS = Path(__file__).with_name("results")


def read(name: str) -> Any:
    """Return the content of a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def plus_minus(mean: float, half: float, sign: str = "") -> str:
    """Return a mean with the half width of its interval.

    >>> plus_minus(0.0104, 0.02), plus_minus(0.0104, 0.02, "+")
    ('0.010 ± 0.020', '+0.010 ± 0.020')
    """
    return f"{mean:{sign}.3f} ± {half:.3f}"


def between(low_and_high: Sequence[float], sign: str = "") -> str:
    """Return an interval.

    >>> between((0.1, 0.25))
    '[0.100, 0.250]'
    """
    return f"[{', '.join(f'{bound:{sign}.3f}' for bound in low_and_high)}]"


def quickstart(found: Any) -> str:
    """Return accuracies by seed."""
    rows = [
        [row["seed"], *(f"{row[moment]['accuracy']:.3f} {between(row[moment]['ci95'])}" for moment in found["summary"])]
        for row in found["rows"]
    ]
    mean = ["mean over the seeds", *(plus_minus(*found["summary"][moment]) for moment in found["summary"])]
    return table(["seed", "before", "after"], [*rows, mean])


def learning(found: Any) -> str:
    """Return accuracies before and after by configuration."""
    seeds: dict[str, list[Any]] = {}
    for row in found["rows"]:
        seeds.setdefault(row["config"], []).append(row)
    rows = [
        [
            f"`{config}`",
            len(runs),
            *(plus_minus(*mean_and_half([run[key] for run in runs])) for key in ("before", "after")),
        ]
        for config, runs in seeds.items()
    ]
    return table(["configuration", "seeds", "before", "after"], rows)


def learning_curves(found: Any) -> dict[str, list[list[float]]]:
    """Return the rewards of each seed by algorithm, for the configurations with rollouts."""
    curves: dict[str, list[list[float]]] = {}
    for row in found["rows"]:
        if "rewards" in row:
            words = row["config"].split()
            name = words[words.index("--model") + 1] if "--model" in words else Path(words[0]).name.upper()
            curves.setdefault({"QUICKSTART": "GRPO"}.get(name, name), []).append(row["rewards"])
    return curves


def parity(found: Any) -> str:
    """Return the rewards of both sides by pair, at the end and over the run, and their differences."""
    shown = [f"{part} {side}" for part in ("end", "run") for side in ("ours", "peer", "difference")]
    rows = [
        [name, pair["peer"], len(pair["rows"])]
        + [plus_minus(*pair["summary"][key], "+" * key.endswith("difference")) for key in shown]
        for name, pair in found["pairs"].items()
    ]
    columns = [f"{part}: {side}" for part in ("last tenth", "whole run") for side in ("mrlm", "peer", "difference")]
    return table(["algorithm", "peer", "seeds", *columns], rows)


def token_losses(found: Any) -> str:
    """Return accuracies by token loss, and their differences to PPO's."""
    rows = []
    for name, row in found["summary"].items():
        gap = plus_minus(row["difference"], row["difference_half"], "+") if "difference" in row else "-"
        means = [
            f"{statistics.fmean(run[key] for run in found['runs'][name]):.3f}"
            for key in ("loss_weight", "clip_fraction")
        ]
        rows.append([f"`{name}`", plus_minus(row["accuracy"], row["accuracy_half"]), gap, *means])
    return table(
        ["loss or option", "held-out accuracy", "difference to `ppo`", "`loss_weight`", "`clip_fraction`"], rows
    )


TURN_CREDIT = {
    "GRPO": "`GRPO` | .1",
    "GRPO turn": "`GRPO`, `credit: turn` | .1",
    "GiGPO": "`GiGPO` | .1",
    "GiGPO, entropy .2": "`GiGPO` | .2",
}
"""Arms with their entropy bonus."""


def turn_credit(found: Any) -> str:
    """Return held-out returns and those of the run by credit of turns."""
    rows = []
    for arm, shown in TURN_CREDIT.items():
        row = found["tasks"]["wheels"]["summary"][arm]
        cells = []
        for name in ("reward", "rollouts"):
            gap = row.get(f"{name} minus GRPO")
            cells += [plus_minus(*row[name]), plus_minus(*gap, "+") if gap else "-"]
        rows.append([shown, *cells])
    header = ["", "entropy bonus", "held-out return", "minus GRPO", "mean return of the run", "minus GRPO"]
    return table(header, rows)


def team_distillation(found: Any) -> str:
    """Return accuracies of a student, its team and the team's majority."""
    row = found["rows"][-1]["all seeds"]
    names = {
        "student before": "untrained student",
        "student": "student",
        "team": "team: mean of its solvers in the last turn",
        "majority": "team: majority of the last turn",
    }
    rows = []
    for name, shown in names.items():
        gap = row.get(f"student - {name}")
        differs = f"{gap['mean']:+.3f} {between(gap['ci95'], '+')}" if gap else ""
        rows.append([shown, f"{row[name]['mean']:.3f} {between(row[name]['ci95'])}", differs])
    return table(["", "held-out accuracy", "student minus it"], rows)


def branches(found: Any) -> str:
    """Return rewards of counterfactual credit at equal generated tokens."""
    rows = [
        [
            f"`{row['experiment']}`",
            row["arm"],
            f"{row['mean']:.3f} {between(row['ci95'])}",
            f"{row['minus MAGRPO']:+.3f} {between(row['ci95 of it'], '+')}" if row["arm"] != "MAGRPO" else "-",
        ]
        for row in found["rows"]
        if "mean" in row
    ]
    return table(["task", "algorithm", "held-out reward", "minus MAGRPO"], rows)


def pairs(found: Any) -> str:
    """Return held-out numbers of algorithms and their differences to GRPO."""
    rows = []
    for pair, measured in found["pairs"].items():
        for arm, means in measured["summary"].items():
            for name in ("reward", "success"):
                gap = means.get(f"{name} minus GRPO")
                seeds = len(measured["runs"][arm])
                shown = [plus_minus(*means[name]), plus_minus(*gap, "+") if gap else "-"]
                rows.append([f"`{pair}`", arm, seeds, name, *shown])
    return table(["task", "algorithm", "seeds", "number", "held-out", "minus GRPO"], rows)


def marginal(found: Any) -> str:
    """Return rewards of credit from replays without an agent at equal generated tokens."""
    rewards: dict[tuple[int, str], list[float]] = {}
    for row in found["rows"]:
        if "seed" in row:
            rewards.setdefault((row["budget"], row["arm"]), []).append(row["reward"])
    rows = [[budget, arm, len(seeds), plus_minus(*mean_and_half(seeds))] for (budget, arm), seeds in rewards.items()]
    return table(["generated tokens", "algorithm", "seeds", "held-out reward"], rows)


def agentbench(found: Any) -> str:
    """Return rewards and success on held-out tasks of AgentBench by algorithm."""
    shown = [f"{name} {moment}" for name in ("reward", "success") for moment in ("before", "after", "gained")]
    rows = []
    for environment, part in found["environments"].items():
        for arm, row in part["summary"].items():
            compared = next((name for name in row if name.startswith("success minus")), "")
            gap = f"{plus_minus(*row[compared], '+')} ({compared.removeprefix('success minus ')})" if compared else "-"
            cells = [plus_minus(*row[name], "+" * name.endswith("gained")) for name in shown]
            rows.append([f"`{environment}`", part["tokens"], arm, *cells, gap])
    return table(["environment", "generated tokens", "algorithm", *shown, "success minus a peer's"], rows)


def five_tasks(found: Any) -> str:
    """Return the first and last rewards of AgentBench's five tasks by setting and seed."""
    rows = []
    for run in found["runs"]:
        for name, task in run["tasks"].items():
            rewards = [f"{task[part]['mean']:.3f} {between(task[part]['ci95'])}" for part in ("first", "last")]
            success = [f"{task[part]['success']:.2f}" for part in ("first", "last")]
            setting = [run["task_normalization"], run["cross_policy_share"], run["seed"]]
            rows.append([*setting, f"`{name}`", *rewards, *success])
    header = ["normalization", "stale turns", "seed", "environment", "first reward", "last reward"]
    return table([*header, "first success", "last success"], rows)


def against(found: Any, peer: str) -> list[str]:
    """Return processor time and memory of a step, as fractions of a peer's."""
    ours, other = found["ours"], found[peer]
    return [
        f"{found['cpu_ratio']:.2f} ({ours['cpu_s']:.2f} s / {other['cpu_s']:.2f} s)",
        f"{found['peak_ratio']:.2f} ({ours['peak_mib']:.0f} MiB / {other['peak_mib']:.0f} MiB)",
    ]


STEP = ("processor time", "peak memory")


def grpo_step(found: Any) -> str:
    """Return the costs of a GRPO step."""
    return table(["", *STEP], [["GRPO, mrlm / TRL", *against(found, "trl")]])


def distillation_step(found: Any) -> str:
    """Return the costs of a step of distillation."""
    return table(["", *STEP], [["distillation, mrlm / TRL", *against(found, "trl")]])


def team_step(found: Any) -> str:
    """Return the costs of a step of a team by turns."""
    rows = [[f"{row['turns']} turns", *against(row, "comlrl")] for row in found["rows"]]
    return table(["MAGRPO, mrlm / CoMLRL", *STEP], rows)


def kill_resume(found: Any) -> str:
    """Return kills and equal resumed runs by case."""
    rows = [[f"`{name}`", case["kills"], len(case["runs"]), case["same"]] for name, case in found["cases"].items()]
    return table(
        ["run", "kills", "resumed runs", "with the weights of the undisturbed run"], [*rows, ["all", *kills(found)]]
    )


def kills(found: Any) -> tuple[int, int, int]:
    """Return the numbers of kills, of resumed runs, and of those with equal weights."""
    cases = found["cases"].values()
    runs = [len(case["runs"]) for case in cases]
    return sum(case["kills"] for case in cases), sum(runs), sum(case["same"] for case in cases)


def attacks(found: Any) -> str:
    """Return successful attacks by level."""
    rows = [
        [
            f"`{level}`",
            row["attacks"],
            row["through"],
            row["harm"],
            f"{row['honest_with_full_score']} of {row['honest']}",
        ]
        for level, row in found["levels"].items()
    ]
    return table(["level", "attacks", "successful", "harm outside", "honest programs with the full score"], rows)


def interval_coverage(found: Any) -> str:
    """Return the least coverage of intervals in simulations."""
    row = found["summary"]["now"]
    return table(
        ["settings", "least coverage", "least coverage with 20 tasks or more"],
        [[row["settings"], row["least coverage"], row["least coverage of 20 tasks or more"]]],
    )


def families(found: Any) -> str:
    """Return the numbers of model families that agree with the model's own forward pass."""
    rows = [row for row in found["families"].values() if "error" not in row]
    names = ("engine", "batch", "session", "learner", "gradient")
    compared = [[row[name] for row in rows if name in row] for name in names]
    equal = [sum(value <= 1e-5 for value in values) for values in compared]
    return table(["families", *names], [["compared", *map(len, compared)], ["difference at most 1e-5", *equal]])


def records(found: Any) -> str:
    """Return the CPU time of an iteration and the size of 1,000 episodes by saved content and by compression."""
    sizes, seconds = found["bytes_per_1000_episodes"], found["cpu_s_per_iteration"]
    costs = [
        [code, variant, f"{sizes[code][variant] / 1e6:.2f} MB", f"{seconds[code][variant]:.2f} s"]
        for code in sizes
        for variant in sizes[code]
    ]
    rows = [
        [name, f"{row['bytes'] / 1e6:.2f} MB", f"{row['compress_s']:.2f} s"]
        for name, row in found["per_1000_episodes"].items()
        if isinstance(row, dict)
    ]
    of_code = table(["code", "episodes", "1,000 episodes", "CPU time of an iteration"], costs)
    return of_code + "\n" + table(["compression", "1,000 episodes", "to compress"], rows)


def start_up(found: Any) -> str:
    """Return the CPU seconds of the quick start up to its first update by phase, with those of other commits."""
    sides = {name: row for name, row in found["quick start"].items() if not name.startswith("now / ")}
    order = [*(name for name in sides if name != "now"), "now"]
    seconds = {name: sides[name]["cpu seconds"] for name in order}
    rows = [[phase, *(f"{seconds[name][phase]:.2f}" for name in order)] for phase in seconds["now"]]
    ratios = [f"{found['quick start'][f'now / {name}']['cpu seconds']:.2f}" for name in order[:-1]]
    return table(["CPU seconds", *order], [*rows, ["now / commit, median of the rounds", *ratios, ""]])


def shared_machine(found: Any) -> str:
    """Return the seconds of a step beside a busy process by OpenMP setting."""
    rows = [
        [f"`{name}`", f"{row['quiet_s']:.2f}", f"{row['busy_s']:.2f}", f"{row['busy_by_quiet']:.1f}"]
        for name, row in found["settings"].items()
    ]
    return table(["setting", "seconds alone", "with one busy process", "ratio"], rows)


def conformance_peers(found: Any) -> str:
    """Return the number of values that the peers' own code computed."""
    counts = {name: sum(name in row for row in found["values"].values()) for name in found["versions"]}
    rows = [[f"{name} {found['versions'][name]}", count] for name, count in counts.items()]
    return table(["peer", "losses and advantages"], rows)


def semantic(found: Any) -> str:
    """Return the numbers of environments that pass each check."""
    reports = [report["checks"] for report in found["environments"].values()]
    rows = []
    for name in reports[0]:
        applied = [report[name]["passed"] for report in reports if report[name]["applies"]]
        rows.append([f"`{name}`", sum(applied), len(applied) - sum(applied), len(reports) - len(applied)])
    return table(["check", "passes", "fails", "does not apply"], rows)
