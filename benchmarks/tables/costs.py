"""Tables of times and memory."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.log_slopes import LEAST, slopes
from benchmarks.tables.markdown import between, columns, pivot, table
from benchmarks.tables.results import grouped, read


def steps(rows: Iterable[Mapping[str, Any]], peer: str, titles: str = "") -> str:
    """Return the columns of steps, with their CPU time and memory as fractions of a peer's."""
    time = f"CPU time: {{cpu_ratio:.2f}} ({{ours[cpu_s]:.2f}} s / {{{peer}[cpu_s]:.2f}} s)"
    memory = f"peak memory: {{peak_ratio:.2f}} ({{ours[peak_mib]:.0f}} MiB / {{{peer}[peak_mib]:.0f}} MiB)"
    return columns(rows, f"{titles}{time} | {memory}")


def grpo_step(found: Any) -> str:
    """Return the costs of a GRPO step by size and precision."""
    rows = ({**row, "compiled": "both" if row["compiled"] else "neither"} for row in found["rows"])
    titles = "size: {size} | mrlm in: {precision} | TRL in: {peer_precision} | compiled: {compiled} | "
    return steps(rows, "trl", titles + "micro-batches of mrlm: {micro_batches} | ")


def distillation_step(found: Any) -> str:
    """Return the costs of a step of distillation."""
    return steps([found], "trl")


def team_step(found: Any) -> str:
    """Return the costs of a step of a team by turns."""
    rows = ({**row, "layers": "compiled" if row["compiled"] else "plain"} for row in found["rows"])
    titles = "size: {size} | turns: {turns} | layers of mrlm: {layers} | states in a micro-batch: {batch_states} | "
    return steps(rows, "comlrl", titles)


PARTS = ("seconds", "operators_seconds", "products_seconds", "attention_seconds")
"""A step's seconds, and those of its parts measured alone."""
SIDES = {"ours": "mrlm", "trl": "TRL", "comlrl": "CoMLRL"}


def adapters_step(found: Any) -> str:
    """Return the costs of a step with adapters by turns."""
    rows = ({**row, "ours": row["adapters"]} for row in found["rows"])
    return steps(rows, "models", "turns: {turns} | ")


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


def rollout(found: Any) -> str:
    """Return tokens per second beside those of ``generate``."""
    engine = "mrlm: {engine_tokens_per_second:,.0f} | mrlm / generate: {engine_ratio:.2f}"
    return columns(found["rows"], f"size: {{size}} | generate: {{generate_tokens_per_second:,.0f}} | {engine}")


def rollout_compiled(found: Any) -> str:
    """Return tokens per second with compiled layers."""
    return columns(
        found["rows"],
        "size: {size} | precision: {dtype} | plain: {engine_tokens_per_second:,.0f} | "
        "compiled: {compiled_tokens_per_second:,.0f} | "
        "compiled / plain, CPU time: {compiled_cpu_of_engine:.2f} | "
        "compiled / `generate`, tokens per second: {compiled_ratio:.2f} | "
        "seconds to compile: {compilation_seconds:.0f}",
    )


def gpu_rollout(found: Any) -> str:
    """Return tokens per second and memory on a GPU, by model and way to generate."""
    ways = {
        "engine": "mrlm",
        "eager": "mrlm without CUDA graphs",
        "generate": "`generate`",
        "continuous": "continuous batching",
    }
    cells = [
        (
            "{size}: {prompts} x {samples}, {prompt_tokens} + {new_tokens} tokens".format_map(row),
            title,
            f"{row[f'{way}_tokens_per_second']:,.0f}, {row[f'{way}_peak_gib']:.1f} GiB",
        )
        for row in found["rows"]
        for way, title in ways.items()
        if f"{way}_peak_gib" in row
    ]
    return pivot("tokens per second, peak memory", cells)


def gpu_grpo_step(found: Any) -> str:
    """Return the costs of a GRPO step on a GPU."""
    titles = "model: {size}, {prompts} x {group}, {prompt_tokens} + {new_tokens} tokens | mrlm in: {precision} | "
    titles += "TRL's weights in: {peer_dtype} | "
    time = "time: {steps_ratio:.2f} ({ours[steps_s]:.2f} s / {trl[steps_s]:.2f} s)"
    return columns(
        found["rows"],
        f"{titles}{time} | memory: {{peak_ratio:.2f}} ({{ours[peak_mib]:.0f}} MiB / {{trl[peak_mib]:.0f}} MiB)",
    )


def shared_machine(found: Any) -> str:
    """Return the seconds of a step alone and beside a busy process."""
    return columns(
        found["settings"],
        "setting: `{name}` | seconds alone: {quiet_s:.2f} | with one busy process: {busy_s:.2f} | "
        "ratio: {busy_by_quiet:.1f}",
    )


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
    return pivot("CPU time", ratios) + "\n" + pivot(title, weights)


def vllm_rollout(found: Any) -> str:
    """Return the seconds of both engines and their ratio by size and precision."""
    rows = (
        [row["size"], row["precision"], f"{row['ours_s']:.2f}", f"{row['vllm_s']:.2f}", f"{row['ratio']:.2f}"]
        for row in found["rows"]
    )
    return table(["size", "precision", "seconds in process", "seconds by vLLM", "ratio"], rows)


def rounds(found: Any) -> str:
    """Return the ratios of rounds to lockstep by the seconds of an answer and the tokens of a chunk."""
    formats = ("{environment_seconds}", "{lockstep_seconds:.2f}", "{chunk_tokens}")
    runs = grouped(found["rows"], lambda row: tuple(text.format_map(row) for text in formats))
    rows = ([*key, ", ".join(f"{row['ratio']:.2f}" for row in same)] for key, same in runs.items())
    return table(["seconds of an answer", "seconds in lockstep", "tokens of a chunk", "ratios of the time"], rows)


def limit(found: Any, steps: str) -> str:
    """Return the seconds of a GRPO step, those of its parts measured alone, and their ratios to TRL's step.

    Args:
        found: the seconds.
        steps: the file with the steps of both sides.
    """
    ratios = {
        (row["size"], row["precision"], row["compiled"]): row["cpu_ratio"]
        for row in read(steps)["rows"]
        if (row["precision"], row["compiled"], 1) == (row["peer_precision"], row["peer_compiled"], row["micro_batches"])
    }
    rows = (
        (f"{row['size']}, {row['precision']}", row, ratios.get((row["size"], row["precision"], row["compiled"])))
        for row in found["rows"]
    )
    return _limits("size, precision, layers", rows, "TRL", "products and attention")


def limit_team(found: Any) -> str:
    """Return the seconds of a team's step, those of its parts, and their ratios to CoMLRL's step."""
    steps = [row for row in read("team_step")["rows"] if row["size"] == "s"]
    ratios = {(row["turns"], row["compiled"]): row["cpu_ratio"] for row in steps}
    rows = ((f"{row['turns']}", row, ratios[row["turns"], row["compiled"]]) for row in found["rows"])
    return _limits("turns, layers", rows, "CoMLRL", "products")


def _limits(head: str, rows: Iterable[tuple[str, Any, float | None]], peer: str, alone: str) -> str:
    """Return a table of steps; the rows come with their names and their ratios to the peer's step."""
    cells = []
    for name, row, ratio in rows:
        title = f"{name}, {'compiled' if row['compiled'] else 'plain'}"
        units = [unit for unit in PARTS if unit in row["phases"]["update"]]
        both = {unit: sum(phase[unit] for phase in row["phases"].values()) for unit in units}
        step, operators, *parts = both.values()
        shown = {"step": step, "operators": operators, alone: sum(parts)}
        cells += [(title, f"{part}, s", f"{seconds:.3f}") for part, seconds in shown.items()]
        if ratio is not None:
            for part, seconds in shown.items():
                cells.append((title, f"{part} / {peer}'s step", f"{ratio * seconds / step:.2f}"))
    return pivot(head, cells)


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
