"""Demonstrations for supervised fine-tuning, from chat-format or prompt/completion files, or from played episodes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mrlm_pl.batch import Batch, collate_rows, padded_masks
from mrlm_pl.data.fixed_data import FixedDataModule
from mrlm_pl.data.rows import read_rows
from mrlm_pl.episode import Episode, Message, Trajectory
from mrlm_pl.errors import DataError
from mrlm_pl.losses import BatchTotals
from mrlm_pl.policy import ChatFormat, Conversation

logger = logging.getLogger(__name__)


class TrajectoryDataModule(FixedDataModule):
    """Rows of demonstrations, shuffled anew in each epoch.

    A data row is one of

    - ``{"messages": [{"role": ..., "content": ...}, ...]}``: a chat; every assistant message is trained on;
    - ``{"prompt": [messages], "completion": [messages]}``: a chat; the completion's assistant messages are trained on;
    - ``{"prompt": "text", "completion": "text"}``: plain text without a chat template; the completion and the EOS token
      are trained on;
    - an episode, as ``mrlm collect`` and runs write them: the chat of each agent that did not fail.

    Rows are packed: a batch is one sequence without padding for the model families that allow it.

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
        super().__init__(batch_size, seed)
        self.max_tokens = max_tokens
        self._sources = {"train": train} | ({"validation": validation} if validation else {})
        self._examples = {split: _read_examples(source, split) for split, source in self._sources.items()}
        self.rows: dict[str, list[Trajectory]] = {}

    def setup(self, stage: str) -> None:
        name, policy = self.learner()
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
        self.algorithm().check_demonstrations(self.rows)

    def count(self, split: str) -> int:
        return len(self.rows.get(split, ()))

    def batch(self, split: str, chosen: Sequence[int], update: Sequence[int], pieces: int) -> Batch:
        rows = [self.rows[split][index] for index in chosen]
        numbers = list(range(len(rows)))
        policy = rows[0].policy
        whole = [self.rows[split][index] for index in update]
        shown = float(len(whole))
        totals = {policy: BatchTotals(float(sum(row.num_actions for row in whole)), shown, shown)}
        observed = [sum(observation_mask(row)) for row in whole]
        answered = float(sum(count > 0 for count in observed))
        totals[f"{policy}/observations"] = BatchTotals(float(sum(observed)), answered, answered)
        table = collate_rows(rows, numbers, numbers, numbers)
        table.observation_mask = padded_masks([observation_mask(row) for row in rows])
        return Batch({policy: table}, totals, pieces)


def observation_mask(row: Trajectory) -> list[bool]:
    """Which tokens of a row are what the environment answered: all after the first action that are no actions."""
    first = row.action_mask.index(True) if any(row.action_mask) else len(row.action_mask)
    return [index > first and not acts for index, acts in enumerate(row.action_mask)]


def demonstration_rows(example: Mapping[str, Any], chat: ChatFormat, policy: str) -> list[Trajectory]:
    """Token rows of one data row: several where the chat template rewrites history, or for the agents of an episode."""
    if "trajectories" in example:
        rows = [row for agent_rows in Episode.from_dict(example).trajectories.values() for row in agent_rows]
        chats = [{"messages": [message.to_chat() for message in row.messages]} for row in rows]
        return [made for one in chats if not _fault(one) for made in demonstration_rows(one, chat, policy)]
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
                f"{source}, row {number}: {fault}; a row is {{messages}}, {{prompt, completion}} or an episode, "
                f"and this one has the fields {sorted(row)}"
            )
    if not rows:
        raise DataError(f"{source} has no rows")
    return rows


def _fault(row: Mapping[str, Any]) -> str | None:
    """What is wrong with a data row, or None."""
    if "trajectories" in row:
        return None if row.get("error") is None else "the episode failed"
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
            known = message.get("role") in ("system", "user", "assistant", "tool")
            if not known or not isinstance(message.get("content"), str):
                return f"{message!r} is not a message with a role and text as content"
    if not any(message["role"] == "assistant" for message in lists[-1]):
        return "it has no assistant message to learn from"
    if lists[0] and lists[0][0]["role"] == "assistant":
        return "it begins with an assistant message, which answers nothing"
    return None


def _messages(rows: Sequence[Mapping[str, Any]]) -> list[Message]:
    return [Message.from_dict(row) for row in rows]
