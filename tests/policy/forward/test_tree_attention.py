"""Block-sparse attention over packed rows against attention segment by segment, on a CPU; compiled on a GPU."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from mrlm_pl.policy.forward.attention import PackedLayout
from mrlm_pl.policy.forward.logprobs import token_logprobs
from mrlm_pl.policy.forward.packing import RowPlan, Segments, TokenRows
from mrlm_pl.policy.forward.tree_attention import has_kernel, tree_mask
from tests.engines.conftest import build

CPU = torch.device("cpu")


def rows_of_a_tree(branches: tuple[int, ...], lengths: tuple[int, ...]) -> Tensor:
    """Return rows [B, T] that share a beginning, part in several ways, and so on; each part has its length."""
    generator = torch.Generator().manual_seed(0)
    parts: dict[tuple[int, ...], Tensor] = {}
    rows = []
    for path in itertools.product(*(range(count) for count in branches)):
        pieces = []
        for depth, length in enumerate(lengths):
            key = path[: depth + 1]
            if key not in parts:
                parts[key] = torch.randint(1, 1000, (length + sum(key),), generator=generator)
            pieces.append(parts[key])
        rows.append(torch.cat(pieces))
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def packed(ids: Tensor, labels: Tensor | None) -> Segments:
    actions = ids > 0
    actions[:, 0] = False
    (inputs,) = RowPlan(ids, actions, labels).packed(None)
    assert inputs.segments is not None
    return inputs.segments


TREES = {
    "a short row": packed(rows_of_a_tree((1,), (20,)), None),
    "a short tree": packed(rows_of_a_tree((1, 3), (20, 9)), torch.zeros(3)),
    "one row": packed(rows_of_a_tree((1,), (300,)), None),
    "rows without a tree": packed(rows_of_a_tree((5,), (70,)), None),
    "a shared prompt": packed(rows_of_a_tree((1, 6), (200, 90)), torch.zeros(6)),
    "a tree of three levels": packed(rows_of_a_tree((2, 2, 3), (140, 300, 60)), torch.zeros(12)),
    "two trees": packed(rows_of_a_tree((2, 4), (260, 33)), torch.arange(8) // 4),
}


def states(tokens: int, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(tokens, heads, 16, generator=generator).to(device, dtype).requires_grad_() for heads in (4, 2, 2)
    ]


def gradients(found: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(2)).to(found.device, found.dtype)
    return list(torch.autograd.grad((found * weights).sum(), inputs))


@pytest.mark.parametrize("name", TREES)
@pytest.mark.long_after(1)
def test_it_is_the_attention_segment_by_segment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its reference, eager implementation has gradients on a CPU too, but it is rejected there.
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    segments = TREES[name]
    inputs = states(sum(map(sum, segments.lengths)))
    expected, found = (PackedLayout(segments, CPU, kernel).attend(*inputs, 0.3) for kernel in (False, True))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for one, other in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", TREES)
def test_the_kernel_reads_the_blocks_that_are_seen(name: str) -> None:
    segments = TREES[name]
    tokens = sum(map(sum, segments.lengths))
    mask = tree_mask(segments, CPU)
    place = torch.arange(tokens)
    seen = mask.mask_mod(place, place, place[:, None], place)
    missing = -tokens % 128
    padded = torch.nn.functional.pad(seen, (0, missing, 0, missing)).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    assert torch.equal(mask.to_dense()[0, 0].bool(), padded.any(3).any(1))
    numbers, columns = mask.full_kv_num_blocks, mask.full_kv_indices
    assert numbers is not None
    assert columns is not None
    whole = [(row, int(column)) for row in range(len(padded)) for column in columns[0, 0, row, : numbers[0, 0, row]]]
    assert all(padded[row, :, column].all() for row, column in whole)
    assert whole or name in ("a short row", "a short tree", "rows without a tree")  # there a row ends within each block


@pytest.mark.parametrize(
    ("device", "dropout", "size", "dtype", "taken"),
    [
        ("cuda", False, 16, torch.float32, True),
        ("cpu", False, 16, torch.float32, False),
        ("cuda", True, 16, torch.float32, False),
        ("cuda", False, 8, torch.float32, False),
        ("cuda", False, 16, torch.float64, False),
    ],
)
def test_the_kernel_is_taken_on_a_gpu(device: str, dropout: bool, size: int, dtype: torch.dtype, taken: bool) -> None:
    config = LlamaConfig(hidden_size=4 * size, num_attention_heads=4)
    assert has_kernel(config, dtype, torch.device(device), dropout) == taken


def test_log_probabilities_through_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("qwen2", hidden_size=64, vocab_size=1000, max_position_embeddings=1024)
    ids = rows_of_a_tree((2, 3), (150, 40))
    actions = ids > 0
    actions[:, :100] = False
    rows = TokenRows(ids, (ids > 0).sum(1), actions, prefix_groups=torch.arange(6) // 3)
    with torch.no_grad():
        expected = token_logprobs(model, rows)
        monkeypatch.setattr("mrlm_pl.policy.forward.passes.has_kernel", lambda *_, **__: True)
        found = token_logprobs(model, rows)
    assert not torch.equal(found, expected)  # another order of sums
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
def test_the_compiled_kernel_is_the_attention_segment_by_segment(dtype: torch.dtype, error: float) -> None:
    device = torch.device("cuda")
    for segments in TREES.values():
        inputs = states(sum(map(sum, segments.lengths)), device, dtype)
        expected, found = (PackedLayout(segments, device, kernel).attend(*inputs, 0.3) for kernel in (False, True))
        torch.testing.assert_close(found, expected, atol=error, rtol=error)
        for one, other in zip(gradients(found, inputs), gradients(expected, inputs), strict=True):
            torch.testing.assert_close(one, other, atol=10 * error, rtol=10 * error)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_long_row_needs_no_table_of_tokens_by_tokens() -> None:
    device = torch.device("cuda")
    short = TREES["a short tree"]
    for heads in range(1, 12):  # more kernels than PyTorch's own limit
        query = torch.randn(sum(map(sum, short.lengths)), heads, 16, device=device)
        PackedLayout(short, device, in_one=True).attend(query, query[:, :1], query[:, :1], 0.3)
    segments = packed(rows_of_a_tree((1, 64), (2000, 500)), torch.zeros(64))
    tokens = sum(map(sum, segments.lengths))
    inputs = states(tokens, device, torch.bfloat16)
    layout = PackedLayout(segments, device, in_one=True)
    layout.attend(*inputs, scaling=0.3)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layout.attend(*inputs, scaling=0.3)
    assert torch.cuda.max_memory_allocated() - before < tokens * tokens / 8
