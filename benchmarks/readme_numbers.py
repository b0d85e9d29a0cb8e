"""The README's table of measured numbers, drawn from ``benchmarks/results/*.json``."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from benchmarks.tables.markdown import table
from benchmarks.tables.results import read

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CONFORMANCE = ROOT / "docs" / "results" / "conformance.md"
MARKS = ("<!-- numbers: make results -->\n", "<!-- end of numbers -->\n")


def numbers() -> str:
    """Return the README's measured numbers beside the peers', and its curve."""
    on_gpu, grpo, team, attacked = (read(name) for name in ("gpu_grpo_step", "grpo_step_amx", "team_step", "attacks"))
    turn = [row for row in team["rows"] if row["size"] == "s" and not row["compiled"]][-1]
    shown_step = ("s", "bf16-mixed", False)
    step = next(row for row in grpo["rows"] if (row["size"], row["precision"], row["compiled"]) == shown_step)
    levels = attacked["levels"]
    tried = " and ".join(f"{row['attacks']} at `{level}`" for level, row in levels.items())
    costs = "**{cpu_ratio:.2f}** of the CPU time, **{peak_ratio:.2f}** of the peak memory"
    gpu_step = on_gpu["rows"][-1]
    version, agree, both = read("conformance_peers")["versions"]["verl"], *agreeing("verl")
    trained = read("pretrained")["rows"]
    before, after = (statistics.fmean(row[moment]["accuracy"] for row in trained) for moment in ("before", "after"))
    minutes = statistics.median(row["cpu_s"] for row in trained) / 60
    team_runs = read("pretrained_team")["rows"]
    joint = [statistics.fmean(row[moment]["reward"] for row in team_runs) for moment in ("before", "after")]
    team_minutes = statistics.median(row["cpu_s"] for row in team_runs) / 60
    rows = {
        f"[GRPO step](benchmarks/results/gpu_grpo_step.json), {gpu_step['size'].upper()} model, bf16, one "
        f"{on_gpu['machine']['gpu']}, against TRL {on_gpu['versions']['trl']} without vLLM": (
            "**{steps_ratio:.2f}** of the time, **{peak_ratio:.2f}** of the peak memory".format_map(gpu_step)
        ),
        "[GRPO step](benchmarks/results/grpo_step_amx.json), small model, bf16, CPU, against TRL "
        f"{grpo['versions']['trl']}": costs.format_map(step),
        f"[MAGRPO step](benchmarks/results/team_step.json), two agents, {turn['turns']} turns, CPU, against CoMLRL "
        f"{team['versions']['comlrl']}": costs.format_map(turn),
        "[GRPO on SmolLM2-135M-Instruct](benchmarks/results/pretrained.json), "
        f"{len(trained[0]['rewards'])} iterations, {minutes:.0f} CPU minutes, {len(trained)} seeds": (
            f"accuracy on 500 held-out problems from {before:.2f} to **{after:.2f}**"
        ),
        "[MAGRPO on two SmolLM2-135M-Instruct](benchmarks/results/pretrained_team.json), "
        f"{len(team_runs[0]['rewards'])} iterations, {team_minutes:.0f} CPU minutes, {len(team_runs)} seeds": (
            f"joint reward, of form alone, on held-out posts from {joint[0]:.2f} to **{joint[1]:.2f}** of 2.98"
        ),
        f"[Losses and advantages](benchmarks/results/conformance_peers.json) against the code of verl {version}": (
            f"**{agree} of {both}** equal within 1e-6"
        ),
        f"[Attacks on the sandbox](benchmarks/results/attacks.json), {tried}": (
            f"**{sum(row['through'] for row in levels.values())}** succeed"
        ),
    }
    curve = read("quickstart")
    begin, end = (curve["summary"][moment][0] for moment in ("before", "after"))
    return (
        f"{table(['measured', 'result of mrlm'], rows.items())}\n"
        "![Reward of the quick start by iteration](docs/images/results/quickstart.svg)\n\n"
        f"Mean reward of the quick start, {len(curve['rows'])} seeds, 95 % interval; held-out accuracy rises from "
        f"{begin:.2f} to {end:.2f} ([file](benchmarks/results/quickstart.json)).\n"
    )


def agreeing(peer: str) -> tuple[int, int]:
    """Return the numbers of formulas with the values of a peer's code on the page of conformance, and of all such."""
    lines = CONFORMANCE.read_text(encoding="utf-8").splitlines()
    peers = [line.rpartition(" | ")[2] for line in lines if re.match(rf"\|.*[|,] {peer}\b", line)]
    return sum("(" not in names for names in peers), len(peers)


def with_numbers(readme: str) -> str:
    """Return the README with the table of the present files."""
    begin, end = map(re.escape, MARKS)
    return re.sub(f"(?<={begin}).*?(?={end})", lambda _: f"\n{numbers()}\n", readme, flags=re.DOTALL)
