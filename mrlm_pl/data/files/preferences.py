"""Pairs of a chosen and a rejected answer, from files or made of played episodes by their rewards."""

from __future__ import annotations

import hashlib
import itertools
import logging
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from mrlm_pl.algorithms import DPO, PairwiseRewardModel
from mrlm_pl.data.files.base import DataSplit, FixedDataModule
from mrlm_pl.data.files.chat_rows import (
    chat_rows,
    messages_fault,
    messages_of,
    played_rows,
    read_examples,
    scored_row,
    text_row,
)
from mrlm_pl.data.option import data_option
from mrlm_pl.episode import Episode, Message, Trajectory
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.batch import PolicyBatch, collate_rows
from mrlm_pl.learner.ranks import data_parallel_rank, sum_over_ranks
from mrlm_pl.losses import BatchTotals, sequence_logp
from mrlm_pl.policy import ChatFormat

logger = logging.getLogger(__name__)


class PlayedPair(NamedTuple):
    """The best and the worst row that one agent played in the episodes of a group."""

    chosen: Trajectory
    rejected: Trajectory


class RowPair(NamedTuple):
    """The token rows of what was preferred and of what was not; several where several agents acted."""

    chosen: tuple[Trajectory, ...]
    rejected: tuple[Trajectory, ...]

    def rows(self) -> tuple[Trajectory, ...]:
        """All rows, the chosen ones first."""
        return self.chosen + self.rejected


class PreferenceDataModule(FixedDataModule):
    """Pairs of answers to the same prompt, shuffled anew in each epoch.

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

    algorithm_classes: ClassVar[tuple[type[Algorithm], ...]] = (DPO, PairwiseRewardModel)

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
        super().__init__({"train": train, "validation": validation, "test": test}, batch_size, seed)
        self.max_tokens, self.reward_gap = max_tokens, reward_gap
        self._examples = {split: self.read_pairs(source, split) for split, source in self.sources.items()}
        self.pairs: dict[DataSplit, list[RowPair]] = {}
        self._starts: dict[DataSplit, list[int]] = {}
        self._references: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}
        self._referenced: dict[str, str] = {}

    def read_pairs(self, source: str, split: str) -> list[Any]:
        """The pairs of a source, in a form that :meth:`row_pair` knows."""
        return _read_pairs(source, split, self.reward_gap)

    def row_pair(self, example: Any, where: str) -> RowPair:
        """The token rows of a pair that :meth:`read_pairs` gave; an error's message begins with ``where``."""
        name, policy = self.learner()
        made = scored_pair if isinstance(self.algorithm(), PairwiseRewardModel) else pair_rows
        chosen, rejected = made(example, policy.chat, name, where)
        return RowPair((chosen,), (rejected,))

    def setup(self, stage: str) -> None:
        algorithm = self.algorithm()
        if not isinstance(algorithm, self.algorithm_classes):
            names = " and ".join(cls.__name__ for cls in self.algorithm_classes)
            raise ConfigurationError(
                f"{type(self).__name__} is for {names}, not for {type(algorithm).__name__}; give that one "
                f"{data_option(algorithm)}"
            )
        for split in self._examples.keys() - self.pairs.keys():
            source = self.sources[split]
            made = [
                self.row_pair(example, f"{source}, row {number}")
                for number, example in enumerate(self._examples[split], start=1)
            ]
            kept = self._learnable(made, source)
            if len(kept) < len(made):
                logger.warning("left out %d of %d pairs of %s", len(made) - len(kept), len(made), source)
            self.pairs[split], self._starts[split], self._digests[split] = kept, row_starts(kept), _digest(kept)

    def _learnable(self, pairs: Sequence[RowPair], source: str) -> list[RowPair]:
        algorithm = self.algorithm()
        limits = {name: self.max_tokens or algorithm.policy(name).context_window for name in algorithm.policies}
        kept = [pair for pair in pairs if all(len(row.token_ids) <= limits[row.policy] for row in pair.rows())]
        if not kept:
            raise DataError(f"no pair of {source!r} fits into {min(limits.values())} tokens; raise data.max_tokens")
        return kept

    def count(self, split: DataSplit) -> int:
        return len(self.pairs.get(split, ()))

    def uses_reference(self) -> bool:
        """Whether the loss compares with the reference."""
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
            self._references = {split: self._reference_sums(pairs) for split, pairs in self.pairs.items()}
            self._referenced = dict(self._digests)
            algorithm.train(was_training)
        for split in self.pairs if trainer.state.fn == "fit" else (self._evaluated_split(),):
            if self._referenced.get(split) != self._digests[split]:
                free = ", or use `model.reference_free`" if isinstance(algorithm, DPO) else ""
                raise ConfigurationError(
                    f"data.{split}: {self.sources[split]!r} holds no pairs that the run began with, so that the "
                    "log-probabilities of DPO's reference, the policy before its first update, are not known; give "
                    f"the checkpoint of a run (--ckpt_path) and its files{free}"
                )

    def _evaluated_split(self) -> DataSplit:
        trainer: Any = self.trainer
        return "test" if trainer.state.fn == "test" else "validation"

    def collate(self, split: DataSplit, chosen: Sequence[int]) -> dict[str, PolicyBatch]:
        tables = row_tables([self.pairs[split][index] for index in chosen])
        if split in self._references:
            starts = self._starts[split]
            places = torch.tensor([place for index in chosen for place in range(starts[index], starts[index + 1])])
            for rows, own in tables.values():
                rows.reference_sums = self._references[split][places[own]]
        return {name: rows for name, (rows, _) in tables.items()}

    def totals(self, split: DataSplit, update: Sequence[int]) -> dict[str, BatchTotals]:
        """The size of an update by policy; its episodes are the answers compared, for each policy all of them."""
        rows = [row for index in update for row in self.pairs[split][index].rows()]
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
        """Log-probabilities of the answers under the weights of now, for each row of each pair in order.

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
    """Place of each pair's first row among the rows of all pairs, and at last the number of rows."""
    return list(itertools.accumulate((len(pair.rows()) for pair in pairs), initial=0))


def preference_pairs(episodes: Sequence[Episode], reward_gap: float = 0.0) -> list[dict[str, Any]]:
    """Rows ``{prompt, chosen, rejected}`` of messages: the best against the worst episode of each group.

    See :func:`played_pairs` for what is left out.

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
    """The best against the worst episode of each group.

    Of equal rewards the first counts. Left out are failed episodes, groups whose rewards differ by ``reward_gap`` or
    less, agents whose history was rewritten by the chat template, and pairs that begin differently or act alike. With
    several agents each one's conversation makes a pair, by its own reward.

    Args:
        episodes: of any number of groups.
        reward_gap: least difference of the rewards, exclusive.
    """
    groups: dict[tuple[str, str, str], list[tuple[float, Trajectory]]] = {}
    for episode in episodes:
        if episode.failed:
            continue
        for agent, rows in episode.trajectories.items():
            if len(rows) == 1:
                key = (episode.task.key, episode.group, agent)
                groups.setdefault(key, []).append((rows[0].reward, rows[0]))
    pairs = []
    for members in groups.values():
        best = max(members, key=lambda member: member[0])
        worst = min(members, key=lambda member: member[0])
        prompt, *answers = _split_prompt(best[1].messages, worst[1].messages)
        both_act = all(any(message.role == "assistant" for message in answer) for answer in answers)
        if best[0] - worst[0] > reward_gap and prompt and both_act:
            pairs.append(PlayedPair(best[1], worst[1]))
    return pairs


def pair_rows(
    example: Mapping[str, Any] | PlayedPair, chat: ChatFormat, policy: str, where: str
) -> tuple[Trajectory, Trajectory]:
    """The token rows of the chosen and the rejected answer of a data row.

    Raises:
        DataError: the chat template rewrites history, so that an answer is no single row; the message begins with
            ``where``.
    """
    if isinstance(example, PlayedPair):
        made = [played_rows(row, chat, policy) for row in example]
    elif isinstance(example["prompt"], str):
        made = [[text_row(example["prompt"], example[answer], chat, policy)] for answer in PlayedPair._fields]
    else:
        given = messages_of(example["prompt"])
        made = [chat_rows(given, messages_of(example[answer]), chat, policy) for answer in PlayedPair._fields]
    for answer, rows in zip(PlayedPair._fields, made, strict=True):
        if len(rows) != 1 or not rows[0].num_actions:
            raise DataError(
                f"{where}: the {answer!r} answer makes {len(rows)} rows, as the chat template rewrites what was said; "
                "give pairs that differ in their last turn only"
            )
    return made[0][0], made[1][0]


def scored_pair(
    example: Mapping[str, Any] | PlayedPair, chat: ChatFormat, policy: str, where: str
) -> tuple[Trajectory, Trajectory]:
    """The rows of both answers as a reward model reads them; plain text is a user's message and the answer to it."""
    if isinstance(example, PlayedPair):
        prompt, *answers = _split_prompt(example.chosen.messages, example.rejected.messages)
    elif isinstance(example["prompt"], str):
        prompt = [Message("user", example["prompt"])]
        answers = [[Message("assistant", example[answer])] for answer in PlayedPair._fields]
    else:
        prompt = messages_of(example["prompt"])
        answers = [messages_of(example[answer]) for answer in PlayedPair._fields]
    chosen, rejected = (scored_row(prompt, answer, chat, policy) for answer in answers)
    return chosen, rejected


def _digest(pairs: Sequence[RowPair]) -> str:
    """What tells these pairs of tokens from others."""
    digest = hashlib.sha256()
    for pair in pairs:
        digest.update(bytes([len(pair.chosen)]))
        for row in pair.rows():
            digest.update(row.policy.encode())
            digest.update(array("q", (len(row.token_ids), *row.token_ids)).tobytes() + bytes(row.action_mask))
    return digest.hexdigest()[:16]


def _read_pairs(source: str, split: str, reward_gap: float) -> list[Mapping[str, Any] | PlayedPair]:
    rows, episodes = read_examples(source, split)
    if episodes:
        pairs = played_pairs(episodes, reward_gap)
        if not pairs:
            raise DataError(
                f"{source}: no two episodes of a group differ by more than {reward_gap} in reward; collect several of "
                "each task with `mrlm collect --samples-per-task 8`, or lower data.reward_gap"
            )
        return list(pairs)
    made: list[Mapping[str, Any] | PlayedPair] = []
    for number, row in rows:
        fault = pair_fault(row)
        if fault:
            raise DataError(
                f"{source}, row {number}: {fault}; a row is {{prompt, chosen, rejected}}, and this one has the fields "
                f"{sorted(row)}"
            )
        made.append(with_prompt(row))
    return made


def with_prompt(row: Mapping[str, Any]) -> dict[str, Any]:
    """``prompt``, ``chosen`` and ``rejected`` of a data row without fault; its prompt may be what both begin with."""
    if "prompt" in row:
        return {key: row[key] for key in ("prompt", "chosen", "rejected")}
    return dict(zip(("prompt", "chosen", "rejected"), _split_prompt(row["chosen"], row["rejected"]), strict=True))


def _split_prompt(chosen: Sequence[Any], rejected: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """What both conversations begin with, and how each goes on."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def pair_fault(row: Mapping[str, Any]) -> str | None:
    """What is wrong with a data row, or None."""
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
