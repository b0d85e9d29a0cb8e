"""Write an environment and train on it from Python: guess a digit with "higher" and "lower" as hints.

python examples/number_guessing.py
"""

from __future__ import annotations

from jsonargparse import auto_cli

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import Outcome, SeededTasks, SingleAgentEnvironment
from mrlm_pl.episode import Message, Task
from mrlm_pl.policy import Policy
from mrlm_pl.runs import Trainer


class NumberGuessing(SingleAgentEnvironment):
    """Guess a number from 1 to 9 within four turns, with a hint after each wrong guess."""

    name = "number-guessing"
    MAX_TURNS = 4

    def tasks(self, split: str) -> SeededTasks:
        """Return numbers to guess, each with a player's number, whose hash decides the split."""
        return SeededTasks(
            self.name,
            split,
            lambda rng: {"number": rng.randint(1, 9), "who": rng.randint(10, 99)},
            lambda data: str(data["who"]),
        )

    def begin(self, task: Task) -> str:
        """Return the first message."""
        self.number, self.turns = task.data["number"], 0
        return f"Player {task.data['who']} thinks of 1 to 9. Guess."

    def reply(self, message: Message) -> Outcome:
        """Judge one guess."""
        self.turns += 1
        digits = [letter for letter in message.content if letter.isdigit()]
        if not digits:
            return Outcome({"unparsed": -0.2}, stop_reason="unparsed", success=False)
        guess = int(digits[-1])
        if guess == self.number:
            return Outcome({"found": 1.0, "turns": -0.1 * (self.turns - 1)}, success=True)
        if self.turns == self.MAX_TURNS:
            return Outcome(stop_reason="max_turns", truncated=True, success=False)
        return Outcome(observation="higher" if guess < self.number else "lower")


def main(iterations: int = 20, output: str = "runs/number-guessing") -> None:
    """Train the built-in tiny model for a few iterations."""
    algorithm = GRPO({"main": Policy("builtin:tiny", learning_rate=1e-3)})
    data = RolloutDataModule(NumberGuessing(), groups=8, iterations=iterations, sampling=Sampling(max_tokens=8))
    trainer = Trainer(accelerator="cpu", default_root_dir=output, limit_val_batches=0)
    trainer.fit(algorithm, data)
    print("reward of the last rollout:", round(float(trainer.callback_metrics["rollout/reward"]), 3))


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
