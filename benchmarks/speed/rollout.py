"""Compare tokens per second of the in-process engine with ``model.generate``, on the same model, prompts and lengths.

    python benchmarks/speed/rollout.py [--size xs s m] [--family qwen2 llama] [--repeats 5] [--json FILE]

On a GPU, with the engine's steps as CUDA graphs and one kernel at a time, and transformers' two ways:

    python benchmarks/speed/rollout.py --device cuda --weights bfloat16 --size 0.5b 1.5b --family qwen2 \\
        --prompts 32 --samples 8 --prompt-tokens 512 --new-tokens 512 --repeats 2 \\
        --sides engine eager generate continuous --json benchmarks/results/gpu_rollout.json

With compiled layers, whose CPU seconds are compared with those of the engine without:

    python benchmarks/speed/rollout.py --sides engine compiled --family llama --threads 1 --dtype float32 bfloat16 \\
        --json benchmarks/results/rollout_compiled.json

All sides run in turns in one process; the figures are medians, and the ratio is the median of the ratios of adjacent
runs, because a shared machine changes its speed over time. The ratio of CPU seconds is for busy machines. Without an
end token all sides have fixed lengths (``min_new_tokens`` would slow ``generate`` down).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from provenance import provenance
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.engines import InProcessEngine, SampleRequest, Sampling
from mrlm_pl.policy.compilation import compilation_seconds
from mrlm_pl.seeding import derive_seed

SIZES: dict[str, dict[str, int]] = {
    "xs": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "inner": 176, "vocabulary": 96},
    "s": {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 2, "inner": 704, "vocabulary": 512},
    "m": {"layers": 8, "hidden": 512, "heads": 8, "kv_heads": 4, "inner": 1408, "vocabulary": 32_000},
    # of Qwen2.5
    "0.5b": {"layers": 24, "hidden": 896, "heads": 14, "kv_heads": 2, "inner": 4864, "vocabulary": 151_936},
    "1.5b": {"layers": 28, "hidden": 1536, "heads": 12, "kv_heads": 2, "inner": 8960, "vocabulary": 151_936},
}


def build_model(family: str, shape: Mapping[str, int]) -> PreTrainedModel:
    """Return a random model of the family with one of the :data:`SIZES`, without an end token."""
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


class Work:
    """A model, its prompts and the ways to sample from it; each returns the number of tokens that it sampled."""

    def __init__(self, family: str, size: str, dtype: str | None, arguments: argparse.Namespace) -> None:
        self.model = build_model(family, SIZES[size]).to(arguments.device, getattr(torch, arguments.weights))
        self.length, self.device = arguments.new_tokens, torch.device(arguments.device)
        prompts = torch.randint(1, SIZES[size]["vocabulary"], (arguments.prompts, arguments.prompt_tokens))
        self.repeated = prompts.repeat_interleave(arguments.samples, 0)
        self.loop = EventLoopThread()
        settings: Any = {"dtype": getattr(torch, dtype) if dtype else None, "max_batch_tokens": 2**20}
        self.engines = {
            side: InProcessEngine(cuda_graphs=side == "engine", compile=side == "compiled", **settings)
            for side in arguments.sides
            if side in ("engine", "eager", "compiled")
        }
        for engine in self.engines.values():
            engine.load("policy", self.model, version=0)
        self.requests = [
            SampleRequest(tuple(prompt), "policy", derive_seed("benchmark", row), Sampling(max_tokens=self.length))
            for row, prompt in enumerate(self.repeated.tolist())
        ]

    def run(self, side: str) -> int:
        """Sample all rows."""
        if side == "generate":
            return self._generate()
        return self._continuous() if side == "continuous" else self._sample(self.engines[side])

    def _sample(self, engine: InProcessEngine) -> int:
        # As in an EpisodePlayer: the loop in its thread, the computation in this one.
        samples = engine.compute_during(lambda: self.loop.submit(engine.sample(self.requests)))
        return sum(len(sample.token_ids) for sample in samples)

    def _generate(self) -> int:
        rows, length = self.repeated.to(self.device), self.length
        settings = {"do_sample": True, "top_k": 0, "max_new_tokens": length, "use_cache": True}
        with torch.inference_mode():
            out = self.model.generate(rows, attention_mask=torch.ones_like(rows), **settings)
        return int(out.numel() - rows.numel())

    def _continuous(self) -> int:
        """Sample through the continuous batching of transformers, which replaces the attention of the model."""
        before = self.model.config._attn_implementation
        settings = GenerationConfig(
            do_sample=True, top_k=0, max_new_tokens=self.length, eos_token_id=-1, pad_token_id=0, bos_token_id=None
        )
        try:
            out = self.model.generate_batch(self.repeated.tolist(), generation_config=settings)
        finally:
            self.model.set_attn_implementation(before)
        return sum(len(one.generated_tokens) for one in out.values())

    def close(self) -> None:
        """Free the engines."""
        self.loop.close()
        for engine in self.engines.values():
            engine.close()


def measure(family: str, size: str, dtype: str | None, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the median speed of each side, and those of the other sides relative to ``generate``, for one model."""
    compiled_before = compilation_seconds()
    work = Work(family, size, dtype, arguments)
    seconds_to_compile = compilation_seconds() - compiled_before
    on_gpu = work.device.type == "cuda"
    speeds: dict[str, list[float]] = {side: [] for side in arguments.sides}
    cpu: dict[str, list[float]] = {side: [] for side in arguments.sides}
    peaks: dict[str, float] = {}
    for repeat in range(arguments.repeats + 1):
        for side in arguments.sides:
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            started, cpu_started = time.perf_counter(), time.process_time()
            tokens = work.run(side)
            seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
            if tokens != len(work.requests) * work.length:
                raise RuntimeError(f"{side} sampled {tokens} tokens instead of {len(work.requests) * work.length}")
            if repeat:
                speeds[side].append(tokens / seconds)
                cpu[side].append(cpu_seconds)
            if on_gpu:
                peaks[side] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    work.close()
    row: dict[str, Any] = {"family": family, "size": size} | ({"dtype": dtype} if dtype else {})
    if on_gpu:
        row |= {name: getattr(arguments, name) for name in ("prompts", "samples", "prompt_tokens", "new_tokens")}
    for side, found in speeds.items():
        row[f"{side}_tokens_per_second"] = round(statistics.median(found), 1)
        if side != "generate" and "generate" in speeds:
            ratios = [ours / theirs for ours, theirs in zip(found, speeds["generate"], strict=True)]
            pairs = zip(cpu["generate"], cpu[side], strict=True)
            row[f"{side}_ratio"] = round(statistics.median(ratios), 2)
            row[f"{side}_cpu_ratio"] = round(statistics.median(a / b for a, b in pairs), 2)
    if "compiled" in cpu and "engine" in cpu:
        ratios = [ours / plain for ours, plain in zip(cpu["compiled"], cpu["engine"], strict=True)]
        row["compiled_cpu_of_engine"] = round(statistics.median(ratios), 3)
        row["compilation_seconds"] = round(seconds_to_compile, 1)
    return row | {f"{side}_peak_gib": peak for side, peak in peaks.items()}


def main() -> None:
    """Run the command line's measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=SIZES, default=["xs", "s", "m"])
    parser.add_argument(
        "--family", nargs="+", choices=("qwen2", "llama", "qwen3", "mistral"), default=["qwen2", "llama"]
    )
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each side, after one warm-up")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8, help="samples of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--dtype",
        nargs="+",
        default=[None],
        help="compute dtypes of the engine, for example bfloat16; default: the model's",
    )
    parser.add_argument("--weights", default="float32", help="dtype of the model")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--sides",
        nargs="+",
        choices=("engine", "eager", "compiled", "generate", "continuous"),
        default=["generate", "engine"],
        help="`compiled` is the engine with compiled layers, on a CPU; on a GPU `eager` is the engine without CUDA "
        "graphs; `continuous` is transformers' continuous batching",
    )
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows = []
    for size in arguments.size:
        for family, dtype in itertools.product(arguments.family, arguments.dtype):
            rows.append(measure(family, size, dtype, arguments))
            print(json.dumps(rows[-1]), flush=True)
            if arguments.json:
                found = {**provenance(device=arguments.device), "threads": arguments.threads, "rows": rows}
                Path(arguments.json).write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
