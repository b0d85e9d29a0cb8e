"""Measure what int8 weights of a frozen policy cost and save: memory, time, log-probabilities and accuracy.

    python benchmarks/speed/int8_weights.py [--episodes 500] [--rounds 5] [--json benchmarks/results/int8_weights.json]

Quality is that of ``builtin:tiny`` on the problems of the quick start: accuracy in float32 and in int8 on the same
tasks and seeds, with the paired 95 % interval of the difference; and for the tokens of the replies in float32 the mean
absolute difference of log-probabilities and the mean divergence KL(float32 || int8) over the vocabulary. Time is that
of random models, CPU seconds in one thread as medians of alternating rounds: per generated token for 8 and 32 rows, and
per token of a pass for log-probabilities, as references and teachers need it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from mrlm_environments.math.environment import MathEnvironment
from provenance import provenance
from random_models import TEMPLATE, make_model

from mrlm_pl.engines import InProcessEngine, Sampling
from mrlm_pl.engines.base import SampleRequest
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.evaluation.comparison import compare
from mrlm_pl.policy import Policy
from mrlm_pl.runs import collect, evaluate

SIDES = ("float32", "int8")
CONTEXT, NEW = 64, 16


def loaded(side: str, model: str, **options: Any) -> Policy:
    """Return the frozen policy of a side, with its weights."""
    policy = Policy(model, trained=False, int8="weights" if side == "int8" else None, **options)
    policy.load()
    return policy


def size(policy: Policy) -> float:
    """Return the MiB of the weights."""
    return sum(weight.numel() * weight.element_size() for weight in policy.model.parameters()) / 2**20


def quality(episodes: int) -> dict[str, Any]:
    """Return accuracies and differences of ``builtin:tiny``."""
    policies = {side: loaded(side, "builtin:tiny") for side in SIDES}
    played: dict[str, Any] = {"split": "test", "num_episodes": episodes, "sampling": Sampling(max_tokens=32)}
    reports = {
        side: evaluate(policy, MathEnvironment(difficulty=(1, 1)), **played).to_dict()
        for side, policy in policies.items()
    }
    comparison = compare(reports["int8"], reports["float32"])
    kinds: dict[str, list[float]] = {"logp": [], "kl": []}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "replies.jsonl"
        collect(policies["float32"], MathEnvironment(difficulty=(1, 1)), output=file, **played)
        replies = list(read_episodes(file))
    for episode in replies:
        ((trajectory,),) = episode.trajectories.values()
        row = torch.tensor([trajectory.token_ids])
        acted = torch.tensor(trajectory.action_mask)[1:]
        with torch.no_grad():
            both = [policies[side].model(row).logits[0, :-1].log_softmax(-1)[acted] for side in SIDES]
        chosen = row[0, 1:, None][acted]
        kinds["logp"] += (both[0] - both[1]).gather(1, chosen).abs().flatten().tolist()
        kinds["kl"] += (both[0].exp() * (both[0] - both[1])).sum(-1).tolist()
    return {
        "episodes": episodes,
        "tokens": len(kinds["kl"]),
        "accuracy": {side: report["accuracy"] for side, report in reports.items()},
        "gain": comparison.gain,
        "gain_ci95": comparison.ci95,
        "logp_difference": statistics.mean(kinds["logp"]),
        "kl": statistics.mean(kinds["kl"]),
        "mib": {side: size(policy) for side, policy in policies.items()},
    }


def speed(shape: str, rounds: int) -> dict[str, Any]:
    """Return memory and CPU milliseconds per token of a random model."""
    folder = tempfile.mkdtemp()
    make_model(Path(folder), shape)
    policies = {side: loaded(side, folder, chat_template=TEMPLATE) for side in SIDES}
    engine = InProcessEngine()
    times: dict[str, dict[str, list[float]]] = {
        work: {side: [] for side in SIDES} for work in ("8 rows", "32 rows", "log-probabilities")
    }
    for side, policy in policies.items():
        engine.load(side, policy.network, 0)
    ids = torch.randint(1, 500, (8, CONTEXT), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(CONTEXT).expand(8, -1) > 0
    for number in range(rounds + 1):
        for side, policy in policies.items():
            for rows in (8, 32):
                requests = [
                    SampleRequest(tuple(ids[row % 8].tolist()), side, row, Sampling(max_tokens=NEW), ())
                    for row in range(rows)
                ]
                spent = _cpu(lambda asked=requests: asyncio.run(engine.sample(asked)))
                times[f"{rows} rows"][side] += [spent / (rows * NEW)] * (number > 0)
            with torch.no_grad():
                spent = _cpu(lambda of=policy: of(ids, torch.full((8,), CONTEXT), mask))
            times["log-probabilities"][side] += [spent / ids.numel()] * (number > 0)
    engine.close()
    return {
        "mib": {side: size(policy) for side, policy in policies.items()},
        "milliseconds": {
            work: {side: 1000 * statistics.median(spent) for side, spent in both.items()}
            for work, both in times.items()
        },
    }


def _cpu(work: Any) -> float:
    """Return the CPU seconds of some work."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shapes", nargs="+", default=["s", "m"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = {
        **provenance(),
        "rounds": options.rounds,
        "quality": quality(options.episodes),
        "speed": {shape: speed(shape, options.rounds) for shape in options.shapes},
    }
    text = json.dumps(found, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
