"""Dtypes and shapes of a device: attention in float32 beside half precision, the same numbers from fewer shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from mrlm_pl.engines import InProcessEngine, Sampling
from mrlm_pl.engines.base import SampleRequest
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import Policy
from mrlm_pl.policy.forward.attention import PackedLayout, packed_attention_forward
from mrlm_pl.policy.forward.devices import TOKENS, bucket, kernels_by_shape, on_device, usable_device
from mrlm_pl.policy.forward.packing import Segments, TokenRows

CPU = torch.device("cpu")
PRODUCTS = {"mm", "addmm", "bmm", "matmul", "linear"}


@pytest.fixture
def bf16_hardware(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    return lambda here: monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: here)


@pytest.fixture(scope="module")
def policy() -> Policy:
    policy = Policy("builtin:tiny")
    policy.load()
    return policy


def test_what_is_pinned_has_its_numbers_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda numbers: pinned.append(numbers) or numbers)
    monkeypatch.setattr(torch.Tensor, "to", lambda numbers, *_, **__: numbers)
    table = torch.arange(6).view(2, 3)
    for numbers in (table[0].expand(4, 3), table[:, :2], table.t()):
        assert torch.equal(on_device(numbers, "cuda"), numbers)
    assert all(numbers.is_contiguous() for numbers in pinned)
    assert len(pinned) == 3


def test_a_device_has_an_index_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(torch, "empty", lambda _, device: made.append(device) or torch.zeros(0))
    monkeypatch.setenv("LOCAL_RANK", "3")
    for count in (8, 1):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert (usable_device("cuda"), usable_device("cuda:1")) == (CPU, CPU)
    assert made == ["cuda:3", "cuda:1", "cuda", "cuda:1"]
    monkeypatch.undo()
    # A build for CUDA names its accelerator where there is no driver too.
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    assert usable_device("auto") == torch.zeros(0, device=accelerator or CPU).device
    with pytest.raises(ConfigurationError, match="device: 'warp' cannot be used"):
        usable_device("warp")


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_is_that_of_float32(dtype: torch.dtype, autocast: bool, kv_heads: int) -> None:
    torch.manual_seed(0)
    layout = PackedLayout(Segments(((6, 6),), (((), ()),)), torch.device("cpu"))
    query, key, value = (torch.randn(1, heads, 12, 16) for heads in (2, kv_heads, kv_heads))
    value = value.to(dtype)
    if not autocast:  # under autocast the rotary embedding promotes queries and keys; values are a projection's result
        query, key = query.to(dtype), key.to(dtype)
    with torch.autocast("cpu", dtype, enabled=autocast):
        found, _ = packed_attention_forward(nn.Identity(), query, key, value, None, packed_layout=layout)
    assert found.dtype == dtype
    for first in (0, 6):
        q, k, v = (x[0, :, first : first + 6].double() for x in (query, key, value))
        scores = (q @ k.transpose(1, 2) / 4).masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), float("-inf"))
        expected = (scores.softmax(-1) @ v).transpose(0, 1).to(dtype)
        # rounded once, at the end; scores in half precision would be wrong by up to 1e-2
        torch.testing.assert_close(found[0, first : first + 6], expected, rtol=2**-7, atol=1e-5)
        assert (found[0, first : first + 6] == expected).float().mean() > 0.98


class Shapes(TorchDispatchMode):
    """Notes the shapes of all matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.split(".")[0] in PRODUCTS:
            self.seen.add((func.__name__, *(item.shape for item in args if isinstance(item, torch.Tensor))))
        return func(*args, **(kwargs or {}))


def test_a_bucket_is_at_most_an_eighth_larger_and_a_bucket_itself() -> None:
    for count in range(1, 5000):
        rounded = bucket(count)
        assert count <= rounded < count + max(8, count / 8)
        assert bucket(rounded) == rounded
    assert len({bucket(count, TOKENS) for count in range(1, 8193)}) == 16 + 8 * 3


@pytest.mark.parametrize(
    ("here", "dtype", "by_shape"),
    [(True, torch.bfloat16, True), (True, torch.float32, False), (False, torch.bfloat16, False)],
)
def test_only_bf16_on_a_cpu_that_has_it_takes_kernels_by_shape(
    here: bool, dtype: torch.dtype, by_shape: bool, bf16_hardware: Any
) -> None:
    bf16_hardware(here)
    assert kernels_by_shape(CPU, dtype) == by_shape
    with torch.autocast("cpu", torch.bfloat16):
        assert kernels_by_shape(CPU, torch.float32) == here
    assert not kernels_by_shape(torch.device("cuda"), torch.bfloat16)


def rows(count: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(count)
    lengths = torch.randint(6, 30, (count,), generator=generator)
    ids = torch.randint(4, 90, (count, 30), generator=generator)
    ids[:, :5] = torch.arange(10, 15)  # a shared prompt
    columns = torch.arange(30)
    return ids, lengths, (columns >= 5) & (columns < lengths[:, None])


def test_the_learner_computes_the_same_from_fewer_shapes(policy: Policy, bf16_hardware: Any) -> None:
    found: dict[bool, list[torch.Tensor]] = {}
    shapes: dict[bool, set[Any]] = {}
    for here in (False, True):
        bf16_hardware(here)
        found[here] = []
        with Shapes() as counted:
            for count in (7, 8, 9, 10):
                ids, lengths, mask = rows(count)
                given = TokenRows(ids, lengths, mask, torch.linspace(0.7, 1.3, count), torch.zeros(count))
                with torch.autocast("cpu", torch.bfloat16):
                    out = policy.outputs(given, with_entropy=True)
                policy.zero_grad()
                out.logp.sum().backward()
                gradient = policy.model.get_input_embeddings().weight.grad
                found[here] += [out.logp.detach(), out.entropy.detach(), gradient.clone()]
        shapes[here] = counted.seen
    for plain, padded in zip(found[False], found[True], strict=True):
        assert torch.allclose(plain, padded, atol=0.02 * float(plain.abs().max()))
    assert len(shapes[True]) < len(shapes[False]) / 1.5


class CountedEngine(InProcessEngine):
    """Counts the products of its own thread."""

    shapes: Shapes

    def _sample(self, *work: Any) -> Any:
        with self.shapes:
            return super()._sample(*work)


@pytest.mark.long
def test_the_sampler_samples_the_same_from_fewer_shapes(policy: Policy, bf16_hardware: Any) -> None:
    context = tuple(range(10, 22))
    requests = [
        SampleRequest(context[: 12 - group], "p", seed, Sampling(max_tokens=4 + seed), (), session=f"{group}/{seed}")
        for group in range(2)
        for seed in range(20)
    ]
    samples, shapes = {}, {}
    for here in (False, True):
        bf16_hardware(here)
        engine = CountedEngine(dtype=torch.bfloat16)
        engine.shapes = Shapes()
        engine.load("p", policy.network, 0)
        first = asyncio.run(engine.sample(requests))
        further = [
            SampleRequest((*one.token_ids, *done.token_ids, 15, 16), "p", 3, Sampling(max_tokens=9), (), one.session)
            for one, done in zip(requests, first, strict=True)
        ]
        samples[here] = [*first, *asyncio.run(engine.sample(further))]
        shapes[here] = engine.shapes.seen
        engine.close()
    same = [plain.token_ids == padded.token_ids for plain, padded in zip(samples[False], samples[True], strict=True)]
    assert sum(same) > 0.9 * len(same), "rounding may change a token"
    for plain, padded, equal in zip(samples[False], samples[True], same, strict=True):
        if equal:
            assert padded.logprobs == pytest.approx(plain.logprobs, abs=0.05)
    assert len(shapes[True]) < len(shapes[False]) / 2
