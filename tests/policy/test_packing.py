"""The layout of rows behind shared prefixes and their division into chunks."""

from __future__ import annotations

import torch

from mrlm_pl.policy.packing import RowPlan, Segments

CPU = torch.device("cpu")
# two rows that agree on 5 6 7 and differ afterwards, one without action tokens, one alone
TOKENS = torch.tensor([[5, 6, 7, 1, 2, 0], [5, 6, 7, 3, 0, 0], [5, 6, 7, 9, 9, 9], [4, 8, 0, 0, 0, 0]])
ACTIONS = torch.tensor([[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]]).bool()
LABELS = torch.tensor([7, 7, 7, 2])


def test_packed_row_by_hand() -> None:
    inputs = RowPlan(TOKENS, ACTIONS, LABELS).pack([[0, 1], [3]], CPU)
    # prefix 5 6 7 | row 0 still needs token 1 to predict 2 | row 1 needs nothing more | row 3 is fed 4 to predict 8
    assert inputs.input_ids.tolist() == [[5, 6, 7, 1, 4]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 0]]
    assert inputs.segments == Segments((3, 0), (1, 0, 1), (0, 0, 1))
    assert inputs.predictors.tolist() == [2, 3, 2, 4]
    assert inputs.targets.tolist() == [1, 2, 3, 8]
    assert inputs.destinations.tolist() == [3, 4, 9, 19]


def test_prefix_ends_before_the_first_action_of_any_member() -> None:
    actions = ACTIONS.clone()
    actions[1, 1] = True  # 6 is now sampled in row 1, although row 0 has the same token there
    inputs = RowPlan(TOKENS, actions, LABELS).pack([[0, 1]], CPU)
    assert inputs.segments == Segments((1,), (3, 2), (0, 0))


def test_without_labels_nothing_is_shared_and_rows_without_actions_are_left_out() -> None:
    plan = RowPlan(TOKENS, ACTIONS, None)
    assert plan.packed_chunks(None) == [[[0], [1], [3]]]
    assert plan.pack([[0], [1], [3]], CPU).segments == Segments((0, 0, 0), (4, 3, 1), (0, 1, 2))


def test_padded_rows_by_hand() -> None:
    inputs = RowPlan(TOKENS, ACTIONS, None).pad([0, 3], CPU)
    assert inputs.input_ids.tolist() == [[5, 6, 7, 1], [4, 0, 0, 0]]
    assert inputs.attention_mask is not None
    assert inputs.attention_mask.tolist() == [[True] * 4, [True, False, False, False]]
    assert inputs.predictors.tolist() == [2, 3, 4]
    assert inputs.destinations.tolist() == [3, 4, 19]


def test_chunks_keep_groups_together_within_the_budget() -> None:
    # three groups of two rows: prefix 2 and two own tokens per row, 6 packed tokens each
    rows = [[g, g, 10 + r, r, 1] for g in range(3) for r in range(2)]
    actions = torch.tensor([[0, 0, 1, 1, 1]] * 6).bool()
    plan = RowPlan(torch.tensor(rows), actions, torch.tensor([0, 0, 1, 1, 2, 2]))
    assert plan.packed_chunks(12) == [[[0, 1], [2, 3]], [[4, 5]]]
    assert plan.packed_chunks(11) == [[[0, 1]], [[2, 3]], [[4, 5]]]
    # too small for a group: every row computes its own prefix
    assert plan.packed_chunks(4) == [[[row]] for row in range(6)]
    assert plan.packed_chunks(1) == [[[row]] for row in range(6)]
    assert plan.padded_chunks(8) == [[0, 1], [2, 3], [4, 5]]
