"""The README's table of measured numbers, drawn from ``benchmarks/results/*.json``."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.tables import correctness
from benchmarks.tables.markdown import table
from benchmarks.tables.results import read

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CONFORMANCE = ROOT / "docs" / "results" / "conformance.md"
MARKS = ("<!-- numbers: make results -->\n", "<!-- end of numbers -->\n")


def numbers() -> str:
    """Return the README's measured numbers beside the peers', and its curve."""
    files = ("gpu_grpo_step", "grpo_step_amx", "team_step", "kill_resume", "attacks")
    on_gpu, grpo, team, killed, attacked = (read(name) for name in files)
    turn = [row for row in team["rows"] if row["size"] == "s" and not row["compiled"]][-1]
    shown_step = ("s", "bf16-mixed", False)
    step = next(row for row in grpo["rows"] if (row["size"], row["precision"], row["compiled"]) == shown_step)
    count, runs, same = correctness.kills(killed)
    most = max(len(run["kills"]) for case in killed["cases"].values() for run in case["runs"])
    levels = attacked["levels"]
    tried = " and ".join(f"{row['attacks']} at `{level}`" for level, row in levels.items())
    costs = "**{cpu_ratio:.2f}** of its CPU time, **{peak_ratio:.2f}** of its peak memory"
    gpu_step = on_gpu["rows"][-1]
    version, agree, both = read("conformance_peers")["versions"]["verl"], *agreeing("verl")
    trained = read("pretrained")["rows"][0]
    rows = {
        "gpu_grpo_step": [
            f"a GRPO step of a {gpu_step['size'].upper()} model in bf16 on one {on_gpu['machine']['gpu']} against TRL "
            f"{on_gpu['versions']['trl']} without vLLM",
            "**{steps_ratio:.2f}** of its time, **{peak_ratio:.2f}** of its peak memory".format_map(gpu_step),
        ],
        "grpo_step_amx": [
            f"a GRPO step of a small model in bf16 on a CPU against TRL {grpo['versions']['trl']}",
            costs.format_map(step),
        ],
        "team_step": [
            f"a MAGRPO step of two agents and {turn['turns']} turns on a CPU against CoMLRL "
            f"{team['versions']['comlrl']}",
            costs.format_map(turn),
        ],
        "pretrained": [
            f"{len(trained['rewards'])} iterations of GRPO on SmolLM2-135M-Instruct, {trained['cpu_s'] / 60:.0f} CPU "
            "minutes: accuracy on 500 held-out problems",
            f"from {trained['before']['accuracy']:.2f} to **{trained['after']['accuracy']:.2f}**",
        ],
        "kill_resume": [
            f"{runs} runs of SFT, GRPO, PPO, DPO and MAGRPO, resumed after {count} `kill -9` at random moments, up to "
            f"{most} in a run",
            f"**{same} of {runs}** end with the weights of an uninterrupted run, bit for bit",
        ],
        "attacks": [
            f"attacks of hostile programs on the sandbox: {tried}",
            f"**{sum(row['through'] for row in levels.values())}** succeed",
        ],
        "conformance_peers": [
            f"losses and advantages against the code of verl {version}",
            f"**{agree} of {both}** are equal within 1e-6",
        ],
    }
    shown = [[*cells, f"[{name}.json](benchmarks/results/{name}.json)"] for name, cells in rows.items()]
    curve = read("quickstart")
    begin, end = (curve["summary"][moment][0] for moment in ("before", "after"))
    return (
        f"{table(['measured', 'result of mrlm', 'file'], shown)}\n"
        "![Reward of the quick start by iteration](docs/images/results/quickstart.svg)\n\n"
        f"Mean reward in the quick start over {len(curve['rows'])} seeds with its 95 % interval. The accuracy on 500 "
        f"held-out problems\nrises from {begin:.2f} to {end:.2f} "
        "([quickstart.json](benchmarks/results/quickstart.json)).\n"
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
