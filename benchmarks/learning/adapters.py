"""Train the tiny model on environments of other libraries, for several seeds.

    python benchmarks/learning/adapters.py [--configs gymnasium pettingzoo textarena reasoning_gym]
        [--seeds 0 1 2] [--json out.json]

Each configuration of configs/tasks/adapters runs once per seed. Printed are means over the first and the last five
rollouts, of 128 episodes each, for self-play the scores against the initial policy before and after, and for
reasoning_gym, which needs the policy of its recipe in runs/tiny-sums, the held-out accuracy, with 95 % intervals.
"""

from __future__ import annotations

import csv
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from seeds import MRLM, ResultsFile, call, parser_of, provenance

CONFIGS = ("gymnasium", "pettingzoo", "textarena", "reasoning_gym")
MEASURES = ("reward", "success")
ENDS = 5
"""Rollouts at the beginning and the end."""


def learned(config: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train once and return what changed."""
    path = f"configs/tasks/adapters/{config}.yaml"
    options = ("--seed_everything", str(seed), "--trainer.default_root_dir", str(folder))
    call(MRLM, "fit", "--config", path, *options)
    with (folder / "metrics.csv").open() as file:
        rollouts = [row for row in csv.DictReader(file) if row["rollout/reward"]]
    row: dict[str, Any] = {"config": config, "seed": seed}
    for measure in MEASURES:
        values = [float(rollout[f"rollout/{measure}"]) for rollout in rollouts if rollout.get(f"rollout/{measure}")]
        if values:
            row[measure] = [round(sum(part) / len(part), 3) for part in (values[:ENDS], values[-ENDS:])]
    scores = folder / "self_play.json"
    if scores.exists():
        games = json.loads(scores.read_text())["anchors"]
        row["score"] = [[round(games[end][key], 3) for key in ("score", "low", "high")] for end in (0, -1)]
    for moment in ("before", "after"):
        if (report := folder / f"evaluation_{moment}.json").exists():
            found = json.loads(report.read_text())[config]
            row[moment] = [round(value, 3) for value in (found["accuracy"], *found["accuracy_ci95"])]
    return row


def main() -> None:
    """Train every configuration with every seed and print a row each."""
    options = parser_of(__doc__, seeds=3, configs=CONFIGS).parse_args()
    rows = []
    for config in options.configs:
        for seed in options.seeds:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(learned(config, seed, Path(folder) / "run"))
            print(json.dumps(rows[-1]), flush=True)
    found = provenance()
    found["versions"] |= {name: version(name) for name in options.configs}
    ResultsFile(options.json).write(found | {"rows": rows})


if __name__ == "__main__":
    main()
