"""Lightning's Trainer on a CPU without output, for benchmarks."""

from __future__ import annotations

from typing import Any

import lightning


def quiet_trainer(**options: Any) -> lightning.Trainer:
    """Return a trainer that logs, saves, validates and prints only if ``options`` say so."""
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
