"""The configuration of a run in its folder, and the settings that a resumed run may change."""

from __future__ import annotations

import itertools
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

from mrlm_pl.cli.parsing.configuration import leaves
from mrlm_pl.durable_files import replacing
from mrlm_pl.errors import ConfigurationError, tell
from mrlm_pl.grouping import mapped
from mrlm_pl.runs.folder import RunFolder, is_first_process, run_of
from mrlm_pl.runs.publication import without_secrets
from mrlm_pl.runs.records.run import is_installed, latest_configuration

_START_SETTINGS = re.compile(r"config|ckpt_path|weights_only|output|resume|trainer\.default_root_dir")
_WEIGHTS = "the weights come from the checkpoint"
_REFUSED = {
    re.compile(r"data\.class_path"): "the position in the data is another class's",
    re.compile(r"model\.((policies|critics|agent_critics)\.[^.]+|critic)\.(model|revision|random_init_seed)"): _WEIGHTS,
}


class SaveConfig(SaveConfigCallback):
    """Saves the configuration as ``config.yaml`` in the run folder, and that of a continuation as ``config-2.yaml``."""

    _waits = False

    def on_run_folder(self, trainer: Trainer, stage: str, folder: RunFolder) -> None:
        """Record the folder, the checkpoint and a measured precision; print the settings that a resumed run changes.

        Raises:
            ConfigurationError: the checkpoint decides a setting that differs.
        """
        self.config.output, self.config.resume = None, False
        self.config.trainer.default_root_dir, self.config.ckpt_path = folder.path, folder.checkpoint
        if self.config.trainer.precision == "auto":
            self.config.trainer.precision = trainer.precision
        owner = run_of(folder.checkpoint)
        before = latest_configuration(owner) if stage == "fit" and owner is not None and owner.is_dir() else None
        if before is None:
            return
        now = with_files(yaml.safe_load(self.parser.dump(self.config, skip_unset=False)))
        changed = changed_settings(yaml.safe_load(before.read_text(encoding="utf-8")) or {}, now)
        check_resumable(changed, adaptive_kl=bool((now["model"].get("init_args", {}).get("kl") or {}).get("target")))
        changes = [*(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items()), *changed_files(before)]
        if changes and is_first_process():
            tell(f"changed since {before}: {', '.join(changes)}")

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write the configuration; that of a continuation waits for its first batch, as it may be rejected before."""
        self._waits = stage == "fit" and (Path(trainer.default_root_dir) / "config.yaml").exists()
        if not self._waits:
            self._write(trainer)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if self._waits:
            self._waits = False
            self._write(trainer)

    def _write(self, trainer: Trainer) -> None:
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        names = itertools.chain(["config.yaml"], (f"config-{number}.yaml" for number in itertools.count(2)))
        path = next(folder / name for name in names if not (folder / name).exists())
        # parsed values are valid: to validate them again takes as long as to write them
        written = yaml.safe_load(self.parser.dump(self.config, skip_unset=False, skip_validation=True))
        with replacing(path) as draft:
            draft.write_text(yaml.safe_dump(with_files(written), sort_keys=False, allow_unicode=True), encoding="utf-8")
        hyperparameters = {name: value for name, value in self.config.as_dict().items() if name != "config"}
        for logger in trainer.loggers:
            logger.log_hyperparams(without_secrets(hyperparameters))


def with_files(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration whose environments find their files from every working folder.

    Paths of data files become absolute; functions and classes of a module beside them, ``my_rewards.exact``, become
    ``/FOLDER/my_rewards.py:exact``.
    """
    data = config.get("data") or {}
    arguments = data.get("init_args") or {}
    if not arguments.get("environment"):
        return dict(config)
    with_paths = {**arguments, "environment": mapped(arguments["environment"], _with_file)}
    return {**config, "data": {**data, "init_args": with_paths}}


def _with_file(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    module, _, name = value.rpartition(".")
    source = getattr(sys.modules.get(module), "__file__", None) or ""
    if Path(source).stem == module != "" and hasattr(sys.modules[module], name) and not is_installed(module):
        return f"{os.path.abspath(source)}:{name}"
    return os.path.abspath(value) if os.path.splitext(value)[1] and os.path.isfile(value) else value


def same_settings(one: Any, other: Any) -> bool:
    """Return whether two settings are equal; two names of one file, or of a function or class in it, are."""

    def real_path(value: Any) -> Any:
        named = _with_file(value)
        return os.path.realpath(named) if isinstance(named, str) and os.path.exists(named) else named

    return bool(mapped(one, real_path) == mapped(other, real_path))


def changed_settings(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the old and the new value of each setting that differs, by its name as in ``--NAME``.

    Two names of one file are equal.

    >>> changed_settings(
    ...     {"model": {"class_path": "GRPO", "init_args": {"gamma": 0.2}}, "ckpt_path": None},
    ...     {"model": {"class_path": "GRPO", "init_args": {"gamma": 0.3}}, "ckpt_path": "last.ckpt"},
    ... )
    {'model.gamma': (0.2, 0.3)}
    """
    old, new = ({name: value for name, value in leaves(config) if value not in (None, {})} for config in (before, now))
    return {
        name: (old.get(name), new.get(name))
        for name in sorted({*old, *new})
        if not same_settings(old.get(name), new.get(name)) and not _START_SETTINGS.fullmatch(name)
    }


def changed_files(before: Path) -> list[str]:
    """Return the Python files and the data files of environments in a configuration that are newer than it."""
    config = yaml.safe_load(before.read_text(encoding="utf-8")) or {}
    files: dict[str, None] = {}
    mapped(config, lambda value: files.update({_file_of(value): None}))
    environment = ((config.get("data") or {}).get("init_args") or {}).get("environment")
    mapped(environment, lambda value: files.update({str(value): None} if os.path.isabs(str(value)) else {}))
    written = before.stat().st_mtime
    return [f"{file} (newer)" for file in files if os.path.isfile(file) and os.path.getmtime(file) > written]


def _file_of(value: Any) -> str:
    """Return the Python file in ``FILE.py:NAME``; empty for another value."""
    file, _, name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    return file if file.endswith(".py") and name.isidentifier() else ""


def check_resumable(changed: Mapping[str, tuple[Any, Any]], *, adaptive_kl: bool) -> None:
    """Raise for settings that a checkpoint decides.

    Args:
        changed: old and new values by name.
        adaptive_kl: whether the KL coefficient follows a target, in which case only its first value is configured.

    Raises:
        ConfigurationError: such a setting differs; the message has its old value.
    """
    for name, (old, new) in changed.items():
        reason = next((reason for pattern, reason in _REFUSED.items() if pattern.fullmatch(name)), None)
        if adaptive_kl and name == "model.kl.coefficient":
            reason = "`kl.target` has steered it since"
        if reason is not None:
            fault = f"{name} is {new!r}, but the run that is resumed has {old!r}, and {reason}"
            raise ConfigurationError(f"{fault}; resume with {old!r}, or start another run without the checkpoint")
