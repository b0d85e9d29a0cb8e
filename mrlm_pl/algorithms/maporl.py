"""Co-training of agents that discuss a question: PPO with a reward for the influence of each answer."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from mrlm_pl.advantages.task_normalization import TaskNormalization
from mrlm_pl.episode import Episode
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.grouping import summed_pairs
from mrlm_pl.learner.batch import PolicyBatch, not_none
from mrlm_pl.learner.credit.answers import answer_rows
from mrlm_pl.learner.credit.influence import Sums, learned_in, with_influence
from mrlm_pl.learner.credit.returns import Batches
from mrlm_pl.learner.credit.tokens import RewardedRows, TokenCredit, rows_of_agents
from mrlm_pl.learner.critics import AgentCritics, PolicyCritics, check_window
from mrlm_pl.learner.policy_gradient import PolicyGradient
from mrlm_pl.learner.ranks import gather_ranks
from mrlm_pl.policy import Policy
from mrlm_pl.rewards import INCENTIVES, Horizon, RewardShare, incentives
from mrlm_pl.settings import NonNegativeFloat, PositiveFloat, PositiveInt, UnitInterval

logger = logging.getLogger(__name__)


class MAPoRL(PolicyGradient):
    """Multi-agent post-co-training (MAPoRL, arXiv 2502.18439): PPO on answers with a reward for their influence.

    ``S(t, a)`` in [0, 1] is the component ``score`` of agent a's reward in turn t. Other components, such as a penalty,
    are its own and not shared; the component ``consensus``, for turns that are not played, is left out. With
    ``reward: team`` and ``mean_j`` over the agents::

        R(t, a) = [S(t, a) + sum_{t' > t} gamma^(t' - t) mean_j S(t', j)] / sum_{t' >= t} gamma^(t' - t)
        r(t, a) = R(t, a) + incentives(t, a) + other components of turn t

        d_k  = r(t, a) on the last token of the turn, else 0,  + V_{k+1} - V_k    (V_{k+1} = 0 behind the last token)
        A_k  = d_k + lambda A_{k+1} within the turn

    ``R`` contains the future already, so every turn is its own decision problem: no value and no advantage crosses
    its end, nor that of a truncated episode. The loss is that of :class:`~mrlm_pl.algorithms.ppo.PPO`;
    critics and whitening by agent are those of :class:`~mrlm_pl.algorithms.ippo.IPPO`.

    The k-th scored answer of an agent is its turn k, whichever step of the environment that was: a leader who answers
    after the others is in the same turn. An environment with an agent ``NAME@K`` for each turn of a person gives every
    turn its own policy, adapter or critic by ``seats`` and ``agent_critics``; the person is one in ``S``.

    Logged once a rollout in addition to the numbers of IPPO, over all ranks: ``train/ties`` (how many incentives
    compared with exactly 0.5), ``train/incentive_KIND`` (mean per answer), ``train/influence/turn_K`` (mean ``R``) and
    ``train/trained/turn_K`` (1 for a trained turn). A decision without a ``score`` keeps
    its reward.

    Args:
        policies, seats, agent_critics: see :class:`~mrlm_pl.algorithms.ippo.IPPO`.
        reward: later scores that reward an answer: the whole ``team``'s or the agent's ``own``.
        horizon: ``discounted_sum`` is ``R``, ``last`` the last turn's scores, ``current`` this turn's.
        gamma: discount factor of the scores per turn.
        alpha0: incentive for changing a wrong answer to right, negative for the reverse, while the others were wrong:
            self-correction.
        alpha1: the same while the others were right: following them.
        beta0: incentive for a wrong answer after which the others change from wrong to right by the next turn, negative
            for the reverse.
        beta1: the same for a right answer: persuading them.
        critic_reads: the critic's input: the agent's whole ``debate``, or with ``agent_critics`` the question and each
            ``answer``.
        turn_schedule: lists of turns, counted from 1, trained one list after the other, repeatedly; None trains all.
        turn_iterations: rollouts per list.
        whiten_over: see :class:`~mrlm_pl.algorithms.ippo.IPPO`.
        value_learning_rate, value_clip, value_coefficient: see :class:`~mrlm_pl.algorithms.ppo.PPO`.
        lam, whiten_advantages, task_normalization: see :class:`~mrlm_pl.algorithms.ppo.PPO`.
        settings: see :class:`~mrlm_pl.learner.policy_gradient.PolicyGradient`.

    Raises:
        ConfigurationError: a value out of range, or critics or a schedule that do not fit the agents.
    """

    kl_placements = ("reward", "loss")
    default_loss = "ppo"

    def __init__(
        self,
        policies: dict[str, Policy] | None = None,
        seats: dict[str, str] | None = None,
        *,
        agent_critics: dict[str, Policy] | None = None,
        reward: RewardShare = "team",
        horizon: Horizon = "discounted_sum",
        gamma: UnitInterval = 0.3,
        alpha0: float = 0.0,
        alpha1: float = 0.0,
        beta0: float = 0.0,
        beta1: float = 0.0,
        critic_reads: Literal["debate", "answer"] = "debate",
        turn_schedule: list[list[int]] | None = None,
        turn_iterations: PositiveInt = 1,
        whiten_over: Literal["agent", "policy"] = "agent",
        value_learning_rate: NonNegativeFloat | None = None,
        value_clip: PositiveFloat | None = 0.2,
        value_coefficient: NonNegativeFloat = 0.5,
        lam: UnitInterval = 0.95,
        whiten_advantages: bool = True,
        task_normalization: TaskNormalization | None = "none",
        **settings: Any,
    ) -> None:
        super().__init__(policies, seats, task_normalization=task_normalization, **settings)
        amounts = dict(zip(INCENTIVES, (alpha0, alpha1, beta0, beta1), strict=True))
        incentives([{"a": 1.0}], **amounts)  # a mistake raises now
        if critic_reads == "answer" and not agent_critics:
            raise ConfigurationError(
                "critic_reads is 'answer', but there are no agent_critics: a value head reads what its policy reads; "
                "give each agent one with `agent_critics: {AGENT: {model: ...}}`"
            )
        if turn_schedule == []:
            raise ConfigurationError("turn_schedule is empty; name the turns, such as [[1], [2, 3]], or leave it out")
        for turns in turn_schedule or ():
            if not turns or min(turns) < 1 or len(set(turns)) != len(turns):
                raise ConfigurationError(
                    f"turn_schedule has the entry {turns}; each must name different turns, counted from 1"
                )
        # Within a turn the discount is 1, and behind its last token 0.
        self.unit = TokenCredit(0.0, lam, "turn", whiten_over if whiten_advantages else None)
        critics = PolicyCritics if not agent_critics else AnswerCritics if critic_reads == "answer" else AgentCritics
        self.critic = critics(agent_critics or {}, self.learners, value_learning_rate, value_clip, value_coefficient)
        self.influence = partial(with_influence, gamma=gamma, reward=reward, horizon=horizon, amounts=amounts)
        self.turn_schedule, self.turn_iterations = turn_schedule, turn_iterations
        self.collections = 0

    @property
    def trained_turns(self) -> Collection[int] | None:
        """Return the turns, counted from 1, that the next rollout trains; None is all of them."""
        if self.turn_schedule is None:
            return None
        return self.turn_schedule[self.collections // self.turn_iterations % len(self.turn_schedule)]

    def check_agents(self, agents: Collection[str]) -> None:
        super().check_agents(agents)
        numbers = [agent.partition("@")[2] for agent in agents]
        if self.turn_schedule and all(number.isdigit() for number in numbers):
            last = max(map(int, numbers))
            late = sorted({turn for turns in self.turn_schedule for turn in turns if turn > last})
            if late:
                raise ConfigurationError(f"turn_schedule names turn {late[0]}, but the agents act in {last} turns")

    def rewarded(self, episodes: Sequence[Episode]) -> Sequence[Episode]:
        turns = self.trained_turns
        self.collections += 1
        played = [episode for episode in episodes if not episode.failed]
        trained = played if turns is None else [learned_in(episode, turns) for episode in played]
        rewarded = [self.influence(episode) for episode in trained]
        self._log_rewards([sums for _, sums in rewarded], turns)
        return [episode for episode, _ in rewarded]

    def _log_rewards(self, sums: Sequence[Sums], turns: Collection[int] | None) -> None:
        """Log the rewards of the episodes of all ranks; every rank must call this."""
        by_rank = gather_ranks(self.trainer, list(sums))
        items = [item for rank_sums in by_rank for of_episode in rank_sums for item in of_episode.items()]
        played: set[int] = set()
        for name, (value, count) in sorted(summed_pairs(items).items()):
            self.metrics.rollout[f"train/{name}"] = value if name == "ties" else value / count
            turn = name.partition("turn_")[2]
            if turn:
                played.add(int(turn))
                self.metrics.rollout[f"train/trained/turn_{turn}"] = float(turns is None or int(turn) in turns)
        if played and turns is not None and played.isdisjoint(turns):
            logger.warning(
                "turn_schedule names the turns %s, but no episode went beyond turn %d: this rollout trains nothing; "
                "name turns that are played",
                sorted(turns),
                max(played),
            )

    def progress(self) -> dict[str, Any]:
        return {**super().progress(), "collections": self.collections}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        super().load_progress(progress)
        self.collections = progress.get("collections", 0)


class AnswerCritics(AgentCritics):
    """A model for each agent, which reads the question and each of its answers alone."""

    def estimates(self, policy: str, rewarded: RewardedRows) -> tuple[Tensor, Tensor]:
        values = torch.zeros_like(rewarded.batch.action_mask, dtype=torch.float32)
        for agent, (rows, answered) in self._answers(rewarded).items():
            values[answered] = self.model(agent).values(rows.inputs()).cpu()[rows.action_mask].to(values.dtype)
        return values, values.new_zeros(len(rewarded.batch))

    def rows(self, rewarded: RewardedRows) -> Batches:
        by_critic = {}
        for agent, (rows, answered) in self._answers(rewarded).items():
            nothing = torch.zeros(rows.action_mask.shape, dtype=torch.float32)
            rows.values = nothing.masked_scatter(rows.action_mask, not_none(rewarded.batch.values)[answered])
            rows.returns = nothing.masked_scatter(rows.action_mask, not_none(rewarded.batch.returns)[answered])
            by_critic[self.label(agent)] = rows
        return by_critic

    def _answers(self, rewarded: RewardedRows) -> dict[str, tuple[PolicyBatch, Tensor]]:
        answers = {}
        for agent, indices in rows_of_agents(rewarded.agents).items():
            critic = self.model(agent)
            answers[agent] = answer_rows(rewarded, indices, critic.chat)
            mask = answers[agent][0].action_mask
            windows = torch.full((len(mask),), min(critic.context_window, mask.shape[1]))
            check_window(mask, windows, f"agent_critics.{agent}")
        return answers
