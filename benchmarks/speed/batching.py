"""Measure what batching saves in the in-process engine: rows of several policies, adapters, and unequal lengths.

    python benchmarks/speed/batching.py [--size xs s] [--rounds 7] [--threads 1] [--json FILE]

``policies``: P policies with random weights of one architecture, ``--rows`` requests each, in one call against a call
for each policy. ``adapters``: P policies with adapters of rank 16 on one base against such policies on copies of it,
whose adapters are added to the weights, and the memory of both sides' weights. ``lengths``: ``--requests`` requests
whose lengths are uniform in 1 to ``--new-tokens``, in one call against ``model.generate`` in waves of ``--rows``,
which last until the longest row of a wave ends. Both sides run in turns in one process. Figures are medians of the
ratios of processor seconds for equal tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rollout import SIZES, build_model

from mrlm_pl.engines import InProcessEngine, SampleRequest, Sampling
from mrlm_pl.engines.local.llama import FusedDecoder
from mrlm_pl.policy.lora import LoRA, add_adapter, with_shared_weights
from mrlm_pl.seeding import derive_seed

sys.path.insert(0, str(Path(__file__).parents[1]))
from provenance import provenance

PROMPT_TOKENS = 64


def cpu_ratio(ours: Callable[[], int], other: Callable[[], int], rounds: int) -> dict[str, Any]:
    """Return the median ratio of processor seconds of two ways to sample the same number of tokens, and all ratios."""
    ratios = []
    for n in range(rounds + 1):
        seconds = []
        for run in (ours, other):
            started = time.process_time()
            tokens = run()
            seconds.append((time.process_time() - started) / tokens)
        if n:  # the first one is the warm-up
            ratios.append(round(seconds[0] / seconds[1], 3))
    return {"ratio": statistics.median(ratios), "ratios": ratios}


def requests_of(policy: str, prompt: list[int], limits: list[int]) -> list[SampleRequest]:
    """Return a request for each limit."""
    return [
        SampleRequest(tuple(prompt), policy, derive_seed("batching", policy, n), Sampling(max_tokens=limit))
        for n, limit in enumerate(limits)
    ]


def policies(size: str, count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the ratio of one call for several policies to a call for each."""
    engine = InProcessEngine()
    prompt = [n % SIZES[size]["vocabulary"] for n in range(1, PROMPT_TOKENS + 1)]
    of_each = []
    for n in range(count):
        engine.load(f"policy {n}", build_model("llama", SIZES[size]), version=0)
        of_each.append(requests_of(f"policy {n}", prompt, [arguments.new_tokens] * arguments.rows))

    def sampled(requests: list[SampleRequest]) -> int:
        return sum(len(sample.token_ids) for sample in asyncio.run(engine.sample(requests)))

    together = [request for requests in of_each for request in requests]
    found = cpu_ratio(lambda: sampled(together), lambda: sum(map(sampled, of_each)), arguments.rounds)
    engine.close()
    return {"size": size, "policies": count, "rows": arguments.rows, **found}


def adapters(size: str, count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return time and weights of policies with adapters on one base against such policies on copies of it."""
    base = build_model("llama", SIZES[size]).requires_grad_(False)
    prompt = [n % SIZES[size]["vocabulary"] for n in range(1, PROMPT_TOKENS + 1)]
    requests, engines = [], (InProcessEngine(), InProcessEngine())
    for n in range(count):
        name = f"policy {n}"
        requests += requests_of(name, prompt, [arguments.new_tokens] * arguments.rows)
        for engine, model in zip(engines, (with_shared_weights(base), copy.deepcopy(base)), strict=True):
            engine.load(name, add_adapter(model, LoRA(), name).get_base_model(), version=0)

    def sampled(engine: InProcessEngine) -> int:
        return sum(len(sample.token_ids) for sample in asyncio.run(engine.sample(requests)))

    shared, merged = engines
    found = cpu_ratio(lambda: sampled(shared), lambda: sampled(merged), arguments.rounds)
    found["weights_mib"] = [round(weights_bytes(engine) / 2**20, 2) for engine in engines]
    for engine in engines:
        engine.close()
    return {"size": size, "policies": count, "rows": arguments.rows, **found}


def weights_bytes(engine: InProcessEngine) -> int:
    """Return the memory of all weights that an engine reads."""
    tensors: dict[int, torch.Tensor] = {}
    for loaded in engine._loaded.values():
        assert isinstance(loaded.backend, FusedDecoder)
        tensors |= {tensor.data_ptr(): tensor for tensor in loaded.backend.weights.tensors()}
    return sum(tensor.nbytes for tensor in tensors.values())


def lengths(size: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the ratio of one call with unequal lengths to waves of ``generate``."""
    model: Any = build_model("llama", SIZES[size])  # its class has no `generate`
    engine = InProcessEngine()
    engine.load("policy", model, version=0)
    rng = random.Random(0)
    limits = [rng.randint(1, arguments.new_tokens) for _ in range(arguments.requests)]
    prompt = [n % SIZES[size]["vocabulary"] for n in range(1, PROMPT_TOKENS + 1)]
    requests = requests_of("policy", prompt, limits)

    def sampled() -> int:
        return sum(len(sample.token_ids) for sample in asyncio.run(engine.sample(requests)))

    def waves() -> int:
        for start in range(0, len(limits), arguments.rows):
            wave = limits[start : start + arguments.rows]
            ids = torch.tensor([prompt] * len(wave))
            with torch.inference_mode():
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=max(wave)
                )
        return sum(limits)

    found = cpu_ratio(sampled, waves, arguments.rounds)
    engine.close()
    return {"size": size, "requests": arguments.requests, "rows": arguments.rows, **found}


def main() -> None:
    """Print and write the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["xs", "s"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    written: dict[str, Any] = {
        **provenance(),
        "threads": arguments.threads,
        "policies": [],
        "adapters": [],
        "lengths": [],
    }
    for size in arguments.size:
        for count in (2, 4):
            written["policies"].append(row := policies(size, count, arguments))
            print(
                f"{size}: {count} policies in one call take {row['ratio']:.2f} of the time of a call each", flush=True
            )
        for count in (2, 4):
            written["adapters"].append(row := adapters(size, count, arguments))
            print(
                f"{size}: {count} adapters on one base take {row['ratio']:.2f} of the time of merged ones", flush=True
            )
        written["lengths"].append(row := lengths(size, arguments))
        print(f"{size}: unequal lengths take {row['ratio']:.2f} of the time of waves of generate", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
