"""What a misspelled name may have meant."""

from __future__ import annotations

import difflib
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
