"""The trainer of the benchmarks: a CPU, nothing written but what is asked for, nothing printed."""

from __future__ import annotations

from typing import Any

import lightning


def quiet_trainer(**options: Any) -> lightning.Trainer:
    """A trainer that logs, saves, validates and shows nothing unless ``options`` say so."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
    }
    return lightning.Trainer(**{**quiet, **options})
