"""Play the shell environment without a model, on tasks of your own. Requires Linux with user namespaces.

python examples/shell_by_hand.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli
from mrlm_environments import ShellEnvironment

from mrlm_pl.environment import Step
from mrlm_pl.episode import Message

ROWS = [
    {
        "description": f"How many lines of ~/app.log contain the word error? The file is of day {day}.",
        "create": {
            "init": "".join(f"echo 'error {line}' >> ~/app.log; " for line in range(day)) + "echo ok >> ~/app.log"
        },
        "evaluation": {"check": [None, {"file": "check/integer-match.py"}], "example": "grep -c error ~/app.log"},
    }
    for day in range(1, 31)
]
"""Tasks in AgentBench's format: the system's set-up, and a reference whose output is the right answer."""


def act(environment: ShellEnvironment, name: str, **arguments: Any) -> Step:
    """Return the environment's step after a tool call."""
    call = json.dumps({"name": name, "arguments": arguments})
    return environment.step({"agent": Message("assistant", f"<tool_call>{call}</tool_call>")})


def main() -> None:
    """Write the rows to a file, inspect a task's system, and give a right and a wrong answer."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "errors.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        environment = ShellEnvironment(data=str(path))
        task = environment.tasks("train")[0]
        print(environment.reset(task)["agent"][0].content)
        seen = act(environment, "bash_action", script="grep -c error ~/app.log").observations["agent"][0].content
        print(f"right: {act(environment, 'answer_action', answer=seen).rewards['agent']}")
        environment.reset(task)
        print(f"wrong: {act(environment, 'answer_action', answer='many').rewards['agent']}")
        environment.close()


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
