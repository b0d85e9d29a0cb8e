"""Advantages of several task types on one scale, over all ranks and for each policy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mrlm_pl.advantages import task_moments
from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import Outcome
from mrlm_pl.episode import Episode, Message, Task, Trajectory
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import PolicyBatch, collate_rows
from mrlm_pl.learner.credit.returns import task_types
from mrlm_pl.policy import Policy
from tests.conftest import EchoEnvironment
from tests.support.runs.short_fits import fingerprint
from tests.support.runs.watching import Watch


class Hundredfold(EchoEnvironment):
    """Rewards are a hundred times as large, and equal for all answers if ``flat``."""

    name = "rich"

    def __init__(self, flat: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.flat = flat

    def reply(self, message: Message) -> Outcome:
        found = super().reply(message)
        return Outcome({"digits": 1.0 if self.flat else 100 * found.components["digits"]}, None, success=found.success)


def collected(model_folder: Path, trainer: Any, flat: bool = False, **model: Any) -> list[torch.Tensor]:
    """The advantages of the tokens of each of two environments in a rollout."""
    seen: list[torch.Tensor] = []
    algorithm = GRPO({"main": Policy(str(model_folder), learning_rate=1e-3)}, advantage="group_centered", **model)
    prepare = algorithm.prepare

    def noting(episodes: Any, *arguments: Any) -> Any:
        tables = prepare(episodes, *arguments)
        rows = tables["main"]
        types = task_types(rows.groups, episodes, ("echo", "rich"))
        seen.extend(rows.advantages[rows.action_mask & (types == task)[:, None]] for task in (0, 1))
        return tables

    algorithm.prepare = noting  # type: ignore[method-assign]
    data = RolloutDataModule(
        [EchoEnvironment(), Hundredfold(flat)],
        groups=8,
        group_size=4,
        iterations=1,
        sampling=Sampling(max_tokens=8),
    )
    trainer.fit(algorithm, data)
    return seen


def test_each_type_has_the_same_spread(model_folder: Path, quiet_trainer: Any) -> None:
    found, metrics = {}, Watch()
    for word in ("none", "paper", None):
        found[word] = collected(model_folder, quiet_trainer(callbacks=[metrics]), task_normalization=word)
    plain = found["none"]
    assert plain[1].std() / plain[0].std() > 20
    for scaled, raw in zip(found[None], plain, strict=True):  # with several environments it is the default
        assert scaled.std() == pytest.approx(1.0, rel=1e-4)
        assert torch.allclose(scaled, raw / raw.std(), rtol=1e-4), "a sign never changes"
    for standard, raw in zip(found["paper"], plain, strict=True):
        assert torch.allclose(standard, (raw - raw.mean()) / raw.std(), rtol=1e-4, atol=1e-5)
    for seen in metrics.steps:  # told before it is divided by
        assert seen["rollout/echo/advantage_std"] == pytest.approx(float(plain[0].std()), rel=1e-4)
        assert seen["rollout/rich/advantage_std"] == pytest.approx(float(plain[1].std()), rel=1e-4)


def test_a_type_without_spread_is_left_and_told_of(
    model_folder: Path, quiet_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    echo, rich = collected(model_folder, quiet_trainer(), flat=True)
    assert (rich == 0).all()
    assert echo.std() == pytest.approx(1.0, rel=1e-4)
    assert "the advantages of rich have no spread" in caplog.text


def test_a_run_of_one_environment_is_what_it_was(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    prints = []
    for options in ({}, {"task_normalization": "none"}, {"task_normalization": "scale_only"}):
        algorithm = GRPO({"main": Policy(str(model_folder), learning_rate=1e-3)}, **options)
        data = RolloutDataModule(echo(), groups=4, group_size=4, iterations=1, sampling=Sampling(max_tokens=6))
        quiet_trainer().fit(algorithm, data)
        prints.append(fingerprint(algorithm))
    assert prints[0] == prints[1] != prints[2]


def table(advantages: list[float], environments: list[str], names: list[str]) -> tuple[PolicyBatch, torch.Tensor]:
    row = Trajectory("a", "main", (5, 6, 7), (False, True, True), (0.0, -1.0, -2.0), ())
    count = len(advantages)
    rows = collate_rows([row] * count, list(range(count)), [0] * count, list(range(count)), advantages=advantages)
    episodes = [Episode(str(n), Task(name, "train", n), f"g{n}", 0, 0, {}, "") for n, name in enumerate(environments)]
    return rows, task_types(rows.groups, episodes, names)


def test_types_are_numbered_by_the_run() -> None:
    _, types = table([1.0, 2.0, 3.0], ["b", "a", "b"], ["z", "a", "b"])
    assert types.tolist() == [2, 1, 2]


def test_moments_of_a_task_type_are_over_its_action_tokens() -> None:
    """Each row has two action tokens, so every advantage counts twice."""
    rows, types = table([1.0, 5.0, 3.0], ["a", "b", "a"], ["a", "b", "c"])
    moments = task_moments(rows.advantages, rows.action_mask, types)
    # 1, 1, 3, 3 has mean 2 and squared deviations 4; 5, 5 has none.
    assert (moments[0].count, moments[0].mean, moments[0].squared_sum) == (4, 2.0, 4.0)
    assert (moments[1].count, moments[1].mean, moments[1].std) == (2, 5.0, 0.0)
    assert list(moments) == [0, 1]


def test_an_unknown_word_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="task_normalization is 'scale'"):
        GRPO(task_normalization="scale")
