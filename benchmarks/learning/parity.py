"""Compare learning curves with TRL's GRPO and CoMLRL's trainers on the same models, prompts, seeds and rewards.

    python benchmarks/learning/parity.py [--pairs GRPO MAGRPO ...] [--seeds 0 1 2 3 4] [--steps 60] [--json FILE]
        [--trl-python .venv-peers/bin/python] [--comlrl-python .venv-peers-multi/bin/python]

The work is that of benchmarks/speed/grpo_step.py and team_step.py: the reward is the fraction of even words. Each seed
makes the random model that both sides train. ``curve`` is the mean reward of each tenth of a run. Compared are the mean
reward of the last tenth and that of the whole run: differences are paired by seed, with 95 % intervals (Student's t).
``--json`` keeps the pairs that the file has.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from seeds import ResultsFile, parser_of, provenance, rounded

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks/speed"))
from grpo_step import of_child  # noqa: E402
from random_models import make_model  # noqa: E402

PAIRS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "GRPO": ("grpo_step", "trl", ()),
    **{
        f"{name}, {turns} turn{'s' * (turns > 1)}": (
            "team_step",
            "comlrl",
            ("--algorithm", name.lower(), "--turns", str(turns)),
        )
        for name, turns in (("MAGRPO", 1), ("MAGRPO", 2), ("MARLOO", 1), ("IPPO", 1))
    },
}
"""Script, peer and options."""
SIZE, LEARNING_RATE, POINTS = "xs", 2e-3, 10


def curve(pair: str, python: str, side: str, models: Path, seed: int, steps: int) -> list[float]:
    """Return the mean reward of each tenth of a run."""
    script, _, more = PAIRS[pair]
    command = [python, str(ROOT / f"benchmarks/speed/{script}.py"), "--side", side, "--size", SIZE, "--threads", "1"]
    command += ["--folder", str(models / "policy"), "--steps", str(steps), "--seed", str(seed)]
    command += ["--learning-rate", str(LEARNING_RATE), *more]
    if script == "team_step":
        command += ["--critic", str(models / "critic")]
    rewards = of_child(command, f"{side} in {pair}", 1, WANDB_MODE="disabled")["rewards"]
    ends = [round(len(rewards) * point / POINTS) for point in range(POINTS + 1)]
    return [round(statistics.fmean(rewards[start:end]), 4) for start, end in itertools.pairwise(ends)]


def summary(rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return mean and half width of each side's last tenth and whole run, and of the paired differences."""
    found: dict[str, list[float]] = {}
    for name, of in {"end": lambda one: one[-1], "run": statistics.fmean}.items():
        sides = {side: [of(row[side]) for row in rows] for side in ("ours", "peer")}
        sides["difference"] = [own - peer for own, peer in zip(*sides.values(), strict=True)]
        found |= {f"{name} {side}": rounded(values) for side, values in sides.items()}
    return found


def main() -> None:
    """Run both sides of every pair and print a row for each seed."""
    parser = parser_of(__doc__, pairs=PAIRS)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--trl-python", default=".venv-peers/bin/python")
    parser.add_argument("--comlrl-python", default=".venv-peers-multi/bin/python")
    options = parser.parse_args()
    pythons = {"trl": options.trl_python, "comlrl": options.comlrl_python}
    file = ResultsFile(options.json)
    kept = file.kept.get("pairs", {})
    written = {**provenance("trl", options.trl_python), "steps": options.steps, "pairs": kept}
    written["versions"] |= provenance("comlrl", options.comlrl_python)["versions"]
    for pair in options.pairs:
        peer, rows = PAIRS[pair][1], []
        for seed in options.seeds:
            models = Path(tempfile.mkdtemp())
            make_model(models / "policy", SIZE, seed=seed)
            make_model(models / "critic", SIZE, seed=seed, knows_eos=True)
            row: dict[str, Any] = {"seed": seed}
            for name, python, side in (("ours", sys.executable, "ours"), ("peer", pythons[peer], peer)):
                row[name] = curve(pair, python, side, models, seed, options.steps)
            rows.append(row)
            print(json.dumps({"pair": pair, **row}), flush=True)
        kept[pair] = {"peer": peer, "summary": summary(rows), "rows": rows}
        print(pair, json.dumps(kept[pair]["summary"]), flush=True)
        file.write(written)


if __name__ == "__main__":
    main()
