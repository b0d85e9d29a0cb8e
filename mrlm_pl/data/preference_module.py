"""Pairs of a chosen and a rejected answer, from files or made of played episodes by their rewards."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mrlm_pl.algorithms.dpo import DPO
from mrlm_pl.batch import Batch, PolicyBatch, collate_rows
from mrlm_pl.data.fixed_data import FixedDataModule
from mrlm_pl.data.rows import read_rows
from mrlm_pl.data.trajectory_module import demonstration_rows
from mrlm_pl.episode import Episode, Trajectory
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.losses import BatchTotals, sequence_logp
from mrlm_pl.policy import ChatFormat

logger = logging.getLogger(__name__)


class PreferenceDataModule(FixedDataModule):
    """Pairs of answers to the same prompt, shuffled anew in each epoch.

    A data row is one of

    - ``{"prompt": "text", "chosen": "text", "rejected": "text"}``: plain text without a chat template; the answers and
      the EOS token are compared;
    - ``{"prompt": [messages], "chosen": [messages], "rejected": [messages]}``: a chat; the assistant's messages of the
      answers are compared; without ``prompt``, what both begin with is the prompt;
    - an episode, as ``mrlm collect --samples-per-task N`` and runs write them: of the episodes of a group, the best and
      the worst are a pair when their rewards differ by more than ``reward_gap``.

    The answers of a pair share the computation of their prompt. The log-probabilities of the reference are computed
    once, before the first update, and are part of checkpoints.

    Args:
        train: file (JSONL, JSON, parquet, also gzipped) or hub name.
        validation: the same for the validation loop; None has none.
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
    ) -> None:
        super().__init__(batch_size, seed)
        self.max_tokens = max_tokens
        self._sources = {"train": train} | ({"validation": validation} if validation else {})
        self._examples = {split: _read_pairs(source, split, reward_gap) for split, source in self._sources.items()}
        self.pairs: dict[str, list[tuple[Trajectory, Trajectory]]] = {}
        self._references: dict[str, Tensor] = {}

    def setup(self, stage: str) -> None:
        if not isinstance(self.algorithm(), DPO):
            raise ConfigurationError(f"PreferenceDataModule is for DPO, not for {type(self.algorithm()).__name__}")
        name, policy = self.learner()
        limit = self.max_tokens or policy.context_window
        for split in self._examples.keys() - self.pairs.keys():
            source = self._sources[split]
            made = [
                pair_rows(example, policy.chat, name, f"{source}, row {number}")
                for number, example in enumerate(self._examples[split], start=1)
            ]
            kept = [pair for pair in made if max(len(row.token_ids) for row in pair) <= limit]
            if not kept:
                raise DataError(f"no pair of {source!r} fits into {limit} tokens; raise data.max_tokens")
            if len(kept) < len(made):
                logger.warning("left out %d of %d pairs of %s", len(made) - len(kept), len(made), source)
            self.pairs[split] = kept

    def count(self, split: str) -> int:
        return len(self.pairs.get(split, ()))

    def before_first_batch(self) -> None:
        algorithm, trainer = self.algorithm(), self.trainer
        assert isinstance(algorithm, DPO)
        assert trainer is not None
        if algorithm.reference_free or self._references:
            return
        if trainer.global_step:
            raise ConfigurationError(
                "the checkpoint holds no log-probabilities of the reference; it is not one of a run on these pairs"
            )
        was_training = algorithm.training
        algorithm.eval()
        for split, pairs in self.pairs.items():
            self._references[split] = self._reference_sums(pairs)
        algorithm.train(was_training)

    def batch(self, split: str, chosen: Sequence[int], update: Sequence[int], pieces: int) -> Batch:
        rows = _rows_of([self.pairs[split][index] for index in chosen])
        if split in self._references:
            rows.reference_sums = self._references[split][torch.tensor(chosen)].flatten()
        tokens = sum(row.num_actions for index in update for row in self.pairs[split][index])
        name, _ = self.learner()
        sequences = 2.0 * len(update)
        return Batch({name: rows}, {name: BatchTotals(float(tokens), sequences, sequences)}, pieces)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "references": dict(self._references)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._references = {split: sums.cpu() for split, sums in state_dict["references"].items()}

    @torch.no_grad()
    def _reference_sums(self, pairs: Sequence[tuple[Trajectory, Trajectory]]) -> Tensor:
        """Log-probabilities [pairs, 2] of the answers under the weights of now, on every rank."""
        algorithm, trainer = self.algorithm(), self.trainer
        assert trainer is not None
        _, policy = self.learner()
        sums = torch.empty(len(pairs), 2)
        with trainer.precision_plugin.forward_context():
            for start in range(0, len(pairs), self.batch_size):
                rows = _rows_of(pairs[start : start + self.batch_size]).to(algorithm.device)
                logp = policy(**rows.inputs())
                sums[start : start + self.batch_size] = sequence_logp(logp, rows.action_mask).view(-1, 2).cpu()
        return sums


def preference_pairs(episodes: Sequence[Episode], reward_gap: float = 0.0) -> list[dict[str, Any]]:
    """Rows ``{prompt, chosen, rejected}`` of messages: the best against the worst episode of each group.

    Of equal rewards the first counts. Left out are failed episodes, groups whose rewards differ by ``reward_gap`` or
    less, and pairs that begin differently. With several agents each one's conversation makes a pair, by its own reward.

    Args:
        episodes: of any number of groups.
        reward_gap: least difference of the rewards, exclusive.
    """
    groups: dict[tuple[str, str, str], list[tuple[float, Trajectory]]] = {}
    for episode in episodes:
        if episode.failed:
            continue
        for agent, rows in episode.trajectories.items():
            key = (episode.task.key, episode.group, agent)
            groups.setdefault(key, []).append((episode.rewards()[agent], rows[-1]))
    pairs = []
    for members in groups.values():
        best = max(members, key=lambda member: member[0])
        worst = min(members, key=lambda member: member[0])
        if best[0] - worst[0] > reward_gap:
            chosen, rejected = ([message.to_chat() for message in member[1].messages] for member in (best, worst))
            prompt, chosen, rejected = _split_prompt(chosen, rejected)
            if prompt and chosen and rejected:
                pairs.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    return pairs


def pair_rows(example: Mapping[str, Any], chat: ChatFormat, policy: str, where: str) -> tuple[Trajectory, Trajectory]:
    """The token rows of the chosen and the rejected answer of a data row.

    Raises:
        DataError: the chat template rewrites history, so that an answer is no single row; the message begins with
            ``where``.
    """
    rows = []
    for answer in ("chosen", "rejected"):
        made = demonstration_rows({"prompt": example["prompt"], "completion": example[answer]}, chat, policy)
        if len(made) != 1 or not made[0].num_actions:
            raise DataError(
                f"{where}: the {answer!r} answer makes {len(made)} rows, as the chat template rewrites what was said; "
                "give pairs that differ in their last turn only"
            )
        rows.append(made[0])
    return rows[0], rows[1]


def _rows_of(pairs: Sequence[tuple[Trajectory, Trajectory]]) -> PolicyBatch:
    rows = [row for pair in pairs for row in pair]
    pair_numbers = [index // 2 for index in range(len(rows))]
    return collate_rows(rows, pair_numbers, pair_numbers, list(range(len(rows))))


def _read_pairs(source: str, split: str, reward_gap: float) -> list[dict[str, Any]]:
    rows = read_rows(source, split, ())
    if all("trajectories" in row for row in rows):
        pairs = preference_pairs([Episode.from_dict(row) for row in rows], reward_gap)
        if not pairs:
            raise DataError(
                f"{source}: no two episodes of a group differ by more than {reward_gap} in reward; collect several of "
                "each task with `mrlm collect --samples-per-task 8`, or lower data.reward_gap"
            )
        return pairs
    made = []
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


def _split_prompt(chosen: list[Any], rejected: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
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
    for messages in (given, *answers):
        if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
            return "prompt, chosen and rejected must all be text, or all lists of {role, content}"
        for message in messages:
            known = message.get("role") in ("system", "user", "assistant", "tool")
            if not known or not isinstance(message.get("content"), str):
                return f"{message!r} is not a message with a role and text as content"
    prompt, *parts = (given, *answers) if "prompt" in row else _split_prompt(row["chosen"], row["rejected"])
    if not prompt:
        return "it has no prompt, and its answers begin differently"
    for name, part in zip(("chosen", "rejected"), parts, strict=True):
        if not any(message["role"] == "assistant" for message in part):
            return f"its {name!r} answer has no assistant message of its own"
    return None
