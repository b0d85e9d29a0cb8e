"""Episodes as tensors.

A training step receives a :class:`Batch`, deliberately neither a collection nor a data class: Lightning moves it
between devices by its ``to`` and leaves its numbers alone. Lightning's low-precision plugins cast every float tensor
inside a collection or a data class, and a log-probability rounded to bf16 is no longer the sampler's.
:class:`PolicyBatch` is a data class, which is safe inside a :class:`Batch` alone: never return one from a data loader
directly.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mrlm_pl.episode import Trajectory
from mrlm_pl.losses import BatchTotals
from mrlm_pl.policy.forward.devices import on_device
from mrlm_pl.policy.forward.packing import TokenRows

T = TypeVar("T")

ReturnAndBaseline = tuple[float | None, float | None]
"""Return and baseline of a turn, as they are compared; None if it has none."""


@dataclass(eq=False)
class PolicyBatch:
    """Rows of one policy, B rows padded on the right to T tokens.

    The optional fields are None in runs that do not use them.

    Attributes:
        token_ids: [B, T] int64.
        lengths: [B] int64, tokens in each row.
        action_mask: [B, T] bool, True where the policy sampled the token.
        behavior_logp: [B, T] fp32, log-probabilities of the behavior policy, as the sampler reported them; 0 outside
            the mask.
        groups: [B] int64, index of the row's group: the episodes of a task, or the answers of a pair. A group is served
            in one micro-batch unless the algorithm lets it be divided, and a forward pass computes the common prefix of
            its rows once.
        comparisons: [B] int64; rows with the same label are compared with each other: those of one agent in a group,
            or in one state of a turn tree.
        episode_tokens: [B] int64, number of action tokens of the row's episode in the whole collection.
        temperature: [B] fp32, sampling temperature; 1 for demonstrations and greedy turns.
        advantages: [B, T] fp32, 0 where nothing is credited.
        ref_logp: [B, T] fp32, log-probabilities under the reference policy.
        proximal_logp: [B, T] fp32, the learner's own log-probabilities at the time of sampling; None where the
            sampler's are used, or those of the update's own pass.
        values: [B, T] fp32, expected return before each action token, estimated at the time of sampling.
        returns: [B, T] fp32, regression targets of the values.
        observation_mask: [B, T] bool, True where the environment answered an action.
        reference_sums: [B] fp32, log-probability of the row's action tokens under the frozen reference.
        correct: [B] fp32 in [0, 1], whether the row's answer is right.
        joint_actions: [B] int64, index of the joint action to which the row belongs: 2 i for the chosen and 2 i + 1
            for the rejected one of pair i.
        margins: [B] fp32, difference of scores by which the chosen answer of the row's pair must win.
        trajectories: records of the rows, in the batch of a whole rollout; none in micro-batches and checkpoints.
        turn_baselines: return and baseline of each turn of the trajectories; None without trajectories.
        teacher_prompts: [B, K, 1 + P] int64, index of each of K teachers, then the prompt that it reads instead of the
            row's; the index is 0 for the row's own prompt and -1 for no teacher.
        taught_tokens: [B, T] bool, the tokens that teachers score; None for all action tokens.
        numbers: [B] int64, index of each row in the batch that it was selected from; for micro-batches, the batch of
            the rollout.
        episodes: [B] int64, index of the row's episode.
        host: the same rows on the host, in a micro-batch on another device. What decides the layout of a forward pass
            is read there: reading it from the device would wait for the work before.
    """

    token_ids: Tensor
    lengths: Tensor
    action_mask: Tensor
    behavior_logp: Tensor
    groups: Tensor
    comparisons: Tensor
    episode_tokens: Tensor
    temperature: Tensor
    advantages: Tensor
    ref_logp: Tensor | None = None
    proximal_logp: Tensor | None = None
    values: Tensor | None = None
    returns: Tensor | None = None
    observation_mask: Tensor | None = None
    reference_sums: Tensor | None = None
    correct: Tensor | None = None
    joint_actions: Tensor | None = None
    margins: Tensor | None = None
    trajectories: tuple[Trajectory, ...] = ()
    turn_baselines: tuple[Sequence[ReturnAndBaseline], ...] = ()
    teacher_prompts: Tensor | None = None
    taught_tokens: Tensor | None = None
    numbers: Tensor | None = None
    episodes: Tensor | None = None
    host: PolicyBatch | None = None

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @property
    def old_logp(self) -> Tensor:
        """Log-probabilities [B, T] of the old policy, at the start of the update: the learner's, or the sampler's."""
        return self.behavior_logp if self.proximal_logp is None else self.proximal_logp

    def inputs(self) -> TokenRows:
        """Return the rows of a forward pass, on the host if they are there; those of a group share their prefix."""
        rows = self.layout
        return TokenRows(rows.token_ids, rows.lengths, rows.action_mask, rows.temperature, rows.groups)

    @property
    def layout(self) -> PolicyBatch:
        """Rows that decide the layout of a forward pass: ``host``, else the batch itself."""
        return self if self.host is None else self.host

    def tensors(self) -> dict[str, Tensor]:
        """Tensors that are set, by name: the form in which checkpoints hold a batch."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> PolicyBatch:
        """Return a copy on another device, for which the host does not wait.

        Its ``host`` are these rows, which must not change any more.
        """
        moved: dict[str, Any] = {name: on_device(value, device) for name, value in self.tensors().items()}
        return replace(self, **moved, host=self.layout)

    def select(self, rows: Tensor) -> PolicyBatch:
        """Return the rows [b] with the given indices, which become their ``numbers``, padded to the longest of them."""
        width = int(self.lengths[rows].max()) if rows.numel() else 0
        chosen = {name: value[rows] for name, value in self.tensors().items()}
        cut: dict[str, Any] = {name: value[:, :width] if value.dim() == 2 else value for name, value in chosen.items()}
        return PolicyBatch(**{**cut, "numbers": rows})


class Batch:
    """The input of a training step: rows by policy, a micro-batch of one optimizer update.

    Attributes:
        policies: rows of this micro-batch, by policy or by critic with its own rows; learners without rows are
            absent.
        totals: size of the whole update by policy, over all micro-batches and ranks; it names every policy with rows.
        micro_batches: number of micro-batches (accumulation steps times ranks) of the update.
        metrics: metrics of the rollout, only on its first micro-batch.
        without_gradient: rows of this micro-batch with action tokens whose loss has no gradient; they count only in the
            metrics. It names all policies that have such rows on any rank; None where this rank has none.
        on_policy: whether the current weights are those that sampled, as in the first update on a synchronous rollout.
    """

    def __init__(
        self,
        policies: Mapping[str, PolicyBatch],
        totals: Mapping[str, BatchTotals],
        micro_batches: int = 1,
        without_gradient: Mapping[str, PolicyBatch | None] | None = None,
    ) -> None:
        self.policies, self.totals, self.micro_batches = dict(policies), dict(totals), micro_batches
        self.without_gradient = dict(without_gradient or {})
        self.metrics: Mapping[str, float] = {}
        self.on_policy = True

    def to(self, device: torch.device | str) -> Batch:
        """Return a copy on another device."""
        moved = copy.copy(self)
        moved.policies = {name: rows.to(device) for name, rows in self.policies.items()}
        moved.without_gradient = {
            name: None if rows is None else rows.to(device) for name, rows in self.without_gradient.items()
        }
        return moved


def not_none(value: T | None) -> T:
    """Return an optional field that this run has set, such as the values of rows with a critic.

    >>> not_none(3)
    3
    """
    assert value is not None
    return value


def padded_masks(masks: Sequence[Sequence[bool]]) -> Tensor:
    """Return masks of any length as one table [B, T], padded with False.

    >>> padded_masks([[True], [False, True]]).tolist()
    [[True, False], [False, True]]
    """
    return pad_sequence([torch.tensor(mask, dtype=torch.bool) for mask in masks], batch_first=True)


def episode_token_counts(action_mask: Tensor, episode_ids: Tensor) -> Tensor:
    """Return the action tokens [B] of each row's episode, summed over the episode's rows in this batch.

    Call it on the whole batch, before it is cut into micro-batches, and cut the result along with the rows.

    Args:
        action_mask: [B, T] bool.
        episode_ids: [B] int64, equal for the rows of one episode.

    >>> mask = torch.tensor([[True, True], [True, False], [True, True]])
    >>> episode_token_counts(mask, torch.tensor([7, 9, 7])).tolist()
    [4, 1, 4]
    """
    labels, index = torch.unique(episode_ids, return_inverse=True)
    lengths = action_mask.sum(-1)
    return lengths.new_zeros(labels.numel()).index_add(0, index, lengths)[index]


def collate_rows(
    rows: Sequence[Trajectory],
    groups: Sequence[int],
    comparisons: Sequence[int],
    episode_ids: Sequence[int],
    temperature: float = 1.0,
    advantages: Sequence[float] | None = None,
    baselines: Sequence[ReturnAndBaseline] = (),
) -> PolicyBatch:
    """Return the rows of one policy as a batch.

    Args:
        rows: B trajectories.
        groups: [B] index of each row's group.
        comparisons: [B] labels; rows with the same label are compared with each other.
        episode_ids: [B] labels, equal for the rows of one episode.
        temperature: sampling temperature.
        advantages: [B], advantage of all action tokens of a row; None is 0.
        baselines: [B], return and baseline of all turns of a row.

    >>> row = Trajectory("a", "p", (5, 6, 7), (False, True, True), (0.0, -1.0, -2.0), ())
    >>> batch = collate_rows([row, row], [0, 0], [0, 0], [0, 1], advantages=[1.0, 2.0])
    >>> batch.token_ids.tolist(), batch.advantages[1].tolist(), batch.episode_tokens.tolist()
    ([[5, 6, 7], [5, 6, 7]], [0.0, 2.0, 2.0], [2, 2])
    """

    def padded(name: str, dtype: torch.dtype) -> Tensor:
        values = [torch.tensor(getattr(row, name), dtype=dtype) for row in rows]
        return pad_sequence(values, batch_first=True) if values else torch.zeros(0, 0, dtype=dtype)

    action_mask = padded("action_mask", torch.bool)
    episodes = torch.tensor(list(episode_ids), dtype=torch.int64)
    return PolicyBatch(
        token_ids=padded("token_ids", torch.int64),
        lengths=torch.tensor([len(row.token_ids) for row in rows], dtype=torch.int64),
        action_mask=action_mask,
        behavior_logp=padded("logprobs", torch.float32),
        groups=torch.tensor(list(groups), dtype=torch.int64),
        comparisons=torch.tensor(list(comparisons), dtype=torch.int64),
        episode_tokens=episode_token_counts(action_mask, episodes),
        episodes=episodes,
        temperature=torch.full((len(rows),), temperature, dtype=torch.float32),
        advantages=action_mask * torch.tensor(advantages or [0.0] * len(rows), dtype=torch.float32)[:, None],
        trajectories=tuple(rows),
        turn_baselines=tuple((pair,) * len(row.turns) for pair, row in zip(baselines, rows, strict=bool(baselines))),
    )
