"""Play the SQL environment without a model: a task, its table, and the reference's replies.

python examples/sql_by_hand.py
"""

from __future__ import annotations

import json

from jsonargparse import auto_cli
from mrlm_environments import SqlEnvironment

from mrlm_pl.episode import Message


def main() -> None:
    """Print a task of each of two kinds, the result of a query, and the reward of the best replies."""
    for kind in ("count", "update"):
        environment = SqlEnvironment(kinds=[kind])
        task = environment.tasks("train")[0]
        print(environment.reset(task)["agent"][-1].content)
        call = {"name": "execute_sql", "arguments": {"query": "SHOW TABLES"}}
        step = environment.step({"agent": Message("assistant", f"<tool_call>{json.dumps(call)}</tool_call>")})
        print(step.observations["agent"][0].content)
        gold = environment.gold(task)
        assert gold is not None, "generated tasks have a solution"
        for reply in gold["agent"]:
            step = environment.step({"agent": Message("assistant", reply)})
        print(f"{kind}: {step.rewards['agent']}")
        environment.close()


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
