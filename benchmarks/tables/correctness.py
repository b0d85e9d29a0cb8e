"""Tables of correctness and robustness, and of earlier measurements."""

from __future__ import annotations

from typing import Any

from benchmarks.tables.markdown import columns, pivot, table
from benchmarks.tables.results import grouped

COMPARED = ("engine", "batch", "session", "learner", "gradient")
"""Results that are compared with those of a model's own forward pass."""


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


def attacks(found: Any) -> str:
    """Return attacks and honest programs by level."""
    return columns(
        found["levels"],
        "level: `{name}` | attacks: {attacks} | successful: {through} | harm outside: {harm} | "
        "honest programs with the full score: {honest_with_full_score} of {honest}",
    )


def interval_coverage(found: Any) -> str:
    """Return the least coverage of intervals in simulations."""
    least = "least coverage: {least coverage} | with 20 tasks or more: {least coverage of 20 tasks or more}"
    return columns([found["summary"]["now"]], f"settings: {{settings}} | {least}")


def families(found: Any) -> str:
    """Return the numbers of model families that agree with the model's own forward pass."""
    rows = [row for row in found["families"].values() if "error" not in row]
    cells = []
    for name in COMPARED:
        compared = [row[name] for row in rows if name in row]
        equal = sum(value <= 1e-5 for value in compared)
        cells += [("compared", name, len(compared)), ("difference at most 1e-5", name, equal)]
    return pivot("families", cells)


def conformance_peers(found: Any) -> str:
    """Return the number of values that the peers' own code computed."""
    counts = {name: sum(name in row for row in found["values"].values()) for name in found["versions"]}
    rows = ([f"{name} {found['versions'][name]}", count] for name, count in counts.items())
    return table(["peer", "losses and advantages"], rows)


def earlier(found: Any) -> str:
    """Return the pages with measurements that were made before their results were kept in files, by command."""
    rows = []
    for command, same in grouped(found["measurements"], lambda row: row["command"]).items():
        pages = dict.fromkeys(page for row in same for page in row["pages"])
        measured = dict.fromkeys(row["what"] for row in same)
        rows.append([f"`{command}`", "; ".join(measured), ", ".join(f"[{page}](../{page})" for page in pages)])
    return table(["command", "measurement", "pages"], rows)
