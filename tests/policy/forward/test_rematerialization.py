"""Activations that are computed again: the same gradients, fewer kept tensors, and nothing held after the graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from mrlm_pl.policy.forward import rematerialization
from mrlm_pl.policy.forward.logprobs import token_logprobs
from mrlm_pl.policy.forward.packing import TokenRows
from mrlm_pl.policy.forward.rematerialization import rematerialized

TOKENS, HIDDEN, INNER = 6, 8, 20


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rematerialization, "LEAST_BYTES", 0)


@pytest.fixture
def kept() -> Iterator[dict[str, StorageWeakRef]]:
    """Follow the memory of the input of every linear layer, by the layer's name, while the test runs."""
    found: dict[str, StorageWeakRef] = {}
    names: dict[nn.Module, str] = {}

    def follow(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if isinstance(module, nn.Linear):
            found[names.setdefault(module, f"{len(names)}")] = StorageWeakRef(inputs[0].untyped_storage())

    handle = nn.modules.module.register_module_forward_pre_hook(follow)
    yield found
    handle.remove()


def gated() -> nn.Sequential:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=INNER, num_attention_heads=1)
    return nn.Sequential(LlamaRMSNorm(HIDDEN), LlamaMLP(config))


def activations(*shape: int) -> Tensor:
    """Return random numbers that are no weights, but need gradients."""
    return torch.randn(shape, requires_grad=True) + 0


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]


def test_the_product_of_a_gated_mlp_is_freed_after_the_forward_pass(kept: dict[str, StorageWeakRef]) -> None:
    model, states = gated(), activations(TOKENS, HIDDEN)
    loss = model(states).square().sum()
    assert [kept[layer].expired() for layer in ("0", "1", "2")] == [False] * 3
    plain = gradients(model, loss)
    with rematerialized():
        loss = model(states).square().sum()
    # inputs of the gate and of the projection up, the norm's result, which needs a weight, and of the projection down
    assert [kept[layer].expired() for layer in ("0", "1", "2")] == [False, False, True]
    again = gradients(model, loss)
    assert len(plain) == 4
    assert all(map(torch.equal, plain, again))


def test_kept_activations_are_freed_with_their_graph() -> None:
    model, states = gated(), activations(TOKENS, HIDDEN)
    followed: list[StorageWeakRef] = []
    gate = model[1].get_submodule("gate_proj")
    gate.register_forward_hook(lambda module, inputs, output: followed.append(StorageWeakRef(output.untyped_storage())))
    model[0].register_forward_pre_hook(
        lambda module, inputs: followed.append(StorageWeakRef(inputs[0].untyped_storage()))
    )
    for backward in (True, False):
        with rematerialized():
            hidden = states + 1
            loss = model(hidden).square().sum()
            del hidden
        assert [one.expired() for one in followed[-2:]] == [False, False]
        if backward:
            loss.backward(retain_graph=True)
        del loss
        # also the input of a norm, an operation of which keeps its own result
        assert [one.expired() for one in followed[-2:]] == [True, True]


def test_each_is_computed_once_in_a_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, states = gated(), activations(TOKENS, HIDDEN)
    with rematerialized():
        loss = model(states).square().sum()
    computed, silu = [], torch.nn.functional.silu

    def counted(gate: Tensor) -> Tensor:
        computed.append(gate.shape)
        return silu(gate)

    monkeypatch.setattr(torch.nn.functional, "silu", counted)
    loss.backward(retain_graph=True)
    first = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
    assert computed == [(TOKENS, INNER)]
    # nothing of it is held until the next
    assert all(map(torch.equal, first, gradients(model, loss)))
    assert computed == [(TOKENS, INNER)] * 2


@pytest.mark.parametrize(
    "loss",
    [
        lambda first, second, weight: (first * second).T @ weight,
        lambda first, second, weight: (first.T * second.T).T @ weight.T,  # not contiguous
        lambda first, second, weight: (first * second)[:2] @ weight.T,  # a part
        lambda first, second, weight: (first * second).unsqueeze(0).expand(2, 3, 5) @ weight.T,
        lambda first, second, weight: _changed(first * second) @ weight.T,
        lambda first, second, weight: torch.nn.functional.silu(first + 1, inplace=True).mul_(second) @ weight.T,
    ],
    ids=["transposed", "strided", "part", "expanded", "changed", "in_place"],
)
def test_gradients_of_views_and_of_operations_in_place(loss: Any) -> None:
    torch.manual_seed(0)
    arguments = [activations(3, 5) for _ in range(3)]
    found = []
    for context in (nullcontext, rematerialized):
        with context():
            total = loss(*arguments).square().sum()
        found.append(torch.autograd.grad(total, arguments))
    assert all(map(torch.equal, *found))


def _changed(states: Tensor) -> Tensor:
    with torch.no_grad():
        states[0] = 1.0
    return states


def test_gradients_of_gradients() -> None:
    torch.manual_seed(0)
    gate, up, weight = (activations(4, 4) for _ in range(3))
    found = []
    for context in (nullcontext, rematerialized):
        with context():
            loss = ((torch.nn.functional.silu(gate) * up) @ weight).square().sum()
            first = torch.autograd.grad(loss, [gate, up, weight], create_graph=True)
        found.append(torch.autograd.grad(torch.cat(first).square().sum(), [gate, up, weight]))
    assert all(map(torch.equal, *found))


def test_a_changed_activation_is_an_error_as_without_recomputation() -> None:
    for context in (nullcontext, rematerialized):
        with context():
            states = activations(4)
            loss = states.square().sum()
            states.add_(5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_weight_is_not_read_again() -> None:
    """Sharding may have freed it when the backward pass is at another layer."""
    weight, states = torch.randn(4, requires_grad=True), activations(4)
    with rematerialized():
        product = states * weight
        followed = StorageWeakRef(product.untyped_storage())
        loss = product.square().sum()
        del product
    assert not followed.expired()
    assert loss.requires_grad


def test_small_activations_are_kept(kept: dict[str, StorageWeakRef], monkeypatch: pytest.MonkeyPatch) -> None:
    model, states = gated(), activations(TOKENS, HIDDEN)
    monkeypatch.setattr(rematerialization, "LEAST_BYTES", 4 * TOKENS * INNER)
    with rematerialized():
        loss = model(states).sum()
    assert [kept[layer].expired() for layer in ("0", "1", "2")] == [False, False, True]
    monkeypatch.setattr(rematerialization, "LEAST_BYTES", 4 * TOKENS * INNER + 1)
    with rematerialized():
        loss = model(states).sum()
    assert not kept["2"].expired()
    assert loss.requires_grad


def test_chains_of_operations_are_bounded() -> None:
    followed, states, factor = [], activations(4), activations(4)
    with rematerialized():
        for _ in range(6):
            states = states * factor
            followed.append(StorageWeakRef(states.untyped_storage()))
    # every third product is kept: the two after it are computed from it
    assert [one.expired() for one in followed[:-1]] == [True, True, False, True, True]
    (gradient,) = torch.autograd.grad(states.sum(), factor)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_gradients_of_log_probabilities_are_equal_bit_for_bit(
    family: str, precision: torch.dtype, checkpointed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = {
        "llama": lambda: LlamaForCausalLM(
            LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2)
        ),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
        ),
    }[family]()
    if checkpointed:
        model.gradient_checkpointing_enable()
        model.train()
    ids, mask = torch.randint(0, 31, (4, 12)), torch.zeros(4, 12, dtype=torch.bool)
    mask[:, 5:] = True
    found = []
    for context in (nullcontext, rematerialized):
        monkeypatch.setattr("mrlm_pl.policy.forward.logprobs.rematerialized", context)
        for most in (None, 24):  # in one pass, and in several, each of which is recomputed as a whole
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16):
                out = token_logprobs(model, TokenRows(ids, torch.full((4,), 12), mask), max_tokens=most)
            found.append(gradients(model, out.sum()))
    plain, plain_passes, again, again_passes = found
    assert all(map(torch.equal, plain, again))
    assert all(map(torch.equal, plain_passes, again_passes))


def test_log_probabilities_free_them(kept: dict[str, StorageWeakRef]) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=40, num_hidden_layers=1, num_attention_heads=2)
    )
    mask = torch.zeros(4, 12, dtype=torch.bool)
    mask[:, 5:] = True
    loss = token_logprobs(model, TokenRows(torch.randint(0, 31, (4, 12)), torch.full((4,), 12), mask)).sum()
    # q, k, v, output of the attention, gate, up: results of norms, which need weights, and of the attention
    assert [kept[f"{layer}"].expired() for layer in range(7)] == [False] * 6 + [True]
    assert loss.requires_grad
