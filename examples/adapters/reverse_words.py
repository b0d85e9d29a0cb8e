"""A taskset of verifiers: reverse a word. Served in `.venv-verifiers`, see docs/environments/verifiers.md."""

import verifiers.v1 as vf

WORDS = ["gold", "silver", "iron", "copper", "zinc", "tin", "lead", "nickel", "cobalt", "chrome"]


class Data(vf.TaskData):
    """A row with the expected answer."""

    answer: str


class Reverse(vf.Task[Data]):
    """Score the reply: mostly whether it is right, a little for its letters."""

    @vf.reward(weight=0.8)
    async def exact(self, trace: vf.Trace) -> float:
        """Return 1 for the reversed word, else 0."""
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.2)
    async def letters(self, trace: vf.Trace) -> float:
        """Return the Jaccard similarity of the letters."""
        said, right = set(trace.last_reply), set(self.data.answer)
        return len(said & right) / len(said | right)

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        """Return the reply's length."""
        return float(len(trace.last_reply))


class ReverseTaskset(vf.Taskset[Reverse, vf.TasksetConfig]):
    """Pairs of words."""

    def load(self) -> list[Reverse]:
        """Return a task for each pair."""
        pairs = [f"{one}{two}" for one in WORDS for two in WORDS if one != two]
        return [Reverse(Data(prompt=f"Reverse: {pair}", answer=pair[::-1]), self.config.task) for pair in pairs]


__all__ = ["ReverseTaskset"]
