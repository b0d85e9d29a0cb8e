"""Every causal family of transformers in the engine and in the learner; the table names those that do not build."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.support.models.model_families import families, measure, tiny_model

TABLE: dict[str, Any] = json.loads(Path("benchmarks/results/families.json").read_text())
EXACT = 1e-4
NOT_CAUSAL = {"cpmant", "prophetnet", "xlm", "xlnet"}
"""Their logits depend on later tokens, even with ``is_decoder``; the engine warns of them."""
NOT_TRAINED = {"reformer"}
"""Rejects a gradient in evaluation mode, and hashes at random in training mode."""


def test_the_table_has_every_family_of_the_pinned_transformers() -> None:
    pinned = re.search(r"^transformers==(\S+)$", Path("constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    if transformers.__version__ != pinned[1]:
        pytest.skip(f"the table is of transformers {pinned[1]}")
    assert sorted([*TABLE["families"], *TABLE["not_built"]]) == sorted(families())


def test_the_table_says_why_a_family_is_missing() -> None:
    assert len(TABLE["families"]) > 150
    assert all(TABLE["not_built"].values())
    wrong = {name for name, row in TABLE["families"].items() if "error" in row or max(numbers(row)) > EXACT}
    assert wrong == NOT_CAUSAL | NOT_TRAINED


def numbers(row: dict[str, Any]) -> list[float]:
    return [row[key] for key in ("engine", "session", "batch", "learner", "gradient")]


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(TABLE["families"].keys() - NOT_CAUSAL - NOT_TRAINED))
def test_a_family_is_sampled_and_trained_as_its_own_forward_pass_says(family: str) -> None:
    found = measure(tiny_model(family))
    assert found["cache"] == TABLE["families"][family]["cache"]
    assert max(numbers(found)) < EXACT, found
