"""Compare tokens per second and weight synchronization of a Ray pool with the in-process engine.

    python benchmarks/speed/ray_pool.py [--workers 1 2 4] [--size s] [--rounds 5] [--json FILE]
    python benchmarks/speed/ray_pool.py --sync [--receivers 1 2] [--divisor 16] [--bucket 1048576 8388608 67108864]

The first form samples the same requests in process and in the pool in turns, changes every weight and times ``load``;
the figures are medians over rounds, memory is the resident set of each worker. The second form sends the 579 tensors of
Qwen2.5-14B, narrower, to receivers in threads of this process, and compares all checksums; memory copies and checksums
are timed separately.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from memory import resident_mib
from rollout import SIZES, build_model
from transformers import PreTrainedModel

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.engines import InProcessEngine, RayPool, SampleRequest, Sampling
from mrlm_pl.engines.transfer.broadcast import WeightReceiver, WeightSender
from mrlm_pl.engines.transfer.manifest import WeightSnapshot, checksum


@torch.no_grad()
def change(model: PreTrainedModel) -> None:
    """Change every weight."""
    for parameter in model.parameters():
        parameter.mul_(1.0001)


def pool_figures(workers: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return medians of one pool and of the in-process engine."""
    model = build_model("qwen2", SIZES[arguments.size])
    vocabulary = SIZES[arguments.size]["vocabulary"]
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, vocabulary, (arguments.prompts, 48), generator=generator).tolist()
    sampling = Sampling(max_tokens=arguments.new_tokens)
    requests = [
        SampleRequest(tuple(prompt), "p", 1000 * n + member, sampling)
        for n, prompt in enumerate(prompts)
        for member in range(arguments.samples)
    ]
    tokens = len(requests) * arguments.new_tokens
    here, pool, loop = InProcessEngine(), RayPool(workers), EventLoopThread()
    speeds: dict[str, list[float]] = {"here": [], "pool": []}
    loads: list[float] = []
    try:
        started = time.perf_counter()
        pool.load("p", model, 0)
        start = time.perf_counter() - started
        for version in range(1, arguments.rounds + 2):
            change(model)
            started = time.perf_counter()
            pool.load("p", model, version)
            loads.append(time.perf_counter() - started)
            here.load("p", model, version)
            found = {}
            for name, engine in (("here", here), ("pool", pool)):
                started = time.perf_counter()
                found[name] = loop.submit(engine.sample(requests)).result()
                speeds[name].append(tokens / (time.perf_counter() - started))
            same = sum(a.token_ids == b.token_ids for a, b in zip(found["here"], found["pool"], strict=True))
        memory = [resident_mib("VmRSS", item["pid"]) for item in pool.describe()]
    finally:
        pool.close()
        here.close()
        loop.close()
    size = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return {
        "workers": workers,
        "model_mib": round(size / 2**20, 1),
        "first_load_seconds": round(start, 1),
        "load_seconds": round(statistics.median(loads[1:]), 4),  # the first round is warm-up
        "tokens_per_second_here": round(statistics.median(speeds["here"][1:])),
        "tokens_per_second_pool": round(statistics.median(speeds["pool"][1:])),
        "equal_samples": f"{same}/{len(requests)}",
        "worker_mib": [round(item) for item in memory],
    }


def sync_figures(receivers: int, bucket: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return medians of sending all 579 tensors, first and again after all have changed."""
    divisor = arguments.divisor
    widths = {"hidden": 5120 // divisor, "inner": 13_824 // divisor, "vocabulary": 152_064 // divisor}
    model = build_model("qwen2", {"layers": 48, "heads": 40, "kv_heads": 8, **widths})
    tensors = dict(model.named_parameters())
    snapshot, sender = WeightSnapshot(), WeightSender()
    sides = [WeightReceiver() for _ in range(receivers)]
    invitation, taking, sending = sender.invite(receivers), [], []
    with ThreadPoolExecutor(receivers) as threads:
        for _ in range(arguments.rounds + 1):
            change(model)
            started = time.perf_counter()
            snapshot.take(tensors)
            taking.append(time.perf_counter() - started)
            manifest = snapshot.missing([{}], bucket)
            started = time.perf_counter()
            got = [threads.submit(side.receive, invitation, rank, manifest) for rank, side in enumerate(sides, 1)]
            sender.send(invitation, manifest, snapshot.__getitem__)
            sending.append(time.perf_counter() - started)
            arrived = [{name: checksum(tensor) for name, tensor in item.result().items()} for item in got]
            if any(item != {name: checksum(tensor) for name, tensor in tensors.items()} for item in arrived):
                raise SystemExit("a receiver has other tensors")
    sender.close()
    seconds, size = statistics.median(sending[1:]), sum(item.size for item in manifest.tensors)
    return {
        "tensors": len(manifest.tensors),
        "mib": round(size / 2**20, 1),
        "largest_mib": round(max(item.size for item in manifest.tensors) / 2**20, 2),
        "bucket_mib": round(bucket / 2**20, 2),
        "receivers": receivers,
        "copy_and_checksum_seconds": round(statistics.median(taking[1:]), 3),
        "send_seconds": round(seconds, 3),
        "mib_per_second_to_each": round(size / 2**20 / seconds),
        "equal_checksums": f"{len(manifest.tensors)}/{len(manifest.tensors)}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--size", choices=SIZES, default="s")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--new_tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sync", action="store_true")
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--divisor", type=int, default=16)
    parser.add_argument("--bucket", type=int, nargs="+", default=[2**20, 2**23, 2**26])
    parser.add_argument("--json")
    arguments = parser.parse_args()
    results = []
    if arguments.sync:
        cases = [(receivers, bucket) for receivers in arguments.receivers for bucket in arguments.bucket]
        for receivers, bucket in cases:
            results.append(sync_figures(receivers, bucket, arguments))
            print(json.dumps(results[-1]), flush=True)
    else:
        for workers in arguments.workers:
            results.append(pool_figures(workers, arguments))
            print(json.dumps(results[-1]), flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
