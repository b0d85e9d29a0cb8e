"""An environment: write the equation of a sum, with a second try after a hint."""

from __future__ import annotations

from mrlm_pl.environment import Message, Outcome, SeededTasks, SingleAgentEnvironment, Task


class Sums(SingleAgentEnvironment):
    """Add two numbers and write the equation; a wrong first reply is answered with the left side.

    Args:
        largest: term of the sums.
    """

    name = "sums"

    def __init__(self, largest: int = 20) -> None:
        self.largest = largest

    def tasks(self, split: str) -> SeededTasks:
        """Return an endless source of sums; no sum is in two splits."""
        return SeededTasks(
            self.name,
            split,
            generate=lambda rng: {"terms": [rng.randint(1, self.largest), rng.randint(1, self.largest)]},
            identity=lambda data: str(data["terms"]),
        )

    def begin(self, task: Task) -> str:
        """Return the first message of an episode."""
        first, second = task.data["terms"]
        self.left, self.right, self.tries = f"{first}+{second}=", str(first + second), 0
        return f"What is {first} + {second}?"

    def reply(self, message: Message) -> Outcome:
        """Judge one reply: reward, and the next observation or None at the end."""
        self.tries += 1
        reply = message.content.replace(" ", "")
        if reply == self.left + self.right:
            return Outcome({"correct": 1.0 if self.tries == 1 else 0.5}, success=True)
        if self.tries == 1:
            return Outcome({"form": 0.2 * reply.startswith(self.left)}, observation=f"Begin with {self.left}")
        return Outcome({"correct": 0.0}, success=False)
