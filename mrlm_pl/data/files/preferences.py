"""Pairs of a chosen and a rejected answer, from files or made of played episodes by their rewards."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor

from mrlm_pl.algorithms import DPO, PairwiseRewardModel
from mrlm_pl.data.files.base import DataSplit, FixedDataModule
from mrlm_pl.data.files.chat_rows import (
    chat_rows,
    messages_fault,
    messages_of,
    played_rows,
    scored_row,
    text_row,
)
from mrlm_pl.episode import Episode, Message, Trajectory
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.batch import PolicyBatch, collate_rows
from mrlm_pl.learner.ranks import data_parallel_rank, sum_over_ranks
from mrlm_pl.losses import BatchTotals, sequence_logp
from mrlm_pl.policy import ChatFormat

P = TypeVar("P", Episode, Trajectory)


class PlayedPair(NamedTuple):
    """The best and the worst row that one agent played in the episodes of a group."""

    chosen: Trajectory
    rejected: Trajectory


class RowPair(NamedTuple):
    """The token rows of the preferred and of the rejected answer; several where several agents acted."""

    chosen: tuple[Trajectory, ...]
    rejected: tuple[Trajectory, ...]

    def rows(self) -> tuple[Trajectory, ...]:
        """Return all rows, the chosen ones first."""
        return self.chosen + self.rejected


class PreferenceDataModule(FixedDataModule):
    """Pairs of answers to the same prompt, shuffled in each epoch.

    A data row is one of

    - ``{"prompt": "text", "chosen": "text", "rejected": "text"}``: plain text without a chat template; the answers and
      the EOS token are compared;
    - ``{"prompt": [messages], "chosen": [messages], "rejected": [messages]}``: a chat; the assistant's messages of the
      answers are compared; without ``prompt``, what both begin with is the prompt;
    - an episode, as ``mrlm collect --samples-per-task N`` and runs write them: of the episodes of a group, the best and
      the worst are a pair when their rewards differ by more than ``reward_gap``. The sampled tokens are compared as
      they are when the learner has the tokenizer and the chat template of the model that played.

    The answers of a pair share the computation of their prompt. ``PairwiseRewardModel`` is shown every pair as a chat
    in its own chat template, and scores each answer at its end. For ``DPO`` the log-probabilities of the reference are
    computed once, before the first update, shared out over the ranks, and are part of checkpoints.

    Args:
        train: file (JSONL, JSON, parquet, also gzipped), a run's folder of episodes, or hub name.
        validation: the same for the validation loop; None has none.
        test: the same for ``mrlm test``; None has none.
        batch_size: pairs in a batch, on each rank.
        max_tokens: pairs with a longer row are left out and counted; None is the model's context window.
        reward_gap: see above.
        seed: of the shuffling; the command line passes ``seed_everything``.

    Raises:
        DataError: a file is missing, a row lacks its fields, or episodes give no pair.
    """

    algorithms: ClassVar[tuple[type[Algorithm], ...]] = (DPO, PairwiseRewardModel)
    unit = "pair"
    form = "{prompt, chosen, rejected}"

    def __init__(
        self,
        train: str,
        validation: str | None = None,
        batch_size: int = 16,
        max_tokens: int | None = None,
        reward_gap: float = 0.0,
        seed: int = 0,
        test: str | None = None,
    ) -> None:
        self.reward_gap = reward_gap
        super().__init__(train, validation, batch_size, max_tokens, seed, test)
        self._starts: dict[DataSplit, list[int]] = {}
        self._references: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}
        self._referenced: dict[str, str] = {}

    def fault(self, row: Mapping[str, Any]) -> str | None:
        return pair_fault(row)

    def of_episodes(self, episodes: Sequence[Episode], source: str) -> list[Any]:
        pairs = self.pairs_of(episodes)
        if not pairs:
            raise DataError(
                f"{source}: no two episodes of a group differ by more than {self.reward_gap} in the agents' mean "
                "return; collect several of each task with `mrlm collect --samples-per-task 8`, or lower "
                "data.reward_gap"
            )
        return pairs

    def pairs_of(self, episodes: Sequence[Episode]) -> list[Any]:
        """Return the pairs that are made of episodes."""
        return list(played_pairs(episodes, self.reward_gap))

    def tokenized(self, example: Any, where: str) -> list[RowPair]:
        name, policy = self.learner()
        made = scored_pair if isinstance(self.algorithm(), PairwiseRewardModel) else pair_rows
        chosen, rejected = made(example, policy.chat, name, where)
        return [RowPair((chosen,), (rejected,))]

    def rows_of(self, example: RowPair) -> Sequence[Trajectory]:
        return example.rows()

    def setup(self, stage: str) -> None:
        super().setup(stage)
        for split, pairs in self.examples.items():
            self._starts[split], self._digests[split] = row_starts(pairs), _digest(pairs)

    def uses_reference(self) -> bool:
        """Return True if the loss compares with the reference."""
        algorithm = self.algorithm()
        return isinstance(algorithm, DPO) and not algorithm.reference_free

    def before_first_batch(self) -> None:
        algorithm, trainer = self.algorithm(), self.trainer
        assert trainer is not None
        if not self.uses_reference():
            return
        if not self._references and trainer.state.fn == "fit" and not trainer.global_step:
            was_training = algorithm.training
            algorithm.eval()
            self._references = {split: self._reference_sums(pairs) for split, pairs in self.examples.items()}
            self._referenced = dict(self._digests)
            algorithm.train(was_training)
        evaluated: DataSplit = "test" if trainer.state.fn == "test" else "validation"
        for split in self.examples if trainer.state.fn == "fit" else (evaluated,):
            if self._referenced.get(split) != self._digests[split]:
                free = ", or use `model.reference_free`" if isinstance(algorithm, DPO) else ""
                raise ConfigurationError(
                    f"data.{split}: {self.sources[split]!r} holds no pairs that the run began with, so that the "
                    "log-probabilities of DPO's reference, the policy before its first update, are not known; give "
                    f"the checkpoint of a run (--ckpt_path) and its files{free}"
                )

    def collate(self, split: DataSplit, chosen: Sequence[int]) -> dict[str, PolicyBatch]:
        tables = row_tables([self.examples[split][index] for index in chosen])
        if split in self._references:
            starts = self._starts[split]
            places = torch.tensor([place for index in chosen for place in range(starts[index], starts[index + 1])])
            for rows, own in tables.values():
                rows.reference_sums = self._references[split][places[own]]
        return {name: rows for name, (rows, _) in tables.items()}

    def totals(self, split: DataSplit, update: Sequence[int]) -> dict[str, BatchTotals]:
        """Return the size of an update by policy; for each policy, its episodes are all answers."""
        rows = [row for index in update for row in self.examples[split][index].rows()]
        sizes: dict[str, BatchTotals] = {}
        for row in rows:
            before = sizes.get(row.policy, BatchTotals(0.0, 0.0, 2.0 * len(update)))
            sizes[row.policy] = before + BatchTotals(float(row.num_actions), 1.0, 0.0)
        return sizes

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "references": dict(self._references), "referenced": dict(self._referenced)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._references = {split: sums.cpu() for split, sums in state_dict["references"].items()}
        self._referenced = dict(state_dict["referenced"])

    @torch.no_grad()
    def _reference_sums(self, pairs: Sequence[RowPair]) -> Tensor:
        """Return the log-probabilities of the answers under the current weights, for each row of each pair in order.

        Each rank computes its share.
        """
        algorithm, trainer = self.algorithm(), self.trainer
        assert trainer is not None
        rank, ranks = data_parallel_rank(trainer)
        starts = row_starts(pairs)
        sums = torch.zeros(starts[-1], device=algorithm.device)
        learners = [name for name in algorithm.policies if algorithm.policy(name).trained]
        with trainer.precision_plugin.forward_context():
            for first in range(0, len(pairs), self.batch_size * ranks):
                start = min(first + rank * self.batch_size, len(pairs))
                tables = row_tables(pairs[start : start + self.batch_size])
                for name in learners:
                    if name not in tables:
                        if ranks > 1:
                            algorithm.policy(name).idle_loss()  # sharded ranks make every forward pass together
                        continue
                    rows, places = tables[name]
                    rows = rows.to(algorithm.device)
                    logp = algorithm.policy(name)(**rows.inputs())
                    sums[places.to(sums.device) + starts[start]] = sequence_logp(logp, rows.action_mask)
        return sum_over_ranks(trainer, sums).cpu()  # the other ranks have zeros here


def row_tables(pairs: Sequence[RowPair]) -> dict[str, tuple[PolicyBatch, Tensor]]:
    """Return the rows of each policy, and the place [B] of each among the rows of all pairs, pair after pair.

    ``groups`` are the numbers of the pairs, so that both answers compute their prompt once.
    """
    rows = [row for pair in pairs for row in pair.rows()]
    answers = [2 * number + side for number, pair in enumerate(pairs) for side in (0, 1) for _ in pair[side]]
    tables = {}
    for policy in dict.fromkeys(row.policy for row in rows):
        places = [place for place, row in enumerate(rows) if row.policy == policy]
        agents: dict[tuple[int, str], int] = {}
        comparisons = [agents.setdefault((answers[p] // 2, rows[p].agent), len(agents)) for p in places]
        table = collate_rows([rows[p] for p in places], [answers[p] // 2 for p in places], comparisons, places)
        table.joint_actions = torch.tensor([answers[p] for p in places])
        tables[policy] = table, torch.tensor(places)
    return tables


def row_starts(pairs: Sequence[RowPair]) -> list[int]:
    """Return the place of each pair's first row among the rows of all pairs, and at last the number of rows."""
    return list(itertools.accumulate((len(pair.rows()) for pair in pairs), initial=0))


def preference_pairs(episodes: Sequence[Episode], reward_gap: float = 0.0) -> list[dict[str, Any]]:
    """Rows ``{prompt, chosen, rejected}`` of messages: the best against the worst episode of each group.

    See :func:`played_pairs` for the groups that are left out.

    Args:
        episodes: of any number of groups.
        reward_gap: least difference of the rewards, exclusive.
    """
    pairs = []
    for pair in played_pairs(episodes, reward_gap):
        parts = _split_prompt(*([message.to_chat() for message in row.messages] for row in pair))
        pairs.append(dict(zip(("prompt", "chosen", "rejected"), parts, strict=True)))
    return pairs


def played_pairs(episodes: Sequence[Episode], reward_gap: float = 0.0) -> list[PlayedPair]:
    """Return the best against the worst episode of each group.

    Of equal rewards the first counts. Left out are failed episodes, groups whose rewards differ by ``reward_gap`` or
    less, agents whose history was rewritten by the chat template, and pairs that begin differently or act alike. With
    several agents each one's conversation makes a pair, by its own reward.

    Args:
        episodes: of any number of groups.
        reward_gap: least difference of the rewards, exclusive.
    """
    rows = [
        ((episode.task.key, episode.group, agent), rows[0])
        for episode in episodes
        for agent, rows in episode.trajectories.items()
        if not episode.failed and len(rows) == 1
    ]
    pairs = []
    for best, worst in best_and_worst(rows, reward_gap):
        prompt, *answers = _split_prompt(best.messages, worst.messages)
        if prompt and all(any(message.role == "assistant" for message in answer) for answer in answers):
            pairs.append(PlayedPair(best, worst))
    return pairs


def best_and_worst(members: Iterable[tuple[Hashable, P]], gap: float) -> list[tuple[P, P]]:
    """Return the first member with the highest and the first with the lowest reward of each group.

    Args:
        members: with the key of their group.
        gap: groups whose rewards differ by this or less are left out.
    """
    groups: dict[Hashable, list[P]] = {}
    for key, member in members:
        groups.setdefault(key, []).append(member)
    pairs = [
        (max(group, key=lambda item: item.reward), min(group, key=lambda item: item.reward))
        for group in groups.values()
    ]
    return [(best, worst) for best, worst in pairs if best.reward - worst.reward > gap]


def pair_rows(
    example: Mapping[str, Any] | PlayedPair, chat: ChatFormat, policy: str, where: str
) -> tuple[Trajectory, Trajectory]:
    """Return the token rows of the chosen and the rejected answer of a data row.

    Raises:
        DataError: the chat template rewrites history, so that an answer is no single row; the message begins with
            ``where``.
    """
    if isinstance(example, PlayedPair):
        made = [played_rows(row, chat, policy) for row in example]
    else:
        prompt, *answers = _parts(example)
        text = isinstance(prompt, str)
        made = [
            [text_row(prompt, answer, chat, policy)] if text else chat_rows(prompt, answer, chat, policy)
            for answer in answers
        ]
    for answer, rows in zip(PlayedPair._fields, made, strict=True):
        if len(rows) != 1 or not rows[0].num_actions:
            raise DataError(
                f"{where}: the {answer!r} answer makes {len(rows)} rows, as the template rewrites earlier messages; "
                "give pairs that differ in their last turn only"
            )
    return made[0][0], made[1][0]


def scored_pair(
    example: Mapping[str, Any] | PlayedPair, chat: ChatFormat, policy: str, where: str
) -> tuple[Trajectory, Trajectory]:
    """Return the rows of both answers for a reward model; plain text becomes a user's message and its answer."""
    prompt, *answers = _parts(example)
    if isinstance(prompt, str):
        prompt, answers = [Message("user", prompt)], [[Message("assistant", answer)] for answer in answers]
    chosen, rejected = (scored_row(prompt, answer, chat, policy) for answer in answers)
    return chosen, rejected


def _digest(pairs: Sequence[RowPair]) -> str:
    """Return a hash of the tokens of these pairs."""
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(bytes([len(pair.chosen)]))
        for row in pair.rows():
            digest.update(row.policy.encode())
            digest.update(array("q", (len(row.token_ids), *row.token_ids)).tobytes() + bytes(row.action_mask))
    return digest.hexdigest()[:16]


def _parts(example: Mapping[str, Any] | PlayedPair) -> tuple[Any, Any, Any]:
    """Return prompt, chosen and rejected answer of a pair: three texts, or three lists of messages.

    Without a prompt of its own, what both answers begin with is the prompt.
    """
    if isinstance(example, PlayedPair):
        return _split_prompt(example.chosen.messages, example.rejected.messages)
    chosen, rejected = example["chosen"], example["rejected"]
    parts = (example["prompt"], chosen, rejected) if "prompt" in example else _split_prompt(chosen, rejected)
    return parts if isinstance(parts[0], str) else (messages_of(parts[0]), messages_of(parts[1]), messages_of(parts[2]))


def _split_prompt(chosen: Sequence[Any], rejected: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return what both conversations begin with, and the rest of each."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def pair_fault(row: Mapping[str, Any]) -> str | None:
    """Return a description of the fault in a data row, or None."""
    for field in ("chosen", "rejected"):
        if field not in row:
            return f"it lacks the field {field!r}"
    answers = [row["chosen"], row["rejected"]]
    if all(isinstance(answer, str) for answer in answers):
        if not isinstance(row.get("prompt"), str) or not row["prompt"]:
            return "answers of plain text need a field 'prompt' of plain text"
        return None
    given = row.get("prompt", [])
    if any(isinstance(part, str) for part in (given, *answers)):
        return "prompt, chosen and rejected must all be text, or all lists of {role, content}"
    fault = next(filter(None, map(messages_fault, (given, *answers))), None)
    if fault:
        return fault
    prompt, *parts = (given, *answers) if "prompt" in row else _split_prompt(row["chosen"], row["rejected"])
    if not prompt:
        return "it has no prompt, and its answers begin differently"
    for name, part in zip(("chosen", "rejected"), parts, strict=True):
        if not any(message["role"] == "assistant" for message in part):
            return f"its {name!r} answer has no assistant message of its own"
    return None
