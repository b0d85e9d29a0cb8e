"""Short runs of the command line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


class ShortRuns:
    """Short runs of ``mrlm fit`` with a configuration and overrides, in folders below one."""

    def __init__(self, below: Path, config: str, options: Mapping[str, str]) -> None:
        self.below, self.config, self.options = below, config, options
        self._started: list[subprocess.Popen[str]] = []

    def start(self, folder: str, *arguments: str, **changed: str) -> subprocess.Popen[str]:
        """Start a run in this folder with piped output; ``changed`` are options of ``data``."""
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
        # The number of threads of a worker with one CPU: another order of sums gives other bits.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        # Background processes of a shell ignore SIGINT, and so would their children.
        before = signal.signal(signal.SIGINT, signal.SIG_DFL)
        try:
            started = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes)
        finally:
            signal.signal(signal.SIGINT, before)
        self._started.append(started)
        return started

    def end(self) -> None:
        """Kill all running processes."""
        for process in self._started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate(timeout=60)
