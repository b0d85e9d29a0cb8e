"""Environments that host processes import by name."""

from __future__ import annotations

import os
import time

from mrlm_pl.environment import DatasetTasks, Outcome, SingleAgentEnvironment
from mrlm_pl.episode import Message, Task


class Hosted(SingleAgentEnvironment):
    """Report its process; on the first try task 1 dies, task 2 hangs and task 3 raises."""

    name = "hosted"

    def __init__(self, folder: str, misbehave: bool = False) -> None:
        self.folder, self.misbehave = folder, misbehave

    def tasks(self, split: str) -> DatasetTasks:
        return DatasetTasks(self.name, split, [{"n": n} for n in range(6)])

    def begin(self, task: Task) -> str:
        self.number = task.data["n"]
        return f"{self.number} {os.getpid()}"

    def reply(self, message: Message) -> Outcome:
        marker = os.path.join(self.folder, str(self.number))
        if self.misbehave and self.number in (1, 2, 3) and not os.path.exists(marker):
            open(marker, "w").close()
            if self.number == 1:
                os._exit(3)
            if self.number == 2:
                time.sleep(600)
            raise OSError("once")
        return Outcome({"n": float(self.number)})
