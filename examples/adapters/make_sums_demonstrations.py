"""Write demonstrations of reasoning-gym's chain sums in which two of five answers are right.

    python examples/adapters/make_sums_demonstrations.py --output runs/tiny-sums.jsonl

The built-in tiny model knows sums, but not the form of these questions. Trained on the file it answers in the tag,
and works the sum out before it in two of five replies only; in the others it guesses: the gap that reinforcement
learning closes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mrlm_environments import ReasoningGymEnvironment

from mrlm_pl.seeding import keyed_random

SETTINGS = {"chain_sum": {"max_terms": 2, "max_digits": 1}}
WORKED = 0.4
"""Fraction of replies that work the sum out."""


def write_demonstrations(path: Path, count: int) -> None:
    """Write chats of the first ``count`` training problems."""
    tasks = ReasoningGymEnvironment(SETTINGS, system_prompt="").tasks("train")
    with path.open("w", encoding="utf-8") as file:
        for index in range(count):
            rng, data = keyed_random("demonstration", index), tasks[index].data
            equation = "".join(data["question"].partition(": ")[2].split())  # 8+3=
            worked = f"{equation}{data['answer']} <answer>{data['answer']}</answer>"
            guess = f"<answer>{int(data['answer']) + rng.choice((-3, -2, -1, 1, 2, 3))}</answer>"
            answer = worked if rng.random() < WORKED else guess
            messages = [{"role": "user", "content": data["question"]}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    """Write the file of the command line."""
    parser = argparse.ArgumentParser(description="Write demonstrations of chain sums for the built-in tiny model.")
    parser.add_argument("--output", type=Path, default=Path("runs/tiny-sums.jsonl"))
    parser.add_argument("--count", type=int, default=9_600, help="rows")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_demonstrations(options.output, options.count)


if __name__ == "__main__":
    main()
