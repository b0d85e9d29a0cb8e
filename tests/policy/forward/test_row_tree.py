"""Trees of shared tokens against counting, and their chunks against trying all."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from mrlm_pl.policy.forward import row_tree
from mrlm_pl.policy.forward.packing import ForwardPass, RowPlan
from mrlm_pl.policy.forward.row_tree import RowTree


def random_rows(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, action mask and labels of rows that often begin alike: 3 words, up to 12 tokens, 2 labels."""
    source = random.Random(seed)
    B, T = source.randint(1, 20), 12
    tokens, actions = torch.zeros(B, T, dtype=torch.int64), torch.zeros(B, T, dtype=torch.bool)
    for row in range(B):
        length = source.randint(2, T)
        kept = source.randint(0, length)
        tokens[row, :length] = torch.tensor([source.randrange(3) for _ in range(length)])
        if row:
            tokens[row, :kept] = tokens[source.randrange(row), :kept]
        actions[row, 1:length] = torch.tensor([source.random() < 0.4 for _ in range(length - 1)])
    return tokens, actions, torch.tensor([source.randrange(2) for _ in range(B)])


def fed(tokens: Tensor, actions: Tensor, row: int) -> list[int]:
    last = max(actions[row].nonzero().flatten().tolist(), default=0)
    return tokens[row, :last].tolist()


def seen(inputs: ForwardPass) -> list[list[int]]:
    """Return for each packed token all tokens that it may attend to, in the order of their chain."""
    assert inputs.segments is not None
    ids, start = inputs.input_ids[0].tolist(), 0
    contents: list[list[list[int]]] = []
    found = []
    for lengths, ancestors in zip(inputs.segments.lengths, inputs.segments.ancestors, strict=True):
        contents.append([])
        for length, chain in zip(lengths, ancestors, strict=True):
            piece = ids[start : start + length]
            start += length
            before = [token for level, place in enumerate(chain) if place >= 0 for token in contents[level][place]]
            contents[-1].append(piece)
            found += [before + piece[: place + 1] for place in range(length)]
    return found


@pytest.mark.parametrize("least", [1, 6])
@pytest.mark.parametrize("max_tokens", [None, 40, 15, 1])
def test_each_action_is_predicted_from_what_came_before_it(
    max_tokens: int | None, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_tree, "LEAST_SAVING", least)
    for seed in range(25):
        tokens, actions, labels = random_rows(seed)
        places = []
        for inputs in RowPlan(tokens, actions, labels).packed(max_tokens):
            context = seen(inputs)
            assert inputs.position_ids[0].tolist() == [len(chain) - 1 for chain in context]
            for place, predictor, target in zip(
                inputs.destinations.tolist(), inputs.predictors.tolist(), inputs.targets.tolist(), strict=True
            ):
                row, column = divmod(place, 12)
                assert context[predictor] == tokens[row, :column].tolist()
                assert target == tokens[row, column]
                places.append(place)
        assert sorted(places) == actions.flatten().nonzero().flatten().tolist()


def test_every_distinct_token_is_computed_once_in_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tree, "LEAST_SAVING", 1)
    for seed, max_tokens in itertools.product(range(25), (None, 30)):
        tokens, actions, labels = random_rows(seed)
        for inputs in RowPlan(tokens, actions, labels).packed(max_tokens):
            rows = set((inputs.destinations // 12).tolist())
            lines = {row: fed(tokens, actions, row) for row in rows}
            distinct = {(int(labels[row]), *line[: end + 1]) for row, line in lines.items() for end in range(len(line))}
            assert inputs.input_ids.shape[1] == len(distinct)
            assert max_tokens is None or len(distinct) <= max_tokens


def test_chunks_are_the_cheapest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tree, "CHUNK_COST", 3)
    source = random.Random(0)
    for _ in range(100):
        leaves = source.randint(1, 8)
        lengths = [source.randint(1, 9) for _ in range(leaves)]
        shared = [0] + [source.randint(0, min(pair) - 1) for pair in itertools.pairwise(lengths)]
        tree = RowTree([[leaf] for leaf in range(leaves)], lengths, shared)
        got = tree.chunks(14)
        assert [leaf for chunk in got for leaf in chunk] == list(range(leaves))

        def cost(chunk: range) -> int:
            return lengths[chunk[0]] + sum(lengths[leaf] - shared[leaf] for leaf in chunk[1:])  # noqa: B023

        def total(cuts: list[range]) -> int | None:
            fits = all(cost(cut) <= 14 or len(cut) == 1 for cut in cuts)
            return sum(map(cost, cuts)) + 3 * len(cuts) if fits else None

        ways = []
        for number in range(leaves):
            for inner in itertools.combinations(range(1, leaves), number):
                ways.append([range(a, b) for a, b in itertools.pairwise([0, *inner, leaves])])
        assert total(got) == min(found for way in ways if (found := total(way)) is not None)


def test_what_saves_too_little_is_not_shared() -> None:
    def shared(*rows: list[int]) -> list[int]:
        width = max(map(len, rows)) + 1
        tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        return RowTree.of(tokens, [len(row) for row in rows], torch.zeros(len(rows))).shared

    assert shared([1] * 31 + [2], [1] * 31 + [3]) == [0, 0]
    assert shared([1] * 32 + [2], [1] * 32 + [3]) == [0, 32]
    # three rows save 2 * 5 tokens: too few, so the two that have 40 in common begin at once
    assert shared([1] * 40 + [2], [1] * 40 + [3], [1] * 5 + [4]) == [0, 40, 0]
    # saved from the fifth token on: 35, but in the second case only 20
    assert shared(*[[1] * 40 + [n] for n in (2, 3)], *[[1] * 5 + [n] for n in range(2, 10)]) == [0, 40, *[5] * 8]
    assert shared(*[[1] * 25 + [n] for n in (2, 3)], *[[1] * 5 + [n] for n in range(2, 10)]) == [0, *[5] * 9]


def test_longer_labels_come_first_and_contained_rows_ride_along() -> None:
    tokens = torch.tensor([[1, 2, 3, 0], [7, 8, 9, 9], [7, 8, 9, 9], [7, 8, 0, 0], [5, 0, 0, 0]])
    tree = RowTree.of(tokens, [2, 4, 4, 2, 0], torch.tensor([0, 1, 1, 1, 0]))
    assert tree == RowTree([[1, 2, 3], [0]], [4, 2], [0, 0])


@pytest.mark.parametrize("copies", [1, 200])
def test_what_rows_share_counts_for_each_of_them_in_the_bound(copies: int) -> None:
    """Keys are copied for each leaf, and hidden states for each row: few tokens can be computed for very many rows."""
    common = torch.arange(100).expand(200, 100)
    ends = torch.arange(200)[:, None].expand(200, 3) if copies == 1 else torch.zeros(200, 3, dtype=torch.int64)
    tokens = torch.cat([common, ends], 1)
    actions = torch.zeros(200, 103, dtype=torch.bool)
    actions[:, 100:] = True
    places = []
    for inputs in RowPlan(tokens, actions, torch.zeros(200, dtype=torch.int64)).packed(800):
        assert inputs.input_ids.shape[1] <= 800
        assert len(set((inputs.destinations // 103).tolist())) * 102 <= row_tree.MOST_READ * 800
        places += inputs.destinations.tolist()
    assert sorted(places) == actions.flatten().nonzero().flatten().tolist()
