"""``mrlm info``: versions, devices, the sandbox, and the classes and environments that a configuration may name."""

from __future__ import annotations

import inspect
import json
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import distributions
from typing import Any

from mrlm_pl.cli.parsing.parser import PlainParser, plain_words
from mrlm_pl.errors import SandboxError, counted
from mrlm_pl.runs.plugins import (
    class_path,
    environments_by_name,
    import_exports,
    import_packages,
    is_offered,
    subclasses,
)

PACKAGES = ("mrlm", "torch", "lightning", "transformers", "torchmetrics", "peft", "jsonargparse", "grpcio", "ray")


def run(arguments: Sequence[str]) -> int:
    """Print the facts and return exit status 0.

    Raises:
        ConfigurationError: a plugin cannot be imported.
    """
    text = "List versions, devices, the sandbox, and the classes and environments of configurations."
    parser = PlainParser("info", text)
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    facts = collect()
    print(json.dumps(facts, indent=2) if options.json else _facts_text(facts))
    return 0


def collect() -> dict[str, Any]:
    """Return all facts as JSON-like data."""
    from lightning.pytorch import Callback, LightningDataModule

    from mrlm_pl.engines import Engine
    from mrlm_pl.learner.algorithm import Algorithm
    from mrlm_pl.serving import RemoteEnvironment

    import_packages()
    import_exports()
    named: dict[str, type] = dict(sorted(environments_by_name().items())) | {"RemoteEnvironment": RemoteEnvironment}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: next((found.version for found in distributions(name=name)), None) for name in PACKAGES},
        "devices": devices(),
        "sandbox": sandbox(),
        "algorithms": _describe(subclasses(Algorithm)),
        "data": _describe(subclasses(LightningDataModule)),
        "engines": _describe(subclasses(Engine)),
        "environments": [{"name": name, **_entry(cls)} for name, cls in named.items()],
        "callbacks": _describe(cls for cls in subclasses(Callback) if not cls.__module__.startswith("lightning.")),
    }


def devices() -> list[str]:
    """Each device that torch can use, with its name and memory in GiB."""
    import torch

    threads = torch.get_num_threads()
    descriptions = [f"cpu ({counted(threads, 'thread')})"]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        descriptions.append(f"cuda:{index} {properties.name} ({properties.total_memory / 2**30:.0f} GiB)")
    if torch.backends.mps.is_available():
        descriptions.append("mps")
    return descriptions


def sandbox() -> dict[str, Any]:
    """The ``level`` at which untrusted code runs here, None without one, and why each stronger one is ``missing``."""
    from mrlm_pl.sandbox import strongest

    try:
        level, reasons = strongest()
    except SandboxError as refused:
        return {"level": None, "missing": {"limits": str(refused)}}
    return {"level": level, "missing": reasons}


def _describe(classes: Iterable[type]) -> list[dict[str, Any]]:
    """Return entries of the classes that a configuration may name, by name."""
    offered = sorted(filter(is_offered, classes), key=lambda cls: cls.__name__)
    return [{"name": cls.__name__, **_entry(cls)} for cls in offered]


def _entry(cls: type) -> dict[str, Any]:
    summary = plain_words((inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " "))
    return {"class": class_path(cls), "summary": summary, "package": cls.__module__.split(".")[0]}


def _facts_text(facts: dict[str, Any]) -> str:
    lines = [f"python        {facts['python']} on {facts['platform']}"]
    lines += [f"{name:<13} {number or 'not installed'}" for name, number in facts["packages"].items()]
    lines += [f"device        {name}" for name in facts["devices"]]
    lines.append(f"sandbox       {facts['sandbox']['level'] or 'none: untrusted code cannot be run'}")
    lines += [f"              {name} is missing: {reason}" for name, reason in facts["sandbox"]["missing"].items()]
    for kind in ("algorithms", "data", "engines", "environments", "callbacks"):
        lines.append(f"\n{kind}:" if facts[kind] else f"\n{kind}: none")
        width = max((len(item["name"]) for item in facts[kind]), default=0)
        lines += [f"  {item['name']:<{width}}  {item['summary']} [{item['package']}]" for item in facts[kind]]
    return "\n".join(lines)
