"""`make small-model` runs, shortened, and its model has the size and the tokenizer that its documents say."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrlm_pl.policy.tiny import tiny_model_path
from tests.support.documents import ROOT, commands

SHORT = ["--trainer.max_epochs", "1", "--trainer.max_steps", "2", "--trainer.callbacks", "null"]
SHORT += ["--trainer.logger", "false", "--trainer.accelerator", "cpu"]


def recipe() -> list[list[str]]:
    """Return the commands of the target, without the folder of their programs."""
    rules = re.findall(r"^small-model:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return commands(rules[0].replace("$(BIN)/", ""))


@pytest.mark.long
def test_the_recipe_runs_and_makes_the_model_that_it_says(
    example: Callable[[str], ModuleType],
    mrlm: Callable[..., tuple[int, str, str]],
    outside_the_repository: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("configs").symlink_to(ROOT / "configs")
    demonstrations, *stages = recipe()
    assert demonstrations[:2] == ["python", "examples/tiny_model/make_demonstrations.py"]
    monkeypatch.setattr("sys.argv", [*demonstrations[1:], "--worked", "64", "--mixed", "64"])
    example("tiny_model/make_demonstrations.py").main()

    assert len(stages) == 2
    for words in stages:
        status, _, errors = mrlm(*words[1:], *SHORT)
        assert status == 0, errors
    first, model = (
        AutoModelForCausalLM.from_pretrained(f"runs/{run}/policies/main") for run in ("small-worked", "small-model")
    )
    assert 2_000_000 < model.num_parameters() < 4_000_000
    assert AutoTokenizer.from_pretrained("runs/small-model/policies/main").get_vocab() == (
        AutoTokenizer.from_pretrained(tiny_model_path()).get_vocab()
    )
    # The second stage begins with the weights of the first: two updates of at most 3e-4 leave them near.
    moved = [(one - other).abs().max() for one, other in zip(first.parameters(), model.parameters(), strict=True)]
    assert 0 < max(moved) < 1e-3
