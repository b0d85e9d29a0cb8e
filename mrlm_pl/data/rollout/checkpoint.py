"""What the ranks of a run put into a checkpoint of its rollouts, and take out of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mrlm_pl.learner.batch import PolicyBatch

logger = logging.getLogger(__name__)


def rows_to_state(rows: Mapping[str, PolicyBatch] | None) -> dict[str, dict[str, Any]] | None:
    """The tensors of all policies' rows, in the CPU's memory; None where there are no rows."""
    if rows is None:
        return None
    return {name: {key: value.cpu() for key, value in batch.tensors().items()} for name, batch in rows.items()}


def rows_from_state(state: Mapping[str, Mapping[str, Any]] | None) -> dict[str, PolicyBatch] | None:
    """What :func:`rows_to_state` was given."""
    return None if state is None else {name: PolicyBatch(**tensors) for name, tensors in state.items()}


def own_groups_ahead(
    ahead: Sequence[dict[str, Any] | None], groups: int, here: range, overlaps: bool
) -> dict[str, Any] | None:
    """Of the groups that ranks have played ahead, which may have been others, those that are this rank's now.

    Args:
        ahead: what the collector of each rank that saved the checkpoint gave, if it played ahead.
        groups: in an iteration, over all ranks.
        here: numbers of this rank's groups.
        overlaps: whether this run plays ahead; if not, a warning says that these groups are played again.

    Returns:
        State for this rank's collector; None where there is nothing for it.
    """
    parts = [part for part in ahead if part is not None]
    found = {(item[0], item[1]): item for part in parts for item in part["complete"]}
    if found and not overlaps:
        logger.warning(
            "%d groups of the checkpoint, which an asynchronous run has played ahead, are played again", len(found)
        )
    if not parts or not overlaps:
        return None
    # Numbers that there are no longer come along, to be told of where the groups are taken up.
    own = [item for (_, number), item in sorted(found.items()) if min(number, groups - 1) in here]
    return {**parts[0], "complete": own}
