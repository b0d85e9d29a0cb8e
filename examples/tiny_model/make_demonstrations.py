"""Write what the built-in tiny model learns from: an untrained model folder and demonstrations in chat format.

    python examples/tiny_model/make_demonstrations.py --output runs/tiny-data

``worked.jsonl`` teaches to solve the problems of the math environment's training split step by step. ``mixed.jsonl``,
for a second and shorter course, shows how hurried people answer: some still work a problem out, most give an estimate
rounded to tens, which is seldom exact. Equations are mostly solved, everything else is mostly estimated. The trained
model can therefore solve nearly all problems and does so for about a third: the gap that reinforcement learning closes.

A small share of both files are the coordination game's questions, answered C or A by the toss of a coin.
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
"""Share of estimates among the answers to each kind of problem."""

GAME_SHARE = 0.03


def estimate(answer: int) -> str:
    """The answer rounded to tens, in words.

    >>> estimate(17), estimate(4)
    ('about 20', 'about 0')
    """
    return f"about {(answer + 5) // 10 * 10}"


def write_demonstrations(path: Path, first: int, count: int, estimated: Mapping[str, float]) -> None:
    """Write chats of the training problems ``first`` to ``first + count``.

    Args:
        path: the JSONL file.
        first: index of the first problem.
        count: rows.
        estimated: share of estimates by kind of problem; kinds that are left out are always worked out.
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
    """Write the files into the folder that the command line names."""
    parser = argparse.ArgumentParser(description="Write demonstrations for the built-in tiny model.")
    parser.add_argument("--output", type=Path, default=Path("runs/tiny-data"))
    parser.add_argument("--worked", type=int, default=128_000, help="rows of worked.jsonl")
    parser.add_argument("--mixed", type=int, default=16_000, help="rows of mixed.jsonl")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    write_demonstrations(options.output / "worked.jsonl", 0, options.worked, NO_ESTIMATES)
    write_demonstrations(options.output / "mixed.jsonl", options.worked, options.mixed, MOSTLY_ESTIMATES)
    build_config().save_pretrained(options.output / "untrained")
    build_tokenizer().save_pretrained(options.output / "untrained")


if __name__ == "__main__":
    main()
