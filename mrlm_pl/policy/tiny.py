"""The built-in tiny model: a character-level tokenizer with a chat template and a small Llama decoder.

``builtin:tiny`` is the trained model of this package, a plain Hugging Face folder without custom code.
:func:`build_tokenizer` and :func:`build_config` make the untrained folder for the recipe of its weights
(``examples/tiny_model/make_demonstrations.py``). Where its 0.17 million weights are too few, ``make small-model``
trains 2.6 million on the same data; they are not in the package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

PAD, UNKNOWN, END = "<pad>", "<unk>", "<|end|>"
ROLE_TOKENS = {role: f"<|{role}|>" for role in ("system", "user", "assistant", "tool")}
CHARACTERS = "\n\t" + "".join(chr(code) for code in range(32, 127))
"""The tokenizer's characters besides its special tokens; any other one becomes ``<unk>``."""

CONTEXT_LENGTH = 2048

CHAT_TEMPLATE = """\
{%- if tools %}<|system|>{% for tool in tools %}{{ tool.function | tojson }}
{% endfor %}<|end|>{% endif %}
{%- for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""


def tiny_model_path() -> Path:
    """Return the folder of the trained model: configuration, weights (safetensors, fp32), tokenizer and template."""
    return Path(__file__).parent / "tiny_model"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return a new character-level tokenizer: one token per printable ASCII character, newline and tab.

    ``<|end|>`` closes every message and is the end-of-sequence token; padding has a token of its own. The template
    renders each message as ``<|role|>content<|end|>``, so a longer conversation begins with the rendering of a shorter.

    >>> tokenizer = build_tokenizer()
    >>> tokenizer.decode(tokenizer.encode("2 + 2 = 4"))
    '2 + 2 = 4'
    >>> tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    '<|user|>Hi<|end|><|assistant|>'
    """
    special = [PAD, UNKNOWN, END, *ROLE_TOKENS.values()]
    vocabulary = {token: index for index, token in enumerate([*special, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=list(ROLE_TOKENS.values()),
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_config(**changes: Any) -> LlamaConfig:
    """Return the decoder's configuration.

    Args:
        changes: other fields of ``LlamaConfig``, for experiments with the size.
    """
    tokens = {token: index for index, token in enumerate([PAD, UNKNOWN, END])}
    fields: dict[str, Any] = {
        "vocab_size": len(tokens) + len(ROLE_TOKENS) + len(CHARACTERS),
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": CONTEXT_LENGTH,
        "tie_word_embeddings": True,
        "pad_token_id": tokens[PAD],
        "bos_token_id": None,
        "eos_token_id": tokens[END],
    }
    return LlamaConfig(**(fields | changes))
