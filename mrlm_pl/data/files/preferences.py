"""Pairs of a chosen and a rejected answer, from files or made of played episodes by their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from mrlm_pl.algorithms import DPO, ORPO, PairwiseRewardModel, SimPO
from mrlm_pl.data.files.base import DataSplit
from mrlm_pl.data.files.chat_rows import (
    chat_rows,
    messages_fault,
    messages_of,
    played_rows,
    scored_row,
    text_row,
    tools_fault,
)
from mrlm_pl.data.files.references import ReferencedDataModule
from mrlm_pl.episode import Episode, Message, Trajectory
from mrlm_pl.errors import DataError
from mrlm_pl.grouping import common_prefix
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.pairs import RowPair, best_and_worst, row_tables
from mrlm_pl.losses import BatchTotals
from mrlm_pl.policy import ChatFormat


class PlayedPair(NamedTuple):
    """The best and the worst row that one agent played in the episodes of a group."""

    chosen: Trajectory
    rejected: Trajectory


class PreferenceDataModule(ReferencedDataModule):
    """Pairs of answers to the same prompt, shuffled in each epoch.

    A data row is one of

    - ``{"prompt": "text", "chosen": "text", "rejected": "text"}``: plain text without a chat template; the answers and
      the EOS token are compared;
    - ``{"prompt": [messages], "chosen": [messages], "rejected": [messages]}``: a chat; the assistant's messages of the
      answers are compared; without ``prompt``, their common beginning is the prompt; ``tools`` as in demonstrations;
    - an episode, as ``mrlm collect --samples-per-task N`` and runs write them: of the episodes of a group, the best and
      the worst are a pair when their rewards differ by more than ``reward_gap``. The sampled tokens are compared as
      they are when the learner has the tokenizer and the chat template of the model that played.

    The answers of a pair share the computation of their prompt. ``PairwiseRewardModel`` reads every pair as a chat in
    its own chat template, and scores each answer at its end. For ``DPO`` the log-probabilities of the reference are
    computed once, before the first update, shared out over the ranks, and are part of checkpoints.

    Args:
        train: file (JSONL, JSON, CSV, Parquet, also with .zst or .gz), a run's folder of episodes, or hub name.
        validation: the same for the validation loop; None has none.
        test: the same for ``mrlm test``; None has none.
        batch_size: pairs in a batch, on each rank.
        max_tokens: pairs with a longer row are left out and counted; None is the model's context window.
        reward_gap: see above.
        seed: of the shuffling; the command line passes ``seed_everything``.

    Raises:
        DataError: a file is missing, a row lacks its fields, or episodes give no pair.
    """

    algorithms: ClassVar[tuple[type[Algorithm], ...]] = (DPO, SimPO, ORPO, PairwiseRewardModel)
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
        if isinstance(self.algorithm(), PairwiseRewardModel):
            chosen, rejected = scored_pair(example, policy.chat, name)
        else:
            chosen, rejected = pair_rows(example, policy.chat, name, where)
        return [RowPair((chosen,), (rejected,))]

    def rows_of(self, example: RowPair) -> Sequence[Trajectory]:
        return example.rows()

    def tables(self, examples: Sequence[RowPair]) -> dict[str, tuple[PolicyBatch, Tensor]]:
        return row_tables(examples)

    def totals(self, split: DataSplit, update: Sequence[int]) -> dict[str, BatchTotals]:
        """Return the size of an update by policy; its episodes are pairs, of which a policy counts its fraction."""
        sizes: dict[str, BatchTotals] = {}
        for rows in (self.examples[split][index].rows() for index in update):
            tokens = sum(row.num_actions for row in rows)
            for row in rows:
                size = BatchTotals(float(row.num_actions), 1.0, row.num_actions / tokens)
                sizes[row.policy] = sizes.get(row.policy, BatchTotals(0.0, 0.0, 0.0)) + size
        return sizes


def preference_pairs(episodes: Sequence[Episode], reward_gap: float = 0.0) -> list[dict[str, Any]]:
    """Rows ``{prompt, chosen, rejected}`` of messages: the best against the worst episode of each group.

    See :func:`played_pairs` for the groups that are left out.

    Args:
        episodes: of any number of groups.
        reward_gap: least difference of the rewards, exclusive.
    """
    pairs = []
    for pair in played_pairs(episodes, reward_gap):
        said = ([replace(message, tool_calls=()).to_chat() for message in row.messages] for row in pair)  # as text
        parts = _split_prompt(*said)
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
        if isinstance(prompt, str):
            made = [[text_row(prompt, answer, chat, policy)] for answer in answers]
        else:
            tools = example.get("tools") or ()
            made = [chat_rows(prompt, answer, chat, policy, tools=tools) for answer in answers]
    for answer, rows in zip(PlayedPair._fields, made, strict=True):
        if len(rows) != 1 or not rows[0].num_actions:
            raise DataError(
                f"{where}: the {answer!r} answer makes {len(rows)} rows, as the template rewrites earlier messages; "
                "give pairs that differ in their last turn only"
            )
    return made[0][0], made[1][0]


def scored_pair(
    example: Mapping[str, Any] | PlayedPair, chat: ChatFormat, policy: str
) -> tuple[Trajectory, Trajectory]:
    """Return the rows of both answers for a reward model; see :func:`chat_parts`."""
    prompt, *answers = chat_parts(example)
    chosen, rejected = (scored_row(prompt, answer, chat, policy) for answer in answers)
    return chosen, rejected


def chat_parts(
    example: Mapping[str, Any] | PlayedPair,
) -> tuple[Sequence[Message], Sequence[Message], Sequence[Message]]:
    """Return prompt, chosen and rejected answer; plain text becomes a user's message and its answers."""
    prompt, chosen, rejected = _parts(example)
    if isinstance(prompt, str):
        return [Message("user", prompt)], [Message("assistant", chosen)], [Message("assistant", rejected)]
    return prompt, chosen, rejected


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
    shared = common_prefix(chosen, rejected)
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
    fault = next(filter(None, map(messages_fault, (given, *answers))), None) or tools_fault(row.get("tools"))
    if fault:
        return fault
    prompt, *parts = (given, *answers) if "prompt" in row else _split_prompt(row["chosen"], row["rejected"])
    if not prompt:
        return "it has no prompt, and its answers begin differently"
    for name, part in zip(("chosen", "rejected"), parts, strict=True):
        if not any(message["role"] == "assistant" for message in part):
            return f"its {name!r} answer has no assistant message of its own"
    return None
