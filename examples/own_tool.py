"""Write your own tool and tasks for it: sums of Roman numerals, with a converter and the calculator.

python examples/own_tool.py
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from jsonargparse import auto_cli
from mrlm_environments import ToolEnvironment

from mrlm_pl.environment import SeededTasks, TaskSource
from mrlm_pl.environment.tools import Tool, ToolError, tool_schema
from mrlm_pl.episode import Message

LETTERS = (
    *((1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL")),
    *((10, "X"), (9, "IX"), (5, "V"), (4, "IV"), (1, "I")),
)


class RomanNumerals(Tool):
    """Read Roman numerals up to 3999."""

    schema = tool_schema("roman", "The value of a Roman numeral.", {"numeral": {"type": "string"}})

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the value; raise a ToolError, which the agent reads, for anything else."""
        rest, value = arguments["numeral"].strip().upper(), 0
        for number, letters in LETTERS:
            while rest.startswith(letters) and value < 4000:
                rest, value = rest.removeprefix(letters), value + number
        if rest or not value or roman(value) != arguments["numeral"].strip().upper():
            raise ToolError("that is no Roman numeral")
        return str(value)


class RomanSums(ToolEnvironment):
    """Add two Roman numerals; both tools are required."""

    name = "roman-sums"

    def __init__(self, max_turns: int = 6) -> None:
        super().__init__(tools=[RomanNumerals(), "calculator"], max_turns=max_turns)

    def tasks(self, split: str) -> TaskSource:
        """Return an endless source of sums."""
        return SeededTasks(self.name, split, problem, lambda data: data["question"])


def roman(value: int) -> str:
    """Return the numeral of a value."""
    text = ""
    for number, letters in LETTERS:
        text += letters * (value // number)
        value %= number
    return text


def problem(rng: Random) -> dict[str, Any]:
    """Return the data of a task."""
    low, high = sorted((rng.randint(100, 1900), rng.randint(100, 1900)))
    return {
        "question": f"{roman(high)}+{roman(low)}=?",
        "answer": str(high + low),
        "required_tools": ["roman", "calculator"],
        "gold": [
            call("roman", numeral=roman(high))
            + call("roman", numeral=roman(low))
            + call("calculator", expression=f"{high}+{low}"),
            f"<answer>{high + low}</answer>",
        ],
    }


def call(name: str, **arguments: str) -> str:
    """Return a call as a model writes it."""
    written = ", ".join(f'"{key}": "{value}"' for key, value in arguments.items())
    return f'<tool_call>{{"name": "{name}", "arguments": {{{written}}}}}</tool_call>'


def main() -> None:
    """Play an episode with the best replies and print it."""
    environment = RomanSums()
    task = environment.tasks("train")[0]
    (question,) = environment.reset(task)["agent"]
    print("user:", question.content)
    for reply in task.data["gold"]:
        print("assistant:", reply)
        step = environment.step({"agent": Message("assistant", reply)})
        for message in step.observations.get("agent", ()):
            print(f"{message.role}:", message.content)
    print("components of the last decision:", dict(step.components["agent"]))
    environment.close()


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
