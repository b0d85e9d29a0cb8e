"""The overview of the results: the proven ones, open questions, and papers by their claims."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.few_values import mean_and_half
from benchmarks.readme_numbers import agreeing
from benchmarks.tables.correctness import COMPARED, kills
from benchmarks.tables.markdown import between, plus_minus, table
from benchmarks.tables.results import grouped, read

PAPERS = Path(__file__).parents[2] / "docs" / "results" / "papers.md"

VERDICTS = ("did not reproduce", "no difference", "reproduced")
"""Words in our cell of a paper's row."""

TINY = "0.17 million weights"

Link = Callable[[str, str], str]
"""Return a link with a text to the section of a file."""


def proven(link: Link) -> str:
    """Return the strongest results, a line each."""
    return table(["result", "measured", "on"], [*_learning(link), *_costs(link), *_correctness(link)])


def _learning(link: Link) -> Iterator[Sequence[str]]:
    for title, name, model in (
        ("GRPO learns", "quickstart", TINY),
        ("GRPO trains a pretrained model", "pretrained", "SmolLM2-135M-Instruct"),
    ):
        rows = read(name)["rows"]
        ends = (mean_and_half([row[moment]["accuracy"] for row in rows]) for moment in ("before", "after"))
        on = f"500 held-out problems, {model}, {len(rows)} seeds"
        yield link(title, name), f"accuracy {' to '.join(map(plus_minus, ends))}", on
    team = read("pretrained_team")["rows"]
    ends = (mean_and_half([row[moment]["reward"] for row in team]) for moment in ("before", "after"))
    on = f"64 held-out posts, two SmolLM2-135M-Instruct, {len(team)} seeds"
    rewards = f"reward {' to '.join(map(plus_minus, ends))} of at most 2.98"
    yield link("MAGRPO trains a pretrained team", "pretrained_team"), rewards, on
    for title, name, key in (
        ("Algorithms of one policy learn", "learning", "config"),
        ("Algorithms of teams and of turns learn", "team_algorithms", "algorithm"),
    ):
        rows = read(name)["rows"]
        gains = gained(rows, key)
        still = ", ".join(each for each, gain in gains.items() if not gain)
        measured = f"{sum(gains.values())} of {len(gains)} gain{still and f', not {still}'}"
        yield link(title, name), measured, f"{TINY}, {len({row['seed'] for row in rows})} seeds"
    pairs = read("parity")["pairs"]
    gaps = [f"{plus_minus(pair['summary']['end difference'], '+')} ({name})" for name, pair in pairs.items()]
    on = f"random models, {min(len(pair['rows']) for pair in pairs.values())} seeds"
    measured = f"last rewards differ by {', '.join(gaps)}"
    yield link("Curves differ little from TRL's and CoMLRL's", "parity"), measured, on


def gained(rows: Iterable[Mapping[str, Any]], key: str) -> dict[str, bool]:
    """Return by name whether the interval of the gains over the seeds is above 0.

    >>> runs = [{"name": "a", "before": 0.0, "after": gain} for gain in (0.5, 0.51)]
    >>> gained([*runs, {**runs[0], "name": "b"}, {**runs[1], "name": "b", "after": 0.0}], "name")
    {'a': True, 'b': False}
    """
    runs = grouped(rows, lambda row: row[key])
    gains = {name: mean_and_half([run["after"] - run["before"] for run in each]) for name, each in runs.items()}
    return {name: mean > half for name, (mean, half) in gains.items()}


def _costs(link: Link) -> Iterator[Sequence[str]]:
    gpu = read("gpu_grpo_step")
    step = gpu["rows"][-1]
    measured = "{steps_ratio:.2f} of TRL's time, {peak_ratio:.2f} of its memory".format_map(step)
    on = f"{step['size'].upper()}, rounds: {step['rounds']}, {gpu['machine']['gpu']}, TRL without vLLM"
    yield link("A GRPO step on a GPU", "gpu_grpo_step"), measured, on
    for title, peer, files in (
        ("A GRPO step on a CPU", "TRL", ("grpo_step", "grpo_step_amx")),
        ("A MAGRPO step on a CPU", "CoMLRL", ("team_step",)),
    ):
        rows = [row for name in files for row in read(name)["rows"]]
        measured = f"{span(rows, 'cpu_ratio')} of {peer}'s CPU time, {span(rows, 'peak_ratio')} of its memory"
        on = f"{len(rows)} settings, rounds: {span(rows, 'rounds', '.0f')}, random models"
        yield link(title, files[0]), measured, on
    for title, name in (("Generation on a CPU", "rollout"), ("Generation on a GPU", "gpu_rollout")):
        found = read(name)
        measured = f"{span(found['rows'], 'engine_ratio')} times as many tokens per second as `generate`"
        on = f"{len(found['rows'])} settings, random models"
        yield link(title, name), measured, ", ".join([on, *filter(None, [found["machine"].get("gpu")])])


def span(rows: Iterable[Mapping[str, float]], key: str, form: str = ".2f") -> str:
    """Return the least and the largest value.

    >>> span([{"cost": 0.5}, {"cost": 0.251}, {"cost": 2}], "cost")
    '0.25 to 2.00'
    """
    values = [row[key] for row in rows]
    return f"{min(values):{form}} to {max(values):{form}}"


def _correctness(link: Link) -> Iterator[Sequence[str]]:
    killed, resumed, same = kills(read("kill_resume"))
    equal = f"{same} of {resumed} resumed runs end with the weights of an undisturbed run"
    yield link("Kills change nothing", "kill_resume"), equal, f"{killed} `kill -9` at random moments, CPU"
    levels = read("attacks")["levels"]
    through, tried = (sum(row[key] for row in levels.values()) for key in ("through", "attacks"))
    on = f"levels {' and '.join(f'`{level}`' for level in levels)}"
    yield link("The sandbox holds", "attacks"), f"{through} of {tried} attacks succeed", on
    equal = ", ".join("{} of {} ({})".format(*agreeing(peer), peer) for peer in ("TRL", "verl", "CoMLRL"))
    yield link("Losses and advantages equal the peers'", "conformance_peers"), equal, "their own code, within 1e-6"
    families = read("families")
    found = [row for row in families["families"].values() if "error" not in row]
    close = sum(max(row[name] for name in COMPARED if name in row) <= 1e-5 for row in found)
    others = len(families["families"]) + len(families["not_built"]) - len(found)
    measured = f"{close} of {len(found)} generate and learn as in transformers; {others} others did not run"
    yield link("Model families", "families"), measured, "random weights, within 1e-5"


def open_questions(link: Link) -> str:
    """Return the claims that no result supports, or only some, a line each."""
    budget, student = read("budget")["summary"], read("team_distillation")["rows"][-1]["all seeds"]
    teams = [f"{plus_minus(budget[f'{name}, after']['minus trained'], '+')} ({name})" for name in ("MAPoRL", "MAGRPO")]
    rises = {
        name: [mean > half for mean, half in (row["success gained"] for row in part["summary"].values())]
        for name, part in read("agentbench")["environments"].items()
    }
    tasks = ", ".join(f"{sum(rise)} of {len(rise)} (`{name}`)" for name, rise in rises.items())
    steps, vllm = read("team_step")["rows"], read("vllm_rollout")["rows"]
    covered = read("interval_coverage")["summary"]["now"]
    rows = {
        "Learning above 135 million weights; several GPUs": "not measured",
        link("A pretrained team writes summaries", "pretrained_team"): "no: its texts satisfy the reward's rules alone",
        link("A team beats the majority of one policy", "budget"): f"not at equal tokens: {', '.join(teams)}",
        link(
            "A student reaches its team", "team_distillation"
        ): f"no: {between(**student['student - team'], sign='+')}",
        link("Algorithms raise the success in tasks of AgentBench", "agentbench"): tasks,
        link("A MAGRPO step takes less memory than CoMLRL's", "team_step"): (
            f"in {sum(row['peak_ratio'] < 1 for row in steps)} of {len(steps)} settings"
        ),
        link("Generation faster than vLLM's", "vllm_rollout"): (
            f"{span(vllm, 'ratio')} of its seconds on a CPU; not measured on a GPU"
        ),
        link("Intervals cover 95 %", "interval_coverage"): (
            "at least {least coverage:.3f}; with 20 tasks or more {least coverage of 20 tasks or more:.3f}".format_map(
                covered
            )
        ),
        "The sandbox holds at `limits`": "[many attacks succeed](../environments/sandbox.md#levels)",
        link("Earlier measurements", "earlier"): (
            f"{len(read('earlier')['measurements'])} have neither date nor machine"
        ),
    }
    return table(["question", "measured"], rows.items())


def papers() -> str:
    """Return the papers by the verdict of our runs on their claims."""
    found: dict[str, list[str]] = {verdict: [] for verdict in (*VERDICTS, "")}
    rows = re.findall(r"^\| (\[[^\]]+\]\([^)]+\)).* \| ([^|]*)\|$", PAPERS.read_text(encoding="utf-8"), re.MULTILINE)
    for name, ours in rows:
        found[next((verdict for verdict in VERDICTS if verdict in ours), "")].append(name)
    lines = [[verdict, len(found[verdict]), ", ".join(found[verdict])] for verdict in VERDICTS]
    return table(["our runs", "papers", ""], [*lines, ["no verdict", len(found[""]), "all others"]])
