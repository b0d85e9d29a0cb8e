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

VERDICTS = {
    "did not reproduce": "did not reproduce|worse|costs reward",
    "no difference": "no difference",
    "reproduced": "reproduced",
}
"""Words in our cell of a paper's row, by verdict."""

Link = Callable[[str, str], str]
"""Return a link with a text to the section of a file."""


def proven(link: Link) -> str:
    """Return the strongest results, a line each."""
    return table(["result", "measured", "on"], [*_learning(link), *_costs(link), *_correctness(link)])


def _learning(link: Link) -> Iterator[Sequence[str]]:
    quick, small = read("quickstart"), read("pretrained")["rows"]
    ends = [plus_minus(quick["summary"][moment]) for moment in ("before", "after")]
    tiny = f"0.17 million weights, {len(quick['rows'])} seeds"
    yield link("GRPO learns", "quickstart"), f"accuracy {' to '.join(ends)}", f"500 held-out problems, {tiny}"
    accuracies = ([row[moment]["accuracy"] for row in small] for moment in ("before", "after"))
    ends = [plus_minus(mean_and_half(each)) for each in accuracies]
    trained = f"SmolLM2-135M-Instruct, {len(small)} seeds"
    yield link("GRPO trains a pretrained model", "pretrained"), f"accuracy {' to '.join(ends)}", trained
    for name, key, who in (
        ("learning", "config", "Algorithms of one policy"),
        ("team_algorithms", "algorithm", "Algorithms of teams and of turns"),
    ):
        gains = gained(read(name)["rows"], key)
        still = [each for each, gain in gains.items() if not gain]
        rest = f", not {', '.join(still)}" if still else ""
        yield link(f"{who} learn", name), f"{len(gains) - len(still)} of {len(gains)} gain{rest}", tiny
    gaps = [
        f"{plus_minus(pair['summary']['end difference'], '+')} ({name.partition(',')[0]})"
        for name, pair in read("parity")["pairs"].items()
    ]
    last = f"last rewards differ by {', '.join(gaps)}"
    yield link("Curves are those of TRL and CoMLRL", "parity"), last, "random models, 5 seeds"


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
    step = "{steps_ratio:.2f} of TRL's time, {peak_ratio:.2f} of its memory".format_map(gpu["rows"][-1])
    yield link("A GRPO step on a GPU", "gpu_grpo_step"), step, f"0.5B, one run, one {gpu['machine']['gpu']}, no vLLM"
    rows = [row for name in ("grpo_step", "grpo_step_amx") for row in read(name)["rows"]]
    on = f"{len(rows)} settings on two processors, random models to 135 million weights"
    yield link("A GRPO step on a CPU", "grpo_step"), costs(rows, "TRL"), on
    rows = read("team_step")["rows"]
    yield link("A MAGRPO step on a CPU", "team_step"), costs(rows, "CoMLRL"), f"{len(rows)} settings, random models"
    times = f"{span(read('rollout')['rows'], 'engine_ratio')} times as many tokens per second as `generate`"
    yield link("Generation", "rollout"), times, "random models, CPU"
    on_gpu = read("gpu_rollout")
    times = f"{span(on_gpu['rows'], 'engine_ratio')} times as many tokens per second as `generate`"
    yield link("Generation on a GPU", "gpu_rollout"), times, f"one run each, one {on_gpu['machine']['gpu']}"


def costs(rows: Sequence[Mapping[str, Any]], peer: str) -> str:
    """Return the least and the largest costs as fractions of a peer's."""
    return f"{span(rows, 'cpu_ratio')} of {peer}'s CPU time, {span(rows, 'peak_ratio')} of its memory"


def span(rows: Iterable[Mapping[str, float]], key: str) -> str:
    """Return the least and the largest value.

    >>> span([{"cost": 0.5}, {"cost": 0.251}, {"cost": 2}], "cost")
    '0.25 to 2.00'
    """
    values = [row[key] for row in rows]
    return f"{min(values):.2f} to {max(values):.2f}"


def _correctness(link: Link) -> Iterator[Sequence[str]]:
    killed, resumed, same = kills(read("kill_resume"))
    equal = f"{same} of {resumed} resumed runs end with the weights of an undisturbed run"
    yield link("Kills change nothing", "kill_resume"), equal, f"{killed} `kill -9` at random moments, CPU"
    levels = read("attacks")["levels"]
    through, tried = (sum(row[key] for row in levels.values()) for key in ("through", "attacks"))
    names = " and ".join(f"`{level}`" for level in levels)
    yield link("The sandbox holds", "attacks"), f"{through} of {tried} attacks succeed", f"levels {names}"
    peers = {peer: agreeing(peer) for peer in ("TRL", "verl", "CoMLRL")}
    equal = ", ".join(f"{equal} of {both} ({peer})" for peer, (equal, both) in peers.items())
    yield link("Losses and advantages equal the peers'", "conformance_peers"), equal, "their own code, within 1e-6"
    found = [row for row in read("families")["families"].values() if "error" not in row]
    close = sum(max(row[name] for name in COMPARED if name in row) <= 1e-5 for row in found)
    yield (
        link("Model families", "families"),
        f"{close} of {len(found)} generate and learn as in transformers",
        ("random weights, within 1e-5"),
    )


def open_questions(link: Link) -> str:
    """Return the claims that no result supports, or only some, a line each."""
    budget, student = read("budget")["summary"], read("team_distillation")["rows"][-1]["all seeds"]
    teams = [f"{plus_minus(budget[f'{name}, after']['minus trained'], '+')} ({name})" for name in ("MAPoRL", "MAGRPO")]
    environments = read("agentbench")["environments"]
    arms = {
        f"{arm} in `{name}`": mean > half
        for name, part in environments.items()
        for arm, (mean, half) in ((arm, row["success gained"]) for arm, row in part["summary"].items())
    }
    rise = [arm for arm, gain in arms.items() if gain]
    steps = read("team_step")["rows"]
    less = sum(row["peak_ratio"] < 1 for row in steps)
    old = len(read("earlier")["measurements"])
    covered = read("interval_coverage")["summary"]["now"]["least coverage"]
    rows = [
        ["Learning above 135 million weights; several GPUs", "not measured"],
        [
            link("A team beats the majority of one policy", "budget"),
            f"it does not at equal tokens: {', '.join(teams)}",
        ],
        [
            link("A student reaches its team", "team_distillation"),
            f"it does not: {between(**student['student - team'], sign='+')}",
        ],
        [
            link("RL raises the success in tasks of AgentBench", "agentbench"),
            f"in {len(rise)} of {len(arms)}: {'; '.join(rise)}",
        ],
        [link("A MAGRPO step takes less memory than CoMLRL's", "team_step"), f"in {less} of {len(steps)} settings"],
        [
            link("Faster than vLLM", "vllm_rollout"),
            f"{span(read('vllm_rollout')['rows'], 'ratio')} of its seconds on a CPU; not measured on a GPU",
        ],
        [
            link("Intervals of few tasks cover 95 %", "interval_coverage"),
            f"{covered:.3f} in the worst setting with fewer than 20",
        ],
        ["The sandbox holds at `limits`", "[many attacks succeed](../environments/sandbox.md#levels)"],
        [link("Earlier measurements", "earlier"), f"{old} have neither date nor machine"],
    ]
    return table(["question", "measured"], rows)


def papers() -> str:
    """Return the papers by the verdict of our runs on their claims."""
    found: dict[str, list[str]] = {}
    rows = re.findall(r"^\| (\[[^\]]+\]\([^)]+\)).* \| ([^|]*)\|$", PAPERS.read_text(encoding="utf-8"), re.MULTILINE)
    for name, ours in rows:
        verdict = next((each for each, words in VERDICTS.items() if re.search(rf"\b({words})\b", ours)), "")
        found.setdefault(verdict, []).append(name)
    lines = [[verdict, len(found[verdict]), ", ".join(found[verdict])] for verdict in VERDICTS]
    return table(["our runs", "papers", ""], [*lines, ["no verdict", len(found[""]), "all others"]])
