"""The reward-model judge: each side's speeches are scored by a model that gives a text one number."""

from __future__ import annotations

import functools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mrlm_environments.debate_judges import SIDES, Debate, Judge, Side, Verdict
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, PolicyError

_VALUE_HEAD = "value_head.safetensors"
_LOADING = threading.Lock()


@dataclass(frozen=True)
class TextScore:
    """What a model gave a conversation: any number, and whether its beginning was left out to fit the window."""

    value: float
    truncated: bool = False


class TextScorer(ABC):
    """Gives a conversation a number, higher for a better last reply. Called from several threads; pickled."""

    @abstractmethod
    def score(self, messages: Sequence[Message]) -> TextScore:
        """The score of a question and its reply."""

    def close(self) -> None:
        """Free what the scorer holds; may be called twice, and the scorer may be used again."""


class RewardModel(TextScorer):
    """A reward model in this process; loaded with the first score, and kept for all judges of the process that use it.

    A folder with ``value_head.safetensors`` is a causal model with the value head of this framework; its score is the
    value before the last token of the reply, when all of its text has been read. Anything else is read as a sequence
    classifier of ``transformers`` with one label, whose score is the logit. A conversation is written in the
    tokenizer's chat template; a classifier's tokenizer without one is given the question and the reply as a pair.

    Args:
        model: hub id or folder.
        device: as torch names it.
        max_tokens: of a conversation; of a longer one the end is scored. None is the model's window.
    """

    def __init__(self, model: str, device: str = "cpu", max_tokens: int | None = None) -> None:
        if max_tokens is not None and max_tokens < 2:
            raise ConfigurationError(f"reward model: max_tokens is {max_tokens}; it must be 2 or above")
        self.model, self.device, self.max_tokens = model, device, max_tokens

    def score(self, messages: Sequence[Message]) -> TextScore:
        """The value or the logit; see :meth:`TextScorer.score`.

        Raises:
            PolicyError: there is no such model, or it is no reward model: it lacks a trained head of one number.
        """
        with _LOADING:
            scorer = _loaded(self.model, self.device)
        ids = scorer.encode(messages)
        room = self.max_tokens or scorer.window
        with scorer.lock:
            return TextScore(scorer.score(ids[-room:]), len(ids) > room)


class RewardModelJudge(Judge):
    """Scores each side by itself: the question is the topic and the side, the reply all of the side's speeches.

    A side's score is ``sigmoid(value / scale)``: for a model of the Bradley-Terry kind the probability that the text is
    better than one of value 0.

    Args:
        model: a :class:`RewardModel`, or one's own :class:`TextScorer`.
        scale: of the model's values.

    Raises:
        ConfigurationError: the scale is not above 0.
    """

    def __init__(self, model: TextScorer, scale: float = 1.0) -> None:
        if not scale > 0:
            raise ConfigurationError(f"reward-model judge: scale is {scale!r}; it must be above 0")
        self.model, self.scale = model, scale

    def judge(self, debate: Debate) -> Verdict:
        """One part ``judge`` for each side; see :meth:`Judge.judge`.

        Raises:
            PolicyError: see :meth:`RewardModel.score`.
        """
        found = {side: self.model.score(side_conversation(debate, side)) for side in SIDES}
        parts = {side: {"judge": sigmoid(found[side].value / self.scale)} for side in SIDES}
        return Verdict(parts, {"judge_truncated": sum(item.truncated for item in found.values()) / len(SIDES)})

    def close(self) -> None:
        """Free what the model holds."""
        self.model.close()


def side_conversation(debate: Debate, side: Side) -> tuple[Message, Message]:
    """The question that a side answers, and all that it said."""
    position = "for" if side == SIDES[0] else "against"
    question = f"Debate: {debate.topic}\nArgue {position} this."
    return Message("user", question), Message("assistant", "\n\n".join(debate.texts(side)))


def sigmoid(value: float) -> float:
    """The logistic function, for any finite number.

    >>> sigmoid(0.0), sigmoid(-1000.0), sigmoid(1000.0)
    (0.5, 0.0, 1.0)
    """
    small = math.exp(-abs(value))
    return (1.0 if value >= 0 else small) / (1.0 + small)


class _Scorer(ABC):
    """A loaded model: token ids of a conversation, and the score of token ids."""

    window: int

    def __init__(self) -> None:
        self.lock = threading.Lock()

    @abstractmethod
    def encode(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a question and its reply."""

    @abstractmethod
    def score(self, ids: Sequence[int]) -> float:
        """The model's number."""


@functools.lru_cache(maxsize=4)
def _loaded(model: str, device: str) -> _Scorer:
    is_policy = (Path(model) / _VALUE_HEAD).is_file()
    return _ValueModel(model, device) if is_policy else _Classifier(model, device)


class _ValueModel(_Scorer):
    """A causal model with a value head beside it."""

    def __init__(self, model: str, device: str) -> None:
        super().__init__()
        from mrlm_pl.policy import Policy

        self.policy = Policy(model=model, trained=False)
        self.policy.load()
        self.policy.add_value_head()
        self.policy.to(device).eval()
        self.device, self.window = device, self.policy.context_window

    def encode(self, messages: Sequence[Message]) -> list[int]:
        chat = self.policy.chat
        return chat.encode(chat.render(messages, generation_prompt=False))

    def score(self, ids: Sequence[int]) -> float:
        import torch

        rows = torch.tensor([list(ids)], device=self.device)
        last = torch.zeros_like(rows, dtype=torch.bool)
        last[0, -1] = True
        with torch.no_grad():
            values = self.policy.values(rows, torch.tensor([len(ids)], device=self.device), last)
        return float(values[0, -1])


class _Classifier(_Scorer):
    """A sequence classifier with one label."""

    def __init__(self, model: str, device: str) -> None:
        super().__init__()
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(model)
            self.network, report = AutoModelForSequenceClassification.from_pretrained(model, output_loading_info=True)
        except (OSError, ValueError, KeyError) as error:
            raise PolicyError(f"reward model {model!r} cannot be read: {error}") from error
        missing = sorted(report["missing_keys"])
        if missing or self.network.config.num_labels != 1:
            fault = f"lacks {missing[0]!r}" if missing else f"has {self.network.config.num_labels} labels"
            raise PolicyError(
                f"reward model {model!r} {fault}; give a sequence classifier with one label, or a policy's folder with "
                f"{_VALUE_HEAD}"
            )
        self.network.to(device).eval()
        window = getattr(self.network.config, "max_position_embeddings", None) or self.tokenizer.model_max_length
        self.device, self.window = device, int(window)

    def encode(self, messages: Sequence[Message]) -> list[int]:
        if self.tokenizer.chat_template is None:
            question, reply = messages
            ids: list[int] = self.tokenizer(question.content, reply.content)["input_ids"]
            return ids
        from mrlm_pl.policy.chat import ChatFormat

        chat = ChatFormat(self.tokenizer)
        return chat.encode(chat.render(messages, generation_prompt=False))

    def score(self, ids: Sequence[int]) -> float:
        import torch

        with torch.no_grad():
            logits = self.network(input_ids=torch.tensor([list(ids)], device=self.device)).logits
        return float(logits[0, 0])
