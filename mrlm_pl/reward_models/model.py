"""A reward model in this process. The first score imports torch."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from mrlm_pl.episode import Message
from mrlm_pl.errors import DataError, NonFiniteError, PolicyError
from mrlm_pl.model_folders import policy_folder
from mrlm_pl.reward_models.scorer import Conversation, TextScore, TextScorer
from mrlm_pl.settings import PositiveInt, at_least

if TYPE_CHECKING:
    import torch

    from mrlm_pl.policy import ChatFormat

VALUE_HEAD_FILE = "value_head.safetensors"
Precision = Literal["64", "32", "bf16", "int8"]
_NEEDED = f"give a sequence classifier with one label, or a policy's folder with {VALUE_HEAD_FILE}"
_LOADING = threading.Lock()


class RewardModel(TextScorer):
    """A reward model in this process, loaded with the first score and shared by all scorers of the process.

    A folder with ``value_head.safetensors`` is a causal model with a value head; its score is the value before the last
    token of the reply. Any other model is a sequence classifier of ``transformers`` with one label, whose score is the
    logit. A conversation is rendered with the tokenizer's chat template; a classifier's tokenizer without one gets the
    question and the reply as a pair.

    Args:
        model: a hub id, a model folder, or the folder of a run that has exported one policy.
        device: device of the model, as torch names it; ``auto`` prefers an accelerator, ``cuda`` is this rank's GPU.
        max_tokens: maximum tokens of a conversation, of which the end is kept; None is the model's window.
        batch_tokens: maximum tokens of a forward pass with padding; a longer conversation is its own pass.
        precision: precision of the weights. The batch changes the order of sums, and so a score by about 1e-6 with
            ``32``, and hardly ever with ``64``. ``int8`` rounds the weights of the linear layers; the rest is ``32``.

    Raises:
        ConfigurationError: a value is out of its range; with the first score, the device cannot be used.
    """

    def __init__(
        self,
        model: str,
        device: str = "cpu",
        max_tokens: Annotated[int, at_least(2)] | None = None,
        batch_tokens: PositiveInt = 8192,
        precision: Precision = "32",
    ) -> None:
        self.model, self.device, self.precision = model, device, precision
        self.max_tokens, self.batch_tokens = max_tokens, batch_tokens

    def score(self, messages: Conversation) -> TextScore:
        """Return the value or the logit; see :meth:`score_batch`."""
        return self.score_batch([messages])[0]

    def score_batch(self, conversations: Sequence[Conversation]) -> list[TextScore]:
        """Return the values or logits in order, in batches; they equal single ones up to rounding (1e-6).

        Raises:
            PolicyError: the model is missing, or lacks a trained head with one output.
            NonFiniteError: the model returned NaN or infinity.
        """
        from mrlm_pl.policy.forward.packing import padded_chunks

        scorer = self.load()
        rows = [scorer.encode(messages) for messages in conversations]
        room = min(self.max_tokens or scorer.window, scorer.window)
        kept = [ids[-room:] for ids in rows]
        values = [0.0] * len(rows)
        for batch in padded_chunks([len(ids) or 1 for ids in kept], self.batch_tokens):  # an empty text too
            with scorer.lock:
                found = scorer.score([kept[number] for number in batch])
            for number, value in zip(batch, found, strict=True):
                values[number] = value
        for value, ids in zip(values, kept, strict=True):
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"the reward model {self.model!r} gave {value!r} for a text of {len(ids)} tokens; its weights are "
                    "broken: train it again, or use another"
                )
        return [TextScore(value, len(ids) > room) for value, ids in zip(values, rows, strict=True)]

    def load(self) -> _ValueModel | _Classifier:
        """Return the model, loaded on the first call; see :meth:`score_batch` for errors."""
        with _LOADING:
            return _loaded(policy_folder(self.model, "reward model"), self.device, self.precision)


@functools.lru_cache(maxsize=4)
def _loaded(model: str, device: str, precision: Precision) -> _ValueModel | _Classifier:
    is_policy = (Path(model).expanduser() / VALUE_HEAD_FILE).is_file()
    return _ValueModel(model, device, precision) if is_policy else _Classifier(model, device, precision)


def _dtype(precision: Precision) -> torch.dtype:
    import torch

    return {"64": torch.float64, "32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float32}[precision]


def _rendered(chat: ChatFormat, messages: Sequence[Message]) -> list[int]:
    """Return the token ids of a conversation in a chat template.

    Raises:
        DataError: the template rejects the conversation.
    """
    try:
        return chat.encode(chat.render([*map(chat.plain, messages)], generation_prompt=False))
    except Exception as error:  # templates raise any class of error
        raise DataError(f"the chat template of the reward model refuses a conversation: {error}") from error


class _ValueModel:
    """A causal model with a value head: token ids of a conversation, and scores of token ids."""

    def __init__(self, model: str, device: str, precision: Precision) -> None:
        from mrlm_pl.policy import Policy
        from mrlm_pl.policy.forward.devices import usable_device

        self.policy = Policy(model=model, trained=False, int8="weights" if precision == "int8" else None)
        self.policy.needs_head = False
        self.policy.load()
        self.policy.to(dtype=_dtype(precision))
        try:
            self.policy.add_value_head()  # whose weights stay in float32
        except (RuntimeError, OSError, ValueError) as error:
            raise PolicyError(f"reward model {model!r}: {VALUE_HEAD_FILE} does not fit the model: {error}") from error
        self.device = usable_device(device)
        self.policy.to(self.device).eval()
        self.window, self.lock = self.policy.context_window, threading.Lock()

    def encode(self, messages: Sequence[Message]) -> list[int]:
        return _rendered(self.policy.chat, messages)

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        from mrlm_pl.policy.forward.packing import TokenRows

        lengths = torch.tensor([len(ids) for ids in rows])
        padded = pad_sequence([torch.tensor(ids) for ids in rows], batch_first=True)
        last = torch.arange(padded.shape[1]) == lengths[:, None] - 1
        with torch.no_grad():
            values = self.policy.values(TokenRows(*(item.to(self.device) for item in (padded, lengths, last))))
        return values.cpu()[last].tolist()


class _Classifier:
    """A sequence classifier with one label, like :class:`_ValueModel`."""

    def __init__(self, model: str, device: str, precision: Precision) -> None:
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        from mrlm_pl.policy.forward.devices import usable_device
        from mrlm_pl.policy.pretrained import context_window, reading_weights

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
            with reading_weights(model):
                self.network, report = AutoModelForSequenceClassification.from_pretrained(
                    model, output_loading_info=True, trust_remote_code=False
                )
        except (OSError, ValueError, KeyError) as error:
            raise PolicyError(f"reward model {model!r} cannot be read; {_NEEDED}: {error}") from error
        missing = sorted(report["missing_keys"])
        if missing or self.network.config.num_labels != 1:
            fault = f"lacks {missing[0]!r}" if missing else f"has {self.network.config.num_labels} labels"
            raise PolicyError(f"reward model {model!r} {fault}; {_NEEDED}")
        if precision == "int8":
            from mrlm_pl.policy.forward.int8 import linear_layers, to_int8

            to_int8(self.network, linear_layers(self.network))
        self.device = usable_device(device)
        self.network.to(self.device, _dtype(precision)).eval()
        self.window = context_window(self.network.config) or int(self.tokenizer.model_max_length)
        self.lock = threading.Lock()

    def encode(self, messages: Sequence[Message]) -> list[int]:
        if self.tokenizer.chat_template is None:
            if len(messages) != 2:
                raise DataError(
                    f"a conversation has {len(messages)} messages; the reward model's tokenizer has no chat template, "
                    "and reads a question and its reply"
                )
            question, reply = messages
            # A reply that spells special tokens would begin another text.
            return self.tokenizer(question.content, reply.content, split_special_tokens=True)["input_ids"]
        return _rendered(self._chat, messages)

    @functools.cached_property
    def _chat(self) -> ChatFormat:
        from mrlm_pl.policy.chat import ChatFormat

        return ChatFormat(self.tokenizer)

    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        import torch
        from torch.nn.utils.rnn import pad_sequence

        padding = self.network.config.get_text_config().pad_token_id
        if padding is None and len(rows) > 1:  # classifiers of transformers find a sequence's end by it
            return [score for ids in rows for score in self.score([ids])]
        padded = pad_sequence([torch.tensor(ids) for ids in rows], batch_first=True, padding_value=padding or 0)
        lengths = torch.tensor([[len(ids)] for ids in rows])
        mask = (torch.arange(padded.shape[1]) < lengths).long()
        with torch.no_grad():
            logits = self.network(input_ids=padded.to(self.device), attention_mask=mask.to(self.device)).logits
        return logits[:, 0].tolist()
