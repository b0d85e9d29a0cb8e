"""A team answers a question, reads each other's answers and answers again: co-training as in MAPoRL."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from mrlm_environments.answers import Format, agree, is_right, read_answer, vote
from mrlm_environments.collaborative_reasoning.masks import AnswerMasks
from mrlm_environments.collaborative_reasoning.record import (
    LEADER,
    STUDENT,
    SUMMARIZER,
    Answer,
    Record,
    Role,
    shown_answers,
)
from mrlm_environments.collaborative_reasoning.tasks import MATH_FIELDS, generate, identity, task_data
from mrlm_environments.data_tasks import DataTasks
from mrlm_environments.math.problems import MAX_DIFFICULTY
from mrlm_pl.environment import Environment, Message, Observations, Step, Task, TaskSource
from mrlm_pl.episode import base_agent
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError, NonFiniteError
from mrlm_pl.reward_models.scorer import VERIFIER_SCORE, TextScorer, as_probability, exchange
from mrlm_pl.settings import PositiveInt, whole_range

LEAD = "You lead the team. Read its answers and give the team's answer."
SUM_UP = "Sum up these answers for those who gave them."


class CollaborativeReasoningEnvironment(Environment):
    """``solver_1``, ``solver_2`` and so on answer a question at the same time, in ``max_turns`` turns.

    In later turns each reads the others' previous answers. The reward of an answer is its score in [0, 1], in the turn
    in which it is given, and less where it is masked; see
    :class:`~mrlm_environments.collaborative_reasoning.masks.AnswerMasks`. The team has solved the task if the solvers'
    majority in the last turn is right; of equally many votes, those of the answer that the first of the solvers gave.

    A ``leader`` reads the solvers' answers at the end of each turn and answers too; it is scored like them, its answer
    is shown to them and is the team's, unless it gives none. A ``summarizer`` turns the answers of each turn but the
    last into a summary, which the solvers read instead of the answers; its reward is the mean of their scores in the
    next turn, as a component ``summary``. A ``student`` answers once, in the first turn, for the distillation of the
    team; no agent reads its answer, and it has no vote.

    Args:
        solvers: number of solvers.
        max_turns: maximum number of turns of each agent.
        data: rows that replace the generated problems, with ``question`` and ``answer`` (ending in ``#### N``) or with
            ``premise``, ``hypothesis`` and ``label`` (or as ANLI, SNLI and MNLI are published): a file or a hub name,
            or a mapping from splits to these; see :func:`mrlm_pl.environment.rows.read_split`.
        format: ``math`` or ``nli``; None detects it for each row by its fields, and generates mathematics.
        difficulty: lowest and highest difficulty of generated mathematics, from 1 to 5.
        scorer: ``label`` gives 1 for a right answer and 0 for another one; a model reads the question and the answer.
        role: an agent in addition to the solvers.
        show_scores: show each answer with one of four words for its score. It tells of right and wrong answers.
        consensus_stop: end the episode after a turn in which all solvers give the same answer; its scores also count
            for the turns that are left, as the component ``consensus``.
        policies_by: ``agent``, or ``turn`` for a separate agent for every turn of a member, ``solver_1@2`` and so
            on, which acts once in a conversation that holds the earlier turns.
        masks: settings of the masks: which answers are masked, and at which penalty.
        instruction: text after the question, on its own line.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    name = "collaborative_reasoning"
    client_settings = (
        *("max_turns", "format", "difficulty", "show_scores", "consensus_stop", "policies_by", "instruction"),
    )
    forks = True

    def __init__(
        self,
        solvers: PositiveInt = 2,
        max_turns: PositiveInt = 2,
        data: str | dict[str, str] | None = None,
        format: Format | None = None,
        difficulty: tuple[int, int] = (1, 1),
        scorer: Literal["label"] | TextScorer = "label",
        role: Role | None = None,
        show_scores: bool = False,
        consensus_stop: bool = False,
        policies_by: Literal["agent", "turn"] = "agent",
        masks: AnswerMasks = AnswerMasks(),  # noqa: B008 (frozen)
        instruction: str = "",
    ) -> None:
        if role == SUMMARIZER and max_turns == 1:
            raise ConfigurationError(f"{self.name}: no turn follows the {SUMMARIZER} when max_turns is 1; raise it")
        if consensus_stop and solvers == 1:
            raise ConfigurationError(f"{self.name}: one of one always agrees; for consensus_stop have more solvers")
        if isinstance(scorer, str) and scorer != "label":
            raise ConfigurationError(f"{self.name}: scorer is {scorer!r}; use label, or the class of a scorer")
        self.max_turns, self.role = max_turns, role
        self.show_scores, self.consensus_stop, self.policies_by = show_scores, consensus_stop, policies_by
        self.masks, self.instruction, self.format = masks, instruction, format
        self.difficulty = whole_range(1, MAX_DIFFICULTY, f"{self.name}: ", difficulty=difficulty)
        self._tasks = DataTasks(self.name, data)
        self.scorer = scorer
        self._solvers = tuple(f"solver_{number}" for number in range(1, solvers + 1))
        everybody = (*self._solvers, *([role] if role else []))
        self._acts = [
            (person, turn)
            for turn in range(1, max_turns + 1)
            for person in everybody
            if (person != SUMMARIZER or turn < max_turns) and (person != STUDENT or turn == 1)
        ]
        self.agents = tuple(dict.fromkeys(self._agent(person, turn) for person, turn in self._acts))

    def tasks(self, split: str) -> TaskSource:
        """Return generated problems without end, or the rows of the data; see :meth:`Environment.tasks`.

        Raises:
            DataError: a row cannot be used.
            ConfigurationError: the split is unknown or empty.
        """
        fields = MATH_FIELDS if self.format == "math" else ()
        make = partial(generate, form=self.format, difficulty=self.difficulty)
        return self._tasks.source(split, fields, partial(task_data, form=self.format), identity, make, "key")

    def gold(self, task: Task) -> Mapping[str, Sequence[str]] | None:
        """Return the worked solution of everybody; None where a model scores, or the masks would not let it pass."""
        solution = task.data["solution"]
        if self.scorer != "label" or self.masks.faults(solution, answered=True):
            return None
        return {agent: [solution] for agent in self.agents}

    def bounds(self, task: Task) -> tuple[float, float] | None:
        """Return 0 and the number of answers; None where a model scores."""
        if self.scorer != "label":
            return None
        # A consensus earns the solvers' scores of the turns that are left, but no summary's.
        unpaid = sum(person == SUMMARIZER for person, _ in self._acts) if self.consensus_stop else 0
        return 0.0, float(len(self._acts) - unpaid)

    def majority(self, task: Task, replies: Sequence[str]) -> bool:
        """Return whether the majority of the replies' answers is right; see :meth:`Environment.majority`."""
        data, form = task.data, task.data["format"]
        chosen = vote([self._read(text, form, data["question"])[0] for text in replies], form)
        return is_right(chosen, data["answer"], form)

    def reset(self, task: Task) -> Observations:
        """Ask all solvers; see :meth:`Environment.reset`."""
        question = task.data["question"]
        self._problem = question
        self._question = f"{question}\n{self.instruction}" if self.instruction else question
        self._record = Record(task.data["answer"], task.data["format"], self.max_turns)
        self._summary: Answer | None = None
        self._truncated = 0
        self._said: dict[str, list[Message]] = {}
        asked = (*self._solvers, *([STUDENT] if self.role == STUDENT else []))
        return self._ask(dict.fromkeys(asked, self._question), turn=1)

    def step(self, actions: Mapping[str, Message]) -> Step:
        """Score the answers, and ask the agents that speak next; see :meth:`Environment.step`.

        Raises:
            EnvironmentContractError: the scorer gave something that is not a score.
        """
        # Halves of characters cannot be given to models.
        replies = {base_agent(agent): message.final_text for agent, message in actions.items()}
        texts = {person: text.encode("utf-8", "replace").decode() for person, text in replies.items()}
        for person, text in texts.items():
            self._said[person].append(Message("assistant", text))
        alone = self._judge({STUDENT: texts[STUDENT]}) if STUDENT in texts else {}
        if SUMMARIZER in texts:
            step = self._summed_up(texts[SUMMARIZER])
        elif LEADER in texts:
            answers = self._judge(texts)
            self._record.rounds[-1] |= answers
            step = self._next_turn(self._pay(answers))
        else:
            step = self._answered({person: texts[person] for person in self._solvers})
        if alone:
            parts = {**step.components, **self._pay(alone)}
            metrics = {**step.metrics, "student_accuracy": float(alone[STUDENT].right)}
            step = replace(step, rewards={}, components=parts, metrics=metrics)
        return step

    def close(self) -> None:
        """Free the scorer's resources."""
        if not isinstance(self.scorer, str):
            self.scorer.close()

    # Order of the agents.

    def _answered(self, texts: Mapping[str, str]) -> Step:
        """Reward the solvers; ask the leader, or go to the next turn."""
        answers = self._judge(texts)
        self._record.rounds.append(answers)
        pay, turn = self._pay(answers), len(self._record.rounds)
        if self._summary is not None:
            mean = math.fsum(answer.score for answer in answers.values()) / len(answers)
            pay[self._agent(SUMMARIZER, turn - 1)] = {"summary": 0.0 if self._summary.faults else mean}
        if self.role != LEADER:
            return self._next_turn(pay)
        told = [LEAD] if turn == 1 else []
        shown = shown_answers(answers, scores=self.show_scores)
        return self._step(pay, self._ask({LEADER: "\n\n".join([*told, *shown, self._question])}, turn))

    def _next_turn(self, pay: dict[str, dict[str, float]]) -> Step:
        """Return the end, the summarizer, or the solvers again."""
        last, turn = self._record.rounds[-1], len(self._record.rounds)
        if turn == self.max_turns:
            return self._step(pay, {}, "turns")
        if self.consensus_stop and agree(self._record.given(), self._record.form):
            for person, answer in last.items():
                pay.setdefault(self._agent(person, turn), {})["consensus"] = (self.max_turns - turn) * answer.score
            return self._step(pay, {}, "consensus")
        if self.role == SUMMARIZER:
            shown = shown_answers(last, scores=self.show_scores)
            return self._step(pay, self._ask({SUMMARIZER: "\n\n".join([self._question, *shown, SUM_UP])}, turn))
        asked = {}
        for solver in self._solvers:
            seen = {person: answer for person, answer in last.items() if person != solver}
            asked[solver] = "\n\n".join([*shown_answers(seen, scores=self.show_scores), self._question])
        return self._step(pay, self._ask(asked, turn + 1))

    def _summed_up(self, text: str) -> Step:
        """Ask the solvers, with the summarizer's text, which needs no answer."""
        faults = self.masks.faults(text, answered=True)
        self._summary = Answer(text, None, faults, False, 0.0)
        (shown,) = shown_answers({SUMMARIZER: self._summary}, scores=False)
        asked = dict.fromkeys(self._solvers, f"{shown}\n\n{self._question}")
        turn = len(self._record.rounds)
        pay = {self._agent(SUMMARIZER, turn): self._penalty(self._summary)}
        return self._step(pay, self._ask(asked, turn + 1))

    def _ask(self, texts: Mapping[str, str], turn: int) -> Observations:
        """Return the agents' observations; an agent's first one holds its person's earlier conversation."""
        asked: dict[str, tuple[Message, ...]] = {}
        for person, text in texts.items():
            said = self._said.setdefault(person, [])
            said.append(Message("user", text))
            asked[self._agent(person, turn)] = tuple(said) if self.policies_by == "turn" else (said[-1],)
        return asked

    def _agent(self, person: str, turn: int) -> str:
        return f"{person}@{turn}" if self.policies_by == "turn" else person

    # Rewards.

    def _read(self, text: str, form: Format, question: str) -> tuple[str | None, frozenset[str]]:
        """Return the answer of a text, None if it is masked, and the faults that mask it."""
        answer = read_answer(text, form, question)
        faults = self.masks.faults(text, answered=answer is not None)
        return (None if faults else answer), faults

    def _judge(self, replies: Mapping[str, str]) -> dict[str, Answer]:
        """Return all answers of a turn, scored in one call: by the label, or by the model where they are not masked.

        Raises:
            EnvironmentContractError: the model gave a value that is not a probability, or another number of scores.
        """
        by_person = {}
        for person, text in replies.items():
            answer, faults = self._read(text, self._record.form, self._problem)
            right = is_right(answer, self._record.expected, self._record.form)
            by_person[person] = Answer(text, answer, faults, right, float(right))
        valid = [person for person, answer in by_person.items() if not answer.faults]
        if isinstance(self.scorer, str) or not valid:
            return by_person
        name = type(self.scorer).__name__
        try:
            scores = self.scorer.score_batch([exchange(self._question, replies[person]) for person in valid])
            values = [as_probability(score, self.scorer.probability) for score in scores]
        except NonFiniteError as error:  # of one answer: it costs the episode, not the run
            raise EnvironmentContractError(f"the scorer {name} failed: {error}") from error
        if len(values) != len(valid):
            raise EnvironmentContractError(f"the scorer {name} gave {len(values)} scores for {len(valid)} answers")
        self._truncated += sum(score.truncated for score in scores)
        return by_person | {
            person: replace(by_person[person], score=value) for person, value in zip(valid, values, strict=True)
        }

    def _pay(self, answers: Mapping[str, Answer]) -> dict[str, dict[str, float]]:
        """Return the components of each agent's reward for its answer in the latest turn."""
        return {
            self._agent(person, len(self._record.rounds)): {"score": answer.score, **self._penalty(answer)}
            for person, answer in answers.items()
        }

    def _penalty(self, answer: Answer) -> dict[str, float]:
        return {"penalty": -self.masks.penalty} if answer.faults and self.masks.penalty else {}

    def _step(self, pay: Mapping[str, Mapping[str, float]], asked: Observations, stop_reason: str = "") -> Step:
        metrics = self._record.metrics(done=bool(stop_reason))
        if self.scorer != "label":
            scores = self._record.mean_scores()
            metrics |= scores | {"truncated_scores": float(self._truncated)}
            if stop_reason:
                metrics[VERIFIER_SCORE] = list(scores.values())[-1]
        return Step(
            observations=asked,
            components=pay,
            done=bool(stop_reason),
            stop_reason=stop_reason,
            success=self._record.team_is_right() if stop_reason else None,
            metrics=metrics,
        )
