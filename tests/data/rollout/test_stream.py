"""The groups of a micro-batch and of its update."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mrlm_pl.data.rollout import stream
from mrlm_pl.data.rollout.stream import GroupPart, TrainingStream
from mrlm_pl.episode import Trajectory
from mrlm_pl.learner.batch import Batch, collate_rows


def updates(accumulation: int, *orders: list[int]) -> list[list[GroupPart]]:
    """The micro-batches of the update at each position of two mini-batches a pass, which has its order of groups."""
    collection: Any = SimpleNamespace(trainer=SimpleNamespace(accumulate_grad_batches=accumulation))
    served = TrainingStream(collection, len(orders), 2, 1)
    served._shuffled_groups = lambda number: torch.tensor(orders[number])  # type: ignore[method-assign]
    assert served.batches == 2 * accumulation * len(orders)
    return [served.update_at(position) for position in range(served.batches)]


def test_every_pass_serves_every_group_once_and_an_update_is_its_micro_batches() -> None:
    made = updates(2, [3, 1, 0, 2, 5, 4, 7, 6], [7, 6, 5, 4, 3, 2, 1, 0])
    found = [[part.groups.tolist() for part in update] for update in made]
    assert [update[position % 2] for position, update in enumerate(found)] == [
        [3, 1], [0, 2], [5, 4], [7, 6], [7, 6], [5, 4], [3, 2], [1, 0],
    ]  # fmt: skip
    assert found[:4] == [[[3, 1], [0, 2]], [[3, 1], [0, 2]], [[5, 4], [7, 6]], [[5, 4], [7, 6]]]


def test_more_micro_batches_than_groups_divide_the_rows_of_each_group(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 2, 3])
    tokens = [[7, 1], [5, 2], [7, 0], [5, 3], [8, 0], [1, 3], [1, 2], [300, 1], [4, 4], [4, 4]]
    rows = [Trajectory("a", "main", tuple(row), (False, True), (0.0, 0.0), ()) for row in tokens]
    table = collate_rows(rows, groups.tolist(), [0] * 10, range(10))
    learner = SimpleNamespace(learners=["main"], rows_with_gradient=lambda rows: torch.arange(10))
    sorted_rows: list[int] = []
    order = stream.prefix_order
    monkeypatch.setattr(stream, "prefix_order", lambda ids: sorted_rows.append(len(ids)) or order(ids))

    def served(position: int) -> list[list[int]]:
        parts = updates(6, [2, 3, 1, 0])[position]
        batches = stream.micro_batches(learner, {"main": table}, parts, lambda sizes: sizes)  # type: ignore[arg-type]
        return [batch.policies["main"].numbers.tolist() if batch.policies else [] for batch in batches]

    assert served(7) == [[6], [5], [7], [1, 3], [2, 0], [4]], "rows with a common prefix are together"
    assert served(5) == [[8], [], [], [9], [], []]
    assert sorted_rows == [8, 2], "once an update, not once a micro-batch"


def test_a_divided_group_is_served_policy_by_policy() -> None:
    """Parts of one policy compute the common prefix of its rows least often."""
    names = ["first", "critic", "second"]
    rows = [Trajectory("a", "main", (1, number), (False, True), (0.0, 0.0), ()) for number in range(4)]
    silent = [Trajectory("a", "main", (2, 0), (False, True), (0.0, 0.0), ())]
    tables = {
        "first": collate_rows(rows, [0, 0, 0, 1], [0] * 4, range(4)),
        "second": collate_rows(rows[:3] + silent, [0] * 4, [0] * 4, range(4)),
    }
    learner: Any = SimpleNamespace(learners=names, rows_with_gradient=lambda rows: torch.arange(3))
    parts = updates(3, [0, 1])[0]
    batches = stream.micro_batches(learner, tables, parts, lambda sizes: sizes)
    served = [{name: own.numbers.tolist() for name, own in batch.policies.items()} for batch in batches]
    assert served == [{"first": [0, 1, 2]}, {"second": [0, 1]}, {"second": [2]}]
    assert [{name: own.numbers.tolist() for name, own in batch.without_gradient.items()} for batch in batches] == [
        {}, {}, {"second": [3]},
    ]  # fmt: skip


def test_a_rollout_that_ends_within_an_update_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """``stop_at_kl`` ends the updates on rollout 0 after the first of two micro-batches of an update."""
    trainer = SimpleNamespace(
        accumulate_grad_batches=2, max_epochs=1, num_training_batches=8, max_steps=-1, world_size=1
    )
    learner = SimpleNamespace(collection_over=False)
    plan = SimpleNamespace(seed=0, groups=4)
    collection: Any = SimpleNamespace(trainer=trainer, learner=learner, plan=plan, on_policy=True)
    collection.collect = lambda iteration, last: ({"main": iteration}, {})
    collection.write_tokens = lambda: None
    monkeypatch.setattr(stream, "data_parallel_rank", lambda trainer: (0, 1))
    monkeypatch.setattr(TrainingStream, "_last_ahead", lambda self: 2)

    def made(learner: Any, rows: Any, parts: Any, sum_ranks: Any) -> list[Batch]:
        found = [Batch({}, {}) for _ in parts]
        for number, batch in enumerate(found):
            batch.origin = (rows["main"], number, parts[number].groups.tolist())  # type: ignore[attr-defined]
        return found

    monkeypatch.setattr(stream, "micro_batches", made)
    training = TrainingStream(collection, passes=1, minibatches=2, iterations=2)
    served = []
    for batch in range(8):
        learner.collection_over = batch in (1, 2, 3)
        served.append(getattr(training.next_batch(), "origin", None))
    assert [item and item[:2] for item in served] == [(0, 0), None, None, None, (1, 0), (1, 1), (1, 0), (1, 1)]
    assert sorted(group for _, _, groups in served[4:] for group in groups) == [0, 1, 2, 3], "each group once"


@pytest.mark.parametrize(("past", "ahead"), [(3, 1), (30, 1), (10, 1)])
def test_no_group_begins_beyond_max_steps_after_updates_of_another_number(past: int, ahead: int) -> None:
    """Of 10 iterations of 1, 3 or 30 updates; two of 2 updates are left, and the first of them begins."""
    progress = SimpleNamespace(batch_progress=SimpleNamespace(total=SimpleNamespace(ready=20)))
    trainer = SimpleNamespace(
        accumulate_grad_batches=1, max_epochs=-1, max_steps=past + 4, global_step=past,
        fit_loop=SimpleNamespace(epoch_loop=progress),
    )  # fmt: skip
    served = TrainingStream(SimpleNamespace(trainer=trainer, max_lag=5), 1, 2, 12)  # type: ignore[arg-type]
    assert served._last_ahead() == ahead
