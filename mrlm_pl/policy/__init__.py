"""The weights: causal language models, their chat format and the built-in tiny model."""

from mrlm_pl.policy.chat import PLAIN_TEMPLATE, ChatFormat, Conversation
from mrlm_pl.policy.hf import BUILTIN_TINY, Policy
from mrlm_pl.policy.lora import LoRA

__all__ = ["BUILTIN_TINY", "PLAIN_TEMPLATE", "ChatFormat", "Conversation", "LoRA", "Policy"]
