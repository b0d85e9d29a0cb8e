from random import Random

from mrlm_pl.environment import Environment, Message, Outcome, SeededTasks, SingleAgentEnvironment, Task, TaskSource


class ParrotEnvironment(SingleAgentEnvironment):
    """Say the word back.

    Args:
        difficulty: lengths of the words.
    """

    name = "parrot"

    def __init__(self, difficulty: list[int] | None = None) -> None:
        self.difficulty = difficulty or [3]

    def tasks(self, split: str) -> TaskSource:
        return SeededTasks(self.name, split, self._generate, lambda data: str(data["word"]))

    def begin(self, task: Task) -> str:
        self.word = task.data["word"]
        return f"Say {self.word}"

    def reply(self, message: Message) -> Outcome:
        right = message.content == self.word
        return Outcome({"right": float(right)}, success=right)

    def _generate(self, rng: Random) -> dict[str, str]:
        return {"word": "".join(rng.choices("abcdefgh", k=rng.choice(self.difficulty)))}


class WrappedEnvironment(ParrotEnvironment):
    """Another environment behind a name.

    Args:
        inner: the environment.
        environment: a plain text, which may look like a short name.
    """

    name = "wrapped"

    def __init__(self, inner: Environment, environment: str = "parrot") -> None:
        super().__init__()
        self.inner, self.environment = inner, environment
