"""Random models over words, their prompts, and a reward of replies."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

SIZES = {
    "xs": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 172, "num_attention_heads": 4, "vocab": 512},
    "xs32k": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 172,
        "num_attention_heads": 4,
        "vocab": 32000,
    },
    "s": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 688, "num_attention_heads": 4, "vocab": 512},
    "m": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "intermediate_size": 1376,
        "num_attention_heads": 8,
        "vocab": 32000,
    },
    "135m": {
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "vocab": 49152,
    },
    "0.5b": {
        "hidden_size": 896,
        "num_hidden_layers": 24,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab": 151_936,
    },
    "1.5b": {
        "hidden_size": 1536,
        "num_hidden_layers": 28,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
        "vocab": 151_936,
    },
}
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def shape_of(size: str, **changes: int) -> dict[str, int]:
    """Return a size's shape with changed entries; a half as many key heads as query heads unless it says otherwise."""
    chosen = SIZES[size] | changes
    return {"num_key_value_heads": chosen["num_attention_heads"] // 2, "tie_word_embeddings": False} | chosen


def make_model(folder: Path, size: str, *, knows_eos: bool = False, seed: int = 0, **changes: int) -> None:
    """Write a random model and a tokenizer of whitespace-separated words.

    Args:
        knows_eos: whether the model's vocabulary has EOS.
        changes: changed entries of the size and of the model's configuration.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    options: dict[str, Any] = {"max_position_embeddings": 512} | shape_of(size, **changes)
    vocabulary = options.pop("vocab")
    torch.manual_seed(seed)
    config = LlamaConfig(
        **options,
        vocab_size=vocabulary + knows_eos,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {"<pad>": 0} | {f"w{n}": n for n in range(1, vocabulary)} | {"<eos>": vocabulary}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder)


def vocabulary_of(folder: str) -> int:
    """Return the number of tokens of a folder's model."""
    return int(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def parameters_of(folder: str) -> int:
    """Return the number of parameters in a folder's model."""
    from safetensors import safe_open

    with safe_open(Path(folder) / "model.safetensors", framework="pt") as weights:
        return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118


def prompt(index: int, vocabulary: int, tokens: int = 64) -> str:
    """Return one prompt: words that are a function of the index."""
    return " ".join(f"w{1 + (index * 7919 + position * 104729) % (vocabulary - 1)}" for position in range(tokens))


def reward(text: str) -> float:
    """Return the fraction of words with an even number."""
    numbers = [int(word[1:]) for word in text.split() if word.startswith("w")]
    return sum(number % 2 == 0 for number in numbers) / max(len(numbers), 1)
