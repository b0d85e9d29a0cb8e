"""``mrlm consolidate``: write a sharded checkpoint, a folder with a file for each rank, as one file."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mrlm_pl.cli.parsing.parser import PlainParser
from mrlm_pl.durable_files import check_new, replacing
from mrlm_pl.errors import ConfigurationError

METADATA = "meta.pt"


def run(arguments: Sequence[str]) -> int:
    """Write the file and return exit status 0.

    Raises:
        ConfigurationError: there is no such checkpoint, it would run code when it is read, or the file exists or cannot
            be written.
    """
    parser = PlainParser("consolidate", "Write a sharded checkpoint as one file.")
    parser.add_argument("checkpoint", type=Path, help="folder of a run with `save_distributed_checkpoint: true`")
    parser.add_argument("output", type=Path, help="file that a run with any strategy can resume from")
    options = parser.parse_args(arguments)
    for name in (METADATA, ".metadata"):
        if not (options.checkpoint / name).is_file():
            remedy = "name a complete one, a folder in RUN/checkpoints"
            raise ConfigurationError(
                f"{str(options.checkpoint)!r} is not a sharded checkpoint: it has no file {name!r}; {remedy}"
            )
    check_new("output", options.output)
    consolidate(options.checkpoint, options.output)
    print(f"whole checkpoint in {options.output}")
    return 0


def consolidate(folder: Path, output: Path) -> None:
    """Write the sharded checkpoint in ``folder`` as one file, in the form of a run in one process.

    Raises:
        ConfigurationError: the checkpoint would run code when it is read.
    """
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    from mrlm_pl.trainer.sharded_checkpoint import check_sharded_checkpoint

    check_sharded_checkpoint(folder)
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as scratch:
        parts = Path(scratch) / "parts.pt"
        dcp_to_torch_save(folder, parts)
        state = torch.load(parts, weights_only=True)
        whole: dict[str, Any] = torch.load(folder / METADATA, weights_only=True)
        whole["state_dict"] = state.pop("state_dict")
        whole["optimizer_states"] = [number_parameters(state[f"optimizer_{index}"]) for index in range(len(state))]
    with replacing(output, durable=True) as draft:
        torch.save(whole, draft)


def number_parameters(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with numbers instead of its parameters' names, as an unsharded optimizer has it.

    A sharded checkpoint before the first update has no state.

    >>> groups = [{"lr": 0.1, "params": ["b"]}, {"lr": 0.2, "params": ["a"]}]
    >>> number_parameters({"state": {"a": {"step": 1}, "b": {"step": 2}}, "param_groups": groups})["state"]
    {0: {'step': 2}, 1: {'step': 1}}
    >>> number_parameters({"param_groups": groups})["state"]
    {}
    """
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    numbers = {name: index for index, name in enumerate(names)}
    by_name = optimizer.get("state", {})
    state = {numbers[name]: by_name[name] for name in numbers if name in by_name}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in optimizer["param_groups"]]
    return {"state": state, "param_groups": groups}
