"""Compare time and memory of the learner's forward and backward pass with the padded pass, on the same work.

    python benchmarks/speed/training_forward.py --size s [--rounds 7] [--threads 2] [--precision bf16] [--json out.json]

Both sides compute the log-probabilities of 4 groups of 8 completions (64 prompt and 64 completion tokens) under the
same random Qwen2 model and the gradient of their mean. The plain side pads the sequences, keeps the logits of the
completion positions and normalizes them per sequence, like trainers that use the model's own forward pass. A third side
is ours with compiled layers (``compile`` of a policy). Times are medians of alternating rounds in one process, wall and
CPU seconds, without the compilation; peak memory is that of a process per side, beyond the weights and gradients.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))
from memory import resident_mib
from provenance import provenance

from mrlm_pl.policy.compilation import compilation_seconds, compile_layers
from mrlm_pl.policy.forward.families import forward_path
from mrlm_pl.policy.forward.logprobs import token_logprobs
from mrlm_pl.policy.forward.packing import TokenRows

SIZES = {
    "xs": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 172, "heads": 4, "vocab_size": 512},
    "s": {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 688, "heads": 4, "vocab_size": 512},
    "m": {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1376, "heads": 8, "vocab_size": 32000},
}
GROUPS, ROWS_PER_GROUP, PROMPT_TOKENS, NEW_TOKENS = 4, 8, 64, 64
SIDES = ("plain", "ours", "compiled")


def build(size: str) -> Qwen2ForCausalLM:
    """Return a random model of this size with half as many key-value heads as heads."""
    options: dict[str, Any] = dict(SIZES[size])
    heads = options.pop("heads")
    torch.manual_seed(0)
    config = Qwen2Config(
        **options, num_attention_heads=heads, num_key_value_heads=heads // 2, tie_word_embeddings=False
    )
    return Qwen2ForCausalLM(config)


def rows(vocabulary: int) -> tuple[Tensor, Tensor]:
    """Return token ids [B, T] and the label of every sequence's group [B]."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, vocabulary, (GROUPS, PROMPT_TOKENS), generator=generator)
    completions = torch.randint(0, vocabulary, (GROUPS * ROWS_PER_GROUP, NEW_TOKENS), generator=generator)
    labels = torch.arange(GROUPS).repeat_interleave(ROWS_PER_GROUP)
    return torch.cat([prompts[labels], completions], 1), labels


def plain(model: Qwen2ForCausalLM, token_ids: Tensor) -> Tensor:
    """Return log-probabilities of the completions [B, C] from the model's own logits at the completion positions."""
    output = model(
        input_ids=token_ids, attention_mask=torch.ones_like(token_ids), use_cache=False, logits_to_keep=NEW_TOKENS + 1
    )
    logits = output.logits[:, :-1]
    targets = token_ids[:, -NEW_TOKENS:, None]
    if logits.dtype == torch.float32:
        return logits.gather(-1, targets).squeeze(-1) - torch.stack([row.logsumexp(-1) for row in logits])
    picked = [row.float().log_softmax(-1).gather(-1, chosen) for row, chosen in zip(logits, targets, strict=True)]
    return torch.stack(picked).squeeze(-1)


def ours(model: Qwen2ForCausalLM, token_ids: Tensor, labels: Tensor) -> Tensor:
    """Return the same log-probabilities [B, C] by `token_logprobs`."""
    B, T = token_ids.shape
    action_mask = (torch.arange(T) >= PROMPT_TOKENS).expand(B, T)
    rows = TokenRows(token_ids, torch.full((B,), T), action_mask, prefix_groups=labels)
    return token_logprobs(model, rows)[:, PROMPT_TOKENS:]


def sides(size: str, precision: str) -> dict[str, Callable[[], Tensor]]:
    """Compute gradients in the model, without an optimizer step, and return the log-probabilities."""
    model = build(size)
    fast = copy.deepcopy(model)
    compile_layers(fast)
    token_ids, labels = rows(model.config.vocab_size)

    def update(model: Qwen2ForCausalLM, forward: Callable[..., Tensor], *labels: Tensor) -> Tensor:
        model.zero_grad(set_to_none=False)
        autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
        with autocast:
            log_probs = forward(model, token_ids, *labels)
        log_probs.mean().backward()
        return log_probs.detach()

    for parameter in (*model.parameters(), *fast.parameters()):
        parameter.grad = torch.zeros_like(parameter)
    return {
        "plain": lambda: update(model, plain),
        "ours": lambda: update(model, ours, labels),
        "compiled": lambda: update(fast, ours, labels),
    }


def measure_times(size: str, precision: str, rounds: int) -> dict[str, Any]:
    """Return medians per side and of the ratios within a round, after a warm-up."""
    updates = sides(size, precision)
    first = updates["plain"]()
    differences = {side: (first - updates[side]()).abs().max().item() for side in SIDES[1:]}
    wall: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            started, cpu_started = time.perf_counter(), time.process_time()
            updates[side]()
            wall[side].append(time.perf_counter() - started)
            cpu[side].append(time.process_time() - cpu_started)
    result: dict[str, Any] = {"largest difference": differences, "compilation seconds": compilation_seconds()}
    for name, seconds in (("wall seconds", wall), ("cpu seconds", cpu)):
        medians: dict[str, Any] = {side: statistics.median(seconds[side]) for side in SIDES}
        for mine, theirs in (("ours", "plain"), ("compiled", "ours")):
            ratios = [one / other for one, other in zip(seconds[mine], seconds[theirs], strict=True)]
            medians[f"{mine} / {theirs}"] = statistics.median(ratios)
        result[name] = medians
    return result


def measure_memory(size: str, precision: str, side: str) -> float:
    """Return the MiB of one update of this side beyond weights and gradients; once per process, on Linux."""
    updates = sides(size, precision)
    before = resident_mib("VmRSS")
    updates[side]()
    return resident_mib("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="s")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--memory-of", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.memory_of:
        print(measure_memory(options.size, options.precision, options.memory_of))
        return

    result: dict[str, Any] = provenance() | {
        "size": options.size,
        "precision": options.precision,
        "threads": options.threads,
    }
    result |= measure_times(options.size, options.precision, options.rounds)
    result["path"] = forward_path(build(options.size)).name
    result["peak megabytes"] = {}
    for side in SIDES:
        command = [sys.executable, __file__, "--size", options.size, "--precision", options.precision]
        command += ["--threads", str(options.threads), "--memory-of", side]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        result["peak megabytes"][side] = float(output)
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
