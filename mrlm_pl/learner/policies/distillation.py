"""Distillation: teachers that score the tokens that a student samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mrlm_pl.advantages import NO_MOMENTS, masked_moments
from mrlm_pl.episode import Episode, Message, by_group
from mrlm_pl.errors import ConfigurationError, source_line
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.policies.reprompts import REPROMPTS, Attempt
from mrlm_pl.learner.ranks import sum_over_ranks
from mrlm_pl.losses import BatchTotals, token_weights
from mrlm_pl.policy import Policy
from mrlm_pl.policy.forward.divergence import Lesson, Teaching
from mrlm_pl.policy.forward.families import forward_path
from mrlm_pl.policy.forward.packing import TokenRows
from mrlm_pl.policy.sharding import is_split
from mrlm_pl.settings import PositiveFloat, PositiveInt, Settings, UnitInterval, one_of

logger = logging.getLogger(__name__)

Form = Literal["sampled", "top_k", "full"]


@dataclass(frozen=True)
class Teacher(Settings):
    """A teacher that scores some of the trajectories.

    Args:
        policy: name of a policy with `trained: false`; None is the student itself, or the policy of ``partner``.
        weight: factor of the teacher's divergence.
        environments: environments whose episodes the teacher scores; None is all.
        agents: agents whose tokens the teacher scores; None is all agents of trained policies.
        reprompt: conversation in which the teacher reads the student's answer; None is the student's own. ``sibling``
            adds the answer of a successful episode of the same task (SDPO), ``demonstration`` the task's solution
            (SDFT), ``feedback`` the environment's later messages, ``team`` the last answers of the other agents,
            ``majority`` their most frequent one in all episodes of the task; or a function (its import path or name in
            a plugin) from an :class:`~mrlm_pl.learner.policies.reprompts.Attempt` to messages or None.
        partner: agent of the same episode whose conversation, up to its last turn, the teacher reads.

    Raises:
        ConfigurationError: a value is out of range, or the teacher would be the student with the same information.
    """

    policy: str | None = None
    weight: PositiveFloat = 1.0
    environments: Sequence[str] | None = None
    agents: Sequence[str] | None = None
    reprompt: Literal["sibling", "demonstration", "feedback", "team", "majority"] | Callable[..., Any] | None = None
    partner: str | None = None

    def __post_init__(self) -> None:
        for option, names in {"environments": self.environments, "agents": self.agents}.items():
            if names is not None and not names:
                raise ConfigurationError(
                    f"distillation.teachers: {option} is empty; name some, or leave it out for all"
                )
        if self.reprompt is not None and self.partner is not None:
            raise ConfigurationError(
                f"distillation.teachers: reprompt is {self.reprompt!r} and partner {self.partner!r}; give one of them"
            )
        if self.policy is None and self.reprompt is None and self.partner is None:
            raise ConfigurationError(
                "distillation.teachers: a teacher without policy is the student itself, and has nothing to teach "
                "without a reprompt or a partner; name a policy with `trained: false`, or set reprompt"
            )


UNKNOWN_SUCCESS = (
    "no episode counts as solved, and reprompt sibling reads the answer of one that does: the environment does not say "
    "which episodes succeed; set its `success_at` (`--data.environment.success_at 1.0`) where it has one, else let its "
    "last step return `success`"
)


@dataclass(frozen=True)
class Distillation(Settings):
    """The loss of the divergence from teachers.

    With the student ``q`` and a teacher ``p`` after the tokens that the student sampled::

        sampled   A_t += coefficient (log p(token_t) - log q_old(token_t))        reverse KL, in the ratio's loss
        full      loss_t += coefficient D(p, q)                                   generalized Jensen-Shannon divergence
        top_k     the same over the teacher's k most probable tokens and one bucket of all others

        D = beta KL(p || m) + (1 - beta) KL(q || m),   m = beta p + (1 - beta) q,   0 < beta < 1
        D = KL(p || q) for beta 0,   KL(q || p) for beta 1

    Each teacher's term has its ``weight``. Tokens are sampled and compared at the same temperature.

    Args:
        teachers: one or more; the terms of several teachers of a token are summed.
        form: ``sampled``, ``full`` or ``top_k`` divergence.
        coefficient: factor of the term.
        beta: interpolation from the forward divergence (0) to the reverse one (1), in ``full`` and ``top_k``.
        top_k: number of the teacher's tokens in ``top_k``.

    Raises:
        ConfigurationError: an unknown name or a value out of range.
    """

    teachers: Sequence[Teacher] = ()
    form: Form = "sampled"
    coefficient: PositiveFloat = 1.0
    beta: UnitInterval = 1.0
    top_k: PositiveInt = 64

    def __post_init__(self) -> None:
        if self.form == "sampled" and self.beta != 1:
            raise ConfigurationError(
                f"distillation.beta is {self.beta}, but form sampled is the reverse KL; choose form full or top_k"
            )
        if not self.teachers:
            raise ConfigurationError(
                "distillation.teachers is empty; name a policy with `trained: false`: `teachers: [{policy: NAME}]`, or "
                "let the policy teach itself: `teachers: [{reprompt: sibling}]`"
            )


class Distiller:
    """Adds the terms of a :class:`Distillation` to the rows and losses of an algorithm.

    Args:
        settings: settings of the loss.
        learner: algorithm with the policies and seats.

    Raises:
        ConfigurationError: a teacher does not exist, is trained, is on a server, or reads other tokens than a student,
            or the algorithm leaves out tokens without an advantage.
    """

    def __init__(self, settings: Distillation, learner: Any) -> None:
        if learner.zero_variance == "exclude":
            raise ConfigurationError(
                "zero_variance is exclude, which leaves out the tokens without an advantage that the teachers of "
                "distillation score; set it to keep"
            )
        self.settings, self.learner = settings, learner
        self.in_loss = settings.form != "sampled"
        self._first = True
        students = list(learner.trained_policies)
        self.names = [
            learner.seat(teacher.partner) if teacher.policy is None and teacher.partner is not None else teacher.policy
            for teacher in settings.teachers
        ]
        for teacher, name in zip(settings.teachers, self.names, strict=True):
            if name is None:
                continue
            one_of(learner.policies, "distillation.teachers: ", policy=name)
            whose = "" if teacher.partner is None or teacher.policy else f" of the partner {teacher.partner!r}"
            of = students if teacher.agents is None else {learner.seat(agent) for agent in teacher.agents}
            for student in of:
                self._check(name, whose, student)
            seat = None if teacher.partner is None else learner.seat(teacher.partner)
            if seat is not None and (differs := _difference(learner.policy(name), learner.policy(seat))):
                raise ConfigurationError(
                    f"distillation.teachers: the policy {name!r} has another {differs} than {seat!r}, which decides "
                    "for its partner; choose policies of one family, or leave out partner"
                )
        learner.teachers = tuple(name for name in self.names if name is not None)

    def _check(self, name: str, whose: str, student_name: str) -> None:
        """Validate that a teacher can score the tokens of a student."""
        teacher, student = self.learner.policy(name), self.learner.policy(student_name)
        sizes = [policy.config.get_text_config().vocab_size for policy in (teacher, student)]
        if teacher.trained and whose:
            fault = (
                "is trained; set `policy` to a frozen one that reads the partner's conversation, or `trained: false`"
            )
        elif teacher.trained:
            fault = "is trained; set `trained: false`, or leave out its name, so that the student is its own teacher"
        elif teacher.served_by:
            fault = f"is served by {teacher.served_by}, which scores no tokens; leave out served_by"
        elif differs := _difference(teacher, student):
            remedy = "choose a teacher of the same family"
            if differs == "chat template":
                remedy = "set the chat_template that the teacher was trained with for both"
            fault = (
                f"({teacher.name_or_path!r}) has another {differs} than its student {student_name!r} "
                f"({student.name_or_path!r}); {remedy}"
            )
        elif self.in_loss and sizes[0] != sizes[1]:
            fault = (
                f"predicts {sizes[0]} tokens, and its student {student_name!r} {sizes[1]}; set distillation.form to "
                "sampled"
            )
        else:
            return
        raise ConfigurationError(f"distillation.teachers: the policy {name!r}{whose} {fault}")

    def prepare(self, batches: Mapping[str, PolicyBatch], episodes: Sequence[Episode]) -> None:
        """Add the teachers' prompts to rows, or for form ``sampled`` their terms to the advantages; all ranks call it.

        Logged once a rollout for each policy: ``taught_rows``, the fraction of rows with a teacher, and for ``sampled``
        ``teacher_divergence`` and ``teacher_agreement``.
        """
        attempts = _attempts(episodes)
        moments_here: dict[tuple[str, str], Any] = {}
        for name, rows in batches.items():
            if self.in_loss:
                self._check_heads(name)
            rows.teacher_prompts = self._prompts(self.learner.policy(name), rows, attempts)
            taught = (rows.teacher_prompts[:, :, 0] >= 0).any(1)
            moments_here[name, "taught_rows"] = masked_moments(
                taught[:, None].float(), torch.ones_like(taught)[:, None]
            )
            if not self.in_loss:
                moments_here |= {(name, metric): moments for metric, moments in self._score(name, rows).items()}
                rows.teacher_prompts = None
        totals = sum_over_ranks(self.learner.trainer, moments_here)
        for (name, metric), moments in totals.items():
            if moments.count:
                self.learner.metrics.rollout[self.learner.metrics.name(metric, name)] = moments.mean
        if self._first and not any(moments.mean for (_, metric), moments in totals.items() if metric == "taught_rows"):
            logger.warning(
                "distillation: no trajectory of the first rollout has a teacher: %s", self._without_teacher(episodes)
            )
        self._first = False

    def _without_teacher(self, episodes: Sequence[Episode]) -> str:
        """Return the likely reason for a rollout without taught rows."""
        siblings = any(teacher.reprompt == "sibling" for teacher in self.settings.teachers)
        if siblings and all(episode.success is None for episode in episodes):
            return UNKNOWN_SUCCESS
        if siblings and not any(episode.success for episode in episodes):
            return "no episode succeeds, and reprompt sibling reads the answer of one that does; use easier tasks first"
        return (
            "see the reprompt, partner, agents and environments of distillation.teachers, the context windows, and "
            "taught_rows in the log"
        )

    def check_rollouts(self, agents: Collection[str], environments: Collection[str]) -> None:
        """Validate the teachers against a run's agents and environments.

        Raises:
            ConfigurationError: there is no agent or environment of a name, no trained policy decides for an agent that
                is taught, or a teacher reads the answers of other agents and there are none.
        """
        owner = "distillation.teachers: "
        for teacher in self.settings.teachers:
            one_of(agents, owner, partner=teacher.partner)
            for environment in teacher.environments or ():
                one_of(environments, owner, environments=environment)
            for agent in teacher.agents or ():
                one_of(agents, owner, agents=agent)
                if not self.learner.policy(self.learner.seat(agent)).trained:
                    raise ConfigurationError(
                        f"distillation.teachers: agents has {agent!r}, for which the frozen policy "
                        f"{self.learner.seat(agent)!r} decides; name agents of trained policies"
                    )
            if teacher.reprompt in ("team", "majority") and len(agents) < 2:
                raise ConfigurationError(
                    f"distillation.teachers: reprompt is {teacher.reprompt!r}, the answers of other agents, but the "
                    f"only agent is {[*agents]}; choose another reprompt, or an environment with several agents"
                )

    def _check_heads(self, student: str) -> None:
        if str(self.learner.trainer.precision).startswith("16"):
            raise ConfigurationError(
                f"distillation.form is {self.settings.form}, whose gradient is computed before it is scaled, and "
                f"trainer.precision is {self.learner.trainer.precision}, in which it would vanish; set "
                "trainer.precision to bf16-mixed or 32-true, or distillation.form to sampled"
            )
        for name in (student, *(name for name in self.names if name is not None)):
            network = self.learner.policy(name).network
            path = forward_path(network)
            remedy = "set distillation.form to sampled"
            if path.name == "logits":
                raise ConfigurationError(
                    f"distillation: policy {name!r} has no plain output head ({path.reason}); {remedy}"
                )
            if is_split(network):
                raise ConfigurationError(
                    f"distillation.form is {self.settings.form}, which reads whole output heads, but this strategy "
                    f"splits policy {name!r} over the ranks; {remedy}, or use the strategy ddp"
                )

    def _prompts(self, student: Policy, rows: PolicyBatch, attempts: Mapping[int, Attempt]) -> Tensor:
        """Return the prompts [B, K, 1 + P] of K teachers for each row, each behind the teacher's index.

        The index is 0 if a teacher reads the student's own prompt, and -1 if it does not teach, for example because the
        row exceeds its context window.
        """
        prompts: list[Tensor] = []
        for row, mask in enumerate(rows.action_mask):
            start, stop = _action_span(mask)
            attempt = attempts[id(rows.trajectories[row].turns[-1])]
            for teacher, name in zip(self.settings.teachers, self.names, strict=True):
                prompt = self._prompt(teacher, student, attempt, start)
                window = (student if name is None else self.learner.policy(name)).context_window
                if prompt is not None and (len(prompt) or start) + stop - start > window:
                    prompt = None
                prompts.append(torch.tensor([-1] if prompt is None else [len(prompt), *prompt]))
        table = pad_sequence(prompts, batch_first=True) if prompts else torch.zeros(0, 1, dtype=torch.int64)
        return table.view(len(rows), len(self.settings.teachers), -1)

    def _prompt(self, teacher: Teacher, student: Policy, attempt: Attempt, start: int) -> Sequence[int] | None:
        row, environment = attempt.trajectory, attempt.episode.task.environment
        if teacher.environments is not None and environment not in teacher.environments:
            return None
        if teacher.agents is not None and row.agent not in teacher.agents:
            return None
        if teacher.partner is not None:
            partner_rows = attempt.episode.trajectories.get(teacher.partner, ())
            read = next((partner for partner in reversed(partner_rows) if partner.turns), None)
            return None if row.agent == teacher.partner or read is None else read.token_ids[: read.turns[-1].start]
        if teacher.reprompt is None:
            return ()
        reprompt = REPROMPTS[teacher.reprompt] if isinstance(teacher.reprompt, str) else teacher.reprompt
        messages = reprompt(attempt)
        if messages is None:
            return None
        if isinstance(messages, str) or not all(isinstance(message, Message) for message in messages):
            raise ConfigurationError(
                f"{getattr(reprompt, '__qualname__', reprompt)} returned {messages!r:.60}; a reprompt must return a "
                f"sequence of messages, or None ({source_line(reprompt)})"
            )
        chat, first = student.chat, row.turns[0].start
        opening_ids, reprompt_ids = (
            chat.encode(chat.render(prompt_messages, generation_prompt=True))
            for prompt_messages in (attempt.opening, messages)
        )
        if tuple(opening_ids) != row.token_ids[:first]:
            raise ConfigurationError(
                f"distillation.teachers: the prompt of agent {row.agent!r} cannot be rendered again from its messages, "
                "as with tools in the chat template; use a teacher without reprompt"
            )
        return [*reprompt_ids, *row.token_ids[first:start]]

    def _views(self, rows: PolicyBatch) -> list[tuple[Policy | None, float, Tensor, TokenRows]]:
        """Return each teacher with trajectories here: its policy, weight, the rows, and the rows as it reads them.

        The last two are on the host.
        """
        views, rows = [], rows.layout
        assert rows.teacher_prompts is not None
        for position, (teacher, name) in enumerate(zip(self.settings.teachers, self.names, strict=True)):
            lengths = rows.teacher_prompts[:, position, 0]
            taught = (lengths >= 0).nonzero().flatten()
            if not taught.numel():
                continue
            inputs = rows.select(taught).inputs()
            if bool((lengths[taught] > 0).any()):
                inputs = inputs._replace(**_teacher_inputs(rows, taught, rows.teacher_prompts[:, position]))
            views.append((None if name is None else self.learner.policy(name), teacher.weight, taught, inputs))
        return views

    @torch.no_grad()
    def _score(self, name: str, rows: PolicyBatch) -> dict[str, Any]:
        """Add the teachers' terms to the advantages, and return the moments of the divergence and the agreement."""
        moments = dict.fromkeys(("teacher_divergence", "teacher_agreement"), NO_MOMENTS)
        for teacher, weight, taught, inputs in self._views(rows):
            logp = (teacher or self.learner.policy(name))(inputs).cpu()
            mask = _mask_of_rows(rows.action_mask, taught)
            gain = torch.zeros_like(rows.old_logp)
            gain[mask] = logp[inputs.action_mask] - rows.old_logp[mask]
            rows.advantages = rows.advantages + self.settings.coefficient * weight * gain
            moments["teacher_divergence"] += masked_moments(-gain, mask)
            moments["teacher_agreement"] += masked_moments(gain.exp().clamp(max=1.0), mask)
        return moments

    def teaching(self, name: str, rows: PolicyBatch, totals: BatchTotals, alone: bool) -> Teaching | None:
        """Return the teachers' part of a policy's forward pass over rows; None without one.

        Args:
            name: name of the policy.
            rows: rows of a micro-batch.
            totals: size of the update; see :func:`mrlm_pl.losses.token_weights`.
            alone: whether no other part of the loss has a gradient.
        """
        if rows.teacher_prompts is None:
            return None
        sizes = {"max_length": self.learner.max_length, "episode_tokens": rows.episode_tokens}
        weights = token_weights(self.learner.reduction, rows.action_mask, totals, **sizes)
        lessons, host = [], rows.layout
        for teacher, weight, taught, inputs in self._views(rows):
            policy = teacher or self.learner.policy(name)
            chosen = _mask_of_rows(host.action_mask, taught)
            taught_tokens = chosen if host.taught_tokens is None else chosen & host.taught_tokens
            if not bool(taught_tokens.any()):
                continue
            positions = torch.where(taught_tokens.flatten(), chosen.flatten().cumsum(0) - 1, -1)
            head = policy.network.get_output_embeddings()
            lessons.append(Lesson(policy.states(inputs), head, positions, weights.flatten(), weight))
        top_k = self.settings.top_k if self.settings.form == "top_k" else None
        return Teaching(tuple(lessons), self.settings.beta, top_k, alone and bool(lessons)) if lessons else None

    def loss(self, name: str, taught: Tensor) -> Tensor:
        """Return the loss [B, T] of the divergences of a forward pass, and add their metrics to the update."""
        losses, divergences, overlaps, teachers = taught
        pairs = teachers.sum()
        means = {"teacher_divergence": divergences.sum() / pairs, "teacher_agreement": overlaps.sum() / pairs}
        self.learner.metrics.add_means(name, means, pairs)
        return self.settings.coefficient * losses


def _difference(teacher: Policy, other: Policy) -> str | None:
    """Return the first difference between the tokens of a teacher and of another policy; None if there is none."""
    if teacher.vocabulary_digest != other.vocabulary_digest:
        return "vocabulary"
    return None if teacher.chat.template == other.chat.template else "chat template"


def _attempts(episodes: Sequence[Episode]) -> dict[int, Attempt]:
    """Return the attempt of each turn by the ``id`` of its record, which the rows of trajectories and of turns share.

    Siblings are ordinary episodes only: branch episodes repeat some of their turns.
    """
    groups = by_group(episode for episode in episodes if not episode.failed and episode.origin is None)
    attempts: dict[int, Attempt] = {}
    for episode in episodes:
        siblings = [sibling for sibling in groups.get(episode.group, ()) if sibling is not episode]
        for row in () if episode.failed else episode.rows():
            attempt = Attempt(episode, row, siblings)
            for turn in row.turns:
                attempts.setdefault(id(turn), attempt)
    return attempts


def _mask_of_rows(mask: Tensor, rows: Tensor) -> Tensor:
    """Return a mask [B, T] in these rows, False in others."""
    return mask & torch.zeros_like(mask).index_fill(0, rows, True)


def _action_span(mask: Tensor) -> tuple[int, int]:
    positions = mask.nonzero().flatten()
    return int(positions[0]), int(positions[-1]) + 1


def _teacher_inputs(rows: PolicyBatch, taught: Tensor, prompts: Tensor) -> dict[str, Tensor]:
    """Return the tokens, lengths and mask of the taught rows, each behind its teacher's prompt [1 + P]."""
    tokens, masks = [], []
    for row in taught.tolist():
        start, stop = _action_span(rows.action_mask[row])
        count = int(prompts[row, 0])
        prompt = prompts[row, 1 : 1 + count] if count else rows.token_ids[row, :start]
        tokens.append(torch.cat([prompt, rows.token_ids[row, start:stop]]))
        masks.append(torch.cat([torch.zeros_like(prompt, dtype=torch.bool), rows.action_mask[row, start:stop]]))
    lengths = torch.tensor([len(row_tokens) for row_tokens in tokens])
    table, mask = (pad_sequence(sequences, batch_first=True) for sequences in (tokens, masks))
    return {"token_ids": table, "lengths": lengths, "action_mask": mask}
