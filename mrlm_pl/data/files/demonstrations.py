"""Demonstrations for supervised fine-tuning, from chat-format or prompt/completion files, or from played episodes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mrlm_pl.algorithms import SFT
from mrlm_pl.data.files.base import DataSplit, FixedDataModule
from mrlm_pl.data.files.chat_rows import (
    chat_rows,
    messages_fault,
    messages_of,
    played_rows,
    read_examples,
    text_row,
    tools_fault,
)
from mrlm_pl.data.option import data_option
from mrlm_pl.episode import Episode, Trajectory
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.learner.batch import PolicyBatch, collate_rows, padded_masks
from mrlm_pl.losses import BatchTotals
from mrlm_pl.policy import ChatFormat

logger = logging.getLogger(__name__)


class TrajectoryDataModule(FixedDataModule):
    """Rows of demonstrations, shuffled anew in each epoch.

    A data row is one of

    - ``{"messages": [{"role": ..., "content": ...}, ...]}``: a chat; every assistant message is trained on;
    - ``{"prompt": [messages], "completion": [messages]}``: a chat; the completion's assistant messages are trained on;
    - ``{"prompt": "text", "completion": "text"}``: plain text without a chat template; the completion and the EOS token
      are trained on;
    - an episode, as ``mrlm collect`` and runs write them: the turns of all agents. The sampled tokens are kept as they
      are when the learner has the tokenizer and the chat template of the model that played. Failed episodes are left
      out.

    A chat may bring ``tools``, a list of schemas (``{"type": "function", "function": {"name": ..., ...}}``): the chat
    template tells them as it does when an agent has these tools.

    Rows are packed: a batch is one sequence without padding for the model families that allow it.

    Args:
        train: file (JSONL, JSON, parquet, also gzipped), a run's folder of episodes, or hub name.
        validation: the same for the validation loop; None has none.
        test: the same for ``mrlm test``; None has none.
        batch_size: rows in a batch, on each rank.
        max_tokens: rows with more tokens are left out and counted; None is the model's context window.
        filter_reward: of episodes, those with a lower reward are left out; None keeps all.
        seed: of the shuffling; the command line passes ``seed_everything``.

    Raises:
        DataError: a file is missing, or a row lacks its fields or an assistant message.
    """

    def __init__(
        self,
        train: str,
        validation: str | None = None,
        batch_size: int = 32,
        max_tokens: int | None = None,
        seed: int = 0,
        test: str | None = None,
        filter_reward: float | None = None,
    ) -> None:
        super().__init__({"train": train, "validation": validation, "test": test}, batch_size, seed)
        self.max_tokens = max_tokens
        self._examples = {split: _read(source, split, filter_reward) for split, source in self.sources.items()}
        self.rows: dict[DataSplit, list[Trajectory]] = {}

    def setup(self, stage: str) -> None:
        algorithm = self.algorithm()
        if algorithm.data_module != SFT.data_module:
            raise ConfigurationError(
                f"{type(algorithm).__name__} does not learn from demonstrations; give it "
                f"{data_option(algorithm)}, or train on {type(self).__name__} with `--model SFT`"
            )
        name, policy = self.learner()
        limit = self.max_tokens or policy.context_window
        for split in self._examples.keys() - self.rows.keys():
            source = self.sources[split]
            rows = [row for example in self._examples[split] for row in demonstration_rows(example, policy.chat, name)]
            kept = [row for row in rows if len(row.token_ids) <= limit and row.num_actions]
            if not kept:
                raise DataError(
                    f"no row of {source!r} fits into {limit} tokens and has an action token; raise data.max_tokens"
                )
            if len(kept) < len(rows):
                left_out = len(rows) - len(kept)
                logger.warning(
                    "left out %d of %d rows of %s that are longer than %d tokens", left_out, len(rows), source, limit
                )
            self.rows[split] = kept
        self.algorithm().check_demonstrations({str(split): rows for split, rows in self.rows.items()})

    def count(self, split: DataSplit) -> int:
        return len(self.rows.get(split, ()))

    def collate(self, split: DataSplit, chosen: Sequence[int]) -> dict[str, PolicyBatch]:
        rows = [self.rows[split][index] for index in chosen]
        numbers = list(range(len(rows)))
        table = collate_rows(rows, numbers, numbers, numbers)
        table.observation_mask = padded_masks([observation_mask(row) for row in rows])
        return {self.learner()[0]: table}

    def totals(self, split: DataSplit, update: Sequence[int]) -> dict[str, BatchTotals]:
        policy, _ = self.learner()
        rows = [self.rows[split][index] for index in update]
        shown, observed = float(len(rows)), [sum(observation_mask(row)) for row in rows]
        answered = float(sum(count > 0 for count in observed))
        return {
            policy: BatchTotals(float(sum(row.num_actions for row in rows)), shown, shown),
            f"{policy}/observations": BatchTotals(float(sum(observed)), answered, answered),
        }


def observation_mask(row: Trajectory) -> list[bool]:
    """Which tokens of a row are what the environment answered: all after the first action that are no actions."""
    first = row.action_mask.index(True) if any(row.action_mask) else len(row.action_mask)
    return [index > first and not acts for index, acts in enumerate(row.action_mask)]


def demonstration_rows(example: Mapping[str, Any] | Episode, chat: ChatFormat, policy: str) -> list[Trajectory]:
    """Token rows of one data row: several where the chat template rewrites history, or for the agents of an episode."""
    if isinstance(example, Episode):
        return [made for row in example.rows() for made in played_rows(row, chat, policy)]
    if isinstance(example.get("prompt"), str):
        return [text_row(example["prompt"], example["completion"], chat, policy)]
    given = messages_of(example.get("prompt", ()))
    shown = messages_of(example["messages"] if "messages" in example else example["completion"])
    return chat_rows(given, shown, chat, policy, tools=example.get("tools") or ())


def _read(source: str, split: str, filter_reward: float | None) -> Sequence[Mapping[str, Any] | Episode]:
    rows, episodes = read_examples(source, split)
    for number, row in rows:
        fault = _fault(row)
        if fault:
            raise DataError(
                f"{source}, row {number}: {fault}; a row is {{messages}}, {{prompt, completion}} or an episode, "
                f"and this one has the fields {sorted(row)}"
            )
    kept = [episode for episode in episodes if filter_reward is None or episode.reward >= filter_reward]
    if episodes and not kept:
        raise DataError(f"{source}: no episode has a reward of {filter_reward} or more; lower data.filter_reward")
    return kept or [row for _, row in rows]


def _fault(row: Mapping[str, Any]) -> str | None:
    """What is wrong with a data row, or None."""
    if "messages" in row:
        lists = [row["messages"]]
    elif "prompt" in row and "completion" in row:
        if isinstance(row["prompt"], str) and isinstance(row["completion"], str):
            return None if row["prompt"] else "the prompt is empty"
        if isinstance(row["prompt"], str) or isinstance(row["completion"], str):
            return "prompt and completion must both be text, or both lists of {role, content}"
        lists = [row["prompt"], row["completion"]]
    else:
        return "it lacks the field 'messages'" if "prompt" not in row else "it lacks the field 'completion'"
    fault = next(filter(None, map(messages_fault, lists)), None) or tools_fault(row.get("tools"))
    if fault:
        return fault
    if not any(message["role"] == "assistant" for message in lists[-1]):
        return "it has no assistant message to learn from"
    if not lists[0]:
        return "the prompt is empty"
    if lists[0][0]["role"] == "assistant":
        return "it begins with an assistant message, which answers nothing"
    return None
