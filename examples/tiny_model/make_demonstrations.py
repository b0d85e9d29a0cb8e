"""Write the training data of the built-in tiny model: untrained model folders and demonstrations in chat format.

    python examples/tiny_model/make_demonstrations.py --output runs/tiny-data

``worked.jsonl`` has worked solutions of problems from the math environment's training split. ``mixed.jsonl``, for a
second and shorter stage, has hurried answers: equations are mostly solved, all other problems mostly estimated in tens,
which is seldom exact. So the trained model can solve nearly all problems, but solves about a third: the gap that
reinforcement learning closes.

A small fraction of both files are the coordination game's questions, answered C or A at random.

``untrained`` is the tiny model's folder, ``untrained-small`` that of ``make small-model``, four times as wide.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from mrlm_environments.games.coordination import ALONE, COLLABORATE, CoordinationGame
from mrlm_environments.math.environment import MathEnvironment

from mrlm_pl.policy.tiny import build_config, build_tokenizer
from mrlm_pl.seeding import keyed_random

NO_ESTIMATES: Mapping[str, float] = {}
MOSTLY_ESTIMATES = {"algebra": 0.15, "arithmetic": 0.85, "word": 0.85, "multistep": 0.85}
"""Fraction of estimates among the answers to each kind of problem."""

GAME_SHARE = 0.03

SIZES: Mapping[str, Mapping[str, int]] = {
    "untrained": {},
    "untrained-small": {"hidden_size": 256, "intermediate_size": 768},
}
"""Untrained folders with their arguments of :func:`build_config`."""


def estimate(answer: int) -> str:
    """Return the answer rounded to tens, in words.

    >>> estimate(17), estimate(4)
    ('about 20', 'about 0')
    """
    return f"about {(answer + 5) // 10 * 10}"


def write_demonstrations(path: Path, first: int, count: int, estimated: Mapping[str, float]) -> None:
    """Write chats of the training problems ``first`` to ``first + count - 1``.

    Args:
        path: the JSONL file.
        first: index of the first problem.
        count: number of rows.
        estimated: fraction of estimates by kind of problem; 0 for other kinds.
    """
    problems, rounds = MathEnvironment(difficulty=(1, 1)).tasks("train"), CoordinationGame().tasks("train")
    with path.open("w", encoding="utf-8") as file:
        for index in range(first, first + count):
            rng = keyed_random("demonstration", index)
            if rng.random() < GAME_SHARE:
                question, answer = rounds[index].data["question"], rng.choice((COLLABORATE, ALONE))
            else:
                data = problems[index].data
                hurried = rng.random() < estimated.get(data["kind"], 0.0)
                question, answer = data["question"], estimate(int(data["answer"])) if hurried else data["solution"]
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")


def main() -> None:
    """Write the files to the command line's folder."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("runs/tiny-data"))
    parser.add_argument("--worked", type=int, default=128_000, help="rows of worked.jsonl")
    parser.add_argument("--mixed", type=int, default=16_000, help="rows of mixed.jsonl")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    write_demonstrations(options.output / "worked.jsonl", 0, options.worked, NO_ESTIMATES)
    write_demonstrations(options.output / "mixed.jsonl", options.worked, options.mixed, MOSTLY_ESTIMATES)
    for name, size in SIZES.items():
        build_config(**size).save_pretrained(options.output / name)
        build_tokenizer().save_pretrained(options.output / name)


if __name__ == "__main__":
    main()
