"""The configuration of a run, in its folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.cli import SaveConfigCallback

from mrlm_pl.durable_files import replacing


class SaveConfig(SaveConfigCallback):
    """Saves the configuration as ``config.yaml`` in the run folder, and that of a continuation as ``config-2.yaml``."""

    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        folder = Path(trainer.default_root_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path, number = folder / "config.yaml", 1
        while path.exists():
            number += 1
            path = folder / f"config-{number}.yaml"
        with replacing(path) as draft:
            self.parser.save(self.config, str(draft), skip_unset=False, multifile=False, overwrite=True)
        hyperparameters = without_paths(self.config.as_dict())
        for logger in trainer.loggers:
            logger.log_hyperparams(hyperparameters)


def without_paths(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration without the files that it was read from, as loggers take it.

    >>> without_paths({"config": ["a.yaml"], "seed_everything": 0})
    {'seed_everything': 0}
    """
    return {name: value for name, value in config.items() if name != "config"}
