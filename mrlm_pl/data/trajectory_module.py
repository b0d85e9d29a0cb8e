"""Demonstrations for supervised fine-tuning, from chat-format or prompt/completion files."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningDataModule

from mrlm_pl.algorithms.base import Algorithm
from mrlm_pl.batch import Batch, collate_rows
from mrlm_pl.data.rows import read_rows
from mrlm_pl.episode import Message, Trajectory
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.losses import BatchTotals
from mrlm_pl.policy import ChatFormat, Conversation
from mrlm_pl.seeding import derive_seed

logger = logging.getLogger(__name__)


class TrajectoryDataModule(LightningDataModule):
    """Rows of demonstrations, shuffled anew in each epoch.

    A data row is one of

    - ``{"messages": [{"role": ..., "content": ...}, ...]}``: a chat; every assistant message is trained on;
    - ``{"prompt": [messages], "completion": [messages]}``: a chat; the completion's assistant messages are trained on;
    - ``{"prompt": "text", "completion": "text"}``: plain text without a chat template; the completion and the EOS token
      are trained on.

    Args:
        train: file (JSONL, JSON, parquet, also gzipped) or hub name.
        validation: the same for the validation loop; None has none.
        batch_size: rows in a batch, on each rank.
        max_tokens: rows with more tokens are left out and counted; None is the model's context window.
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
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ConfigurationError(f"data.batch_size is {batch_size}; it must be 1 or above")
        self.batch_size, self.max_tokens, self.seed = batch_size, max_tokens, seed
        self._sources = {"train": train} | ({"validation": validation} if validation else {})
        self._examples = {split: _read_examples(source, split) for split, source in self._sources.items()}
        self.rows: dict[str, list[Trajectory]] = {}
        self.epoch = 0
        self.position = 0

    def setup(self, stage: str) -> None:
        trainer: Any = self.trainer
        algorithm = trainer.lightning_module
        if not isinstance(algorithm, Algorithm):
            raise ConfigurationError(f"{type(algorithm).__name__} is not an Algorithm; demonstrations need its policy")
        name = next(iter(algorithm.policies))
        policy = algorithm.policy(name)
        limit = self.max_tokens or policy.context_window
        for split in self._examples.keys() - self.rows.keys():
            rows = [row for example in self._examples[split] for row in demonstration_rows(example, policy.chat, name)]
            kept = [row for row in rows if len(row.token_ids) <= limit and row.num_actions]
            if not kept:
                raise DataError(
                    f"no row of {self._sources[split]!r} fits into {limit} tokens and has an action token; "
                    "raise data.max_tokens"
                )
            if len(kept) < len(rows):
                logger.warning(
                    "left out %d of %d rows of %s that are longer than %d tokens",
                    len(rows) - len(kept),
                    len(rows),
                    self._sources[split],
                    limit,
                )
            self.rows[split] = kept

    def train_dataloader(self) -> _DemonstrationStream:
        return _DemonstrationStream(self, "train")

    def val_dataloader(self) -> _DemonstrationStream | list[Any]:
        return _DemonstrationStream(self, "validation") if "validation" in self.rows else []

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch, self.position = state_dict["epoch"], state_dict["position"]

    def order(self, split: str) -> list[int]:
        """Row numbers of a split in the order of this epoch; validation is read in the order of the file."""
        count = len(self.rows[split])
        if split != "train":
            return list(range(count))
        generator = torch.Generator().manual_seed(derive_seed("shuffle", self.seed, self.epoch))
        return torch.randperm(count, generator=generator).tolist()


class _DemonstrationStream:
    """Sized stream over one split; for training, the position lives in the data module."""

    def __init__(self, data: TrajectoryDataModule, split: str) -> None:
        self.data, self.split = data, split
        trainer: Any = data.trainer
        kwargs = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"rank": 0, "num_replicas": 1}
        self.rank, self.ranks = int(kwargs["rank"]), int(kwargs["num_replicas"])
        self.accumulation = int(trainer.accumulate_grad_batches) if split == "train" else 1

    def __len__(self) -> int:
        rows, size = len(self.data.rows[self.split]), self.data.batch_size * self.ranks
        # Several ranks drop the incomplete last batch, as a rank without rows would stop the others.
        return -(-rows // size) if self.ranks == 1 else rows // size

    def __iter__(self) -> Iterator[Batch]:
        if self.split != "train":
            for number in range(len(self)):
                yield self._batch(number, self.data.order(self.split))
            return
        while self.data.position < len(self):
            number = self.data.position
            order = self.data.order(self.split)
            self.data.position += 1
            if self.data.position == len(self):
                self.data.epoch, self.data.position = self.data.epoch + 1, 0
            yield self._batch(number, order)
            if self.data.position == 0:
                return

    def _batch(self, number: int, order: Sequence[int]) -> Batch:
        rows, size = self.data.rows[self.split], self.data.batch_size
        first = (number * self.ranks + self.rank) * size
        chosen = [rows[index] for index in order[first : first + size]]
        numbers = list(range(len(chosen)))
        batch = collate_rows(chosen, numbers, numbers, numbers)
        start = number - number % self.accumulation
        stop = min(start + self.accumulation, len(self))
        update = [rows[index] for index in order[start * size * self.ranks : stop * size * self.ranks]]
        totals = BatchTotals(float(sum(row.num_actions for row in update)), float(len(update)), float(len(update)))
        policy = chosen[0].policy
        return Batch({policy: batch}, {policy: totals}, self.accumulation * self.ranks)


def demonstration_rows(example: Mapping[str, Any], chat: ChatFormat, policy: str) -> list[Trajectory]:
    """Token rows of one data row: one, or several where the chat template rewrites history."""
    if isinstance(example.get("prompt"), str):
        return [_plain_row(example["prompt"], example["completion"], chat, policy)]
    given = _messages(example.get("prompt", ()))
    shown = _messages(example["messages"] if "messages" in example else example["completion"])
    conversation = Conversation(chat)
    pending: list[Message] = []
    for number, message in enumerate([*given, *shown]):
        if message.role == "assistant" and number >= len(given):
            conversation.observe(pending)
            conversation.demonstrate(message.content)
            pending = []
        else:
            pending.append(message)
    return [
        Trajectory(
            agent="demonstrator",
            policy=policy,
            token_ids=tuple(row.token_ids),
            action_mask=tuple(row.action_mask),
            logprobs=tuple(row.logprobs),
            turns=(),
            messages=tuple(row.messages),
        )
        for row in conversation.rows
    ]


def _plain_row(prompt: str, completion: str, chat: ChatFormat, policy: str) -> Trajectory:
    eos = chat.tokenizer.eos_token_id
    given = chat.tokenizer.encode(prompt)
    given = given[:-1] if given and given[-1] == eos else given
    shown = [*chat.encode(completion), eos]
    return Trajectory(
        agent="demonstrator",
        policy=policy,
        token_ids=tuple(given + shown),
        action_mask=(False,) * len(given) + (True,) * len(shown),
        logprobs=(0.0,) * (len(given) + len(shown)),
        turns=(),
        messages=(Message("user", prompt), Message("assistant", completion)),
    )


def _read_examples(source: str, split: str) -> Sequence[Mapping[str, Any]]:
    rows = read_rows(source, split, ())
    for number, row in enumerate(rows, start=1):
        fault = _fault(row)
        if fault:
            raise DataError(
                f"{source}, row {number}: {fault}; a row is {{messages}} or {{prompt, completion}}, "
                f"and this one has the fields {sorted(row)}"
            )
    if not rows:
        raise DataError(f"{source} has no rows")
    return rows


def _fault(row: Mapping[str, Any]) -> str | None:
    """What is wrong with a data row, or None."""
    if "messages" in row:
        lists = [row["messages"]]
    elif "prompt" in row and "completion" in row:
        if isinstance(row["prompt"], str) and isinstance(row["completion"], str):
            return None if row["prompt"] else "the prompt is empty"
        lists = [row["prompt"], row["completion"]]
    else:
        return "it lacks the field 'messages'" if "prompt" not in row else "it lacks the field 'completion'"
    for messages in lists:
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            return "messages must be a list of {role, content}"
        for message in messages:
            if message.get("role") not in ("system", "user", "assistant", "tool") or "content" not in message:
                return f"{message!r} is not a message with a role and content"
    if not any(message["role"] == "assistant" for message in lists[-1]):
        return "it has no assistant message to learn from"
    if lists[0] and lists[0][0]["role"] == "assistant":
        return "it begins with an assistant message, which answers nothing"
    return None


def _messages(rows: Sequence[Mapping[str, Any]]) -> list[Message]:
    return [Message.from_dict(row) for row in rows]
