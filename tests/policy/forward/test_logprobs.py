"""Log-probabilities of a batch against the model's own padded forward pass, for every family and layout."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from mrlm_pl.policy.forward import attention, products, row_tree
from mrlm_pl.policy.forward import head as chunked_head
from mrlm_pl.policy.forward.attention import ATTENTION_NAME, packed_attention_forward
from mrlm_pl.policy.forward.families import PACKED_FAMILIES, PADDED_FAMILIES, forward_path, log_path
from mrlm_pl.policy.forward.logprobs import bounded_together, token_logprobs, token_outputs, token_values
from mrlm_pl.policy.forward.packing import TokenRows
from mrlm_pl.policy.value_head import ValueHead
from tests.support.models.largest_tensor import LargestTensor

V = 50
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GPT2_SIZES = {
    "vocab_size": V,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
LONGROPE = {
    "original_max_position_embeddings": 12,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 4,
        "long_factor": [1.2, 1.5, 2.0, 3.0],
        "original_max_position_embeddings": 12,
    },
}
WINDOWLESS = {"mistral", "mixtral", "phi3", "starcoder2"}


@pytest.fixture(autouse=True)
def everything_is_worth_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tree, "LEAST_SAVING", 1)


def tiny_model(family: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(GPT2_SIZES if family == "gpt2" else SIZES)
    if family in WINDOWLESS:
        sizes["sliding_window"] = None
    if "moe" in family or family == "mixtral":
        sizes |= {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(sizes | changes)))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.train()


class Batch:
    """Seven rows: two groups with ragged prompts, a multi-turn row, one without actions, one sampled from its start."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.token_ids = torch.randint(0, V, (7, 20), generator=generator)
        self.token_ids[1:3, :6] = self.token_ids[0, :6]
        self.token_ids[4, :9] = self.token_ids[3, :9]
        self.lengths = torch.tensor([15, 20, 10, 18, 17, 9, 12])
        self.action_mask = torch.zeros(7, 20, dtype=torch.bool)
        for row, start, stop in ((0, 7, 15), (1, 6, 12), (1, 15, 18), (2, 6, 10), (3, 9, 18), (4, 9, 10), (6, 1, 12)):
            self.action_mask[row, start:stop] = True
        self.groups = torch.tensor([3, 3, 3, 1, 1, 1, 8])
        self.weights = torch.randn(7, 20, generator=generator)

    def rows(self, **options: Tensor) -> TokenRows:
        return TokenRows(self.token_ids, self.lengths, self.action_mask, **options)

    def shared(self) -> TokenRows:
        return self.rows(prefix_groups=self.groups)


def plain_log_softmax(model: Any, batch: Batch, temperature: float | Tensor = 1.0) -> Tensor:
    """Return log-softmax of the model's own padded forward pass, [B, T, V]; entry t is the distribution of token t."""
    attention_mask = (torch.arange(20) < batch.lengths[:, None]).long()
    modes = [module.training for module in model.modules()]
    model.eval()
    logits = model(input_ids=batch.token_ids, attention_mask=attention_mask).logits
    for module, mode in zip(model.modules(), modes, strict=True):
        module.training = mode
    return (logits / temperature).log_softmax(-1).roll(1, dims=1)


def plain_logprobs(model: Any, batch: Batch, temperature: float | Tensor = 1.0) -> Tensor:
    log_softmax = plain_log_softmax(model, batch, temperature)
    chosen = log_softmax.gather(-1, batch.token_ids[..., None]).squeeze(-1)
    return chosen.masked_fill(~batch.action_mask, 0.0)


def gradients(model: Any, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    largest = max(grad.norm() for grad in want.values())
    for name, grad in want.items():
        # a gradient that is 0 in exact arithmetic (the keys' bias) is compared with the size of the others
        assert (got[name] - grad).norm() <= 1e-5 * grad.norm() + 1e-7 * largest, name


@pytest.mark.parametrize("family", [*sorted(PACKED_FAMILIES | PADDED_FAMILIES), "gemma2", "granite"])
def test_values_and_gradients_are_those_of_the_padded_forward_pass(family: str) -> None:
    model, batch = tiny_model(family), Batch()
    expected_path = "packed" if family in PACKED_FAMILIES else "padded" if family in PADDED_FAMILIES else "logits"
    assert forward_path(model).name == expected_path
    expected = plain_logprobs(model, batch)
    expected_gradients = gradients(model, (expected * batch.weights).sum())
    got = token_logprobs(model, batch.shared())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert (got[~batch.action_mask] == 0).all()
    assert_same_gradients(gradients(model, (got * batch.weights).sum()), expected_gradients)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma2"])
@pytest.mark.parametrize("max_tokens", [1, 30, 45])
def test_chunks_change_neither_values_nor_gradients(family: str, max_tokens: int) -> None:
    model, batch = tiny_model(family), Batch()
    temperature = torch.full((7,), 0.7)
    rows = batch.rows(temperature=temperature, prefix_groups=batch.groups)
    whole = token_logprobs(model, rows)
    whole_gradients = gradients(model, (whole * batch.weights).sum())
    got = token_logprobs(model, rows, max_tokens=max_tokens)
    torch.testing.assert_close(got, whole, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model, (got * batch.weights).sum()), whole_gradients)


def test_passes_of_one_backward_pass_are_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ONEDNN_IS_FASTER", False)  # it would pad the passes
    model, batch = tiny_model("qwen2"), Batch()
    calls = [0]
    model.model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))

    def passes(max_tokens: int | None, together: bool) -> tuple[int, dict[str, Tensor]]:
        calls[0] = 0
        with bounded_together() if together else nullcontext():
            found = [token_logprobs(model, batch.rows(), max_tokens=max_tokens) for _ in range(3)]
        loss = torch.stack([(logp * batch.weights).sum() for logp in found]).sum()
        return calls[0], gradients(model, loss)

    fed = 14 + 17 + 9 + 17 + 9 + 11
    free, expected = passes(None, True)
    for max_tokens, again in ((3 * fed, 0), (3 * fed - 1, 1), (2 * fed - 1, 2), (fed, 2)):
        found, got = passes(max_tokens, True)
        assert found == free == 3
        assert calls[0] == 3 + again
        assert_same_gradients(got, expected)
    passes(fed, False)
    assert calls[0] == 3, "each may hold one pass when they share no backward pass"


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma2"])
def test_temperature_and_entropy(family: str) -> None:
    model, batch = tiny_model(family), Batch()
    for temperature in (torch.full((7,), 0.7), torch.linspace(0.5, 1.5, 7)):
        divisor = temperature[:, None, None]
        log_softmax = plain_log_softmax(model, batch, divisor)
        expected = -(log_softmax.exp() * log_softmax).sum(-1).masked_fill(~batch.action_mask, 0.0)
        log_probs, entropy, *_ = token_outputs(
            model, batch.rows(temperature=temperature, prefix_groups=batch.groups), with_entropy=True
        )
        assert entropy is not None
        torch.testing.assert_close(log_probs, plain_logprobs(model, batch, divisor), rtol=0, atol=1e-5)
        torch.testing.assert_close(entropy, expected, rtol=0, atol=1e-5)
        expected_gradients = gradients(model, (expected * batch.weights).sum())
        assert_same_gradients(gradients(model, (entropy * batch.weights).sum()), expected_gradients)


@pytest.mark.parametrize("max_tokens", [None, 25])
@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma2"])  # packed, padded, logits
def test_values_come_from_the_state_before_each_token(family: str, max_tokens: int | None) -> None:
    model, batch = tiny_model(family), Batch()
    head = ValueHead(model.config.hidden_size)
    with torch.no_grad():
        head.linear.weight.copy_(torch.linspace(-1.0, 1.0, model.config.hidden_size))
        head.linear.bias.fill_(0.25)
    hidden = torch.zeros(7, 20, model.config.hidden_size)
    model.eval()
    for row, length in enumerate(batch.lengths.tolist()):
        ids = batch.token_ids[row : row + 1, :length]
        hidden[row, :length] = model(ids, output_hidden_states=True).hidden_states[-1][0]
    states = torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]  # the state before token t is that of token t - 1
    expected = (states @ head.linear.weight[0] + 0.25).masked_fill(~batch.action_mask, 0.0)
    rows = batch.shared()
    found = token_outputs(model, rows, with_entropy=True, value_head=head, max_tokens=max_tokens)
    assert found.values is not None
    torch.testing.assert_close(found.values, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.logp, token_logprobs(model, rows, max_tokens=max_tokens))
    alone = token_values(model, head, rows, max_tokens=max_tokens)
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)
    wanted = gradients(model, (expected * batch.weights).sum())
    wanted.pop("lm_head.weight", None)
    got = gradients(model, (alone * batch.weights).sum())
    got.pop("lm_head.weight", None)
    assert_same_gradients(got, wanted)


def turn_tree() -> Batch:
    """Return seven rows of a tree: decisions 3 to 6 follow 0 and 1, and 5 and 6 are alike up to their last token."""
    batch = Batch()
    ids, mask = batch.token_ids, torch.zeros(7, 20, dtype=torch.bool)
    ids[1:, :5] = ids[0, :5]
    for row, before in ((3, 0), (4, 0), (5, 1), (6, 1)):
        ids[row, :10] = ids[before, :10]
    ids[4, 10:12], ids[6, 10:19] = ids[3, 10:12], ids[5, 10:19]
    for row, start, stop in ((0, 5, 10), (1, 5, 10), (2, 5, 8), (3, 12, 20), (4, 12, 17), (5, 12, 19), (6, 12, 20)):
        mask[row, start:stop] = True
    batch.action_mask, batch.lengths, batch.groups = mask, torch.full((7,), 20), torch.zeros(7, dtype=torch.int64)
    return batch


@pytest.mark.parametrize("max_tokens", [None, 50, 30])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_rows_of_a_turn_tree(family: str, max_tokens: int | None) -> None:
    model, batch = tiny_model(family), turn_tree()
    expected = plain_logprobs(model, batch)
    expected_gradients = gradients(model, (expected * batch.weights).sum())
    got = token_logprobs(model, batch.shared(), max_tokens=max_tokens)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model, (got * batch.weights).sum()), expected_gradients)
    unshared = token_logprobs(model, batch.rows())
    torch.testing.assert_close(got, unshared, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", ["groups", "tree", "one group"])
@pytest.mark.parametrize(("most", "causal"), [(1, 1024), (60, 1024), (400, 1024), (1, 1)])
def test_other_masks_change_neither_values_nor_gradients(
    rows: str, most: int, causal: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = tiny_model("llama"), turn_tree() if rows == "tree" else Batch()
    if rows == "one group":
        batch.action_mask[3:] = False
    expected = plain_logprobs(model, batch)
    expected_gradients = gradients(model, (expected * batch.weights).sum())
    monkeypatch.setattr(attention, "MASK_ELEMENTS", most)
    monkeypatch.setattr(attention, "CAUSAL_TOKENS", causal)
    got = token_logprobs(model, batch.shared())
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model, (got * batch.weights).sum()), expected_gradients)
    with torch.no_grad():
        torch.testing.assert_close(token_logprobs(model, batch.shared()), got, rtol=0, atol=1e-6)


def test_parts_of_a_mask_have_the_same_dropout_in_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = tiny_model("llama", attention_dropout=0.5), Batch()
    monkeypatch.setattr(attention, "MASK_ELEMENTS", 60)

    def found() -> dict[str, Tensor]:
        got = token_logprobs(model, batch.shared(), noise_seed=3)
        return gradients(model, (got * batch.weights).sum())

    recomputed = found()
    monkeypatch.setattr(attention, "checkpoint", lambda run, *inputs, **_: run(*inputs))
    assert_same_gradients(recomputed, found())


@pytest.mark.parametrize("causal", [1, 1024])
@pytest.mark.parametrize(("second", "max_tokens"), [(40, None), (60, None), (60, 1000)])
@pytest.mark.long_after(2)
def test_no_tensor_has_the_square_of_a_rows_tokens(
    causal: int, second: int, max_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    T, model = 512, tiny_model("llama", max_position_embeddings=512)
    token_ids = torch.randint(0, V, (4, T), generator=torch.Generator().manual_seed(0))
    token_ids[1, :60] = token_ids[0, :60]
    token_ids[3, :second] = token_ids[2, :second]
    action_mask = torch.zeros(4, T, dtype=torch.bool)
    action_mask[:, 100:] = True
    monkeypatch.setattr(attention, "MASK_ELEMENTS", 2**14)
    monkeypatch.setattr(attention, "CAUSAL_TOKENS", causal)
    with LargestTensor() as sizes:
        labels, lengths = torch.tensor([0, 0, 1, 1]), torch.full((4,), T)
        rows = TokenRows(token_ids, lengths, action_mask, prefix_groups=labels)
        token_logprobs(model, rows, max_tokens=max_tokens).sum().backward()
    # a mask of one row would have nearly T * T elements
    assert sizes.elements < T * T // 2


def test_prefixes_that_unequally_many_rows_share() -> None:
    model, batch = tiny_model("llama"), Batch()
    batch.action_mask[4, 9:17] = True
    batch.action_mask[1, 15:] = False  # the longest two rows share a prefix, three another, and one has none
    got = token_logprobs(model, batch.shared())
    torch.testing.assert_close(got, plain_logprobs(model, batch), rtol=0, atol=1e-5)


def test_rows_of_equal_shape() -> None:
    model, batch = tiny_model("qwen3"), Batch()
    batch.token_ids = batch.token_ids[[0, 1, 3, 4]].contiguous()
    batch.token_ids[:2, :5], batch.token_ids[2:, :5] = batch.token_ids[0, :5], batch.token_ids[3, :5].clone()
    batch.token_ids[:, 5] = torch.arange(4)
    batch.lengths, batch.weights = torch.full((4,), 20), batch.weights[:4]
    batch.action_mask = (torch.arange(20) >= 5).expand(4, 20)
    expected = plain_logprobs(model, batch)
    expected_gradients = gradients(model, (expected * batch.weights).sum())
    for groups in (torch.tensor([0, 0, 1, 1]), torch.tensor([0, 0, 0, 0]), torch.tensor([0, 0, 1, 2]), None):
        got = token_logprobs(model, batch.rows(prefix_groups=groups))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
        assert_same_gradients(gradients(model, (got * batch.weights).sum()), expected_gradients)


@pytest.mark.parametrize("row", [0, 1, 6])
def test_one_row(row: int) -> None:
    model, batch = tiny_model("llama"), Batch()
    expected = plain_logprobs(model, batch)[row]
    got = token_logprobs(model, batch.shared().select(torch.tensor([row])))
    torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_padding_has_no_influence(family: str) -> None:
    model, batch = tiny_model(family), Batch()
    before = token_logprobs(model, batch.shared())
    padding = torch.arange(20) >= batch.lengths[:, None]
    batch.token_ids = batch.token_ids.where(~padding, 0)
    assert torch.equal(token_logprobs(model, batch.shared()), before)


def test_a_batch_without_actions_is_zero_and_still_reaches_every_parameter() -> None:
    model, batch = tiny_model("qwen2"), Batch()
    batch.action_mask = torch.zeros_like(batch.action_mask)
    got = token_logprobs(model, batch.shared())
    assert got.shape == (7, 20)
    assert not got.any()
    grads = gradients(model, got.sum())
    assert grads.keys() == dict(model.named_parameters()).keys()
    assert not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma2"])
def test_dropout_is_off_and_the_module_is_left_as_it_was(family: str) -> None:
    rates = (
        {"resid_pdrop": 0.5, "attn_pdrop": 0.5, "embd_pdrop": 0.5} if family == "gpt2" else {"attention_dropout": 0.5}
    )
    model, batch = tiny_model(family, **rates), Batch()
    implementation = model.config._attn_implementation
    attributes = {name: dict(vars(module)) for name, module in model.named_modules()}
    first = token_logprobs(model, batch.shared())
    torch.testing.assert_close(first, plain_logprobs(model, batch), rtol=0, atol=1e-5)
    assert model.config._attn_implementation == implementation != ATTENTION_NAME
    assert attributes == {name: dict(vars(module)) for name, module in model.named_modules()}
    assert model.training


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["mixtral", "phimoe"])
def test_a_router_that_is_noisy_in_training_is_not_in_the_learner(family: str, checkpointing: bool) -> None:
    model, batch = tiny_model(family, router_jitter_noise=0.3, input_jitter_noise=0.3, sliding_window=None), Batch()
    expected = plain_logprobs(model, batch)
    expected_gradients = gradients(model, (expected * batch.weights).sum())
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    got = token_logprobs(model, batch.rows())
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model, (got * batch.weights).sum()), expected_gradients)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "gemma2"])  # packed, padded, logits
def test_noise_that_is_asked_for_follows_from_its_seed(family: str) -> None:
    rates = {"resid_pdrop": 0.3, "attn_pdrop": 0.3} if family == "gpt2" else {"attention_dropout": 0.3}
    model, batch = tiny_model(family, **rates), Batch()
    state = torch.get_rng_state()
    first = token_logprobs(model, batch.shared(), noise_seed=1)
    again = token_logprobs(model, batch.shared(), noise_seed=1)
    other = token_logprobs(model, batch.shared(), noise_seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert (first - other)[batch.action_mask].abs().max() > 0.01


@pytest.mark.parametrize("family", ["qwen2", "gemma2"])
def test_the_backward_pass_recomputes_with_the_same_noise(family: str) -> None:
    model, batch = tiny_model(family, attention_dropout=0.3), Batch()
    options = {"max_tokens": 30, "noise_seed": 5}
    values = token_logprobs(model, batch.rows(), **options)  # several passes: each is computed again
    expected_gradients = gradients(model, (values * batch.weights).sum())
    model.gradient_checkpointing_enable({"use_reentrant": False})
    got = token_logprobs(model, batch.rows(), **options)  # and so is each layer of a pass
    torch.testing.assert_close(got, values, rtol=0, atol=1e-6)
    assert_same_gradients(gradients(model, (got * batch.weights).sum()), expected_gradients)
    weight = model.model.layers[0].self_attn.q_proj.weight
    (gradient,) = torch.autograd.grad((token_logprobs(model, batch.rows(), **options) * batch.weights).sum(), [weight])
    step = 1e-2 * gradient / gradient.norm()
    with torch.no_grad():
        weight += step
        above = (token_logprobs(model, batch.rows(), **options) * batch.weights).sum()
        weight -= 2 * step
        below = (token_logprobs(model, batch.rows(), **options) * batch.weights).sum()
    assert (above - below) / 2e-2 == pytest.approx(gradient.norm().item(), rel=0.05)


def test_rows_on_both_sides_of_a_long_rotary_embedding() -> None:
    """Each token has the log-probability that the model gives it after the tokens before it alone."""
    model = tiny_model("phi3", **LONGROPE).eval()
    batch = Batch()
    assert batch.lengths.max() > 12 > batch.lengths.min()
    expected = torch.zeros(7, 20)
    for row, column in batch.action_mask.nonzero().tolist():
        ids = batch.token_ids[row : row + 1]
        with torch.no_grad():
            expected[row, column] = model(ids[:, :column]).logits[0, -1].log_softmax(-1)[ids[0, column]]
    for rows, max_tokens in ((batch.rows(), None), (batch.shared(), None), (batch.rows(), 25)):
        got = token_logprobs(model, rows, max_tokens=max_tokens)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_the_module_is_left_as_it_was_when_its_forward_pass_fails() -> None:
    model, batch = tiny_model("qwen2"), Batch()
    batch.token_ids[0, 0] = V  # not in the vocabulary
    with pytest.raises(IndexError):
        token_logprobs(model, batch.rows())
    assert model.config._attn_implementation != ATTENTION_NAME
    assert "forward" not in vars(model.lm_head)


@pytest.mark.parametrize("max_tokens", [None, 30])
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_recomputes_the_same_attention(max_tokens: int | None, reentrant: bool) -> None:
    model, batch = tiny_model("qwen2", attention_dropout=0.5), Batch()
    expected = token_logprobs(model, batch.shared())
    expected_gradients = gradients(model, (expected * batch.weights).sum())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    got = token_logprobs(model, batch.shared(), max_tokens=max_tokens)
    assert_same_gradients(gradients(model, (got * batch.weights).sum()), expected_gradients)
    assert model.model.layers[0].self_attn.attention_dropout == 0.5


def test_tied_embeddings() -> None:
    model, batch = tiny_model("qwen2", tie_word_embeddings=True), Batch()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = plain_logprobs(model, batch)
    expected_gradients = gradients(model, (expected * batch.weights).sum())
    got = token_logprobs(model, batch.shared())
    assert_same_gradients(gradients(model, (got * batch.weights).sum()), expected_gradients)


@pytest.mark.parametrize("target_modules", [["q_proj", "v_proj"], ["q_proj", "lm_head"]])
def test_lora(target_modules: list[str]) -> None:
    config = LoraConfig(target_modules=target_modules, init_lora_weights=False, lora_dropout=0.5, task_type="CAUSAL_LM")
    model, batch = get_peft_model(tiny_model("qwen2"), config).train(), Batch()
    assert forward_path(model).name == ("logits" if "lm_head" in target_modules else "packed")
    expected = plain_logprobs(model, batch)
    expected_gradients = gradients(model, (expected * batch.weights).sum())
    got = token_logprobs(model, batch.shared())
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert_same_gradients(gradients(model, (got * batch.weights).sum()), expected_gradients)


def test_bf16_autocast_is_close_to_fp32() -> None:
    model, batch = tiny_model("qwen2"), Batch()
    exact = token_logprobs(model, batch.shared())
    with torch.autocast("cpu", torch.bfloat16):
        got = token_logprobs(model, batch.shared())
        padded = plain_logprobs(model, batch)
    got.sum().backward()
    assert got.dtype == torch.float32
    # as far from fp32 as the padded bf16 forward pass is
    assert (got - exact).abs().mean() < 2 * (padded - exact).abs().mean()


@pytest.mark.parametrize(
    ("family", "max_tokens", "most_tokens"),
    # without access to the head at least one row's logits exist: row 1 is fed 17 tokens, of which 12 predict
    [("qwen2", None, 8), ("gpt2", None, 8), ("gemma2", None, 12), ("gemma2", 1000, 12)],
)
def test_logits_are_never_held_for_all_action_tokens(
    family: str, max_tokens: int | None, most_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = tiny_model(family, vocab_size=4000), Batch()
    monkeypatch.setattr(chunked_head, "_CHUNK_ELEMENTS_CPU", 8 * 4000)
    parameters = {parameter.numel() for parameter in model.parameters()}
    sizes: set[int] = set()

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            sizes.update(leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
            return result

    with Sizes():
        token_logprobs(model, batch.shared(), max_tokens=max_tokens).sum().backward()
    assert int(batch.action_mask.sum()) > 5 * 8
    assert max(sizes - parameters) == most_tokens * 4000


@pytest.mark.parametrize(
    ("family", "changes", "path", "reason"),
    [
        ("mistral", {"sliding_window": 8}, "padded", "sliding_window=8"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "padded", "sliding"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "padded", "dynamic"),
        ("gemma2", {}, "logits", "gemma2"),
    ],
)
def test_models_that_cannot_be_packed(family: str, changes: dict[str, Any], path: str, reason: str) -> None:
    model, batch = tiny_model(family, **changes), Batch()
    chosen = forward_path(model)
    assert chosen.name == path
    assert reason in chosen.reason
    got = token_logprobs(model, batch.shared())
    torch.testing.assert_close(got, plain_logprobs(model, batch), rtol=0, atol=1e-5)


def test_a_model_class_of_someone_else_computes_its_own_logits() -> None:
    model, batch = tiny_model("qwen2"), Batch()
    original = type(model)

    class Doubled(original):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits * 2
            return output

    model.__class__ = Doubled
    assert "Doubled" in forward_path(model).reason
    got = token_logprobs(model, batch.rows())
    model.__class__ = original
    torch.testing.assert_close(got, plain_logprobs(model, batch, 0.5), rtol=0, atol=1e-5)


def test_the_path_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = tiny_model("smollm3"), Batch()
    log_path.cache_clear()
    with caplog.at_level(logging.INFO, logger="mrlm_pl"):
        token_logprobs(model, batch.rows())
        token_logprobs(model, batch.rows())
    assert len([record for record in caplog.records if "packed" in record.getMessage()]) == 1


def test_a_call_without_layout_during_the_packed_forward_pass_fails_loudly() -> None:
    states = torch.zeros(1, 2, 3, 4)
    with pytest.raises(RuntimeError, match="another thread"):
        packed_attention_forward(nn.Identity(), states, states, states, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first": True}, r"action_mask\[:, 0\] is True in rows \[2\]"),
        ({"padding": True}, r"at or after lengths in rows \[0\]"),
        ({"temperature": torch.ones(3)}, r"temperature has shape \(3,\)"),
        ({"prefix_groups": torch.zeros(2)}, r"prefix_groups has shape \(2,\)"),
    ],
)
def test_contradictory_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    model, batch = tiny_model("qwen2"), Batch()
    if change.pop("first", False):
        batch.action_mask[2, 0] = True
    if change.pop("padding", False):
        batch.action_mask[0, 16] = True
    with pytest.raises(ValueError, match=message):
        token_logprobs(model, batch.rows(**change))
