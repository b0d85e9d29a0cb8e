"""Log-probabilities of the sampled tokens under a policy: the forward pass of every learner in this package.

Three ways lead to the same numbers, chosen from the model's configuration (`forward_path` says which and why):

``packed``
    what rows with the same label begin with in common is computed once, nothing is padded (`packing`, `row_tree`,
    `packed_attention`), and logits exist for one chunk of action tokens at a time (`chunked_head`);
``padded``
    the rows are padded, the logits are chunked;
``logits``
    the rows are padded and the model computes its logits itself, for few rows at a time.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mrlm_pl.errors import PolicyError
from mrlm_pl.policy.chunked_head import chunked_log_probs, default_chunk_size, log_probs_from_logits
from mrlm_pl.policy.held_passes import hold
from mrlm_pl.policy.packed_attention import ATTENTION_NAME, ForwardSwitches, PackedLayout
from mrlm_pl.policy.packing import ForwardInputs, RowPlan
from mrlm_pl.policy.sharding import is_sharded, passes_on_all_ranks

_log = logging.getLogger(__name__)

# Families of transformers whose logits are exactly `lm_head(hidden states)`; the tests compare each with its own
# forward pass. The first set also hands unknown keyword arguments down to the attention function.
PACKED_FAMILIES = frozenset(
    {
        "ernie4_5",
        "gemma",
        "glm4",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "seed_oss",
        "smollm3",
        "starcoder2",
    }
)
PADDED_FAMILIES = frozenset({"gpt2", "gpt_neox", "stablelm"})
# Rotary embeddings that depend on nothing but the position; others look at the longest row of the batch.
_POSITIONAL_ROPE = frozenset({"default", "linear", "llama3", "yarn"})


class ForwardPath(NamedTuple):
    """How a model's log-probabilities are computed, and the property of the model that decides it."""

    name: Literal["packed", "padded", "logits"]
    reason: str


def forward_path(model: nn.Module) -> ForwardPath:
    """The path that `token_logprobs` takes for this model, with the reason.

    Raises:
        PolicyError: the model is a PEFT wrapper that puts virtual tokens before the prompt.
    """
    base = _base_model(model)
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        raise PolicyError(
            f"the adapter {type(adapter).__name__} puts virtual tokens before the prompt, which shifts every position; "
            "use an adapter that changes weights, such as LoRA"
        )
    config = base.config
    family = config.model_type
    head = base.get_output_embeddings()
    if type(base).forward.__module__.partition(".models.")[0] != "transformers":
        return ForwardPath("logits", f"{type(base).__name__} is not a class of transformers")
    if family not in PACKED_FAMILIES | PADDED_FAMILIES:
        return ForwardPath("logits", f"family {family!r} may change its logits after the output head")
    if not isinstance(head, nn.Linear) or type(head).forward is not nn.Linear.forward or "forward" in vars(head):
        return ForwardPath("logits", f"the output head {type(head).__name__} is not a plain linear layer")
    if family not in PACKED_FAMILIES:
        return ForwardPath("padded", f"family {family!r} has no packed attention")
    window = getattr(config, "sliding_window", None)
    layer_types = set(getattr(config, "layer_types", None) or ())
    if window is not None or layer_types - {"full_attention"}:
        return ForwardPath("padded", f"attention is not full (sliding_window={window}, layers {sorted(layer_types)})")
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _POSITIONAL_ROPE:
        return ForwardPath("padded", f"rotary embedding {rope!r} depends on the length of the batch")
    return ForwardPath("packed", f"family {family!r} with full attention")


class TokenOutputs(NamedTuple):
    """What a forward pass says about every action token, each [B, T] float32 and 0 elsewhere; None: not asked for."""

    logp: Tensor
    entropy: Tensor | None
    values: Tensor | None


def token_logprobs(
    model: nn.Module,
    token_ids: Tensor,
    lengths: Tensor,
    action_mask: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    prefix_groups: Tensor | None = None,
    max_tokens: int | None = None,
) -> Tensor:
    """Log-probability of every action token given the tokens before it, [B, T] float32; exactly 0 elsewhere.

    ``out[b, t] = log softmax(logits / temperature)[token t | tokens < t]`` where ``action_mask[b, t]``. Differentiable
    in the model's parameters. Dropout is off whatever mode the module is in. While it runs, no other thread may call
    the same module.

    Args:
        model: a causal language model of transformers, or its PEFT wrapper.
        token_ids: [B, T] int64, padded on the right.
        lengths: [B] number of real tokens of each row.
        action_mask: [B, T] bool, True where the policy sampled the token.
        temperature: the sampler's temperature: a number, one per row [B], or one per token [B, T].
        prefix_groups: [B] labels; rows with the same label compute what any of them begin with in common once. It never
            changes the values, only the work.
        max_tokens: most tokens in one forward pass; its rows, with what they share counted for each, have at most
            ``row_tree.MOST_READ`` times as many. Needing several, they run one after the other and, when gradients
            are wanted, each is computed again in the backward pass, so that memory is that of one pass. So is one that
            is too much beside others that wait for the same backward pass (`held_passes`). The ranks of a sharded model
            make equally many passes, some of them idle.

    Raises:
        ValueError: shapes disagree, an action token has no token before it or lies in the padding, or the temperature
            is not positive.
    """
    return token_outputs(
        model,
        token_ids,
        lengths,
        action_mask,
        temperature=temperature,
        prefix_groups=prefix_groups,
        max_tokens=max_tokens,
    ).logp


def token_outputs(
    model: nn.Module,
    token_ids: Tensor,
    lengths: Tensor,
    action_mask: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    prefix_groups: Tensor | None = None,
    max_tokens: int | None = None,
    with_entropy: bool = False,
    value_head: nn.Module | None = None,
) -> TokenOutputs:
    """`token_logprobs` with, from the same forward pass, the entropies and the values of the action tokens.

    The entropy, in nats, is that of the whole vocabulary at the given temperature. The value of a token is
    ``value_head`` of the last hidden state before it: the expected return from the state in which it was chosen. All
    three are differentiable. The other arguments and the errors are those of `token_logprobs`.

    Args:
        with_entropy: whether the entropies are wanted.
        value_head: module that turns hidden states [n, hidden size] into values [n]; None: no values.
    """
    rows = _evaluate(
        model,
        token_ids,
        lengths,
        action_mask,
        temperature,
        prefix_groups,
        max_tokens,
        _Wanted(True, with_entropy, value_head),
    )
    found = list(rows.unbind())
    return TokenOutputs(
        found.pop(0), found.pop(0) if with_entropy else None, found.pop(0) if value_head is not None else None
    )


def token_values(
    model: nn.Module,
    value_head: nn.Module,
    token_ids: Tensor,
    lengths: Tensor,
    action_mask: Tensor,
    *,
    prefix_groups: Tensor | None = None,
    max_tokens: int | None = None,
) -> Tensor:
    """The values of `token_outputs` alone, [B, T] float32: the language-model head is left out where it can be."""
    wanted = _Wanted(False, False, value_head)
    return _evaluate(model, token_ids, lengths, action_mask, 1.0, prefix_groups, max_tokens, wanted)[0]


class _Wanted(NamedTuple):
    log_probs: bool
    entropy: bool
    value_head: nn.Module | None

    @property
    def rows(self) -> int:
        """Number of things that are wanted."""
        return int(self.log_probs) + int(self.entropy) + int(self.value_head is not None)

    def values(self, hidden: Tensor) -> Tensor:
        """Values [n] in at least float32."""
        assert self.value_head is not None
        values = self.value_head(hidden)
        return values.to(torch.promote_types(values.dtype, torch.float32))

    def stack(self, log_probs: Tensor, entropy: Tensor | None, hidden: Callable[[], Tensor]) -> Tensor:
        """All that is wanted about n tokens as rows [1 to 3, n]."""
        rows = [log_probs] if entropy is None else [log_probs, entropy]
        if self.value_head is not None:
            rows.append(self.values(hidden()).to(log_probs.dtype))
        return torch.stack(rows)


def _evaluate(
    model: nn.Module,
    token_ids: Tensor,
    lengths: Tensor,
    action_mask: Tensor,
    temperature: float | Tensor,
    prefix_groups: Tensor | None,
    max_tokens: int | None,
    wanted: _Wanted,
) -> Tensor:
    """What is wanted of every token, [1 to 3, B, T]."""
    _check_arguments(token_ids, lengths, action_mask, prefix_groups, max_tokens)
    B, T = token_ids.shape
    device = token_ids.device
    temperatures = _flat_temperature(temperature, B, T, device)
    path = forward_path(model)
    _log_path(type(_base_model(model)).__name__, path)
    if not action_mask.any():
        # forward passes all the same: every rank of a sharded model must take part in them, and in their gradient
        passes = passes_on_all_ranks(model, 1)
        idle = torch.stack([_idle_pass(model, wanted, torch.is_grad_enabled() and passes > 1) for _ in range(passes)])
        return torch.zeros(wanted.rows, B, T, device=device) + 0.0 * idle.sum()

    plan = RowPlan(token_ids, action_mask, prefix_groups)
    forward = _model_logits if path.name == "logits" else _chunked_logits
    chunks = _chunks(model, plan, path, max_tokens, device)
    passes = passes_on_all_ranks(model, len(chunks))
    recompute = torch.is_grad_enabled() and passes > 1
    if torch.is_grad_enabled() and passes == 1 and max_tokens is not None and not is_sharded(model):
        # the ranks of a sharded model must compute again alike, whatever each of them holds
        recompute = not hold(chunks[0].input_ids.numel(), max_tokens)
    results, destinations = [], []
    for inputs in chunks:
        chosen = temperatures
        if temperatures is not None and temperatures.dim():
            chosen = temperatures[inputs.destinations]
        run = functools.partial(forward, model, inputs, chosen, wanted)
        results.append(checkpoint(run, use_reentrant=False, preserve_rng_state=False) if recompute else run())
        destinations.append(inputs.destinations)
    values = torch.cat(results, 1)
    for _ in range(passes - len(chunks)):
        values = values + 0.0 * _idle_pass(model, wanted, recompute)
    flat = values.new_zeros(values.shape[0], B * T)
    return flat.index_copy(1, torch.cat(destinations), values).view(-1, B, T)


def _idle_pass(model: nn.Module, wanted: _Wanted, recompute: bool) -> Tensor:
    """A number (0-dim) that depends on all weights, from the shortest row that there is."""
    device = next(model.parameters()).device
    mask = torch.tensor([[False, True]])
    plan = RowPlan(torch.zeros(1, 2, dtype=torch.int64), mask, None)
    path = forward_path(model)
    (inputs,) = _chunks(model, plan, path, None, device)
    forward = _model_logits if path.name == "logits" else _chunked_logits
    run = functools.partial(forward, model, inputs, None, wanted)
    return (checkpoint(run, use_reentrant=False, preserve_rng_state=False) if recompute else run()).sum()


def _chunks(
    model: nn.Module, plan: RowPlan, path: ForwardPath, max_tokens: int | None, device: torch.device
) -> list[ForwardInputs]:
    """The inputs of every forward pass."""
    if path.name == "packed":
        return plan.packed(max_tokens, device)
    if path.name == "logits":
        bound = default_chunk_size(_base_model(model).get_output_embeddings().weight.shape[0], device)
        max_tokens = bound if max_tokens is None else min(bound, max_tokens)
    return [plan.pad(rows, device) for rows in plan.padded_chunks(max_tokens)]


def _chunked_logits(model: nn.Module, inputs: ForwardInputs, temperature: Tensor | None, wanted: _Wanted) -> Tensor:
    """What is wanted of n tokens, [1 to 3, n]; the output head is replaced by the chunked one.

    The model is called as a whole, not its decoder and head one after the other, because sharding gathers the
    parameters of the outermost module in that call.
    """
    base = _base_model(model)
    head = base.get_output_embeddings()

    def forward(hidden: Tensor) -> Tensor:
        predicting = hidden.flatten(0, 1).index_select(0, inputs.predictors)
        if not wanted.log_probs:
            return wanted.values(predicting)[None, None]
        log_probs, entropy = chunked_log_probs(
            predicting,
            head.weight,
            inputs.targets,
            bias=head.bias,
            temperature=temperature,
            with_entropy=wanted.entropy,
        )
        return wanted.stack(log_probs, entropy, lambda: predicting).unsqueeze(0)

    layout: dict[str, Any] = {}
    if inputs.segments is not None:
        layout["packed_layout"] = PackedLayout(inputs.segments, inputs.input_ids.device)
    with ForwardSwitches(base, ATTENTION_NAME if layout else None), _replaced_forward(head, forward):
        output = model(input_ids=inputs.input_ids, position_ids=inputs.position_ids, use_cache=False, **layout)
    return output.logits[0]


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within the context calling ``module`` runs its hooks and ``forward``."""
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]


def _model_logits(model: nn.Module, inputs: ForwardInputs, temperature: Tensor | None, wanted: _Wanted) -> Tensor:
    """What is wanted of n tokens, [1 to 3, n], from the logits that the model computes itself."""
    width = inputs.input_ids.shape[1]
    base = _base_model(model)
    first = int((inputs.predictors % width).min())
    keep: dict[str, Any] = {}
    if "logits_to_keep" in inspect.signature(base.forward).parameters:
        keep["logits_to_keep"] = width - first
    if wanted.value_head is not None:
        keep["output_hidden_states"] = True
    with ForwardSwitches(base, None):
        output = model(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, use_cache=False, **keep)

    def predicting() -> Tensor:
        return output.hidden_states[-1].flatten(0, 1).index_select(0, inputs.predictors)

    if not wanted.log_probs:
        return wanted.values(predicting())[None]
    logits = output.logits
    kept = logits.shape[1]
    row, column = inputs.predictors // width, inputs.predictors % width
    log_probs, entropy = log_probs_from_logits(
        logits.flatten(0, 1).index_select(0, row * kept + column - (width - kept)),
        inputs.targets,
        temperature=temperature,
        with_entropy=wanted.entropy,
    )
    return wanted.stack(log_probs, entropy, predicting)


def _base_model(model: nn.Module) -> Any:
    """The transformers model inside a PEFT wrapper, or ``model`` itself."""
    wrapper: Any = model
    return wrapper.get_base_model() if hasattr(model, "get_base_model") else model


@functools.cache
def _log_path(model: str, path: ForwardPath) -> None:
    """Log the path, once for every model class and reason."""
    _log.info("log-probabilities of %s take the %s path: %s", model, path.name, path.reason)


def _flat_temperature(temperature: float | Tensor, B: int, T: int, device: torch.device) -> Tensor | None:
    """Temperatures [B * T], or a 0-dimensional one for all tokens, or None when there is nothing to divide by."""
    if not isinstance(temperature, Tensor):
        if not temperature > 0:
            raise ValueError(f"temperature is {temperature}, but must be positive")
        return None if temperature == 1 else torch.tensor(float(temperature), device=device)
    if not (temperature > 0).all():
        raise ValueError(f"temperature has the value {temperature.min().item()}, but must be positive")
    temperature = temperature.to(device=device, dtype=torch.float32)
    if temperature.dim() == 0:
        return temperature
    if temperature.shape not in ((B,), (B, T)):
        raise ValueError(f"temperature has shape {tuple(temperature.shape)}; give a number, [{B}] or [{B}, {T}]")
    return temperature.view(B, -1).expand(B, T).reshape(-1)


def _check_arguments(
    token_ids: Tensor, lengths: Tensor, action_mask: Tensor, prefix_groups: Tensor | None, max_tokens: int | None
) -> None:
    """Raise ValueError when the batch contradicts itself."""
    if token_ids.dim() != 2 or 0 in token_ids.shape:
        raise ValueError(f"token_ids has shape {tuple(token_ids.shape)}, but must be [B, T] with at least one token")
    B, T = token_ids.shape
    if action_mask.shape != (B, T) or action_mask.dtype != torch.bool:
        raise ValueError(f"action_mask is {action_mask.dtype} {tuple(action_mask.shape)}, but must be bool [{B}, {T}]")
    for name, value in (("lengths", lengths), ("prefix_groups", prefix_groups)):
        if value is not None and value.shape != (B,):
            raise ValueError(f"{name} has shape {tuple(value.shape)}, but must be [{B}]: one value per row")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}, but must be at least 1, or None for no limit")
    mask, ends = action_mask.cpu(), lengths.cpu()
    if mask[:, 0].any():
        rows = mask[:, 0].nonzero().flatten().tolist()
        raise ValueError(
            f"action_mask[:, 0] is True in rows {rows}: nothing comes before a row's first token, so it has no "
            "log-probability; start every row with a prompt or a beginning-of-sequence token"
        )
    padding = (torch.arange(T) >= ends[:, None]) & mask
    if padding.any():
        rows = padding.any(1).nonzero().flatten().tolist()
        raise ValueError(f"action_mask is True at or after lengths in rows {rows}: padding cannot be an action token")
