"""Small games of bits, played in every way that they can go."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.engines.base import Engine, Sample, SampleRequest, Sampling
from mrlm_pl.environment import DatasetTasks, Environment, Observations, Step, TaskSource
from mrlm_pl.episode import Episode, Message, Task
from mrlm_pl.policy.chat import ChatFormat
from mrlm_pl.policy.tiny import build_tokenizer
from mrlm_pl.rollout.branches import BranchRule
from mrlm_pl.rollout.play import EpisodeSpec, Seat
from mrlm_pl.rollout.player import EpisodePlayer

TOKENIZER = build_tokenizer()


class Choices:
    """The random choices of one outcome; :meth:`all` goes through all outcomes."""

    def __init__(self) -> None:
        self._path: list[tuple[int, int]] = []
        self._place, self.probability = 0, 1.0

    def pick(self, probabilities: Sequence[float]) -> int:
        """Return the number of the choice in this outcome."""
        if self._place == len(self._path):
            self._path.append((0, len(probabilities)))
        chosen = self._path[self._place][0]
        self._place += 1
        self.probability *= probabilities[chosen]
        return chosen

    def all(self) -> Iterator[None]:
        """Yield once for each outcome."""
        while True:
            self._place, self.probability = 0, 1.0
            yield
            while self._path and self._path[-1][0] + 1 == self._path[-1][1]:
                self._path.pop()
            if not self._path:
                return
            number, count = self._path[-1]
            self._path[-1] = (number + 1, count)

    def choices(self, found: Sequence[Any], k: int) -> list[Any]:
        """Return what ``random.Random.choices`` draws, in this outcome."""
        return [found[self.pick([1 / len(found)] * len(found))] for _ in range(k)]


class Bits(Environment):
    """The agents say a bit one after the other; each is shown all bits before, and all earn the worth of the bits.

    Args:
        agents: agents in their order; an agent that occurs twice acts twice.
        worth: worth by the bits as text; bits that have a worth end the game.
        shares: factor of the worth that each agent earns, in order of the agents; () is 1 for all.
    """

    name = "bits"

    def __init__(self, agents: str, worth: Mapping[str, float], shares: Sequence[float] = ()) -> None:
        self.order, self.worth = agents, dict(worth)
        self.agents = tuple(dict.fromkeys(agents))
        self.shares = dict(zip(self.agents, shares or [1.0] * len(self.agents), strict=True))

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{}])

    def reset(self, task: Task) -> Observations:
        self.said = ""
        return self._due()

    def step(self, actions: Mapping[str, Message]) -> Step:
        self.said += next(iter(actions.values())).content
        if self.said in self.worth:
            rewards = {agent: share * self.worth[self.said] for agent, share in self.shares.items()}
            return Step(rewards=rewards, done=True, stop_reason="end")
        return Step(self._due())

    def _due(self) -> Observations:
        return {self.order[len(self.said)]: [Message("user", f"#{self.said}.")]}


class Bitwise(Engine):
    """Says a bit with the probability that the bits before it have."""

    def __init__(self, choices: Choices, logits: Mapping[str, float]) -> None:
        self.choices, self.logits = choices, logits

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        return [self._sample(request) for request in requests]

    def _sample(self, request: SampleRequest) -> Sample:
        heard = re.findall(r"#([01]*)\.", TOKENIZER.decode(request.token_ids))[-1]
        one = 1 / (1 + math.exp(-self.logits[heard]))
        bit = self.choices.pick([1 - one, one])
        ids = (*TOKENIZER.encode(str(bit), add_special_tokens=False), TOKENIZER.eos_token_id)
        return Sample(ids, (0.0, 0.0), "stop", 0, "bitwise")

    def load(self, policy: str, weights: Any, version: int) -> None:
        raise AssertionError("the player loads no weights")


class Game:
    """A game of bits and a policy with a logit for each history.

    Args:
        agents, worth, shares: see :class:`Bits`.
        logits: logit of saying 1, by the bits before.
    """

    def __init__(
        self, agents: str, worth: Mapping[str, float], logits: Mapping[str, float], shares: Sequence[float] = ()
    ) -> None:
        self.environment, self.logits, self.choices = Bits(agents, worth, shares), dict(logits), Choices()

    def gradient(self, terms: Sequence[tuple[str, str, Tensor | float]]) -> dict[str, float]:
        """Return the sum of A grad log pi by history, of terms (history, bit, A)."""
        found = dict.fromkeys(self.logits, 0.0)
        for heard, bit, advantage in terms:
            one = 1 / (1 + math.exp(-self.logits[heard]))
            found[heard] += float(advantage) * ((1 - one) if bit == "1" else -one)
        return found

    def outcomes(self, group: int, rule: BranchRule | None = None) -> list[tuple[float, list[Episode]]]:
        """Return every outcome of a group and its branch episodes, with its probability."""
        seats = dict.fromkeys(self.environment.agents, Seat("main", ChatFormat(TOKENIZER), Sampling(), 4096))
        player = EpisodePlayer({"bits": self.environment}, seats, Bitwise(self.choices, self.logits))
        task = self.environment.tasks("train")[0]

        async def played() -> list[tuple[float, list[Episode]]]:
            found = []
            for _ in self.choices.all():
                episodes = await player.play([EpisodeSpec(str(n), task, "g", n) for n in range(group)])
                rounds = 0
                while rule and (specs := rule.due(episodes, rounds)):
                    episodes, rounds = [*episodes, *await player.play(specs)], rounds + 1
                found.append((self.choices.probability, episodes))
            return found

        try:
            return player.run_blocking(played)
        finally:
            player.close()

    def mean_gradient(
        self, outcomes: Sequence[tuple[float, list[Episode]]], terms: Callable[[list[Episode]], Any]
    ) -> dict[str, float]:
        """Return the expected gradient over these outcomes; see :meth:`gradient` for the terms of one."""
        total = dict.fromkeys(self.logits, 0.0)
        for probability, episodes in outcomes:
            gradient = self.gradient(terms(episodes))
            total = {key: total[key] + probability * gradient[key] for key in total}
        return total

    def expected(self, rule: BranchRule, group: int, terms: Callable[[list[Episode]], Any]) -> dict[str, float]:
        """Return the expected gradient, over all outcomes of a group and its branch episodes."""
        return self.mean_gradient(self.outcomes(group, rule), terms)

    def true_gradient(self) -> dict[str, float]:
        """Return the gradient of the expected worth of the bits."""
        logits = torch.tensor([*self.logits.values()], dtype=torch.float64, requires_grad=True)
        one = dict(zip(self.logits, logits.sigmoid(), strict=True))
        value = torch.zeros((), dtype=torch.float64)
        for bits, earned in self.environment.worth.items():
            probability = torch.ones((), dtype=torch.float64)
            for place, bit in enumerate(bits):
                probability = probability * (one[bits[:place]] if bit == "1" else 1 - one[bits[:place]])
            value = value + probability * earned
        return dict(zip(self.logits, torch.autograd.grad(value, logits)[0].tolist(), strict=True))
