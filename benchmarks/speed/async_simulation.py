"""Simulate samples per second of synchronous and asynchronous training from measured costs.

    python benchmarks/speed/async_simulation.py [--generate .02] [--update .4] [--workers 1 2 4 8 16 32]
        [--max-lag 0 1 2 4 8]

The rules are those of ``data.mode``: 8 groups of 8 episodes per iteration; a group starts when the weights of
``max_lag`` iterations before are published; iterations are trained on in order. An episode is one turn, which a worker
generates, and the environment's log-normal time (mean 1 s, sigma 1). Each worker generates sequentially, in
``--generate`` seconds per turn, its cost in a batch; an update takes ``--update`` seconds.
``benchmarks/speed/async_rollout.py`` prints both (``generate_s``, ``update_s``) and a measured rate to compare with.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
from dataclasses import dataclass

GROUPS, MEMBERS = 8, 8


@dataclass(frozen=True)
class Costs:
    """Seconds of a turn in a worker, of an update, and the parameters of the environment's time."""

    generate: float
    update: float
    mean: float
    sigma: float


def samples_per_second(
    costs: Costs, workers: int, max_lag: int, iterations: int, episodes: int, seed: int = 0
) -> float:
    """Return the rate of a simulated run with a bounded number of concurrent episodes."""
    random_numbers = random.Random(seed)
    events: list[tuple[float, int, int]] = []  # time, event (0: turn generated, 1: episode over), iteration
    turns: list[int] = []
    waiting: list[int] = []
    free = workers
    left = [GROUPS * MEMBERS] * iterations
    under_way = admitted = 0
    now = 0.0

    def begin() -> None:
        """Start the permitted episodes, and give turns to idle workers."""
        nonlocal free, under_way
        while waiting and under_way < episodes:
            turns.append(waiting.pop(0))
            under_way += 1
        while turns and free:
            heapq.heappush(events, (now + costs.generate, 0, turns.pop(0)))
            free -= 1

    for iteration in range(iterations):
        while admitted <= min(iteration + max_lag, iterations - 1):
            waiting += [admitted] * (GROUPS * MEMBERS)
            admitted += 1
        begin()
        until = math.inf
        while left[iteration] or now < until:
            if not left[iteration] and until == math.inf:
                until = now + costs.update
            if events and events[0][0] <= until:
                now, what, of = heapq.heappop(events)
                if what == 0:
                    free += 1
                    time = costs.mean * math.exp(random_numbers.gauss(0.0, costs.sigma) - costs.sigma**2 / 2)
                    heapq.heappush(events, (now + time, 1, of))
                else:
                    left[of] -= 1
                    under_way -= 1
                begin()
            else:
                now = until
                break
    return iterations * GROUPS * MEMBERS / now


def main() -> None:
    """Print a row for each number of workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generate", type=float, default=0.02)
    parser.add_argument("--update", type=float, default=0.4)
    parser.add_argument("--mean", type=float, default=1.0)
    parser.add_argument("--sigma", type=float, default=1.0)
    parser.add_argument("--episodes", type=int, default=64, help="maximum concurrent episodes per worker")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--max-lag", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--iterations", type=int, default=200)
    options = parser.parse_args()
    costs = Costs(options.generate, options.update, options.mean, options.sigma)
    for workers in options.workers:
        rates = {
            max_lag: round(
                samples_per_second(costs, workers, max_lag, options.iterations, options.episodes * workers), 1
            )
            for max_lag in options.max_lag
        }
        print(json.dumps({"workers": workers, "samples_per_second_by_max_lag": rates}), flush=True)


if __name__ == "__main__":
    main()
