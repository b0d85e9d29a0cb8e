"""Compare tokens per second of the in-process engine with ``model.generate``, on the same model, prompts and lengths.

    python benchmarks/speed/rollout.py [--size xs s m] [--family qwen2 llama] [--repeats 5] [--json FILE]

Both sides run in turns in one process; the figures are medians, and the ratio is the median of the ratios of adjacent
runs, because a shared machine changes its speed over time. The ratio of CPU seconds is for busy machines. Without an
end token both sides have fixed lengths (``min_new_tokens`` would slow ``generate`` down).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.engines import InProcessEngine, SampleRequest, Sampling
from mrlm_pl.seeding import derive_seed

SIZES: dict[str, dict[str, int]] = {
    "xs": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "inner": 176, "vocabulary": 96},
    "s": {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "inner": 704, "vocabulary": 512},
    "m": {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "inner": 1408, "vocabulary": 32_000},
}


def build_model(family: str, size: str) -> PreTrainedModel:
    """Return a random model of the family and size, without an end token."""
    shape = SIZES[size]
    config = AutoConfig.for_model(
        family,
        num_hidden_layers=shape["layers"],
        hidden_size=shape["hidden"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        intermediate_size=shape["inner"],
        vocab_size=shape["vocabulary"],
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def measure(family: str, size: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return medians of both sides and their ratio for one model."""
    model = build_model(family, size)
    length, groups, members = arguments.new_tokens, arguments.prompts, arguments.samples
    prompts = torch.randint(1, SIZES[size]["vocabulary"], (groups, arguments.prompt_tokens))
    loop = EventLoopThread()
    engine = InProcessEngine(dtype=getattr(torch, arguments.dtype) if arguments.dtype else None)
    engine.load("policy", model, version=0)
    requests = [
        SampleRequest(tuple(prompt), "policy", derive_seed("benchmark", g, i), Sampling(max_tokens=length))
        for g, prompt in enumerate(prompts.tolist())
        for i in range(members)
    ]
    repeated = prompts.repeat_interleave(members, 0)
    mask = torch.ones_like(repeated)

    def generate() -> int:
        with torch.inference_mode():
            out = model.generate(
                repeated, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=length, use_cache=True
            )
        return out.numel() - repeated.numel()

    def sample() -> int:
        # As in an EpisodePlayer: the loop in its thread, the computation in this one.
        samples = engine.compute_during(lambda: loop.submit(engine.sample(requests)))
        return sum(len(sample.token_ids) for sample in samples)

    speeds: dict[str, list[float]] = {"generate": [], "engine": []}
    cpu: dict[str, list[float]] = {"generate": [], "engine": []}
    for repeat in range(arguments.repeats + 1):
        for name, run in (("generate", generate), ("engine", sample)):
            started, cpu_started = time.perf_counter(), time.process_time()
            tokens = run()
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
            if tokens != groups * members * length:
                raise RuntimeError(f"{name} sampled {tokens} tokens instead of {groups * members * length}")
            if repeat:
                speeds[name].append(tokens / seconds)
                cpu[name].append(cpu_seconds)
    loop.close()
    engine.close()
    ratios = [ours / theirs for ours, theirs in zip(speeds["engine"], speeds["generate"], strict=True)]
    return {
        "family": family,
        "size": size,
        "generate_tokens_per_second": round(statistics.median(speeds["generate"]), 1),
        "engine_tokens_per_second": round(statistics.median(speeds["engine"]), 1),
        "ratio": round(statistics.median(ratios), 2),
        "cpu_ratio": round(statistics.median(a / b for a, b in zip(cpu["generate"], cpu["engine"], strict=True)), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
    }


def main() -> None:
    """Run the command line's measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument(
        "--family", nargs="+", choices=("qwen2", "llama", "qwen3", "mistral"), default=["qwen2", "llama"]
    )
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each side, after one warm-up")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", help="compute dtype of the engine, for example bfloat16; default: the model's")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = [measure(family, size, arguments) for size in arguments.size for family in arguments.family]
    for row in rows:
        print(
            f"{row['family']:8s} {row['size']:3s} generate {row['generate_tokens_per_second']:9.1f} tok/s   "
            f"engine {row['engine_tokens_per_second']:9.1f} tok/s   "
            f"ratio {row['ratio']:.2f}   in CPU seconds {row['cpu_ratio']:.2f}"
        )
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"torch": torch.__version__, "threads": arguments.threads, "rows": rows}, file, indent=2)


if __name__ == "__main__":
    main()
