"""A row for the shell environment, and replies to it."""

from __future__ import annotations

import json

COUNT = {
    "description": "How many files are in ~/d?",
    "create": {"init": "mkdir ~/d; touch ~/d/a ~/d/b ~/d/c"},
    "evaluation": {
        "check": [None, {"language": "python", "file": "check/integer-match.py"}],
        "example": "ls ~/d|wc -l",
    },
}


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def bash(script: str) -> str:
    return call("bash_action", script=script)


def answer(text: str) -> str:
    return call("answer_action", answer=text)


FINISH = call("finish_action")
