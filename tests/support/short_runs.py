"""Runs of the command line that tests start, watch and end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class ShortRuns:
    """Runs of ``mrlm fit`` with a configuration and what a short run changes of it, in folders below one."""

    def __init__(self, below: Path, config: str, options: Mapping[str, str]) -> None:
        self.below, self.config, self.options = below, config, options
        self._started: list[subprocess.Popen[str]] = []

    def start(self, folder: str, *arguments: str, **changed: str) -> subprocess.Popen[str]:
        """A run in this folder, whose output is piped; ``changed`` are options of ``data``."""
        options = {
            "--trainer.accelerator": "cpu",
            "--trainer.callbacks": "null",
            "--trainer.enable_progress_bar": "false",
            "--trainer.default_root_dir": str(self.below / folder),
            **self.options,
            **{f"--data.{name}": value for name, value in changed.items()},
        }
        flat = [word for option in options.items() for word in option]
        command = [sys.executable, "-m", "mrlm_pl.cli.main", "fit", "--config", self.config, *flat, *arguments]
        # As many threads as a worker with one CPU: sums in another order end in other bits.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        # What runs in the background of a shell ignores SIGINT, and so would what it starts.
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            started = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)
        finally:
            signal.signal(signal.SIGINT, before)
        self._started.append(started)
        return started

    def end(self) -> None:
        """Kill all that still runs."""
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
