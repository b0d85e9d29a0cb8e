"""Which settings a resumed run has that differ from those of the run before, and which of them cannot be honored."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mrlm_pl.errors import ConfigurationError

_OF_THE_START = re.compile(r"config|ckpt_path|weights_only|trainer\.default_root_dir")
_WEIGHTS = "the weights come from the checkpoint"
_REFUSED = {
    re.compile(r"data\.class_path"): "the position in the data is another class's",
    re.compile(r"model\.((policies|critics|agent_critics)\.[^.]+|critic)\.(model|random_init_seed)"): _WEIGHTS,
}


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the old and the new value of each setting that differs, by its name as in ``--NAME``.

    >>> changed_settings(
    ...     {"model": {"class_path": "GRPO", "init_args": {"clip": 0.2}}, "ckpt_path": None},
    ...     {"model": {"class_path": "GRPO", "init_args": {"clip": 0.3}}, "ckpt_path": "last.ckpt"},
    ... )
    {'model.clip': (0.2, 0.3)}
    """
    old, new = _flat(before), _flat(now)
    return {
        name: (old.get(name), new.get(name))
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name) and not _OF_THE_START.fullmatch(name)
    }


def check_resumable(changed: Mapping[str, tuple[Any, Any]], *, adaptive_kl: bool) -> None:
    """Raise for settings that a checkpoint decides.

    Args:
        changed: old and new values by name.
        adaptive_kl: whether the KL coefficient follows a target, so that only its first value is configured.

    Raises:
        ConfigurationError: such a setting differs; the message has its old value.
    """
    for name, (old, new) in changed.items():
        reason = next((reason for pattern, reason in _REFUSED.items() if pattern.fullmatch(name)), None)
        if adaptive_kl and name == "model.kl_coefficient":
            reason = "`kl_target` has steered it since"
        if reason is not None and not _same_path(old, new):
            raise ConfigurationError(
                f"{name} is {new!r}, but the run that is resumed has {old!r}, and {reason}; resume with {old!r}, or "
                "start another run without the checkpoint"
            )


def read_settings(path: Path) -> dict[str, Any]:
    """Return the configuration that a run has saved."""
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {} if value in (None, {}) else {name: value}
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _flat(item, name if key == "init_args" else f"{name}.{key}".lstrip("."))
    return found


def _same_path(old: Any, new: Any) -> bool:
    """Whether two spellings name one file or folder."""
    if not (isinstance(old, str) and isinstance(new, str)):
        return False
    return Path(old).exists() and Path(new).exists() and Path(old).samefile(new)
