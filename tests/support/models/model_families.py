"""Engine and learner against every causal family of transformers, from tiny configurations.

``python -m tests.support.models.model_families OUTPUT.json [FAMILY ...]`` writes the table in ``benchmarks/results``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mrlm_pl.engines import InProcessEngine, Sample, SampleRequest, Sampling
from mrlm_pl.policy.forward.families import forward_path
from mrlm_pl.policy.forward.logprobs import token_logprobs
from mrlm_pl.policy.forward.packing import TokenRows

VOCABULARY = 48
MOST_PARAMETERS = 100_000_000
_SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "lru_width", "mamba_d_ssm"), 32),
    **dict.fromkeys(("n_inner", "intermediate_size", "ffn_dim", "ffn_hidden_size", "d_ff", "ffn_size", "dff"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "context_length"), 128),
    **dict.fromkeys(("max_target_positions", "seq_length"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "moe_top_k", "num_key_value_heads"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("shared_intermediate_size", "q_lora_rank", "kv_lora_rank", "index_topk", "qk_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_head_dim", "head_dim"), 8),
    **dict.fromkeys(("state_size", "ssm_state_size", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_chunk_size"), 8),
    **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "chunk_size"), 8),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups", "encoder_layers"), 1),
    **dict.fromkeys(("linear_num_key_heads", "n_mamba_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "mamba_dt_rank", "rotary_dim", "conv_kernel"), 4),
    "index_n_heads": 16,  # with few heads many tokens tie for the selection
    "vocab_size": VOCABULARY,
    "sliding_window": None,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "sep_token_id": 3,
    "forced_eos_token_id": None,
    "cls_token_id": 1,
}
_WINDOW = {"sliding_window": 8}
_LATENT = {"num_key_value_heads": 4}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_INKLING: dict[str, Any] = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "sliding_window_size": 8,
    "d_rel": 4,
    "rel_extent": 16,
    "sliding_window": 8,
    "num_hidden_layers": 2,
    "layer_types": ["hybrid_sliding", "hybrid"],
    "unpadded_vocab_size": VOCABULARY,
    "log_scaling_n_floor": 1024,
    "intermediate_size": 48,
}
# Further settings of families.
_EXTRA: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("afmoe", "beam", "cohere2", "cohere2_moe", "cwm", "deepseek_v4", "exaone4", "exaone_moe", "flint", "gemma2"),
        _WINDOW,
    ),
    **dict.fromkeys(
        ("gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "gpt_oss", "granite_swa", "kolibri1"),
        _WINDOW,
    ),
    **dict.fromkeys(
        ("granitemoe_swa", "laguna", "mimo_v2_flash", "ministral", "moshi", "olmo3", "vaultgemma", "recurrent_gemma"),
        _WINDOW,
    ),
    "modernbert-decoder": {"sliding_window": 8, "local_attention": 8},
    "cohere_compass_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}, "full_attention": None},
    },
    **dict.fromkeys(
        ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text", "glm4_moe_lite"), _LATENT
    ),
    **dict.fromkeys(("glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"), _LATENT),
    **dict.fromkeys(("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _HYBRID),
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "falcon_h1": {"mamba_n_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "dbrx": {
        "attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
    "xlstm": {"hidden_size": 64, "qk_dim_factor": 1.0},
    "bailing_hybrid": {**_LATENT, "layer_group_size": 2, "first_k_dense_replace": 1},
    "kimi_linear": {**_LATENT, **_HYBRID, "linear_head_dim": 8, "linear_num_heads": 4},
    "lfm3": {
        "sliding_window": 8,
        "layer_types": ["conv", "full_attention", "sliding_attention"],
        "num_hidden_layers": 3,
    },
    "gemma3n_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 0,
        "laurel_rank": 4,
    },
    "gemma4_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
    },
    "recurrent_gemma": {"attention_window_size": 8, "sliding_window": 8, "num_hidden_layers": 3},
    **dict.fromkeys(("inkling_text", "inkling2_text"), _INKLING),
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "hc_lowrank": 4,
        "hc_count": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "xmod": {"default_language": "en_XX"},
    "reformer": {"attn_layers": ["local", "local"], "axial_pos_embds": False, "local_attn_chunk_length": 64},
    "roc_bert": {"pronunciation_vocab_size": 50, "shape_vocab_size": 50},
    "dots1": {"n_shared_experts": 1},
}


def tiny_config(family: str, **changes: Any) -> Any:
    """Return a small configuration of a family, with the given settings."""
    return _shrunk(CONFIG_MAPPING[family], **changes)


def _shrunk(kind: Any, **changes: Any) -> Any:
    """Return a small configuration of a class, and of the parts of a multimodal model."""
    known = {*kind().to_dict(), *kind.attribute_map, *inspect.signature(kind.__init__).parameters}
    small: dict[str, Any] = {key: value for key, value in _SMALL.items() if key in known}
    for name, part in kind.sub_configs.items():
        if getattr(part, "model_type", "") not in ("", "moshi_depth"):  # Moshi's language model does not use it
            small[name] = _shrunk(part).to_dict()
    return kind(**{**small, **_EXTRA.get(kind.model_type, {}), **changes})


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    """Return a random model of a family, with weights away from their trivial initial values.

    Raises:
        Exception: any error of the family with a small configuration; ValueError if the model stays large.
    """
    config = tiny_config(family, **changes)
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
        model(input_ids=torch.tensor([[5, 6, 7, 8, 9]]))
    return model


def context_rows(*lengths: int) -> list[list[int]]:
    """Return sequences of random tokens without special ones."""
    draw = random.Random(0)
    return [[draw.randrange(5, VOCABULARY) for _ in range(length)] for length in lengths]


def measure(model: PreTrainedModel) -> dict[str, Any]:
    """Compare engine and learner with the model's own forward pass over each sequence alone.

    Returns:
        ``cache`` (its use by the engine), ``path`` (of the learner), and the largest differences: ``engine``,
        ``session`` (a second turn) and ``batch`` (the same requests alone; tokens must be equal) of log-probabilities;
        ``learner`` of log-probabilities and ``gradient`` relative to the largest one.
    """
    engine = InProcessEngine()
    engine.load("p", model, 0)
    try:
        return _measured(model, engine)
    finally:
        engine.close()


def _measured(model: PreTrainedModel, engine: InProcessEngine) -> dict[str, Any]:
    rows = context_rows(9, 3, 14)
    rows.append(rows[0])
    requests = [_request(row, seed) for seed, row in enumerate(rows)]
    samples = asyncio.run(engine.sample(requests))
    found: dict[str, Any] = {"cache": _cache(engine), "path": forward_path(model).name}
    found["engine"] = _difference(model, rows, samples)
    alone = [asyncio.run(engine.sample([request]))[0] for request in requests]
    same = [one.token_ids == other.token_ids for one, other in zip(alone, samples, strict=True)]
    pairs = zip(alone, samples, strict=True)
    found["batch"] = max(_gap(a.logprobs, b.logprobs) for a, b in pairs) if all(same) else float("inf")
    later = [
        [*row, *sample.token_ids, *more]
        for row, sample, more in zip(rows, samples, context_rows(1, 8, 3, 5), strict=True)
    ]
    again = asyncio.run(engine.sample([_request(row, seed) for seed, row in enumerate(later)]))
    found["session"] = _difference(model, later, again)
    found |= _learner(model, later, again)
    return found


def _request(row: Sequence[int], seed: int) -> SampleRequest:
    return SampleRequest(tuple(row), "p", seed, Sampling(max_tokens=6), session=f"s/{seed}")


def _cache(engine: InProcessEngine) -> str:
    (loaded,) = engine._loaded.values()
    use = getattr(loaded.backend, "use", None)
    if use is None:
        return "fused"
    if not use.cached:
        return "recomputed"
    return ("padded" if use.padded else "by length") + (", sessions" if use.sessions else "")


def plain_logprobs(model: PreTrainedModel, row: Sequence[int]) -> Tensor:
    """Return the log-probability of each token but the first, from one forward pass over the sequence alone."""
    ids = torch.tensor([row])
    settings = {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    table = model(input_ids=ids, **settings).logits[0, :-1].float().log_softmax(-1)
    return table.gather(-1, ids[0, 1:, None])[:, 0]


@torch.no_grad()
def _difference(model: PreTrainedModel, rows: Sequence[Sequence[int]], samples: Sequence[Sample]) -> float:
    return max(
        _gap(plain_logprobs(model, [*row, *sample.token_ids])[len(row) - 1 :].tolist(), sample.logprobs)
        for row, sample in zip(rows, samples, strict=True)
    )


def _gap(first: Sequence[float], second: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(first, second, strict=True))


def _learner(model: PreTrainedModel, contexts: Sequence[Sequence[int]], samples: Sequence[Sample]) -> dict[str, float]:
    rows = [[*row, *sample.token_ids] for row, sample in zip(contexts, samples, strict=True)]
    width = max(map(len, rows))
    lengths = torch.tensor([len(row) for row in rows])
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    starts = torch.tensor([len(row) for row in contexts])
    mask = (torch.arange(width) >= starts[:, None]) & (torch.arange(width) < lengths[:, None])

    def plain() -> Tensor:
        return torch.cat([plain_logprobs(model, row)[start - 1 :] for row, start in zip(rows, starts, strict=True)])

    model.eval()
    expected, expected_gradients = _with_gradients(model, plain)
    model.train()
    got, gradients = _with_gradients(model, lambda: token_logprobs(model, TokenRows(ids, lengths, mask))[mask])
    model.eval()
    largest = max(float(value.abs().max()) for value in expected_gradients.values())
    worst = max(
        float((gradients.get(name, torch.zeros(1)) - value).abs().max()) for name, value in expected_gradients.items()
    )
    return {"learner": float((got - expected).abs().max()), "gradient": worst / largest}


def _with_gradients(model: PreTrainedModel, compute: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    values = compute()
    (values * torch.linspace(-1, 1, len(values))).sum().backward()
    found = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
    return values.detach(), found


def families() -> Iterator[str]:
    """Return the names of all causal families of transformers."""
    yield from MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def table(names: Sequence[str]) -> dict[str, Any]:
    """Return ``families``, the results of :func:`measure`, and ``not_built``, the errors of the others."""
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name in names:
        try:
            model = tiny_model(name)
        except Exception as error:  # each family fails in its own way
            missing[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"
            print(name, missing[name], flush=True)
            continue
        try:
            numbers = measure(model).items()
            found[name] = {key: float(f"{value:.1e}") if isinstance(value, float) else value for key, value in numbers}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"}
        print(name, found[name], flush=True)
    return {"families": found, "not_built": missing}


def _lines(rows: dict[str, Any]) -> list[str]:
    return [f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]


if __name__ == "__main__":
    torch.set_num_threads(1)
    result = table(sys.argv[2:] or list(families()))
    lines = [f" {json.dumps(kind)}: {{\n" + ",\n".join(_lines(rows)) + "\n }" for kind, rows in result.items()]
    command = json.dumps(" ".join(["python -m tests.support.models.model_families", *sys.argv[1:]]))
    Path(sys.argv[1]).write_text("{\n" + ",\n".join([f' "command": {command}', *lines]) + "\n}\n")
