"""What a misspelled name may have meant."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path

SYNONYMS = {
    "beta": "kl_coefficient",
    "discount": "gamma",
    "epsilon": "clip_low",
    "gae_lambda": "lam",
    "lr": "learning_rate",
    "share": "reward",
    "whiten": "whiten_advantages",
}
"""Names that other frameworks, or earlier versions, give to our settings."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that ``name`` may have meant, or None.

    The first that fits, in this order: it is ``name`` with two adjacent letters swapped; it begins with ``name``; it is
    our word for it; it looks like it; it ends with it. Upper and lower case are alike.

    >>> nearest("GPRO", ["GSPO", "GRPO"])
    'GRPO'
    >>> nearest("mathenvironmet", ["MathEnvironment", "math", "code"])
    'MathEnvironment'
    >>> nearest("clip", ["value_clip", "lam"])
    'value_clip'
    >>> nearest("discount", ["joint_mode", "gamma"])
    'gamma'
    """
    word = name.lower()
    folded = {item.lower(): item for item in known}
    swaps = {word[:at] + word[at + 1] + word[at] + word[at + 2 :] for at in range(len(word) - 1)}
    swapped = [item for item in folded if item in swaps]
    longer = sorted((item for item in folded if word and item.startswith(word)), key=len)
    meant = [item for item in folded if item == SYNONYMS.get(word)]
    ends = [item for item in folded if item.endswith(f"_{word}")]
    found = swapped or longer or meant or difflib.get_close_matches(word, folded, n=1) or ends
    return folded[found[0]] if found else None


def nearest_path(path: Path, *, folders: bool = False) -> Path | None:
    """Return the file, or the folder, beside a missing ``path`` whose name it may have meant, or None."""
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    near = nearest(path.name, [item.name for item in beside if item.is_dir() == folders])
    return path.parent / near if near else None


def missing_folder(name: str) -> str | None:
    """Say that ``name`` is a path to nothing, with the nearest folder; return None where it exists or may be a hub id.

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
    near = nearest_path(path, folders=True)
    if near:
        return f"there is no folder {name!r}; did you mean {str(near)!r}?"
    if not path.parent.is_dir():
        return f"there is no folder {name!r}, nor {str(path.parent)!r}; check the path"
    hub = f", or read the model of this name from the hub with `hf download {name}`" if not local else ""
    return f"there is no folder {name!r}; check the path{hub}"
