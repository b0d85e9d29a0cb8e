"""Shapes in buckets where a CPU makes kernels by shape: the same numbers from fewer shapes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mrlm_pl.engines import InProcessEngine, Sampling
from mrlm_pl.engines.base import SampleRequest
from mrlm_pl.policy import Policy
from mrlm_pl.policy.forward.kernel_shapes import TOKENS, bucket, kernels_by_shape

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
                groups, temperature = torch.zeros(count), torch.linspace(0.7, 1.3, count)
                with torch.autocast("cpu", torch.bfloat16):
                    out = policy.outputs(
                        ids, lengths, mask, with_entropy=True, temperature=temperature, prefix_groups=groups
                    )
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
