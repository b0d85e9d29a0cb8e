"""The built-in tiny model: a character-level tokenizer with a chat template and a small Llama decoder.

``builtin:tiny`` is the trained model of this package, a plain Hugging Face folder without custom code.
:func:`build_tokenizer` and :func:`build_config` make the untrained folder for the recipe of its weights
(``examples/tiny_model/make_demonstrations.py``). If its 0.17 million weights are too few, ``make small-model``
trains 2.6 million on the same data; they are not in the package.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import LlamaConfig, PreTrainedTokenizerFast

_OF_THE_WEIGHTS = ("architectures", "dtype", "head_dim", "rope_parameters", "transformers_version")
"""Fields that a saved model has in addition to the given ones; heads and rotations follow from the others."""


def tiny_model_path() -> Path:
    """Return the folder of the trained model: configuration, weights (safetensors, fp32), tokenizer and template."""
    return Path(__file__).parent / "tiny_model"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a new character-level tokenizer: one token per printable ASCII character, newline and tab.

    ``<|end|>`` closes every message and is the end-of-sequence token; padding has its own token, and any other
    character becomes ``<unk>``. The template renders each message as ``<|role|>content<|end|>``, so a longer
    conversation begins with the rendering of a shorter.

    >>> tokenizer = build_tokenizer()
    >>> tokenizer.decode(tokenizer.encode("2 + 2 = 4"))
    '2 + 2 = 4'
    >>> tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    '<|user|>Hi<|end|><|assistant|>'
    """
    return PreTrainedTokenizerFast.from_pretrained(tiny_model_path())


def build_config(**changes: Any) -> LlamaConfig:
    """Return the decoder's configuration.

    Args:
        changes: other fields of ``LlamaConfig``, for experiments with the size.
    """
    saved = json.loads((tiny_model_path() / "config.json").read_text(encoding="utf-8"))
    fields = {name: value for name, value in saved.items() if name not in _OF_THE_WEIGHTS}
    return LlamaConfig(**fields | changes)
