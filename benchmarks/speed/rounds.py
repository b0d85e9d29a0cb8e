"""Measure what rounds save against lockstep where turns have unequal lengths and environments take time.

    python benchmarks/speed/rounds.py [--size s] [--seconds 0 0.1 0.5] [--chunk-tokens 16 32] [--answers 1 4 8]
        [--rounds 3] [--json FILE]

``--episodes`` episodes of ``--turns`` turns each, which end by chance within ``--new-tokens``; a step of an environment
sleeps for a time that is uniform in 0 to twice ``--seconds``, and up to ``--workers`` do so at once. All sides play the
same episodes, in turns, with one thread of the model. Figures are medians of the ratios of wall-clock seconds, rounds
to lockstep; the run fails if a side samples other tokens.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rollout import SIZES, build_model

from mrlm_pl.engines import InProcessEngine, Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Message, Observations, Step, Task, TaskSource
from mrlm_pl.policy import ChatFormat
from mrlm_pl.policy.tiny import build_tokenizer
from mrlm_pl.rollout.play import EpisodeSpec, Seat
from mrlm_pl.rollout.player import EpisodePlayer
from mrlm_pl.rollout.rounds import RoundOptions, Rounds
from mrlm_pl.seeding import keyed_random

sys.path.insert(0, str(Path(__file__).parents[1]))
from provenance import provenance

SIZE_NAMES = ("xs", "s")
TOKENIZER = build_tokenizer()


class SlowAnswers(Environment):
    """The agent speaks some times; each answer takes a random time.

    Args:
        turns: number of turns of an episode.
        seconds: mean duration of an answer.
    """

    name = "slow_answers"
    agents = ("agent",)

    def __init__(self, turns: int, seconds: float) -> None:
        self.turns, self.seconds = turns, seconds

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(256)])

    def reset(self, task: Task) -> Observations:
        self.random, self.left = keyed_random("slow answers", task.key), self.turns
        return {"agent": [Message("user", f"Count to {task.data['n']}")]}

    def step(self, actions: Mapping[str, Message]) -> Step:
        time.sleep(2 * self.seconds * self.random.random())
        self.left -= 1
        if self.left:
            return Step({"agent": [Message("user", "Go on")]}, {"agent": 0.0})
        return Step(rewards={"agent": 1.0}, done=True, stop_reason="end")


class Side:
    """A way to play the episodes.

    Args:
        model: samples.
        arguments: arguments of the command line.
        seconds: mean duration of an answer.
        chunk_tokens: maximum number of tokens of a turn in a round; None is lockstep.
        answer: number of rounds that an answer takes.
    """

    def __init__(
        self, model: Any, arguments: argparse.Namespace, seconds: float, chunk_tokens: int | None, answer: int = 1
    ) -> None:
        engine, environment = InProcessEngine(), SlowAnswers(arguments.turns, seconds)
        engine.load("main", model, 0)
        seats = {"agent": Seat("main", ChatFormat(TOKENIZER), Sampling(max_tokens=arguments.new_tokens), 2048)}
        self.player = EpisodePlayer({environment.name: environment}, seats, engine, workers=arguments.workers)
        self.play: Any = self.player.play
        if chunk_tokens is not None:
            rounds = Rounds(engine, RoundOptions(chunk_tokens, answer))
            self.player.engine, self.player.call = rounds, partial(rounds.call, self.player.caller)
            self.play = rounds.apart(self.player.play)
        source = environment.tasks("train")
        self.specs = [EpisodeSpec(f"e{n}", source[n], f"g{n}", seed=n) for n in range(arguments.episodes)]

    def run(self) -> tuple[float, list[Any]]:
        """Return the seconds that the episodes took, and their tokens."""
        started = time.perf_counter()
        episodes = self.player.run_blocking(lambda: self.play(self.specs))
        seconds = time.perf_counter() - started
        return seconds, [row.token_ids for episode in episodes for row in episode.rows()]


def measure(size: str, seconds: float, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row for each size of chunks and rounds of an answer: the ratios of its seconds to those of lockstep."""
    model = build_model("qwen2", {**SIZES[size], "vocabulary": len(TOKENIZER)})
    kinds = list(itertools.product(arguments.chunk_tokens, arguments.answers))
    lockstep, sides = Side(model, arguments, seconds, None), [Side(model, arguments, seconds, *kind) for kind in kinds]
    ratios: list[list[float]] = [[] for _ in kinds]
    took = []
    for n in range(arguments.rounds + 1):
        base, tokens = lockstep.run()
        for side, found in zip(sides, ratios, strict=True):
            own, same = side.run()
            if same != tokens:
                raise SystemExit("rounds sampled other tokens than lockstep")
            found.append(round(own / base, 3))
        took.append(base)
        if not n:  # the warm-up
            took, ratios = [], [[] for _ in kinds]
    for side in (lockstep, *sides):
        side.player.close()
        side.player.engine.close()
    return [
        {
            "size": size,
            "environment_seconds": seconds,
            "chunk_tokens": chunk_tokens,
            "answer": answer,
            "lockstep_seconds": round(statistics.median(took), 2),
            "ratio": statistics.median(found),
            "ratios": found,
        }
        for (chunk_tokens, answer), found in zip(kinds, ratios, strict=True)
    ]


def main() -> None:
    """Run the measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZE_NAMES, default="s")
    parser.add_argument("--seconds", type=float, nargs="+", default=[0.0, 0.1, 0.5])
    parser.add_argument("--chunk-tokens", type=int, nargs="+", default=[16, 32])
    parser.add_argument("--answers", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for seconds in arguments.seconds for row in measure(arguments.size, seconds, arguments)]
    for row in rows:
        print(json.dumps(row))
    if arguments.json:
        arguments.json.write_text(json.dumps({**provenance(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
