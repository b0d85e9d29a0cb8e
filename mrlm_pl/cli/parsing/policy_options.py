"""Completes options of single policies, so that a policy need not be in a configuration file."""

from __future__ import annotations

import re
from collections.abc import Sequence

_NESTED = re.compile(r"--model\.(?:init_args\.)?(policies|critics|agent_critics)\.([^.=+]+)\.[^=]+(=.*)?$")


def declare_policies(arguments: Sequence[str]) -> list[str]:
    """The arguments, with each policy declared before the first option that sets one of its fields.

    The parser sets fields of a mapping's values only once the mapping exists; an empty value for a name creates it and
    leaves the fields as they are when a configuration file has them.

    >>> declare_policies(["--model", "GRPO", "--model.policies.solver.learning_rate", "1e-5"])[2:]
    ['--model.policies.solver', '{}', '--model.policies.solver.learning_rate', '1e-5']
    >>> declare_policies(["--model.agent_critics.row.learning_rate=1e-5"])
    ['--model.agent_critics.row', '{}', '--model.agent_critics.row.learning_rate=1e-5']
    """
    declared: set[tuple[str | None, ...]] = set()
    completed: list[str] = []
    for argument in arguments:
        match = _NESTED.match(argument)
        if match and match.groups()[:2] not in declared:
            declared.add(match.groups()[:2])
            completed += [f"--model.{match.group(1)}.{match.group(2)}", "{}"]
        completed.append(argument)
    return completed
