"""The weights: causal language models, their chat format and the built-in tiny model."""

from mrlm_pl.policy.chat import PLAIN_TEMPLATE, ChatFormat, Conversation
from mrlm_pl.policy.lora import LoRA
from mrlm_pl.policy.policy import Policy
from mrlm_pl.policy.pretrained import BUILTIN_TINY

__all__ = ["BUILTIN_TINY", "PLAIN_TEMPLATE", "ChatFormat", "Conversation", "LoRA", "Policy"]
