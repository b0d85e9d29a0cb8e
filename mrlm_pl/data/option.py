"""The option that names an algorithm's data module, for messages."""

from __future__ import annotations

import inspect

from mrlm_pl import data
from mrlm_pl.learner.algorithm import Algorithm


def data_option(algorithm: Algorithm) -> str:
    """Return the option that names an algorithm's data module, with the arguments that it requires.

    The settings of another data module would be refused, hence the empty ``init_args``.
    """
    module = getattr(data, algorithm.data_module, None)
    found = inspect.signature(module).parameters if module else {}
    needed = [name for name, item in found.items() if item.default is item.empty]
    given = "".join(f" --data.{name} {name.upper()}" for name in needed)
    return f"`--data '{{class_path: {algorithm.data_module}, init_args: {{}}}}'{given}`"
