"""Write what the built-in tiny model learns from: an untrained model folder and demonstrations in chat format.

    python examples/tiny_model/make_demonstrations.py --output runs/tiny-data

The demonstrations mix two styles of answering problems of the math environment's training split. Most give the bare
answer, which needs arithmetic "in the head" that a model of this size often gets wrong; a minority work the problem step
by step, which it gets right nearly always. No answer is wrong. A model trained on the mixture answers about a third of
held-out problems right, although it can solve nearly all of them: the gap that reinforcement learning closes.

A small share are the coordination game's questions, answered C or A by the toss of a coin.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from mrlm_environments.coordination import CoordinationGame
from mrlm_environments.math import MathEnvironment
from mrlm_pl.environment import Environment
from mrlm_pl.policy.tiny import build_config, build_tokenizer
from mrlm_pl.seeding import keyed_random


def demonstration(environment: Environment, index: int, worked_share: float) -> dict[str, object]:
    """A chat of one problem, answered in a style that is drawn by the index."""
    task = environment.tasks("train")[index]
    question = next(iter(environment.reset(task).values()))[-1].content
    rng = keyed_random("demonstration", environment.name, index)
    if environment.name == "coordination":
        answer = rng.choice("CA")
    else:
        answer = task.data["solution"] if rng.random() < worked_share else task.data["answer"]
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def main() -> None:
    """Parse the command line and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/tiny-data"))
    parser.add_argument("--count", type=int, default=60_000)
    parser.add_argument("--worked-share", type=float, default=0.25)
    parser.add_argument("--game-share", type=float, default=0.02)
    options = parser.parse_args()
    environments: list[tuple[Environment, int]] = [
        (MathEnvironment(difficulty=(1, 2)), options.count - round(options.game_share * options.count)),
        (CoordinationGame(), round(options.game_share * options.count)),
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    with open(options.output / "demonstrations.jsonl", "w", encoding="utf-8") as file:
        for environment, count in environments:
            for index in range(count):
                file.write(json.dumps(demonstration(environment, index, options.worked_share)) + "\n")
    build_config().save_pretrained(options.output / "untrained")
    build_tokenizer().save_pretrained(options.output / "untrained")


if __name__ == "__main__":
    main()
