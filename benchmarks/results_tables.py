"""Tables of the files ``benchmarks/results/*.json``, for the results page and the README.

``COLUMNS`` has the columns of a file that is one table; a function with the name of another returns its tables.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.few_values import mean_and_half
from benchmarks.log_slopes import LEAST, slopes
from benchmarks.markdown_tables import between, columns, pivot, plus_minus, table

RESULTS = Path(__file__).with_name("results")


def read(name: str) -> Any:
    """Return the content of a file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


COLUMNS = {
    "attacks": (
        "levels",
        "level: `{name}` | attacks: {attacks} | successful: {through} | harm outside: {harm} | "
        "honest programs with the full score: {honest_with_full_score} of {honest}",
    ),
    "rollout": (
        "rows",
        "size: {size} | generate: {generate_tokens_per_second:,.0f} | mrlm: {engine_tokens_per_second:,.0f} | "
        "mrlm / generate: {engine_ratio:.2f}",
    ),
    "rollout_compiled": (
        "rows",
        "size: {size} | precision: {dtype} | plain: {engine_tokens_per_second:,.0f} | "
        "compiled: {compiled_tokens_per_second:,.0f} | "
        "compiled / plain, processor time: {compiled_cpu_of_engine:.2f} | "
        "compiled / `generate`, tokens per second: {compiled_ratio:.2f} | "
        "seconds to compile: {compilation_seconds:.0f}",
    ),
    "shared_machine": (
        "settings",
        "setting: `{name}` | seconds alone: {quiet_s:.2f} | with one busy process: {busy_s:.2f} | "
        "ratio: {busy_by_quiet:.1f}",
    ),
}
"""Of the files that are one table: the key of their rows and their columns."""


def shown(name: str) -> str:
    """Return the Markdown tables of a file."""
    found = read(name)
    if name in COLUMNS:
        rows, titles = COLUMNS[name]
        return columns(found[rows], titles)
    tables: str = globals()[name](found)
    return tables


def grouped(rows: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """Return rows by a key of theirs, in their order."""
    found: dict[Any, list[Any]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def against(means: Mapping[str, Sequence[float]], name: str, gap: str) -> str:
    """Return a mean and, in parentheses, a difference where there is one."""
    return plus_minus(means[name]) + (f" ({plus_minus(means[gap], '+')})" if gap in means else "")


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
    """Return accuracies by seed."""
    summary = found["summary"]
    seeds = [
        (row["seed"], moment, between(row[moment]["accuracy"], row[moment]["ci95"]))
        for row in found["rows"]
        for moment in summary
    ]
    means = [("mean over the seeds", moment, plus_minus(mean)) for moment, mean in summary.items()]
    return pivot("seed", seeds + means)


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
    return table(["loss or option", "held-out accuracy (minus `ppo`)", "`loss_weight`", "`clip_fraction`"], rows)


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
    return pivot("", cells)


def branches(found: Any) -> str:
    """Return rewards of counterfactual credit at equal generated tokens."""
    cells = []
    for row in found["rows"]:
        if "mean" in row:
            gap = between(row["minus MAGRPO"], row["ci95 of it"], "+")
            mean = between(row["mean"], row["ci95"]) + (f" ({gap})" if row["arm"] != "MAGRPO" else "")
            cells.append((row["arm"], f"`{row['experiment']}`", mean))
    return pivot("algorithm", cells)


def pairs(found: Any) -> str:
    """Return held-out numbers of algorithms and their differences to GRPO."""
    return "\n".join(arms(pair, part, ("reward", "success"), "GRPO") for pair, part in found["pairs"].items())


def effects(found: Any) -> str:
    """Return the numbers of each effect's arms and their differences to its first arm."""
    tables = []
    for effect, part in found["effects"].items():
        first = next(iter(part["summary"]))
        tables.append(arms(effect, part, [*part["summary"][first]], first))
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
        title = f"`{environment}`, {part['tokens']:,} tokens"
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


def steps(rows: Iterable[Mapping[str, Any]], peer: str, titles: str = "") -> str:
    """Return the columns of steps, with their processor time and memory as fractions of a peer's."""
    time = f"processor time: {{cpu_ratio:.2f}} ({{ours[cpu_s]:.2f}} s / {{{peer}[cpu_s]:.2f}} s)"
    memory = f"peak memory: {{peak_ratio:.2f}} ({{ours[peak_mib]:.0f}} MiB / {{{peer}[peak_mib]:.0f}} MiB)"
    return columns(rows, f"{titles}{time} | {memory}")


def grpo_step(found: Any) -> str:
    """Return the costs of a GRPO step by size and precision."""
    rows = ({**row, "compiled": "both" if row["compiled"] else "neither"} for row in found["rows"])
    titles = "size: {size} | mrlm in: {precision} | TRL in: {peer_precision} | compiled: {compiled} | "
    return steps(rows, "trl", titles + "micro-batches of mrlm: {micro_batches} | ")


grpo_step_amx = grpo_step


def distillation_step(found: Any) -> str:
    """Return the costs of a step of distillation."""
    return steps([found], "trl")


def team_step(found: Any) -> str:
    """Return the costs of a step of a team by turns."""
    rows = ({**row, "layers": "compiled" if row["compiled"] else "plain"} for row in found["rows"])
    titles = "turns: {turns} | layers of mrlm: {layers} | states in a micro-batch: {batch_states} | "
    return steps(rows, "comlrl", titles)


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
    text = table(["what grows", "in", "", "slopes of time", "slopes of memory", "at the largest"], rows)
    per_token = (
        (title, f"{row['x']:,} tokens", f"{row['memory_mib'] * 1024 / row['x']:.1f}")
        for title, name in {"pass of the learner": "learner", "turn in the engine": "engine"}.items()
        for row in points(found, name, "ours")
        if "reason" not in row
    )
    text += "\n" + pivot("KiB per token", per_token)
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
    quality = {**found["quality"], "change": between(found["quality"]["gain"], found["quality"]["gain_ci95"], "+")}
    titles = (
        "accuracy in float32: {accuracy[float32]:.3f} | in int8: {accuracy[int8]:.3f} | difference: {change} | "
        "mean difference of log-probabilities: {logp_difference:.5f} | mean KL, nats: {kl:.1e}"
    )
    return f"{text}\n{columns([quality], titles)}"


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
    header = ["run", "kills", "resumed runs", "with the weights of the undisturbed run"]
    return table(header, [*rows, ["all", *kills(found)]])


def kills(found: Any) -> tuple[int, int, int]:
    """Return the numbers of kills, of resumed runs, and of those with equal weights."""
    cases = found["cases"].values()
    runs = [len(case["runs"]) for case in cases]
    return sum(case["kills"] for case in cases), sum(runs), sum(case["same"] for case in cases)


def interval_coverage(found: Any) -> str:
    """Return the least coverage of intervals in simulations."""
    least = "least coverage: {least coverage} | with 20 tasks or more: {least coverage of 20 tasks or more}"
    return columns([found["summary"]["now"]], f"settings: {{settings}} | {least}")


def families(found: Any) -> str:
    """Return the numbers of model families that agree with the model's own forward pass."""
    rows = [row for row in found["families"].values() if "error" not in row]
    cells = []
    for name in ("engine", "batch", "session", "learner", "gradient"):
        compared = [row[name] for row in rows if name in row]
        equal = sum(value <= 1e-5 for value in compared)
        cells += [("compared", name, len(compared)), ("difference at most 1e-5", name, equal)]
    return pivot("families", cells)


def batching(found: Any) -> str:
    """Return the engine's ratios by work and size, and the weights of several policies."""
    works = {
        "{policies} policies": found["policies"],
        "{policies} policies with adapters on one base": found["adapters"],
        "unequal lengths": found["lengths"],
    }
    ratios = (
        (work.format_map(row), row["size"], f"{row['ratio']:.2f}") for work, rows in works.items() for row in rows
    )
    weights = (
        (f"{row['policies']} policies", row["size"], "{:.1f} / {:.1f}".format(*row["weights_mib"]))
        for row in found["adapters"]
    )
    title = "MiB of weights with one base / with adapters added to copies"
    return pivot("processor time", ratios) + "\n" + pivot(title, weights)


def rounds(found: Any) -> str:
    """Return the ratios of rounds to lockstep by the seconds of an answer and the piece."""
    formats = ("{environment_seconds}", "{lockstep_seconds:.2f}", "{piece}")
    runs = grouped(found["rows"], lambda row: tuple(text.format_map(row) for text in formats))
    rows = ([*key, ", ".join(f"{row['ratio']:.2f}" for row in same)] for key, same in runs.items())
    return table(["seconds of an answer", "seconds in lockstep", "piece", "ratios of the time"], rows)


def limit(found: Any) -> str:
    """Return the seconds of a GRPO step by phase, those of its parts measured alone, and their ratios to TRL's step."""
    units = ("seconds", "operators_seconds", "products_seconds", "attention_seconds")
    ratios = {
        (row["size"], row["precision"], row["compiled"]): row["cpu_ratio"]
        for row in read("grpo_step_amx")["rows"]
        if (row["precision"], row["compiled"], 1) == (row["peer_precision"], row["peer_compiled"], row["micro_batches"])
    }
    cells = []
    for row in found["rows"]:
        title = f"{row['size']}, {row['precision']}, {'compiled' if row['compiled'] else 'plain'}"
        both = {unit: sum(phase[unit] for phase in row["phases"].values()) for unit in units}
        for phase, seconds in {**row["phases"], "both": both}.items():
            cells.append((title, phase, " / ".join(f"{seconds[unit]:.3f}" for unit in units)))
        if ratio := ratios.get((row["size"], row["precision"], row["compiled"])):
            parts = both["products_seconds"] + both["attention_seconds"]
            shares = {"step": both["seconds"], "operators": both["operators_seconds"], "products and attention": parts}
            for name, seconds in shares.items():
                cells.append((title, f"{name} / TRL's step", f"{ratio * seconds / both['seconds']:.2f}"))
    return pivot("size, precision, layers", cells)


def records(found: Any) -> str:
    """Return the CPU time of an iteration and the size of 1,000 episodes by saved content and by compression."""
    sizes, seconds = found["bytes_per_1000_episodes"], found["cpu_s_per_iteration"]
    costs = (
        (variant, code, f"{size / 1e6:.2f} MB, {seconds[code][variant]:.2f} s")
        for code, variants in sizes.items()
        for variant, size in variants.items()
    )
    of_code = pivot("1,000 episodes; CPU time of an iteration", costs)
    compressed = {name: row for name, row in found["per_1000_episodes"].items() if isinstance(row, dict)}
    rows = {name: {"mb": row["bytes"] / 1e6, **row} for name, row in compressed.items()}
    titles = "compression: {name} | 1,000 episodes: {mb:.2f} MB | to compress: {compress_s:.2f} s"
    return of_code + "\n" + columns(rows, titles)


def start_up(found: Any) -> str:
    """Return the CPU seconds of the quick start up to its first update by phase, with those of other commits."""
    start, libraries = found["quick start"], found["the libraries of a fit alone"]["now"]["cpu seconds"]
    commits = [name for name in start if name != "now" and not name.startswith("now / ")]
    cells = [
        (phase, name, f"{seconds:.2f}")
        for name in (*commits, "now")
        for phase, seconds in start[name]["cpu seconds"].items()
    ]
    ratios = [(name, f"{start[f'now / {name}']['cpu seconds']:.2f}") for name in commits]
    cells += [("now / commit, median of the rounds", *ratio) for ratio in ratios]
    return pivot("CPU seconds", [*cells, ("plain import of the libraries", "now", f"{libraries['in all']:.2f}")])


def conformance_peers(found: Any) -> str:
    """Return the number of values that the peers' own code computed."""
    counts = {name: sum(name in row for row in found["values"].values()) for name in found["versions"]}
    rows = ([f"{name} {found['versions'][name]}", count] for name, count in counts.items())
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
    """Return the pages with measurements that were made before their results were kept in files, by command."""
    rows = []
    for command, same in grouped(found["measurements"], lambda row: row["command"]).items():
        pages = dict.fromkeys(page for row in same for page in row["pages"])
        measured = dict.fromkeys(row["what"] for row in same)
        rows.append([f"`{command}`", "; ".join(measured), ", ".join(f"[{page}]({page})" for page in pages)])
    return table(["command", "measurement", "pages"], rows)
