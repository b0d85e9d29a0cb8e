"""Compare asynchronous with synchronous rollouts in slow environments, in one run.

    python benchmarks/speed/async_rollout.py [--iterations 24] [--rounds 2] [--max-lag 1 2 4] [--json out.json]
    python benchmarks/speed/async_rollout.py --soak 1000
    python benchmarks/speed/async_rollout.py --workers 1 2 4 [--token-seconds 0.02] [--iterations 8] [--max-lag 2]

The environment is the quick-start's, but each answer takes a log-normal time (mean 1 s, sigma of its logarithm 1)
without blocking, like a remote judge or tool. GRPO with the built-in model, 8 groups of 8 episodes per rollout, 64
concurrent episodes in both modes. Synchronous and asynchronous runs take turns. Printed are samples per second of the
whole training and their ratios, the reward of the last weights on 512 held-out tasks and its differences at equal
samples (95 % interval over rounds, each with its own seed), and for asynchronous runs the fractions of the lags, the
age of groups in the buffer, and the idle fractions of learner and engine. ``--soak N`` makes N updates without latency
and prints the largest lag in the episodes and the memory of the process. ``--workers N`` runs with pools of N workers
under Ray, each of which takes a given time per token without using the CPU, like a device that samples sequentially.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import logging
import math
import random
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, seed_everything
from mrlm_environments import MathEnvironment

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.data.rollout.collectors.asynchronous import AsyncOptions
from mrlm_pl.engines import Engine, InProcessEngine, RayPool, Sample, SampleRequest, Sampling
from mrlm_pl.engines.ray.settings import PoolResources
from mrlm_pl.environment import Observations, Step
from mrlm_pl.episode import Message, Task
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.losses import Correction
from mrlm_pl.policy import Policy

sys.path.insert(0, str(Path(__file__).parents[1]))
from few_values import mean_and_half
from quiet_trainer import quiet_trainer

GROUPS, MEMBERS = 8, 8
EPISODES = 512
"""Of the evaluation after a run."""
LATENCIES = random.Random(0)


class SlowMath(MathEnvironment):
    """Problems whose answers are judged after a log-normal delay."""

    def __init__(self, mean: float, sigma: float, **options: Any) -> None:
        super().__init__(**options)
        self.mean, self.sigma = mean, sigma

    async def reset(self, task: Task) -> Observations:  # type: ignore[override]
        return super().reset(task)

    async def step(self, actions: Mapping[str, Message]) -> Step:  # type: ignore[override]
        if self.mean and not Watch.trained:
            await asyncio.sleep(self.mean * math.exp(LATENCIES.gauss(0.0, self.sigma) - self.sigma**2 / 2))
        return super().step(actions)


class Device(InProcessEngine):
    """Add a given time to every token."""

    def __init__(self, token_seconds: float) -> None:
        super().__init__()
        self.token_seconds = token_seconds

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        samples = await super().sample(requests)
        await asyncio.sleep(self.token_seconds * sum(len(sample.token_ids) for sample in samples))
        return samples


class Watch(Callback):
    """Record the metrics, end time and process memory of every iteration; evaluate the last weights."""

    trained = False
    """True after the run, when answers take no time."""

    def __init__(self) -> None:
        self.reward = math.nan
        self.seen: list[dict[str, float]] = []
        self.began = 0.0

    def on_train_start(self, *arguments: Any) -> None:
        self.began = time.perf_counter()
        Watch.trained = False

    def on_train_end(self, trainer: Any, *arguments: Any) -> None:
        Watch.trained = True
        report = trainer.datamodule.evaluate(MathEnvironment.name, split="test", episodes=EPISODES)
        self.reward = report.mean_reward

    def on_train_batch_end(self, trainer: Any, *arguments: Any) -> None:
        found = {name: float(value) for name, value in trainer.callback_metrics.items()}
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self.seen.append(found | {"seconds": time.perf_counter() - self.began, "mb": pages * 4096 / 1e6})


def train(
    folder: Path, max_lag: int, iterations: int, seed: int, latency: tuple[float, float], engine: Engine | None = None
) -> Watch:
    """Measurements of one training run; a lag of 0 is the synchronous one."""
    seed_everything(seed, verbose=False)
    LATENCIES.seed(seed)
    watch = Watch()
    algorithm = GRPO(
        {"main": Policy("builtin:tiny", learning_rate=5e-4)},
        kl={"coefficient": 0.01},
        correction=Correction("truncated") if max_lag else Correction(),
    )
    data = RolloutDataModule(
        SlowMath(*latency, difficulty=(1, 1)),
        groups=GROUPS,
        group_size=MEMBERS,
        iterations=iterations,
        sampling=Sampling(max_tokens=32),
        mode="async" if max_lag else "sync",
        max_lag=max_lag,
        async_options=AsyncOptions(episodes=GROUPS * MEMBERS),
        engine=engine,
        seed=seed,
    )
    trainer = quiet_trainer(max_epochs=1, gradient_clip_val=1.0, default_root_dir=folder, callbacks=[watch])
    trainer.fit(algorithm, data)
    return watch


def mean(seen: list[dict[str, float]], name: str) -> float:
    """Return the mean of a metric over all but the first iterations, in which the buffer fills."""
    return statistics.mean(row[name] for row in seen[len(seen) // 4 :])


def sum_rate(seen: list[dict[str, float]], idle: str) -> float:
    """Return samples per busy second."""
    ends = [0.0, *(row["seconds"] for row in seen)]
    busy = sum((1 - row[idle]) * (end - begin) for row, begin, end in zip(seen, ends, ends[1:], strict=False))
    return len(seen) * GROUPS * MEMBERS / busy


def describe(watch: Watch, max_lag: int) -> dict[str, Any]:
    """Return the figures of one run."""
    seen = watch.seen
    found: dict[str, Any] = {
        "max_lag": max_lag,
        "samples_per_second": round(len(seen) * GROUPS * MEMBERS / seen[-1]["seconds"], 2),
        "reward_after": round(watch.reward, 3),
    }
    if max_lag:
        found |= {
            "lag_shares": [round(mean(seen, f"async/lag_{lag}"), 3) for lag in range(max_lag + 1)],
            "queue_age_s": round(mean(seen, "async/queue_age"), 2),
            "learner_idle": round(mean(seen, "async/learner_idle"), 3),
            "engine_idle": round(mean(seen, "async/engine_idle"), 3),
            "mixed_turns": round(mean(seen, "async/mixed_turns"), 4),
            "generate_s": round(1 / sum_rate(seen, "async/engine_idle"), 4),
            "update_s": round(1 / sum_rate(seen, "async/learner_idle") * GROUPS * MEMBERS, 3),
        }
    return found


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Run both modes in turns and return their figures."""
    runs = []
    for number in range(options.rounds):
        for max_lag in (0, *options.max_lag):
            folder = Path(tempfile.mkdtemp())
            watch = train(folder, max_lag, options.iterations, number, (options.mean, options.sigma))
            runs.append({"round": number, **describe(watch, max_lag)})
            print(json.dumps(runs[-1]), flush=True)
    found: dict[str, Any] = {"runs": runs, "ratios": {}, "reward_differences": {}}
    synchronous = [run for run in runs if not run["max_lag"]]
    for max_lag in options.max_lag:
        pairs = list(zip([run for run in runs if run["max_lag"] == max_lag], synchronous, strict=True))
        ratios = [one["samples_per_second"] / other["samples_per_second"] for one, other in pairs]
        found["ratios"][max_lag] = round(statistics.median(ratios), 2)
        differences = [one["reward_after"] - other["reward_after"] for one, other in pairs]
        found["reward_differences"][max_lag] = "{:+.3f} +- {:.3f}".format(*mean_and_half(differences))
    print("async / sync samples per second, median by max_lag:", found["ratios"])
    print("async - sync reward at equal samples, by max_lag:", found["reward_differences"])
    return found


def scale(options: argparse.Namespace) -> dict[str, Any]:
    """Run with pools of several sizes and return the figures."""
    runs = []
    for workers, max_lag in itertools.product(options.workers, (0, *options.max_lag)):
        device = functools.partial(Device, options.token_seconds)
        pool = RayPool(workers, engine=device, resources=PoolResources(cpus=0.5))
        latency = (options.mean, options.sigma)
        try:
            seen = train(Path(tempfile.mkdtemp()), max_lag, options.iterations, 0, latency, pool).seen
        finally:
            pool.close()
        tokens = mean(seen, "rollout/response_tokens")
        # Ray starts in the first iteration.
        seconds = seen[-1]["seconds"] - seen[0]["seconds"]
        rate = round((len(seen) - 1) * GROUPS * MEMBERS / seconds, 2)
        runs.append({"workers": workers, "max_lag": max_lag, "samples_per_second": rate})
        runs[-1]["turn_s"] = round(options.token_seconds * tokens, 3)
        print(json.dumps(runs[-1]), flush=True)
    return {"runs": runs}


def soak(updates: int, max_lag: int) -> dict[str, Any]:
    """Make many updates without latency; return the largest lag and the memory."""
    folder = Path(tempfile.mkdtemp())
    seen = train(folder, max_lag, updates, 0, (0.0, 1.0)).seen
    largest = 0
    episodes = 0
    for episode in read_episodes(folder / "episodes"):
        episodes += 1
        for row in episode.rows():
            for turn in row.turns:
                # One update in an iteration, so the optimizer step is the version.
                largest = max(largest, *(episode.iteration - span.version for span in turn.token_spans()))
    quarter = len(seen) // 4
    found = {
        "updates": len(seen),
        "episodes": episodes,
        "bound": max_lag,
        "largest_lag": largest,
        "mb_by_quarter": [round(seen[min(n * quarter, len(seen) - 1)]["mb"]) for n in range(1, 5)],
        "lag_shares": [round(mean(seen, f"async/lag_{lag}"), 3) for lag in range(max_lag + 1)],
    }
    print(json.dumps(found))
    return found


def main() -> None:
    """Compare, or soak."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--iterations", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--max-lag", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--mean", type=float, default=1.0, help="mean seconds of an answer")
    parser.add_argument("--sigma", type=float, default=1.0, help="standard deviation of the logarithm of these seconds")
    parser.add_argument("--soak", type=int, help="number of updates without latency")
    parser.add_argument("--workers", type=int, nargs="+", help="sizes of pools under Ray")
    parser.add_argument("--token-seconds", type=float, default=0.02, help="seconds per token of a pool's worker")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    if options.soak:
        result = soak(options.soak, options.max_lag[0])
    else:
        result = scale(options) if options.workers else compare(options)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
