"""Write your own programming tasks, rows with arguments and expected values, and grade programs on them.

python examples/own_code_tasks.py
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from jsonargparse import auto_cli
from mrlm_environments import CodeEnvironment

from mrlm_pl.environment import Task
from mrlm_pl.episode import Message
from mrlm_pl.sandbox import Sandbox

SMALLEST, LARGEST = 2, 41


def rows() -> list[dict[str, Any]]:
    """Return a task for each base: the digits of a number in that base."""
    return [
        {
            "prompt": f"Write digits(n), which returns the digits of n >= 0 in base {base} as a list, first one first.",
            "entry_point": "digits",
            "pairs": [[[number], digits(number, base)] for number in (0, 1, base - 1, base, 12345)],
            "solution": f"def digits(n):\n    return digits(n // {base}) + [n % {base}] if n >= {base} else [n]\n",
        }
        for base in range(SMALLEST, LARGEST + 1)
    ]


def digits(number: int, base: int) -> list[int]:
    """Return the digits of a number, first one first."""
    found = [number % base]
    while number >= base:
        number //= base
        found.insert(0, number % base)
    return found


def reward(environment: CodeEnvironment, task: Task, program: str) -> float:
    """Return the reward of a program."""
    environment.reset(task)
    return environment.step({"agent": Message("assistant", program)}).rewards["agent"]


def main() -> None:
    """Write the rows to a file, read them as tasks, and grade a right, a wrong and a cheating program."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
        environment = CodeEnvironment(data=str(path), sandbox=Sandbox(wall_seconds=10.0))
        task = environment.tasks("train")[0]
        print(task.data["prompt"])
        programs = {
            "right": task.data["solution"],
            "decimal": "def digits(n): return [int(digit) for digit in str(n)]",
            "cheat": "import os\ndef digits(n): os._exit(0)",
            "broken": "def digits(n) return n",
        }
        for name, program in programs.items():
            print(f"{name}: {reward(environment, task, program)}")


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
