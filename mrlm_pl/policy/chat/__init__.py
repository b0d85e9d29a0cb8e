"""Chats to tokens and back: templates, their limits and tool calls, conversations, and replies of data files."""

from mrlm_pl.policy.chat.conversation import ChatFormat, Conversation, Row
from mrlm_pl.policy.chat.replies import GivenConversation, GivenReply, plain_reply
from mrlm_pl.policy.chat.template import PLAIN_TEMPLATE, checked_template, template_variables, with_arguments

__all__ = [
    "PLAIN_TEMPLATE",
    "ChatFormat",
    "Conversation",
    "GivenConversation",
    "GivenReply",
    "Row",
    "checked_template",
    "plain_reply",
    "template_variables",
    "with_arguments",
]
