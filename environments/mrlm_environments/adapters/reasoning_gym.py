"""The generators of reasoning-gym, with their scores. Needs the extra ``reasoning_gym``."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial
from random import Random
from typing import Any

from mrlm_environments.data_tasks import opening
from mrlm_environments.libraries import asked_for, library
from mrlm_pl.environment import Message, Outcome, SeededTasks, SingleAgentEnvironment, Task, TaskSource
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError, did_you_mean
from mrlm_pl.settings import PositiveFloat, UnitInterval

INDICES = 1 << 31
POOL = 10_000
"""Problems of the few generators that make all of theirs together; the others make one for each index."""

EVALUATING = (
    *("binary_matrix", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
    *("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
)
"""Generators of 0.1.25 whose scorers pass the answer to ``eval``, themselves or in sympy's ``parse_expr``."""

_NAN = re.compile(r"\bnan[ij]?\b", re.IGNORECASE)
_generating = threading.Lock()
_library = partial(library, "reasoning_gym", "reasoning_gym")


class ReasoningGymEnvironment(SingleAgentEnvironment):
    """One problem of a reasoning-gym generator, one reply, the generator's score as the reward.

    The reward is ``score_answer`` of the last answer tag in the reply, from 0 to 1, and 0 without a tag. A scorer that
    raises an error on an answer scores it 0, and the metric ``scorer_errors`` counts it. An answer with ``nan``, which
    no distance separates from the right one, is wrong unless the right one has it too.

    Args:
        generators: settings of each generator by its name, such as ``{chain_sum: {max_terms: 3}}``; without settings
            ``{}``. ``seed`` and ``size`` belong to the environment.
        weights: relative frequency of generators; 1 for those that are left out.
        tag: name of the tag around the answer; empty scores the whole reply.
        system_prompt: name of a prompt in ``reasoning_gym.utils.SYSTEM_PROMPTS``, or a text; empty is none.
        success_at: score from which a problem counts as solved.
        evaluate_replies: allows the generators in :data:`EVALUATING`, whose scorers run replies as Python in this
            process. A reply then has all rights of the process.

    Raises:
        ConfigurationError: reasoning-gym is not installed, a generator or one of its settings does not exist or is out
            of range or evaluates replies without permission, a weight is not positive or of another generator, or
            ``success_at`` is not between 0 and 1.
    """

    name = "reasoning_gym"
    client_settings = ("tag", "system_prompt", "success_at")
    forks = True

    def __init__(
        self,
        generators: dict[str, dict[str, Any] | None],
        weights: dict[str, PositiveFloat] | None = None,
        tag: str = "answer",
        system_prompt: str = "default",
        success_at: UnitInterval = 1.0,
        evaluate_replies: bool = False,
    ) -> None:
        if not generators or not set(weights or ()) <= set(generators):
            raise ConfigurationError(
                f"reasoning_gym: generators names {sorted(generators)} and weights {sorted(weights or ())}; name at "
                "least one generator, and weights of these only"
            )
        if (evaluating := sorted(set(EVALUATING) & set(generators))) and not evaluate_replies:
            raise ConfigurationError(
                f"reasoning_gym: the scorers of {', '.join(evaluating)} run replies as Python in this process; choose "
                "other generators, or set evaluate_replies: true where the process may be lost, such as a server in a "
                "container"
            )
        self.generators = {name: dict(settings or {}) for name, settings in generators.items()}
        self.weights = [(weights or {}).get(name, 1.0) for name in self.generators]
        self.tag, self.success_at = tag, success_at
        self.system_prompt = _library().utils.SYSTEM_PROMPTS.get(system_prompt, system_prompt)
        for name in self.generators:
            self._dataset(name)

    def tasks(self, split: str) -> TaskSource:
        """Return generated problems without end; see :meth:`Environment.tasks`."""
        return SeededTasks(self.name, split, self._generate, lambda data: f"{data['generator']}: {data['question']}")

    def bounds(self, task: Task) -> tuple[float, float]:
        """Return the lowest and the highest score; see :meth:`Environment.bounds`."""
        return 0.0, 1.0

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return the generator's answer in the tag, None where its own scorer does not give it 1."""
        entry = self._pose(task)
        if self._dataset(task.data["generator"]).score_answer(entry["answer"], entry) != 1.0:
            return None
        return {self.agents[0]: [f"<{self.tag}>{entry['answer']}</{self.tag}>" if self.tag else entry["answer"]]}

    def begin(self, task: Task) -> Sequence[Message]:
        """Return the question; see :meth:`SingleAgentEnvironment.begin`.

        Raises:
            EnvironmentContractError: the generator makes another question of the same index.
        """
        self._generator, self._entry = task.data["generator"], self._pose(task)
        return opening(task.data["question"], self.system_prompt)

    def reply(self, message: Message) -> Outcome:
        """Score the answer; see :meth:`SingleAgentEnvironment.reply`."""
        extract = _library().utils.extract_answer
        answer = extract(message.final_text, self.tag) if self.tag else message.final_text.strip()
        score, failed = 0.0, False
        # Some scorers give a little for any text, and for none.
        if answer is not None and (_NAN.search(str(self._entry["answer"])) or not _NAN.search(answer)):
            try:
                dataset_score = float(self._dataset(self._generator).score_answer(answer, self._entry))
                score = min(1.0, max(0.0, dataset_score))  # sums of the library's may round to more
            except Exception:  # scorers parse answers in many ways, and raise anything on a malformed one
                failed = True
        return Outcome(
            {"score": score},
            stop_reason="answered" if answer is not None else "unparsed",
            success=score >= self.success_at,
            metrics={"parsed": float(answer is not None), "scorer_errors": float(failed)},
        )

    def _generate(self, rng: Random) -> Mapping[str, Any]:
        (name,) = rng.choices(list(self.generators), self.weights)
        index = rng.randrange(INDICES)
        entry = self._made(name, index)
        return {"generator": name, "index": index, "question": entry["question"], "answer": str(entry["answer"])}

    def _pose(self, task: Task) -> dict[str, Any]:
        """Return the entry of a task, whose other fields need not be JSON."""
        entry = self._made(task.data["generator"], task.data["index"])
        if entry["question"] != task.data["question"]:
            raise EnvironmentContractError(
                f"reasoning_gym: {task.data['generator']!r} now asks another question for index {task.data['index']}: "
                "its settings or its version have changed, or it is not a function of its seed"
            )
        return entry

    def _made(self, name: str, index: int) -> dict[str, Any]:
        dataset = self._dataset(name)
        with _generating:
            try:
                return dataset[index]
            except IndexError:
                return dataset[index % POOL]

    def _dataset(self, name: str) -> Any:
        datasets, settings = _library().factory.DATASETS, self.generators[name]
        if name not in datasets:
            hint = did_you_mean(name, datasets, f"there are {len(datasets)}, such as {', '.join(sorted(datasets)[:5])}")
            raise ConfigurationError(f"reasoning_gym: there is no generator {name!r}; {hint}")
        own = [field.name for field in dataclasses.fields(datasets[name][1]) if field.name not in ("seed", "size")]
        if not set(settings) <= set(own):
            raise ConfigurationError(
                f"reasoning_gym: generators.{name} is {settings}; its settings are {', '.join(own)}"
            )
        with asked_for(f"reasoning_gym: generators.{name} with {settings}"):
            return _made_once(name, json.dumps(settings, sort_keys=True))


@lru_cache(maxsize=256)
def _made_once(name: str, settings: str) -> Any:
    """Return a generator, which may read word lists while it is made; one for all environments of the process."""
    return _library().create_dataset(name, seed=0, size=POOL, **json.loads(settings))
