"""A receiver of weights in its own process, for tests that kill it."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from mrlm_pl.engines.transfer.broadcast import WeightReceiver


def many_tensors(divisor: int = 40) -> PreTrainedModel:
    """Return the 579 tensors of Qwen2.5-14B (48 layers of 12, embedding, head, last norm), narrower, in bfloat16."""
    config = Qwen2Config(
        vocab_size=152_064 // divisor,
        hidden_size=5120 // divisor,
        intermediate_size=13_824 // divisor,
        num_hidden_layers=48,
        num_attention_heads=8,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    """Receive weights as rank 1, with pickled arguments from standard input."""
    invitation, manifest = pickle.load(sys.stdin.buffer)
    print("ready", flush=True)
    received: Any = WeightReceiver().receive(invitation, 1, manifest)
    print(len(received), flush=True)


if __name__ == "__main__":
    main()
