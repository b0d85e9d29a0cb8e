"""Small reward models with random weights, and scorers with known scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from mrlm_pl.episode import Message
from mrlm_pl.reward_models import TextScore, TextScorer


class Lengths(TextScorer):
    """Score with the number of characters of the reply."""

    def score(self, messages: Sequence[Message]) -> TextScore:
        return TextScore(float(len(messages[-1].content)), messages[0].content.endswith("against this."))


def tiny(folder: Path, kind: str) -> torch.nn.Module:
    """Write a random model with the tiny tokenizer and a head that sums the first half of a hidden state.

    Args:
        folder: folder of the model.
        kind: ``value`` has a value head with bias 0.5, ``classifier`` is a classifier with one label, ``encoder`` the
            same of the BERT family, ``none`` has no head.
    """
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
    )

    from mrlm_pl.policy.tiny import build_config, build_tokenizer
    from mrlm_pl.policy.value_head import ValueHead

    torch.manual_seed(3)
    build_tokenizer().save_pretrained(folder)
    weights = torch.tensor([[1.0] * 32 + [0.0] * 32])
    if kind == "encoder":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        model = BertForSequenceClassification(BertConfig(vocab_size=200, num_labels=1, **sizes))
    elif kind == "classifier":
        model = LlamaForSequenceClassification(build_config(num_labels=1))
        model.score.weight.data = weights
    else:
        model = LlamaForCausalLM(build_config(num_labels=1))
    model.save_pretrained(folder)
    if kind == "value":
        head = ValueHead(64)
        head.linear.weight.data = weights
        head.linear.bias.data = torch.tensor([0.5])
        head.save(folder)
    return model.eval()


def hidden(model: torch.nn.Module, text: str) -> torch.Tensor:
    """Return the last hidden states [T, 64] of a text with one character, or special token, per token."""
    from mrlm_pl.policy.tiny import build_tokenizer

    ids = torch.tensor([build_tokenizer().encode(text, add_special_tokens=False)])
    with torch.no_grad():
        return model.model(input_ids=ids).last_hidden_state[0]
