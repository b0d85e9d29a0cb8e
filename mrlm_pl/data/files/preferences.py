"""Pairs of a chosen and a rejected answer, from files or made of played episodes by their rewards."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from mrlm_pl.algorithms import DPO, ORPO, PairwiseRewardModel, SimPO
from mrlm_pl.data.files.chat_rows import Demonstration, answer_row, messages_of, scored_row, tools_of
from mrlm_pl.data.files.references import ReferencedDataModule
from mrlm_pl.episode import Episode, Message, Trajectory
from mrlm_pl.errors import DataError
from mrlm_pl.grouping import common_prefix
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.learner.batch import PolicyBatch
from mrlm_pl.learner.credit.pairs import RowPair, best_and_worst, collate_pairs
from mrlm_pl.policy import ChatFormat


class AnswerPair(NamedTuple):
    """The chosen and the rejected answer to a prompt: of a data row, or the rows that one agent played in a group.

    ``margin`` is the difference of scores by which the chosen one must win.
    """

    chosen: Demonstration | Trajectory
    rejected: Demonstration | Trajectory
    margin: float = 0.0

    def parts(self, chat: ChatFormat | None = None) -> tuple[Sequence[Message], Sequence[Message], Sequence[Message]]:
        """Return the prompt and the messages of both answers; of played rows the common beginning is the prompt.

        Args:
            chat: chat format that writes the tool calls of replies in data rows, whose text lacks them.
        """
        chosen, rejected = self[:2]
        if isinstance(chosen, Trajectory) or isinstance(rejected, Trajectory):
            return split_prompt(chosen.messages, rejected.messages)
        chosen, rejected = (answer.written(chat) if chat else answer for answer in (chosen, rejected))
        return chosen.given, chosen.shown, rejected.shown


class PreferenceDataModule(ReferencedDataModule):
    """Pairs of answers to the same prompt, shuffled in each epoch.

    A data row is one of

    - ``{"prompt": "text", "chosen": "text", "rejected": "text"}``: plain text without a chat template; the answers and
      the EOS token are compared;
    - ``{"prompt": [messages], "chosen": [messages], "rejected": [messages]}``: a chat; the assistant's messages of the
      answers are compared; without ``prompt``, their common beginning is the prompt; ``tools`` as in demonstrations;
      both may have a number ``margin``, which ``PairwiseRewardModel`` adds to its own;
    - an episode, as ``mrlm collect --samples-per-task N`` and runs write them: of the episodes of a group, the best and
      the worst by an agent's return are a pair when these differ by more than ``reward_gap``. The sampled tokens are
      compared as they are when the learner has the tokenizer and the chat template of the model that played.

    The answers of a pair share the computation of their prompt. ``PairwiseRewardModel`` reads every pair as a chat in
    its own chat template, and scores each answer at its end. For ``DPO`` the log-probabilities of the reference are
    computed once, before the first update, shared out over the ranks, and are part of checkpoints.

    Args:
        train: file (JSONL, JSON, CSV or Parquet, optionally .zst or .gz), a run's folder of episodes, or hub name.
        validation: source for the validation loop, in the same forms; None skips validation.
        test: source for ``mrlm test``, in the same forms; optional.
        batch_size: number of pairs in a batch, on each rank.
        max_tokens: longest row in tokens; pairs with a longer one are left out and counted. None is the model's context
            window.
        reward_gap: difference of the rewards that a pair from episodes must exceed.
        seed: seed of the shuffling; None is 0. The command passes ``--seed_everything``.

    Raises:
        DataError: a file is missing, a row lacks its fields, or episodes give no pair.
    """

    algorithms: ClassVar[tuple[type[Algorithm], ...]] = (DPO, SimPO, ORPO, PairwiseRewardModel)
    unit = "pair"
    form = "{prompt, chosen, rejected}"
    compared: ClassVar[str] = "an agent's return"

    def __init__(
        self,
        train: str,
        validation: str | None = None,
        batch_size: int = 16,
        max_tokens: int | None = None,
        reward_gap: float = 0.0,
        seed: int | None = None,
        test: str | None = None,
    ) -> None:
        self.reward_gap = reward_gap
        super().__init__(train, validation, batch_size, max_tokens, seed, test)

    def of_row(self, row: Mapping[str, Any]) -> Any:
        return pair_of(row)

    def of_episodes(self, episodes: Sequence[Episode], source: str) -> list[Any]:
        pairs = self.pairs_of(episodes)
        if not pairs:
            raise DataError(
                f"{source}: no two episodes of a group differ by more than {self.reward_gap} in {self.compared}; "
                "collect several of each task with `mrlm collect --samples-per-task 8`, or lower data.reward_gap"
            )
        return pairs

    def pairs_of(self, episodes: Sequence[Episode]) -> list[Any]:
        """Return the pairs that are made of episodes."""
        return list(played_pairs(episodes, self.reward_gap))

    def tokenized(self, example: Any) -> list[RowPair]:
        name, policy = self.learner()
        if isinstance(self.algorithm(), PairwiseRewardModel):
            prompt, *answers = example.parts(policy.chat)
            chosen, rejected = (scored_row(prompt, answer, policy.chat, name) for answer in answers)
        else:
            chosen, rejected = pair_rows(example, policy.chat, name)
        return [RowPair((chosen,), (rejected,), example.margin)]

    def batches(self, examples: Sequence[RowPair]) -> dict[str, tuple[PolicyBatch, Tensor]]:
        return collate_pairs(examples)


def played_pairs(episodes: Sequence[Episode], reward_gap: float = 0.0) -> list[AnswerPair]:
    """Return the best against the worst episode of each group.

    The first of several equal rewards counts. Left out are failed episodes, groups whose rewards differ by
    ``reward_gap`` or less, agents whose history was rewritten by the chat template, and pairs that begin differently or
    act alike. With several agents each one's conversation makes a pair, by its own reward.

    Args:
        episodes: episodes of any number of groups.
        reward_gap: difference of the rewards that a pair must exceed.
    """
    rows = [
        ((episode.task.key, episode.group, agent), rows[0])
        for episode in episodes
        for agent, rows in episode.trajectories.items()
        if not episode.failed and len(rows) == 1
    ]
    pairs = []
    for pair in itertools.starmap(AnswerPair, best_and_worst(rows, reward_gap)):
        prompt, *answers = pair.parts()
        if prompt and all(any(message.role == "assistant" for message in answer) for answer in answers):
            pairs.append(pair)
    return pairs


def pair_rows(pair: AnswerPair, chat: ChatFormat, policy: str) -> tuple[Trajectory, Trajectory]:
    """Return the token rows of the chosen and the rejected answer.

    Raises:
        ValueError: the chat template rewrites history, so that an answer is not a single row.
    """
    return answer_row(pair.chosen, chat, policy, "chosen"), answer_row(pair.rejected, chat, policy, "rejected")


def split_prompt(chosen: Sequence[Any], rejected: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Return the common beginning of both conversations, and the rest of each."""
    shared = common_prefix(chosen, rejected)
    return chosen[:shared], chosen[shared:], rejected[shared:]


def pair_of(row: Mapping[str, Any]) -> AnswerPair:
    """Return the pair in a data row; of chats that have no prompt or repeat it, their common beginning is the prompt.

    Raises:
        ValueError: the row has a fault.
    """
    if missing := [field for field in ("chosen", "rejected") if field not in row]:
        raise ValueError(f"it lacks the field {missing[0]!r}")
    margin = row.get("margin") or 0.0  # a table has nulls
    if not isinstance(margin, (int, float)) or not math.isfinite(margin):
        raise ValueError(f"its margin is {margin!r}; it must be a finite number")
    prompt_field, answers = row.get("prompt") or [], (row["chosen"], row["rejected"])
    if all(isinstance(answer, str) for answer in answers):
        if not isinstance(prompt_field, str) or not prompt_field:
            raise ValueError("answers of plain text need a field 'prompt' of plain text")
        better, worse = (Demonstration.of_text(prompt_field, answer, row.get("tools")) for answer in answers)
        return AnswerPair(better, worse, margin)
    if any(isinstance(answer, str) for answer in answers):
        raise ValueError("prompt, chosen and rejected must all be text, or all lists of {role, content}")
    tools, (chosen, rejected) = tools_of(row.get("tools")), map(messages_of, answers)
    prompt, *own_messages = split_prompt(chosen, rejected)
    if not isinstance(prompt_field, str) and (stated := messages_of(prompt_field)) != prompt[: len(stated)]:
        prompt, own_messages = stated, [chosen, rejected]
    if not prompt:
        raise ValueError("it has no prompt of messages, and its answers begin differently")
    for name, messages in zip(("chosen", "rejected"), own_messages, strict=True):
        if not any(message.role == "assistant" for message in messages):
            raise ValueError(f"its {name!r} answer has no assistant message of its own")
        if any(message.get("weight") == 0 for message in row[name][-len(messages) :]):
            raise ValueError(f"its {name!r} answer has a message of weight 0; leave it out or put it into `prompt`")
    better, worse = (Demonstration(prompt, messages, tools=tools) for messages in own_messages)
    return AnswerPair(better, worse, margin)
