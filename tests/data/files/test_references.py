"""Log-probabilities under the first weights, computed by several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.algorithms import KTO
from mrlm_pl.data import AnswerDataModule
from mrlm_pl.data.files import references
from mrlm_pl.policy import Policy


@pytest.mark.parametrize(("rank", "scored"), [(0, 8), (1, 0)])
def test_a_rank_may_have_none_of_the_last_answers(
    rank: int, scored: int, model_folder: Path, quiet_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four answers, each beside an unrelated one, are a batch of the first of two ranks."""
    answers = [{"question": f"{n}?", "answer": str(n), "correct": n % 2} for n in range(4)]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, answers)))
    monkeypatch.setattr(references, "data_parallel_rank", lambda trainer: (rank, 2))
    data = AnswerDataModule(str(tmp_path / "answers.jsonl"), batch_size=4)
    quiet_trainer(max_steps=1).fit(KTO({"main": Policy(str(model_folder))}), data)
    assert (data.references["train"] != 0).sum() == scored
