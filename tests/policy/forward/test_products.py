"""Products by oneDNN: equal to PyTorch's, with their gradients, and only where they are faster."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from mrlm_pl.engines.local.decoder import Affine
from mrlm_pl.policy import Policy
from mrlm_pl.policy.forward import products
from mrlm_pl.policy.forward.devices import padded_tokens
from mrlm_pl.policy.forward.logprobs import token_logprobs
from mrlm_pl.policy.forward.packing import TokenRows
from mrlm_pl.policy.forward.products import FastLinear, linear, multiply, packed, with_fast_products

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch has no oneDNN")

HAS_BF16 = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
BF16 = pytest.mark.skipif(not HAS_BF16, reason="oneDNN has no bf16 on this processor")


class Calls(TorchDispatchMode):
    """Counts the products of oneDNN and of other libraries; lists the inputs that oneDNN's operator copies."""

    def __init__(self) -> None:
        super().__init__()
        self.onednn = self.others = self.clones = 0
        self.copied: list[tuple[int, ...]] = []
        self.gaps = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        self.onednn += name == "_linear_pointwise"
        self.others += name in ("mm", "addmm", "addmm_", "bmm")
        self.clones += name == "clone"
        if name == "_linear_pointwise":
            x, weight = args[:2]
            self.copied += [tuple(x.shape)] * (not x.is_contiguous())
            self.gaps |= not (weight.is_contiguous() or weight.t().is_contiguous())
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "ONEDNN_IS_FASTER", True)
    monkeypatch.setattr(products, "LEAST", 1)
    torch.manual_seed(0)


def gradients(y: Tensor, *inputs: Tensor) -> list[Tensor]:
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
    return list(torch.autograd.grad((y * weights).sum(), inputs))


@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("input_major", [True, False])
def test_values_and_gradients_are_those_of_a_linear_layer_in_float64(
    shape: tuple[int, ...], bias: bool, input_major: bool
) -> None:
    x, weight = torch.randn(shape), torch.randn(4, 5)
    given = [x, weight.t().contiguous().t() if input_major else weight, *([torch.randn(4)] if bias else [])]
    inputs = [item.requires_grad_() for item in given]
    wide = [item.detach().double().requires_grad_() for item in given]
    with Calls() as calls:
        y = linear(*inputs)
        found = gradients(y, *inputs)
    assert (calls.onednn, calls.others) == (3, 0)
    expected = F.linear(*wide)
    torch.testing.assert_close(y, expected.float())
    for one, other in zip(found, gradients(expected, *wide), strict=True):
        torch.testing.assert_close(one, other.float())


@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5)])
def test_a_product_may_be_changed_in_place(shape: tuple[int, ...]) -> None:
    """The embedding of RoCBert adds to the result of a linear layer."""
    x, weight, other = torch.randn(shape), torch.randn(4, 5).requires_grad_(), torch.randn(4).requires_grad_()
    y = linear(x, weight)
    y += other
    expected = gradients(x @ weight.T + other, weight, other)
    for found, slope in zip(gradients(y, weight, other), expected, strict=True):
        torch.testing.assert_close(found, slope)


def test_transposed_inputs_and_slopes_keep_their_numbers() -> None:
    x, weight, slope = torch.randn(5, 6).t().requires_grad_(), torch.randn(3, 5).requires_grad_(), torch.randn(3, 6).t()
    found = torch.autograd.grad(linear(x, weight), (x, weight), slope)
    torch.testing.assert_close(found[0], slope @ weight)
    torch.testing.assert_close(found[1], slope.t() @ x)
    ones = torch.autograd.grad(linear(x, weight).sum(), weight)  # a slope with one place of memory
    torch.testing.assert_close(ones[0], torch.ones(3, 6) @ x)


@pytest.mark.parametrize("outputs", [3, 7])
def test_the_smaller_factor_of_a_weights_gradient_is_copied(outputs: int) -> None:
    x, weight = torch.randn(6, 5), torch.randn(outputs, 5).requires_grad_()
    with Calls() as calls:
        linear(x, weight).backward(torch.randn(6, outputs))
    assert calls.copied == [(min(5, outputs), 6)]
    assert weight.grad is not None
    assert weight.grad.is_contiguous()


@pytest.mark.parametrize(
    ("weight", "copies"),
    [(torch.randn(3, 7)[:, :5], 1), (torch.randn(5, 3).t(), 0), (torch.ones(1, 1).expand(3, 5), 1)],
)
def test_a_weight_with_gaps_is_copied_first_and_its_transpose_is_not(weight: Tensor, copies: int) -> None:
    x = torch.randn(6, 5)
    with Calls() as calls, torch.no_grad():
        found = linear(x, weight)
    torch.testing.assert_close(found, F.linear(x, weight))
    assert (calls.onednn, calls.gaps, calls.clones) == (1, False, copies)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), pytest.param(torch.bfloat16, 1e-2, marks=BF16)]
)
def test_products_with_a_packed_weight_are_those_with_the_stacked_one(
    bias: bool, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, parts = torch.randn(6, 5).to(dtype), [torch.randn(3, 5), torch.randn(4, 5)]
    added = torch.randn(7).to(dtype) if bias else None
    assert packed(parts, dtype) is None  # small
    monkeypatch.setattr(products, "PACKED", 35)
    weight = packed(parts, dtype)
    assert weight is not None
    assert weight.is_mkldnn
    assert weight.shape == (7, 5)
    with torch.inference_mode():
        found = linear(x, weight, added)
    expected = F.linear(x.double(), torch.cat(parts).to(dtype).double(), None if added is None else added.double())
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    assert packed(parts, torch.float16) is None
    assert packed([part.to("meta") for part in parts], dtype) is None
    monkeypatch.setattr(products, "ONEDNN_IS_FASTER", False)
    assert packed(parts, dtype) is None


def test_a_frozen_weight_has_no_gradient_and_its_input_is_not_kept() -> None:
    x, weight = torch.randn(6, 5, requires_grad=True), torch.randn(3, 5)
    with Calls() as calls:
        y = linear(x, weight)
        node: Any = y.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        assert [item.shape for item in node.saved_tensors if item is not None] == [weight.shape]
        y.sum().backward()
    assert calls.onednn == 2
    torch.testing.assert_close(x.grad, torch.ones(6, 3) @ weight)


def test_other_dtypes_autocast_and_small_products_are_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(6, 5), torch.randn(3, 5)
    with Calls() as calls:
        assert linear(x.double(), weight.double()).dtype == torch.float64
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(x, weight).dtype == torch.bfloat16
        monkeypatch.setattr(products, "LEAST", 6 * 5 * 3 + 1)
        linear(x, weight)
        monkeypatch.setattr(products, "LEAST", 6 * 5 * 3)
        monkeypatch.setattr(products, "ONEDNN_IS_FASTER", False)
        linear(x, weight)
        assert calls.onednn == 0
        monkeypatch.setattr(products, "ONEDNN_IS_FASTER", True)
        linear(x, weight)
    assert calls.onednn == 1


def test_unusual_inputs_are_those_of_a_linear_layer() -> None:
    weight = torch.randn(3, 5, requires_grad=True)
    rows = torch.randn(11)
    for x in (rows[:5], rows.new_empty(0, 5), rows.new_empty(2, 0, 5), rows[:5].expand(4, 5), rows.unfold(0, 5, 2)):
        torch.testing.assert_close(linear(x, weight), F.linear(x, weight))
        found, expected = (gradients(product(x, weight), weight) for product in (linear, F.linear))
        torch.testing.assert_close(found, expected)
    assert linear(torch.ones(2, 0), torch.ones(3, 0)).tolist() == [[0.0] * 3] * 2
    for bias in (torch.arange(6.0)[::2], torch.ones(1).expand(3)):
        torch.testing.assert_close(linear(x, weight, bias), F.linear(x, weight, bias))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(torch.ones(2, 4), weight)


def test_gradients_of_gradients_are_those_of_a_linear_layer() -> None:
    def penalty(product: Any) -> list[Tensor]:
        torch.manual_seed(1)
        x, weight = torch.randn(6, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
        slopes = torch.autograd.grad(product(x, weight).square().sum(), (x, weight), create_graph=True)
        return list(torch.autograd.grad(sum(slope.square().sum() for slope in slopes), (x, weight)))

    torch.testing.assert_close(penalty(linear), penalty(F.linear), rtol=1e-5, atol=1e-5)


def test_products_of_other_threads_are_not_part_of_code_that_one_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch has one flag for all threads, such as one that plays episodes while the learner is compiled."""
    x, weight = torch.randn(6, 5), torch.randn(3, 5)
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    with Calls() as calls:
        torch.testing.assert_close(linear(x, weight), x @ weight.t())
        monkeypatch.setattr(products, "LEAST", 6 * 5 * 3 + 1)
        linear(x, weight)
    assert calls.onednn == 1, "the number of rows decides"


@pytest.mark.parametrize(("rows", "columns"), [(5, 3), (3, 11)])
def test_a_product_is_written_or_added_in_parts(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "PART", 6)  # two rows or columns of three numbers
    left, right = torch.randn(rows, 4), torch.randn(4, columns)
    out = torch.full((rows, columns), float("nan"))
    with Calls() as calls:
        multiply(left, right, out)
    assert (calls.onednn, calls.others) == (-(-max(rows, columns) // 2), 0)
    torch.testing.assert_close(out, left @ right)
    multiply(left, right, out, add=True)
    torch.testing.assert_close(out, 2 * left @ right)


@pytest.mark.parametrize(
    ("processor", "capability", "faster"),
    [
        ("vendor_id\t: AuthenticAMD", "AVX512", True),
        ("AMD64 Family 26 Model 2 Stepping 1, AuthenticAMD", "AVX512", True),
        ("vendor_id\t: AuthenticAMD", "AVX2", False),
        ("vendor_id\t: GenuineIntel", "AVX512", False),
        ("", "DEFAULT", False),
    ],
)
def test_only_avx_512_of_amd_takes_onednn(
    processor: str, capability: str, faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert products.onednn_is_faster(processor) == faster


def tokens_of(count: int) -> int:
    return padded_tokens(count, torch.device("cpu"), torch.float32)


def test_the_layers_of_a_model_but_its_head_compute_so_and_new_shapes_are_rounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2, "vocab_size": 11}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes))
    names = list(model.state_dict())
    ids = torch.tensor([[1, 2, 3]])
    expected = model(ids).logits
    monkeypatch.setattr(products, "ONEDNN_IS_FASTER", False)
    assert tokens_of(65) == 65
    monkeypatch.setattr(products, "ONEDNN_IS_FASTER", True)
    assert [tokens_of(count) for count in (64, 65, 2049)] == [64, 128, 2112]
    assert sum(type(module) is FastLinear for module in with_fast_products(model).modules()) == 2 * 7
    assert type(model.lm_head) is nn.Linear
    assert list(model.state_dict()) == names
    with Calls() as calls:
        torch.testing.assert_close(model(ids).logits, expected)
    assert calls.onednn == 2 * 7


@pytest.mark.parametrize("seed", [None, 0])
def test_a_policy_its_learner_and_its_sampler_take_no_other_product(seed: int | None) -> None:
    policy = Policy("builtin:tiny", random_init_seed=seed)
    policy.load()
    ids = torch.arange(1, 9).repeat(2, 1)
    with Calls() as calls:
        logp = token_logprobs(policy.model, TokenRows(ids, torch.tensor([8, 8]), torch.arange(8).repeat(2, 1) > 3))
        logp.sum().backward()
    layers = sum(type(module) is FastLinear for module in policy.model.modules())
    assert layers == 7 * policy.model.config.num_hidden_layers
    assert (calls.onednn, calls.others) == (3 * layers + 4, 0)  # the head computes its logits twice
    layer, h = Affine(torch.randn(5, 5), None), torch.randn(2, 5)
    with Calls() as calls, torch.inference_mode():
        torch.testing.assert_close(layer.add_to(h, layer.apply(h)), h + h @ layer.weight.t() @ layer.weight.t())
    assert calls.onednn == 2


@pytest.mark.long
def test_compiled_code_takes_onednn_with_equal_gradients() -> None:
    layer = with_fast_products(nn.Sequential(nn.Linear(64, 512), nn.SiLU(), nn.Linear(512, 64)))
    x = torch.randn(6, 64)
    expected = gradients(layer(x), *layer.parameters())
    compiled = torch.compile(layer, dynamic=True, fullgraph=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found = gradients(compiled(x), *layer.parameters())
    counts = {item.key: item.count for item in profile.key_averages()}
    assert counts["mkldnn::_linear_pointwise"] == 2 + 3  # the input needs no gradient
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.long
def test_the_module_can_be_loaded_again() -> None:
    """As notebooks do with edited modules; in its own process, since the classes are then others."""
    code = (
        "import importlib, torch; from mrlm_pl.policy.forward import products; importlib.reload(products); "
        "print(torch.ops.mrlm.product(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]), None).tolist())"
    )
    reply = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert reply.stdout.split() == ["[[11.0]]"], reply.stderr
