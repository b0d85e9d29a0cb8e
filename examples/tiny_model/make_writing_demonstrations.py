"""Write demonstrations for :class:`WritingEnvironment` for the built-in tiny model.

    python examples/tiny_model/make_writing_demonstrations.py --output runs/tiny-writing.jsonl

The tiny model cannot write sentences, but it can learn to write words. A row has one agent's prompt and some words of
its post, sometimes with a transition word. Both agents' parts are equally long and often too short, so the trained
model gets little reward: the gap that reinforcement learning closes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from mrlm_environments.writing.environment import WritingEnvironment
from mrlm_environments.writing.words import TRANSITIONS, content_words

from mrlm_pl.environment import Task
from mrlm_pl.episode import Message
from mrlm_pl.seeding import keyed_random

ROWS = 1_600
FEWEST, MOST = 5, 16
"""Number of words in a part."""
LINKS = 0.1
"""Fraction of transition words."""


def demonstration(environment: WritingEnvironment, task: Task, agent: str) -> dict[str, Any]:
    """Return an agent's prompt and part, a row for ``TrajectoryDataModule``."""
    rng = keyed_random("demonstration", agent, task.seed)
    own, links = sorted(content_words(task.data["text"])), [phrases[0] for phrases in TRANSITIONS.values()]
    words = [rng.choice(links if rng.random() < LINKS else own) for _ in range(rng.randint(FEWEST, MOST))]
    reply = Message("assistant", " ".join(words))
    return {"messages": [message.to_chat() for message in (*environment.reset(task)[agent], reply)]}


def main() -> None:
    """Write the command line's file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSONL file")
    parser.add_argument("--rows", type=int, default=ROWS, help="half of them for each agent")
    options = parser.parse_args()
    environment = WritingEnvironment()
    tasks = environment.tasks("train")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w", encoding="utf-8") as file:
        for index in range(options.rows):
            agent = environment.agents[index % 2]
            file.write(json.dumps(demonstration(environment, tasks[index // 2], agent)) + "\n")


if __name__ == "__main__":
    main()
