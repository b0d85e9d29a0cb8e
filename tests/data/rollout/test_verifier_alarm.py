"""A run whose verifier is gamed is warned of: the verifier's score rises while the accuracy falls."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.data.rollout.history import VerifierWatch, diverged
from mrlm_pl.engines import Sampling
from mrlm_pl.environment import DatasetTasks, Outcome, SingleAgentEnvironment, Task, TaskSource
from mrlm_pl.episode import Message
from mrlm_pl.policy import Policy
from mrlm_pl.reward_models.scorer import VERIFIER_SCORE


def means(score: float, accuracy: float | None, episodes: int = 64, name: str = "sums") -> dict[str, Any]:
    found = {f"rollout/{name}/{VERIFIER_SCORE}": (score * episodes, float(episodes)), "rollout/reward": (1.0, 1.0)}
    if accuracy is not None:
        found[f"rollout/{name}/accuracy"] = (accuracy * episodes, float(episodes))
    return found


def told(run: list[dict[str, Any]], watch: VerifierWatch | None = None) -> list[int]:
    """The iterations that are warned of."""
    watch = watch or VerifierWatch()
    return [number for number, item in enumerate(run) if watch.add(item) is not None]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ((24, 100, 7, 100), (72, 100, 1, 100), True),  # 0.07 - 0.01 = 0.06 > 2 sqrt(0.0651/100 + 0.0099/100) = 0.0548
        ((24, 100, 7, 100), (72, 100, 2, 100), False),  # 0.05 < 2 sqrt(0.0651/100 + 0.0196/100) = 0.0582
        ((24, 1000, 70, 1000), (720, 1000, 20, 1000), True),
        ((24, 100, 7, 100), (24, 100, 1, 100), False),  # the score stays
        ((720, 1000, 70, 1000), (760, 1000, 10, 1000), False),  # it rises by less than 0.05
        ((72, 100, 7, 100), (24, 100, 1, 100), False),  # both fall
        ((24, 100, 7, 100), (72, 100, 50, 100), False),  # both rise
        ((0, 100, 100, 100), (100, 100, 0, 100), True),
    ],
)
def test_a_run_diverges_where_the_score_rises_and_the_accuracy_falls_beyond_chance(
    before: Any, after: Any, expected: bool
) -> None:
    assert diverged(before, after) is expected


def test_environments_that_part_in_the_same_iteration_are_all_named() -> None:
    watch = VerifierWatch()
    run = [means(0.24, 0.5, 256, "a") | means(0.24, 0.5, 256, "b")] * 2
    run += [means(0.72, 0.01, 256, "a") | means(0.72, 0.01, 256, "b")] * 2
    texts = [watch.add(item) for item in run]
    assert texts[:3] == [None] * 3
    assert [line.partition(":")[0] for line in str(texts[3]).splitlines()] == ["a", "b"]
    assert [len(found["b"]) for found in (watch.state()["first"], watch.state()["latest"])] == [2, 2]


def test_a_run_of_four_iterations_is_warned_of_once() -> None:
    run = [means(0.24, 0.07, 256), means(0.4, 0.06, 256), means(0.6, 0.02, 256), *[means(0.72, 0.01, 256)] * 5]
    assert told(run) == [3]
    watch = VerifierWatch()
    text = next(found for item in run if (found := watch.add(item)))
    assert "sums: the verifier's score has risen from 0.320 to 0.660" in text
    assert "while the accuracy has fallen from 0.065 to 0.015" in text


def test_no_alarm_where_score_and_accuracy_do_not_part() -> None:
    assert told([means(0.2 + 0.1 * n, 0.1 + 0.1 * n) for n in range(8)]) == [], "both rise"
    assert told([means(0.5, 0.5 - 0.05 * n) for n in range(8)]) == [], "the verifier does not reward what gets worse"
    assert told([means(0.2 + 0.1 * n, None) for n in range(8)]) == [], "there are no labels"
    assert told([means(0.2, 0.5, 4), means(0.2, 0.5, 4), means(0.5, 0.25, 4), means(0.5, 0.25, 4)]) == [], "too few"


def test_environments_are_watched_apart_and_over_a_resumed_run() -> None:
    good = [means(0.2 + 0.1 * n, 0.1 + 0.1 * n, name="good") for n in range(8)]
    bad = [means(0.2 + 0.1 * n, 0.8 - 0.1 * n, name="bad") for n in range(8)]
    both = [{**one, **other} for one, other in zip(good, bad, strict=True)]
    assert told(both) == [3]
    watch, resumed = VerifierWatch(), VerifierWatch()
    assert told(both[:3], watch) == []
    resumed.load(json.loads(json.dumps(watch.state())))
    resumed.load(None)
    assert told(both[3:], resumed) == [0]


class Gamed(SingleAgentEnvironment):
    """A verifier that likes what comes late, and tasks that are solved early."""

    name = "gamed"
    replies = 0

    def tasks(self, split: str) -> TaskSource:
        return DatasetTasks(self.name, split, [{"n": f"{split[0]}{n}"} for n in range(16)])

    def begin(self, task: Task) -> str:
        return f"Say {task.data['n']}"

    def reply(self, message: Message) -> Outcome:
        type(self).replies += 1
        late = type(self).replies > 32
        score = 0.9 if late else 0.1
        return Outcome({"score": score}, success=not late, metrics={VERIFIER_SCORE: score})


def test_a_run_logs_both_side_by_side_and_warns(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Gamed.replies = 0
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    data = RolloutDataModule(Gamed(), groups=4, group_size=4, iterations=4, sampling=Sampling(max_tokens=2))
    trainer = quiet_trainer(callbacks=[keep], enable_checkpointing=True)
    with caplog.at_level(logging.WARNING):
        trainer.fit(GRPO({"main": Policy(str(model_folder), learning_rate=1e-3)}), data)
    assert trainer.callback_metrics["rollout/gamed/verifier_score"] == pytest.approx(0.9)
    assert trainer.callback_metrics["rollout/gamed/accuracy"] == 0
    assert "gamed: the verifier's score has risen from 0.100 to 0.900 while the accuracy has fallen" in caplog.text
    state = data.state_dict()["verifiers"]
    assert [len(state[end]["gamed"]) for end in ("first", "latest")] == [2, 2]
