"""Tables of the files ``benchmarks/results/*.json``, for the results page and the README."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.few_values import mean_and_half
from benchmarks.log_slopes import LEAST, slopes

RESULTS = Path(__file__).with_name("results")


def read(name: str) -> Any:
    """Return the content of a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)


def plus_minus(mean: float, half: float, sign: str = "") -> str:
    """Return a mean with the half width of its interval, which one value alone does not have.

    >>> plus_minus(0.0104, 0.02), plus_minus(0.0104, 0.02, "+"), plus_minus(0.0104, float("nan"))
    ('0.010 ± 0.020', '+0.010 ± 0.020', '0.010')
    """
    return f"{mean:{sign}.3f}" + ("" if math.isnan(half) else f" ± {half:.3f}")


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
    return over_seeds(found["rows"], "configuration", lambda row: f"`{row['config']}`")


def team_algorithms(found: Any) -> str:
    """Return mean rewards before and after by algorithm and environment."""
    return over_seeds(
        found["rows"], "algorithm | environment", lambda row: f"{row['algorithm']} | `{row['environment']}`"
    )


def over_seeds(rows: Sequence[Any], title: str, name: Callable[[Any], str]) -> str:
    """Return a table of means over the seeds before and after, by name."""
    seeds: dict[str, list[Any]] = {}
    for row in rows:
        seeds.setdefault(name(row), []).append(row)
    shown = [
        [key, len(runs), *(plus_minus(*mean_and_half([run[when] for run in runs])) for when in ("before", "after"))]
        for key, runs in seeds.items()
    ]
    columns = title.split(" | ")
    return table([*columns, "seeds", "before", "after"], [[*line[0].split(" | "), *line[1:]] for line in shown])


def learning_curves(found: Any) -> dict[str, list[list[float]]]:
    """Return the rewards of each seed by algorithm, for the runs with rollouts."""
    curves: dict[str, list[list[float]]] = {}
    for row in found["rows"]:
        if "algorithm" in row:
            curves.setdefault(row["algorithm"], []).append(row["rewards"])
        elif "rewards" in row:
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


def effects(found: Any) -> str:
    """Return the numbers of each effect's arms and their differences to its first arm."""
    rows = []
    for effect, measured in found["effects"].items():
        (first, *_), runs = measured["summary"], measured["runs"]
        for arm, means in measured["summary"].items():
            for name in means:
                if " minus " not in name:
                    gap = means.get(f"{name} minus {first}")
                    shown = [plus_minus(*means[name]), plus_minus(*gap, "+") if gap else "-"]
                    rows.append([f"`{effect}`", arm, len(runs[arm]), name, *shown])
    return table(["effect", "arm", "seeds", "number", "mean", "minus the first arm"], rows)


def budget(found: Any) -> str:
    """Return accuracies by arm, and their differences to a majority of one policy with as many tokens of a problem."""
    rows = []
    for name, means in found["summary"].items():
        row = [name, len(found["runs"][name.partition(", ")[0]]), f"{means['tokens'][0]:.1f}"]
        row.append(plus_minus(*means["accuracy"]))
        for of in ("untrained", "trained"):
            row += [plus_minus(*means[of]), plus_minus(*means[f"minus {of}"], "+")] if of in means else ["-", "-"]
        rows.append(row)
    majorities = [head for of in ("untrained", "trained") for head in (f"majority, {of}", "minus it")]
    return table(["", "seeds", "tokens per problem", "accuracy", *majorities], rows)


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
    """Return the costs of a GRPO step by size and precision."""
    rows = [[row["size"], row["precision"], row["peer_precision"], *against(row, "trl")] for row in found["rows"]]
    return table(["size", "mrlm in", "TRL in", *STEP], rows)


def distillation_step(found: Any) -> str:
    """Return the costs of a step of distillation."""
    return table(["", *STEP], [["distillation, mrlm / TRL", *against(found, "trl")]])


def team_step(found: Any) -> str:
    """Return the costs of a step of a team by turns."""
    rows = [[f"{row['turns']} turns", *against(row, "comlrl")] for row in found["rows"]]
    return table(["MAGRPO, mrlm / CoMLRL", *STEP], rows)


SIDES = {"ours": "mrlm", "trl": "TRL", "comlrl": "CoMLRL"}


def points(found: Any, axis: str, side: str) -> list[Any]:
    """Return the points of a side on an axis of the cost curves, the smallest first."""
    rows = [row for row in found["rows"] if (row["axis"], row["side"]) == (axis, side)]
    return sorted(rows, key=lambda row: row["x"])


def cost_curves(found: Any) -> str:
    """Return slopes of time and memory by axis and side, memory per token by length, and the missing points."""
    rows, missing = [], []
    for name, axis in found["axes"].items():
        for side in filter(None, ("ours", axis["peer"])):
            own = points(found, name, side)
            done = [row for row in own if "reason" not in row]
            missing += [f"{side} at {row['x']:,} {axis['unit']}: {row['reason']}" for row in own if "reason" in row]
            fitted = ["{:.2f}, {:.2f}".format(*slopes(done, measure) or (math.nan,) * 2) for measure in LEAST]
            last = done[-1]
            cost = f"{last['x']:,}: {last['cpu_s']:.1f} s, {last['memory_mib']:.0f} MiB"
            grows = f"{axis['unit']}, {done[0]['x']:,} to {last['x']:,}"
            rows.append([grows, axis["algorithm"], SIDES[side], *fitted, cost])
    header = ["what grows", "in", "", "slopes of time", "slopes of memory", "at the largest"]
    text = table(header, rows)
    for name, title in (("learner", "pass of the learner"), ("engine", "turn in the engine")):
        known = [row for row in points(found, name, "ours") if "reason" not in row]
        per_token = [f"{row['memory_mib'] * 1024 / row['x']:.1f}" for row in known]
        text += "\n" + table(
            ["tokens of a row", *(f"{row['x']:,}" for row in known)], [[f"KiB per token, {title}", *per_token]]
        )
    return text + (f"\nNot measured: {'; '.join(missing)}.\n" if missing else "")


def int8_weights(found: Any) -> str:
    """Return memory and time of int8 beside float32."""
    rows = []
    for shape, row in found["speed"].items():
        times = [both["int8"] / both["float32"] for both in row["milliseconds"].values()]
        memory = [f"{row['mib'][side]:.0f}" for side in ("float32", "int8")]
        rows.append([f"`{shape}`", *memory, *(f"{ratio:.2f}" for ratio in times)])
    works = next(iter(found["speed"].values()))["milliseconds"]
    text = table(["random model", "MiB in float32", "in int8", *(f"CPU time, {work}" for work in works)], rows)
    quality = found["quality"]
    accuracies = [f"{quality['accuracy'][side]:.3f}" for side in ("float32", "int8")]
    difference = f"{quality['gain']:+.3f} {between(quality['gain_ci95'], '+')}"
    numbers = [*accuracies, difference, f"{quality['logp_difference']:.5f}", f"{quality['kl']:.1e}"]
    header = ["accuracy in float32", "in int8", "difference", "mean difference of log-probabilities", "mean KL, nats"]
    return f"{text}\n{table(header, [numbers])}"


def kernel_shapes(found: Any) -> str:
    """Return the distinct products of all steps, and the new ones of the later half of them."""
    rows = []
    for phase in found["exact"]:
        late = {name: found[name][phase]["new"][found["steps"] // 2 :] for name in ("exact", "buckets")}
        counts = [found[name][phase]["all"] for name in late]
        rows.append([phase, *counts, *(f"{statistics.mean(new):.1f}" for new in late.values())])
    head = ["shapes", "of all steps, exact", "in buckets", "new in each later step, exact", "in buckets"]
    return table(head, rows)


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


def batching(found: Any) -> str:
    """Return the engine's ratios by size, for several policies and for unequal lengths."""
    rows = [[row["size"], f"{row['policies']} policies", f"{row['ratio']:.2f}"] for row in found["policies"]]
    rows += [
        [row["size"], f"{row['policies']} policies with adapters on one base", f"{row['ratio']:.2f}"]
        for row in found["adapters"]
    ]
    rows += [[row["size"], "unequal lengths", f"{row['ratio']:.2f}"] for row in found["lengths"]]
    memory = [
        [row["size"], row["policies"], *(f"{mib:.1f} MiB" for mib in row["weights_mib"])] for row in found["adapters"]
    ]
    held = table(["size", "policies", "weights with one base", "with adapters added to copies"], memory)
    return table(["size", "work", "processor time"], rows) + "\n\n" + held


def rounds(found: Any) -> str:
    """Return the ratios of rounds to lockstep by the seconds of an answer and the piece."""
    rows = [
        [row["environment_seconds"], f"{row['lockstep_seconds']:.2f}", row["piece"], f"{row['ratio']:.2f}"]
        for row in found["rows"]
    ]
    return table(["seconds of an answer", "seconds in lockstep", "piece", "ratio of the time"], rows)


def limit(found: Any) -> str:
    """Return the seconds of a GRPO step by phase, those of its products alone, and their ratios to TRL's step."""
    against_trl = {(row["size"], row["precision"], row["peer_precision"]): row for row in read("grpo_step")["rows"]}
    rows = []
    for size, precisions in found["sizes"].items():
        for precision, phases in precisions.items():
            sums = {unit: sum(row[unit] for row in phases.values()) for unit in ("seconds", "products_seconds")}
            step = {**sums, "share_of_products": sums["products_seconds"] / sums["seconds"]}
            for phase, row in {**phases, "both": step}.items():
                share = row["share_of_products"]
                seconds = [f"{row['seconds']:.3f}", f"{row['products_seconds']:.3f}", f"{share:.2f}"]
                rows.append([size, precision, phase, *seconds, "", ""])
            peer = against_trl.get((size, precision, precision))
            if peer is not None:
                ratio = peer["cpu_ratio"]
                rows[-1][-2:] = [f"{ratio:.2f}", f"{ratio * step['share_of_products']:.2f}"]
    names = [
        "size",
        "precision",
        "phase",
        "seconds",
        "products alone",
        "share",
        "step / TRL's",
        "products / TRL's step",
    ]
    return table(names, rows)


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
    libraries = found["the libraries of a fit alone"]["now"]["cpu seconds"]["in all"]
    alone = ["plain import of the libraries alone", *[""] * len(ratios), f"{libraries:.2f}"]
    return table(["CPU seconds", *order], [*rows, ["now / commit, median of the rounds", *ratios, ""], alone])


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


def earlier(found: Any) -> str:
    """Return the pages with measurements that were made before their results were kept in files."""
    rows = [
        [", ".join(f"[{page}]({page})" for page in row["pages"]), row["what"], f"`{row['command']}`"]
        for row in found["measurements"]
    ]
    return table(["page", "measurement", "command"], rows)
