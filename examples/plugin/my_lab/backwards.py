"""An environment: spell a word backwards, with a second try after a hint."""

from __future__ import annotations

from mrlm_pl.environment import Message, Outcome, SeededTasks, SingleAgentEnvironment, Task


class Backwards(SingleAgentEnvironment):
    """Spell a random word backwards; a wrong first reply is answered with the first letter.

    Args:
        letters: length of the words.
    """

    name = "backwards"

    def __init__(self, letters: int = 3) -> None:
        self.letters = letters

    def tasks(self, split: str) -> SeededTasks:
        """Return an endless source of words; no word is in two splits."""
        return SeededTasks(
            self.name,
            split,
            generate=lambda rng: {"word": "".join(rng.choices("abcdefgh", k=self.letters))},
            identity=lambda data: data["word"],
        )

    def begin(self, task: Task) -> str:
        """Return the first message of an episode."""
        self.answer, self.tries = task.data["word"][::-1], 0
        return f"Spell {task.data['word']} backwards."

    def reply(self, message: Message) -> Outcome:
        """Judge one reply: reward, and the next observation or None at the end."""
        self.tries += 1
        reply = message.content.strip()
        if reply == self.answer:
            return Outcome({"correct": 1.0 if self.tries == 1 else 0.5}, success=True)
        if self.tries == 1:
            return Outcome(
                {"first_letter": 0.2 * reply.startswith(self.answer[0])}, f"It begins with {self.answer[0]}."
            )
        return Outcome({"correct": 0.0}, success=False)
