"""Measure the model of `make small-model` beside `builtin:tiny`: held-out accuracy by difficulty.

    python benchmarks/learning/small_model.py [--problems 500] [--json FILE]

After `make small-model`. The models answer the same problems once, at temperature 1. Their demonstrations have
difficulty 1 alone; the second stage's are mostly estimates.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from mrlm_environments import MathEnvironment
from mrlm_environments.math.problems import MAX_DIFFICULTY
from seeds import ResultsFile, provenance, silence

import mrlm_pl
from mrlm_pl.engines import Sampling

MODELS = {
    "builtin:tiny": "builtin:tiny",
    "small, first stage": "runs/small-worked/policies/main",
    "small": "runs/small-model/policies/main",
}
"""Models by the names of their rows."""


def measured(model: str, difficulty: int, problems: int) -> dict[str, Any]:
    """Return the accuracy on held-out problems of a difficulty, with its interval."""
    used = time.process_time()
    report = mrlm_pl.evaluate(
        mrlm_pl.Policy(model),
        MathEnvironment(difficulty=(difficulty, difficulty)),
        num_episodes=problems,
        sampling=Sampling(max_tokens=64),
        device="cpu",
    )
    assert report.accuracy_ci95 is not None, "every problem is judged"
    return {
        "difficulty": difficulty,
        "accuracy": report.accuracy,
        "ci95": [round(bound, 3) for bound in report.accuracy_ci95],
        "cpu_seconds": round(time.process_time() - used, 1),
    }


def main() -> None:
    """Evaluate the models and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=500, help="of each difficulty")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    silence()
    rows = []
    for difficulty in range(1, MAX_DIFFICULTY + 1):
        for name, model in MODELS.items():
            rows.append({"model": name, **measured(model, difficulty, options.problems)})
            print(json.dumps(rows[-1]), flush=True)
    ResultsFile(options.json).write({**provenance(), "problems": options.problems, "rows": rows})


if __name__ == "__main__":
    main()
