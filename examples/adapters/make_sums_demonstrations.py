"""Write demonstrations of reasoning-gym's chain sums in which less than half of the answers are right.

    python examples/adapters/make_sums_demonstrations.py --output runs/tiny-sums.jsonl

The built-in tiny model does not know the question's form. Trained on these it answers in the tag and knows the right
value, but is often off by a little: the gap that reinforcement learning closes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mrlm_environments import ReasoningGymEnvironment

from mrlm_pl.seeding import keyed_random

SETTINGS = {"chain_sum": {"max_terms": 3, "max_digits": 1}}
RIGHT = 0.4
"""Fraction of right answers."""


def write_demonstrations(path: Path, count: int) -> None:
    """Write chats of the first ``count`` training problems."""
    tasks = ReasoningGymEnvironment(SETTINGS, system_prompt="").tasks("train")
    with path.open("w", encoding="utf-8") as file:
        for index in range(count):
            rng, data = keyed_random("demonstration", index), tasks[index].data
            offset = 0 if rng.random() < RIGHT else rng.choice((-2, -1, 1, 2))
            answer = f"<answer>{int(data['answer']) + offset}</answer>"
            messages = [{"role": "user", "content": data["question"]}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    """Write the file of the command line."""
    parser = argparse.ArgumentParser(description="Write demonstrations of chain sums for the built-in tiny model.")
    parser.add_argument("--output", type=Path, default=Path("runs/tiny-sums.jsonl"))
    parser.add_argument("--count", type=int, default=16_000, help="rows")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_demonstrations(options.output, options.count)


if __name__ == "__main__":
    main()
