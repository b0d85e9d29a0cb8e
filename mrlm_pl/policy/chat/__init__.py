"""Chats: messages to the text of a chat template, and that to token rows."""

from mrlm_pl.policy.chat.conversation import ChatFormat, Conversation, GivenReply, Row
from mrlm_pl.policy.chat.template import PLAIN_TEMPLATE, checked_template, template_variables, with_arguments

__all__ = [
    "PLAIN_TEMPLATE",
    "ChatFormat",
    "Conversation",
    "GivenReply",
    "Row",
    "checked_template",
    "template_variables",
    "with_arguments",
]
