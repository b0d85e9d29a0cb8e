"""Write demonstrations of reasoning-gym's sums of three numbers in which two of five answers are right.

    python examples/adapters/make_sums_demonstrations.py --output runs/tiny-sums.jsonl

The built-in tiny model knows sums, but not the form of these questions. Trained on the file it answers in the tag,
and works the sum out before it in two of five replies only; in the others it guesses: the gap that reinforcement
learning closes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mrlm_environments import ReasoningGymEnvironment

from mrlm_pl.seeding import keyed_random

SETTINGS: dict[str, dict[str, Any] | None] = {
    "basic_arithmetic": {
        "min_terms": 3,
        "max_terms": 3,
        "max_digits": 1,
        "operators": ["+"],
        "allow_parentheses": False,
    }
}
WORKED = 0.4
"""Fraction of replies that work the sum out."""


def write_demonstrations(path: Path, count: int) -> None:
    """Write chats of the first ``count`` training problems."""
    tasks = ReasoningGymEnvironment(SETTINGS, system_prompt="").tasks("train")
    with path.open("w", encoding="utf-8") as file:
        for index in range(count):
            rng, data = keyed_random("demonstration", index), tasks[index].data
            one, _, two, _, three = data["question"].removeprefix("Calculate ").removesuffix(".").split()
            first, answer = int(one) + int(two), int(data["answer"])
            worked = f"{one}+{two}={first}; {first}+{three}={answer} <answer>{answer}</answer>"
            guess = f"<answer>{answer + rng.choice((-3, -2, -1, 1, 2, 3))}</answer>"
            reply = worked if rng.random() < WORKED else guess
            messages = [{"role": "user", "content": data["question"]}, {"role": "assistant", "content": reply}]
            file.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    """Write the file of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/tiny-sums.jsonl"))
    parser.add_argument("--count", type=int, default=6_400, help="rows")
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_demonstrations(options.output, options.count)


if __name__ == "__main__":
    main()
