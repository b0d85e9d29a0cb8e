"""Count the files on the path of one GRPO step, from `fit` to the first optimizer step.

``sys.setprofile`` traces the run in all threads. Each function of the project counts once, at its first call. Dataclass
methods, lambdas, comprehensions and module bodies do not count. Printed are

- ``functions``: functions that ran, and ``files``: their files;
- ``changes``: first calls in another file than the previous one;
- ``returns``: changes to an earlier file;
- ``entries``: changes to each file, for the files with most of them.

Threads are ordered separately and their numbers added. The run is small: the built-in model, one agent, two groups of
two episodes, one iteration, one mini-batch.

    python benchmarks/speed/call_path.py                # this checkout
    python benchmarks/speed/call_path.py --root OTHER   # another checkout, in the same Python environment
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any


class Tracer:
    """Record the project's functions in the order of their first calls, by thread."""

    def __init__(self, root: Path) -> None:
        self.root = str(root / "mrlm_pl") + os.sep
        self.seen: set[Any] = set()
        self.calls: dict[str, list[str]] = {}
        self.on = True

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if not self.on or event != "call" or code in self.seen:
            return
        self.seen.add(code)
        if code.co_filename.startswith(self.root) and not code.co_name.startswith("<"):
            name = threading.current_thread().name
            self.calls.setdefault(name, []).append(code.co_filename.removeprefix(self.root))

    def counts(self) -> dict[str, Any]:
        """Return the printed figures."""
        entries: collections.Counter[str] = collections.Counter()
        changes = returns = 0
        for files in self.calls.values():
            opened: set[str] = set()
            for before, file in zip([None, *files], files, strict=False):
                if file != before:
                    entries[file] += 1
                    changes += before is not None
                    returns += file in opened
                opened.add(file)
        functions = sum(map(len, self.calls.values()))
        return {
            "functions": functions,
            "files": len(entries),
            "changes": changes,
            "returns": returns,
            "entries": dict(entries.most_common(12)),
        }


def traced(root: Path) -> dict[str, Any]:
    """Return the counts of a run with the code of a checkout."""
    sys.path[:0] = [str(root), str(root / "environments"), str(root / "callbacks")]
    import lightning

    from mrlm_pl.algorithms import GRPO
    from mrlm_pl.concurrency import calls
    from mrlm_pl.data import RolloutDataModule
    from mrlm_pl.engines import Sampling
    from mrlm_pl.environment import DatasetTasks, Outcome, SingleAgentEnvironment
    from mrlm_pl.policy.forward import products

    products.ONEDNN_IS_FASTER = False  # equal paths on all processors
    calls.WATCH_SECONDS = 3600.0  # and on a busy machine, where a step takes longer than the watch waits

    class Digits(SingleAgentEnvironment):
        name = "digits"

        def tasks(self, split: str) -> DatasetTasks:
            return DatasetTasks(self.name, split, [{"prompt": f"{n} + {n} = ?"} for n in range(4)])

        def begin(self, task: Any) -> str:
            return str(task.data["prompt"])

        def reply(self, message: Any) -> Outcome:
            return Outcome({"length": float(len(message.content))})

    class End(lightning.Callback):
        def on_before_optimizer_step(self, *arguments: Any) -> None:
            tracer.on = False

    algorithm = GRPO()
    data = RolloutDataModule(Digits(), groups=2, group_size=2, iterations=1, sampling=Sampling(max_tokens=4))
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        default_root_dir=tempfile.mkdtemp(),
        callbacks=[End()],
    )
    tracer = Tracer(root)
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        trainer.fit(algorithm, data)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return tracer.counts()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[2], help="checkout to trace")
    print(json.dumps(traced(parser.parse_args().root.resolve()), indent=2))
