"""Train two small specialists, one on sums and one on differences below 100, and write questions of both kinds.

Each solves its own kind and only estimates the other. In later turns each repeats the other's answer with probability
one half: the data does not show whose answer to trust, so the team can gain from discussion.

python examples/specialists.py --output runs/specialists
mrlm train --config configs/algorithms/teams/co_training.yaml --output runs/co-training
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from lightning.pytorch import Trainer
from mrlm_environments.collaborative_reasoning.environment import CollaborativeReasoningEnvironment

from mrlm_pl import Optimization
from mrlm_pl.algorithms import SFT
from mrlm_pl.data import TrajectoryDataModule
from mrlm_pl.environment import Task
from mrlm_pl.episode import Message
from mrlm_pl.policy import Policy
from mrlm_pl.seeding import keyed_random

SPECIALISTS: Mapping[str, str] = {"sums": "+", "differences": "-"}
ROWS, TURNS = 8000, 3
HELD_OUT = 500
"""Questions of the validation and of the test split each; all others are for training."""


def questions() -> dict[str, list[dict[str, str]]]:
    """Return all questions by split, with GSM8K's fields."""
    rows = []
    for first, second in itertools.product(range(10, 100), range(1, 31)):
        rows.append(_row(first, "+", second, first + second))
        if first >= second:
            rows.append(_row(first, "-", second, first - second))
    Random(0).shuffle(rows)
    test, validation = rows[:HELD_OUT], rows[HELD_OUT : 2 * HELD_OUT]
    return {"train": rows[2 * HELD_OUT :], "validation": validation, "test": test}


def _row(first: int, operator: str, second: int, value: int) -> dict[str, str]:
    worked = f"{first}{operator}{second}={value}"
    return {"question": f"What is {first} {operator} {second}?", "answer": f"{worked}\n#### {value}"}


def answer_of(name: str, task: Task) -> str:
    """Return a specialist's answer: a worked solution of its own kind of question, else an estimate in tens."""
    value = int(task.data["answer"])
    if SPECIALISTS[name] not in task.data["question"]:
        return f"about {(value + 5) // 10 * 10}"
    worked = task.data["question"].removeprefix("What is ").removesuffix("?").replace(" ", "")
    return f"{worked}={value}"


def demonstration(environment: CollaborativeReasoningEnvironment, task: Task, name: str, index: int) -> dict[str, Any]:
    """Return the conversation of the specialist ``name`` in an episode with the other one, as a chat row."""
    (other,) = set(SPECIALISTS) - {name}
    names = {"solver_1": name, "solver_2": other}
    rng = keyed_random("specialists", name, index)
    said: dict[str, str] = {}
    messages: list[Message] = []
    observations = environment.reset(task)
    while observations:
        before, said = said, {}
        for agent, partner in (("solver_1", "solver_2"), ("solver_2", "solver_1")):
            repeats = bool(before) and rng.random() < 0.5
            said[agent] = before[partner] if repeats else answer_of(names[agent], task)
        actions = {agent: Message("assistant", text) for agent, text in said.items()}
        messages += [*observations["solver_1"], actions["solver_1"]]
        observations = environment.step(actions).observations
    return {"messages": [message.to_chat() for message in messages]}


def teach(name: str, folder: Path, train: Path, seed: int = 0, rows: int = ROWS) -> None:
    """Fine-tune the built-in tiny model as a specialist on the questions in ``train``, and write it to ``folder``."""
    environment = CollaborativeReasoningEnvironment(max_turns=TURNS, data={"train": str(train)})
    tasks = environment.tasks("train")
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "demonstrations.jsonl"
        chosen = [tasks[(seed * rows + n) % (tasks.size or rows)] for n in range(rows)]
        shown = [demonstration(environment, task, name, n) for n, task in enumerate(chosen)]
        data.write_text("".join(json.dumps(row) + "\n" for row in shown))
        algorithm = SFT(
            {"main": Policy("builtin:tiny", learning_rate=3e-3)},
            optimization=Optimization(schedule="cosine", warmup_steps=20),
        )
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=1.0,
            default_root_dir=scratch,
        )
        trainer.fit(algorithm, TrajectoryDataModule(str(data), batch_size=16, seed=seed))
        algorithm.policy("main").save_pretrained(folder)


def main() -> None:
    """Train both specialists with the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/specialists"))
    parser.add_argument("--rows", type=int, default=ROWS, help="demonstrations per specialist")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    for split, rows in questions().items():
        (arguments.output / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in SPECIALISTS:
        train = arguments.output / "train.jsonl"
        teach(name, arguments.output / name, train, arguments.seed, arguments.rows)
        print(f"wrote {arguments.output / name}")


if __name__ == "__main__":
    main()
