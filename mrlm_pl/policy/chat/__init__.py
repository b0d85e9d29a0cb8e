"""Chats to tokens and back: templates, their limits and tool calls, conversations, and replies of data files."""

from mrlm_pl.policy.chat.conversation import ChatFormat, Conversation
from mrlm_pl.policy.chat.template import PLAIN_TEMPLATE, template_variables

__all__ = ["PLAIN_TEMPLATE", "ChatFormat", "Conversation", "template_variables"]
