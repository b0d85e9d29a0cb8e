"""The model that a user names: a folder, a run, which stands for its only policy, or a model on the hub."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from mrlm_pl.errors import PolicyError, first_line, meant, nearest_path

ADAPTER_FOLDER = "adapter"
"""Name of an exported policy's adapter folder, below the folder with the merged weights."""

CRITIC_FILE = "critic.txt"
"""A file in the folder of an exported critic."""

HUB_SECONDS = 5.0
"""Time for the hub to say whether it has a model."""


def policy_folder(name: str, option: str) -> str:
    """Return the folder of the model that an option names; a hub id is returned as it is.

    A name of the form ``A/B`` means a folder where there is a folder ``A`` here.

    Args:
        name: folder, run or hub id.
        option: option or setting that named it, for messages.

    Raises:
        PolicyError: the run has several policies, or none, or there is no such folder.
    """
    folder = Path(name).expanduser()
    if missing := missing_folder(name):
        raise PolicyError(f"{option}: {missing}")
    if not folder.is_dir():
        return name
    if (folder / "config.json").is_file():
        return str(folder)
    exported = exported_policies(folder, critics=False)
    if len(exported) == 1:
        return str(exported[0])
    if exported:
        raise PolicyError(
            f"{option}: the run {name!r} has {len(exported)} policies; name one: {', '.join(map(str, exported))}"
        )
    if (folder / "config.yaml").is_file():
        raise PolicyError(
            f"{option}: the run {name!r} has no policies, they are written when it ends; "
            f"`mrlm train --output {shlex.quote(name)} --resume` continues it, or writes those of a finished run again"
        )
    fault = "neither a run nor the folder of a model: it has no config.json"
    inside = [str(file.parent) for file in sorted(folder.glob("*/config.json"))]  # as of an export
    remedy = f"name {' or '.join(inside) or 'another'}, or write a model there with `save_pretrained`"
    if (folder / "adapter_config.json").is_file():
        fault, remedy = "an adapter", "name the folder of the merged weights, such as RUN/policies/NAME"
    raise PolicyError(f"{option}: {name!r} is {fault}; {remedy}")


def exported_policies(run: Path, critics: bool = True) -> list[Path]:
    """Return the folders of the policies that a run has written, without drafts that a kill left.

    Args:
        run: run folder.
        critics: whether critics, which play no agent, are included.
    """
    folders = (path.parent for path in (run / "policies").glob("*/config.json"))
    complete = sorted(folder for folder in folders if folder.suffix not in (".part", ".old"))
    return [folder for folder in complete if critics or not (folder / CRITIC_FILE).exists()]


def missing_folder(name: str) -> str | None:
    """Return the message that a folder does not exist, with the nearest one; None if it exists or may be a hub id.

    ``owner/model`` may be a hub id, unless there is a folder ``owner`` here and no such model in the hub's cache.
    """
    path = Path(name).expanduser()
    local = name.startswith((".", "~", os.sep)) or name.count("/") > 1
    beside = name.count("/") == 1 and path.parent.is_dir()
    if not (local or beside) or path.exists():
        return None
    if not local:
        from huggingface_hub import try_to_load_from_cache

        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return None
    advice = _advice(path)
    if not local and not advice.endswith("?"):
        advice += f", or read it from the hub with `hf download {name}`"
    return f"there is no {'checkpoint' if path.suffix == '.ckpt' else 'folder'} {name!r}; {advice}"


def check_hub_model(name: str, option: str) -> None:
    """Reject a name that is neither a folder nor a model on the hub, without the hub client's many retries.

    Raises:
        PolicyError: the hub has no such model, or does not answer within :data:`HUB_SECONDS` seconds.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache

    if Path(name).expanduser().is_dir():
        return
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=HUB_SECONDS)
    except Exception as error:  # the hub client, its HTTP library and the system raise many classes
        fault = f"the hub does not give such a model ({first_line(error)}); {_advice(Path(name))}"
        raise PolicyError(f"{option}: there is no folder {name!r}, and {fault}") from error


def _advice(folder: Path) -> str:
    """Return a suggestion for a folder that does not exist."""
    if (Path("runs") / folder).is_dir():
        return f"did you mean {str(Path('runs') / folder)!r}?"
    run = folder.parent.parent
    if folder.parent.name == "policies" and not run.is_dir():
        command = f"`mrlm fit --config CONFIG --output {shlex.quote(str(run))}`"
        return f"it is of a run that is not here: train it with {command}, or as the head of your configuration says"
    if not folder.parent.is_dir():
        return f"there is no folder {str(folder.parent)!r} either; check the path"
    return meant(nearest_path(folder, folders=True) or (nearest_path(folder) if folder.suffix == ".ckpt" else None))
