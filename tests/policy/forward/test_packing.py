"""The layout of rows behind shared segments, and padded."""

from __future__ import annotations

import pytest
import torch

from mrlm_pl.policy.forward import row_tree
from mrlm_pl.policy.forward.packing import RowPlan, Segments, padded_chunks

# two rows that agree on 5 6 7 and differ afterwards, one without action tokens, one alone
TOKENS = torch.tensor([[5, 6, 7, 1, 2, 0], [5, 6, 7, 3, 4, 0], [5, 6, 7, 9, 9, 9], [4, 8, 0, 0, 0, 0]])
ACTIONS = torch.tensor([[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]]).bool()
LABELS = torch.tensor([7, 7, 7, 2])


@pytest.fixture(autouse=True)
def everything_is_worth_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tree, "LEAST_SAVING", 1)


def test_packed_row_by_hand() -> None:
    (inputs,) = RowPlan(TOKENS, ACTIONS, LABELS).packed(None)
    # prefix 5 6 7 | row 0 still needs token 1 to predict 2 | row 1 its 3 to predict 4 | row 3 is fed 4 to predict 8
    assert inputs.input_ids.tolist() == [[5, 6, 7, 1, 3, 4]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 3, 0]]
    assert inputs.segments == Segments(((3,), (1, 1, 1)), (((),), ((0,), (0,), (-1,))))
    assert inputs.predictors.tolist() == [2, 3, 2, 4, 5]
    assert inputs.targets.tolist() == [1, 2, 3, 4, 8]
    assert inputs.destinations.tolist() == [3, 4, 9, 10, 19]


def test_a_tree_of_rows_by_hand() -> None:
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 8, 9, 9], [1, 2, 3, 6, 0, 0, 0], [1, 2, 9, 9, 5, 0, 0]])
    actions = torch.zeros_like(tokens).bool()
    actions[0, 2:] = True  # 3 4 is sampled here and context in the next row
    actions[1, 6] = actions[2, 3] = actions[3, 4] = True
    (inputs,) = RowPlan(tokens, actions, torch.zeros(4)).packed(None)
    # 1 2 for all | 3 4 for rows 0 and 1, whose beginning is all that row 2 needs | their own tokens, and those of row 3
    assert inputs.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 8, 9, 9, 9]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 4, 5, 2, 3]]
    assert inputs.segments == Segments(((2,), (2,), (2, 2, 2)), (((),), ((0,),), ((0, 0), (0, 0), (0, -1))))
    found = dict(zip(inputs.destinations.tolist(), inputs.predictors.tolist(), strict=True))
    assert found == {2: 1, 3: 2, 4: 3, 5: 4, 6: 5, 7 + 6: 7, 14 + 3: 2, 21 + 4: 9}
    assert dict(zip(inputs.destinations.tolist(), inputs.targets.tolist(), strict=True))[17] == 6


def test_without_labels_nothing_is_shared_and_rows_without_actions_are_left_out() -> None:
    (inputs,) = RowPlan(TOKENS, ACTIONS, None).packed(None)
    assert inputs.segments == Segments(((4, 4, 1),), (((), (), ()),))
    assert inputs.input_ids.tolist() == [[5, 6, 7, 1, 5, 6, 7, 3, 4]]


def test_padded_rows_by_hand() -> None:
    inputs = RowPlan(TOKENS, ACTIONS, None).pad([0, 3])
    assert inputs.input_ids.tolist() == [[5, 6, 7, 1], [4, 0, 0, 0]]
    assert inputs.attention_mask is not None
    assert inputs.attention_mask.tolist() == [[True] * 4, [True, False, False, False]]
    assert inputs.predictors.tolist() == [2, 3, 4]
    assert inputs.destinations.tolist() == [3, 4, 19]


def test_chunks_keep_groups_together_within_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tree, "CHUNK_COST", 1)
    # three groups of two rows: prefix 2 and two own tokens per row, 6 packed tokens each
    rows = [[g, g, 10 + r, r, 1] for g in range(3) for r in range(2)]
    actions = torch.tensor([[0, 0, 1, 1, 1]] * 6).bool()
    plan = RowPlan(torch.tensor(rows), actions, torch.tensor([0, 0, 1, 1, 2, 2]))

    def chunks(max_tokens: int) -> list[list[int]]:
        return [sorted(set((x.destinations // 5).tolist())) for x in plan.packed(max_tokens)]

    assert chunks(12) == [[0, 1, 2, 3], [4, 5]]
    assert chunks(11) == [[0, 1], [2, 3], [4, 5]]
    # too small for a group: every row computes its own prefix
    assert chunks(4) == chunks(1) == [[row] for row in range(6)]
    assert padded_chunks(plan.fed_lengths, 8) == [[0, 1], [2, 3], [4, 5]]
    # a chunk less is worth computing two tokens twice
    monkeypatch.setattr(row_tree, "CHUNK_COST", 3)
    assert chunks(11) == [[0, 1, 2], [3, 4, 5]]
