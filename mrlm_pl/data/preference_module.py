"""Pairs of a chosen and a rejected answer, from files or made of played episodes by their rewards."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mrlm_pl.algorithms.dpo import DPO
from mrlm_pl.batch import PolicyBatch, collate_rows
from mrlm_pl.data.chat_rows import chat_rows, messages_fault, messages_of, played_rows, read_examples, text_row
from mrlm_pl.data.fixed_data import DataSplit, FixedDataModule
from mrlm_pl.episode import Episode, Trajectory
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.losses import BatchTotals, sequence_logp
from mrlm_pl.policy import ChatFormat
from mrlm_pl.strategies import data_parallel_rank

logger = logging.getLogger(__name__)


class PlayedPair(NamedTuple):
    """The best and the worst row that one agent played in the episodes of a group."""

    chosen: Trajectory
    rejected: Trajectory


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

    The answers of a pair share the computation of their prompt. The log-probabilities of the reference are computed
    once, before the first update, shared out over the ranks, and are part of checkpoints.

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
        self.max_tokens = max_tokens
        self._examples = {split: _read_pairs(source, split, reward_gap) for split, source in self.sources.items()}
        self.pairs: dict[DataSplit, list[tuple[Trajectory, Trajectory]]] = {}
        self._references: dict[str, Tensor] = {}
        self._digests: dict[str, str] = {}
        self._referenced: dict[str, str] = {}

    def setup(self, stage: str) -> None:
        if not isinstance(self.algorithm(), DPO):
            raise ConfigurationError(f"PreferenceDataModule is for DPO, not for {type(self.algorithm()).__name__}")
        name, policy = self.learner()
        limit = self.max_tokens or policy.context_window
        for split in self._examples.keys() - self.pairs.keys():
            source = self.sources[split]
            made = [
                pair_rows(example, policy.chat, name, f"{source}, row {number}")
                for number, example in enumerate(self._examples[split], start=1)
            ]
            kept = [pair for pair in made if max(len(row.token_ids) for row in pair) <= limit]
            if not kept:
                raise DataError(f"no pair of {source!r} fits into {limit} tokens; raise data.max_tokens")
            if len(kept) < len(made):
                logger.warning("left out %d of %d pairs of %s", len(made) - len(kept), len(made), source)
            self.pairs[split], self._digests[split] = kept, _digest(kept)

    def count(self, split: DataSplit) -> int:
        return len(self.pairs.get(split, ()))

    def before_first_batch(self) -> None:
        algorithm, trainer = self.algorithm(), self.trainer
        assert isinstance(algorithm, DPO)
        assert trainer is not None
        if algorithm.reference_free:
            return
        if not self._references and trainer.state.fn == "fit" and not trainer.global_step:
            was_training = algorithm.training
            algorithm.eval()
            self._references = {split: self._reference_sums(pairs) for split, pairs in self.pairs.items()}
            self._referenced = dict(self._digests)
            algorithm.train(was_training)
        for split in self.pairs if trainer.state.fn == "fit" else (self._evaluated_split(),):
            if self._referenced.get(split) != self._digests[split]:
                raise ConfigurationError(
                    f"data.{split}: {self.sources[split]!r} holds no pairs that the run began with, so that the "
                    "log-probabilities of DPO's reference, the policy before its first update, are not known; give "
                    "the checkpoint of a run (--ckpt_path) and its files, or use `model.reference_free`"
                )

    def _evaluated_split(self) -> DataSplit:
        trainer: Any = self.trainer
        return "test" if trainer.state.fn == "test" else "validation"

    def collate(self, split: DataSplit, chosen: Sequence[int]) -> PolicyBatch:
        rows = _rows_of([self.pairs[split][index] for index in chosen])
        if split in self._references:
            rows.reference_sums = self._references[split][torch.tensor(chosen)].flatten()
        return rows

    def totals(self, split: DataSplit, update: Sequence[int]) -> dict[str, BatchTotals]:
        name, _ = self.learner()
        tokens = sum(row.num_actions for index in update for row in self.pairs[split][index])
        sequences = 2.0 * len(update)
        return {name: BatchTotals(float(tokens), sequences, sequences)}

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "references": dict(self._references), "referenced": dict(self._referenced)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._references = {split: sums.cpu() for split, sums in state_dict["references"].items()}
        self._referenced = dict(state_dict["referenced"])

    @torch.no_grad()
    def _reference_sums(self, pairs: Sequence[tuple[Trajectory, Trajectory]]) -> Tensor:
        """Log-probabilities [pairs, 2] of the answers under the weights of now; each rank computes its share."""
        algorithm, trainer = self.algorithm(), self.trainer
        assert trainer is not None
        _, policy = self.learner()
        rank, ranks = data_parallel_rank(trainer)
        sums = torch.zeros(len(pairs), 2, device=algorithm.device)
        with trainer.precision_plugin.forward_context():
            for first in range(0, len(pairs), self.batch_size * ranks):
                start = first + rank * self.batch_size
                if start >= len(pairs):
                    policy.idle_loss()  # sharded ranks make every forward pass together
                    continue
                rows = _rows_of(pairs[start : start + self.batch_size]).to(algorithm.device)
                logp = policy(**rows.inputs())
                sums[start : start + self.batch_size] = sequence_logp(logp, rows.action_mask).view(-1, 2)
        return algorithm.from_all_ranks(sums).sum(0).cpu()  # the other ranks have zeros here


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


def _rows_of(pairs: Sequence[tuple[Trajectory, Trajectory]]) -> PolicyBatch:
    rows = [row for pair in pairs for row in pair]
    pair_numbers = [index // 2 for index in range(len(rows))]
    return collate_rows(rows, pair_numbers, pair_numbers, list(range(len(rows))))


def _digest(pairs: Sequence[tuple[Trajectory, Trajectory]]) -> str:
    """What tells these pairs of tokens from others."""
    digest = hashlib.sha256()
    for pair in pairs:
        for row in pair:
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
    for number, row in enumerate(rows, start=1):
        fault = _fault(row)
        if fault:
            raise DataError(
                f"{source}, row {number}: {fault}; a row is {{prompt, chosen, rejected}}, and this one has the fields "
                f"{sorted(row)}"
            )
        if "prompt" in row:
            made.append({key: row[key] for key in ("prompt", "chosen", "rejected")})
        else:
            prompt, chosen, rejected = _split_prompt(row["chosen"], row["rejected"])
            made.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return made


def _split_prompt(chosen: Sequence[Any], rejected: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """What both conversations begin with, and how each goes on."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    return chosen[:shared], chosen[shared:], rejected[shared:]


def _fault(row: Mapping[str, Any]) -> str | None:
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
