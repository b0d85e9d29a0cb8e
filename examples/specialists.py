"""Two small models that know different things: of arithmetic problems, one works out those that end in a sum, the other
those that end in a difference; of the rest each knows an estimate. Both can repeat what another has said, and do so by
the toss of a coin: whom to believe is not shown to them. Teams of the two have something to gain from talking.

python examples/specialists.py --output runs/specialists
mrlm train --config configs/co_training.yaml --output runs/co-training
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from mrlm_environments.collaborative_reasoning import CollaborativeReasoningEnvironment

from mrlm_pl.algorithms import SFT
from mrlm_pl.data import TrajectoryDataModule
from mrlm_pl.environment import Task
from mrlm_pl.episode import Message
from mrlm_pl.policy import Policy
from mrlm_pl.seeding import keyed_random

SPECIALISTS: Mapping[str, str] = {"sums": "+", "differences": "-"}
ROWS, TURNS = 4000, 3


def last_operator(solution: str) -> str:
    """The last operator of a worked solution.

    >>> last_operator("1+9=10; 10-5=5"), last_operator("x=11+3=14")
    ('-', '+')
    """
    return max(SPECIALISTS.values(), key=solution.rfind)


def answer_of(name: str, task: Task) -> str:
    """What a specialist says of a problem: the solution if it is of its kind, else the answer rounded to tens."""
    if last_operator(task.data["solution"]) == SPECIALISTS[name]:
        return str(task.data["solution"])
    return f"about {(int(task.data['answer']) + 5) // 10 * 10}"


def demonstration(environment: CollaborativeReasoningEnvironment, task: Task, name: str, index: int) -> dict[str, Any]:
    """What the specialist ``name`` saw and said in an episode with the other one, as a row of chat messages."""
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


def teach(name: str, folder: Path, seed: int = 0, rows: int = ROWS) -> None:
    """Write to ``folder`` the built-in tiny model, taught to be a specialist."""
    environment = CollaborativeReasoningEnvironment(max_turns=TURNS)
    tasks = environment.tasks("train")
    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "demonstrations.jsonl"
        shown = [demonstration(environment, tasks[seed * rows + n], name, n) for n in range(rows)]
        data.write_text("".join(json.dumps(row) + "\n" for row in shown))
        algorithm = SFT({"main": Policy("builtin:tiny", learning_rate=3e-3)}, schedule="cosine", warmup_steps=20)
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
    """Make the models that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/specialists"))
    parser.add_argument("--rows", type=int, default=ROWS, help="demonstrations for each")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name in SPECIALISTS:
        teach(name, arguments.output / name, arguments.seed, arguments.rows)
        print(f"wrote {arguments.output / name}")


if __name__ == "__main__":
    main()
