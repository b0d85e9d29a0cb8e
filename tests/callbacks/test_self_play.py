from __future__ import annotations

import csv
import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from mrlm_callbacks import AnchorGames, CollapseAlarm, SelfPlay
from torch import Tensor

from mrlm_pl.algorithms import GRPO
from mrlm_pl.engines import Sampling
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.policy.lora import merged_state
from mrlm_pl.rollout.cross_policy import CrossPolicy, stale_turns
from mrlm_pl.runs.metrics_file import MetricsFile
from mrlm_pl.trainer.fsdp import FSDP
from tests.support.runs.short_fits import fingerprint
from tests.support.servers.ports import free_port


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in merged_state(policy.network).items()}


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, two[name]) for name, value in one.items())


class Watch(Callback):
    """Keeps who the opponent is, and who the learner was, at the beginning of each iteration."""

    def __init__(self) -> None:
        self.opponents: list[dict[str, Tensor]] = []
        self.learners: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: Any, algorithm: Any, batch: Any, batch_idx: int) -> None:
        self.opponents.append(weights(algorithm.policy("opponent")))
        self.learners.append(weights(algorithm.policy("learner")))


def test_the_opponent_of_an_iteration_is_a_snapshot_of_the_learner(duel: Any, quiet_trainer: Any) -> None:
    """With a snapshot after every second iteration the latest are those before iterations 0, 0, 2, 2 and 4."""
    algorithm, data, callback = duel(draw="latest")
    watch = Watch()
    quiet_trainer(callbacks=[callback, watch]).fit(algorithm, data)
    for iteration, source in enumerate((0, 0, 2, 2, 4)):
        assert same(watch.opponents[iteration], watch.learners[source]), iteration
    assert not same(watch.learners[1], watch.learners[0]), "the learner changes"
    assert sorted(callback.pool.snapshots) == [0, 2, 4]


def test_with_lora_a_snapshot_is_the_adapter(duel: Any, quiet_trainer: Any) -> None:
    algorithm, data, callback = duel(draw="latest", learner={"lora": LoRA(rank=2)})
    watch = Watch()
    quiet_trainer(callbacks=[callback, watch]).fit(algorithm, data)
    for iteration, source in enumerate((0, 0, 2, 2, 4)):
        assert same(watch.opponents[iteration], watch.learners[source]), iteration
    assert not same(watch.opponents[2], watch.opponents[0])
    held = callback.state_dict()["pool"]["snapshots"][4]
    assert held
    assert all(".lora_" in name for name in held)


@pytest.mark.parametrize("learner", [{}, {"lora": LoRA(rank=2)}], ids=["full", "lora"])
@pytest.mark.long
def test_a_resumed_run_equals_an_uninterrupted_one(
    duel: Any, quiet_trainer: Any, tmp_path: Path, learner: dict[str, Any]
) -> None:
    """Checkpoints lie within collections (odd steps) and between them (even steps)."""
    options: dict[str, Any] = {"data": {"passes": 2}, "learner": learner, "draw": "prioritized", "pool_size": 2}
    algorithm, data, callback = duel(**options)
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    trainer = quiet_trainer(callbacks=[callback, keep], enable_checkpointing=True)
    trainer.fit(algorithm, data)
    whole = {name: weights(algorithm.policy(name)) for name in algorithm.policies}
    report = (Path(trainer.default_root_dir) / "self_play.json").read_text()
    scores = callback.pool.scores
    assert json.loads(report)["anchors"][-1]["iteration"] == 5
    for step in (3, 8):
        algorithm, data, callback = duel(**options)
        trainer = quiet_trainer(callbacks=[callback])
        trainer.fit(algorithm, data, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert trainer.global_step == 10
        for name, values in whole.items():
            assert same(values, weights(algorithm.policy(name))), (step, name)
        assert (Path(trainer.default_root_dir) / "self_play.json").read_text() == report
        assert callback.pool.scores == scores


@pytest.mark.long
def test_a_signal_in_the_games_against_anchors_changes_nothing(duel: Any, run: Any, tmp_path: Path) -> None:
    """The games of iteration 0 are the first to be played, those after iteration 2 the second, after 4 the third."""
    found = []
    for name, ends in (("whole", [None]), ("ended", [2, None]), ("ended twice", [3, 1, None])):
        for ended_in in ends:
            algorithm, data, callback = duel(draw="latest", alarm=CollapseAlarm(margin=1.0))
            run(tmp_path / name, algorithm, data, callback, ended_in)
        with (tmp_path / name / "metrics.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        names = ("step", "train/loss", "self_play/elo", "self_play/initial/wins")
        numbers = [[row[name] for name in names] for row in rows]
        report = (tmp_path / name / "self_play.json").read_text()
        found.append((fingerprint(algorithm), sorted(callback.pool.snapshots), report, numbers))
    assert found[0][1] == [0, 2, 4]
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_a_checkpoint_has_the_table_of_games() -> None:
    callback = SelfPlay()
    state = callback.state_dict()
    callback.load_state_dict({**state, "table": {("0", "1"): (1.5, 2)}})
    assert callback.table == {("0", "1"): (1.5, 2)}


def test_what_is_logged_agrees_with_the_report(duel: Any, quiet_trainer: Any, tmp_path: Path) -> None:
    algorithm, data, callback = duel()
    trainer = quiet_trainer(callbacks=[callback], logger=[MetricsFile(tmp_path)], log_every_n_steps=1)
    trainer.fit(algorithm, data)
    report = json.loads((Path(trainer.default_root_dir) / "self_play.json").read_text())
    assert [row["iteration"] for row in report["anchors"]] == [0, 2, 4, 5]
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    measured = [row for row in rows if row["self_play/initial/score"]]
    assert [int(row["step"]) for row in measured] == [0, 1, 3, 4]
    for row, told in zip(measured, report["anchors"], strict=True):
        for key in ("score", "low", "high", "wins", "draws"):
            assert float(row[f"self_play/initial/{key}"]) == pytest.approx(told[key])
        assert told["low"] <= told["score"] == told["wins"] + told["draws"] / 2 <= told["high"]
    played = [row for row in rows if row["self_play/score"]]
    assert len(played) == 5
    assert {float(row["self_play/opponent"]) for row in played} <= {0, 2, 4}
    assert [float(row["self_play/pool"]) for row in played] == [1, 1, 2, 2, 3]
    rating = report["ratings"]["6"]
    for name, key in (("elo", "elo"), ("elo_low", "low"), ("elo_high", "high")):
        assert float(played[-1][f"self_play/{name}"]) == pytest.approx(rating[key], rel=1e-4)
    # 5 collections of 12 games, and 8 games against the anchor at iterations 2, 4 and 5.
    assert sum(games for _, games in callback.table.values()) == 5 * 12 + 3 * 8


def test_snapshots_that_no_games_link_with_the_initial_one_have_no_rating(
    duel: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    """Player 1 has no game, as if all tasks were of another environment; the anchor's games at the end link 3 to 0."""
    options = {"snapshot_every": 1, "draw": "latest", "anchors": AnchorGames(every=100, games=2)}
    algorithm, data, callback = duel({"iterations": 3}, **options)
    count = callback.on_collection
    callback.on_collection = lambda trainer, episodes: count(trainer, episodes if data.stream.iteration else [])
    trainer = quiet_trainer(callbacks=[callback], logger=[MetricsFile(tmp_path)], log_every_n_steps=1)
    trainer.fit(algorithm, data)
    assert sorted(callback.table) == [("0", "3"), ("1", "2"), ("2", "3")]
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [bool(row["self_play/elo"]) for row in rows] == [False, False, True]
    assert [bool(row["self_play/opponent_elo"]) for row in rows] == [True, False, True]
    assert sorted(json.loads((Path(trainer.default_root_dir) / "self_play.json").read_text())["ratings"]) == [*"0123"]


@pytest.mark.parametrize("action", ["warn", "stop"])
@pytest.mark.long
def test_the_alarm_tells_of_a_learner_that_collapses(
    duel: Any, quiet_trainer: Any, caplog: pytest.LogCaptureFixture, action: str, tmp_path: Path
) -> None:
    """Training rewards few digits and the anchors' games many: the trained policy loses against the initial one."""
    alarm = CollapseAlarm(margin=0.15, action=action)
    anchors = AnchorGames(every=2, games=64)
    settings = {"iterations": 8, "groups": 4, "group_size": 16, "sampling": Sampling(max_tokens=12)}
    algorithm, data, callback = duel(perverse=True, data=settings, anchors=anchors, alarm=alarm)
    trainer = quiet_trainer(callbacks=[callback])
    with caplog.at_level(logging.WARNING):
        trainer.fit(algorithm, data)
    assert abs(callback.history[0]["score"] - 0.5) < 0.2, "before training it plays against itself"
    first = next(row for row in callback.history if row["alarm"])
    best = max(row["score"] for row in callback.history[: callback.history.index(first) + 1])
    assert best - first["score"] > 0.15
    assert f"collapse at iteration {first['iteration']}: the score against initial" in caplog.text
    assert data.stream.iteration == (first["iteration"] if action == "stop" else 8)
    assert Path(trainer.default_root_dir, "policies", "learner").is_dir(), "a run that is stopped ends cleanly"
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    algorithm, resumed, callback = duel(perverse=True, data=settings, anchors=anchors, alarm=alarm)
    quiet_trainer(callbacks=[callback]).fit(algorithm, resumed, ckpt_path=tmp_path / "end.ckpt", weights_only=False)
    assert resumed.stream.iteration == data.stream.iteration, "a run that is stopped is complete"


@pytest.mark.long
def test_a_learner_that_gets_better_raises_no_alarm(duel: Any, quiet_trainer: Any) -> None:
    settings = {"iterations": 6, "groups": 4, "group_size": 16, "sampling": Sampling(max_tokens=12)}
    algorithm, data, callback = duel(data=settings, anchors=AnchorGames(every=3, games=64))
    quiet_trainer(callbacks=[callback]).fit(algorithm, data)
    assert callback.history[-1]["score"] > 0.7
    assert not any(row["alarm"] for row in callback.history)
    assert callback.history[-1]["low"] > callback.history[0]["score"]


def test_a_model_folder_is_an_anchor(duel: Any, quiet_trainer: Any, model_folder: Path) -> None:
    anchors = AnchorGames(every=5, games=8, models={"twin": str(model_folder)})
    algorithm, data, callback = duel(anchors=anchors)
    quiet_trainer(callbacks=[callback]).fit(algorithm, data)
    rows = {name: [row for row in callback.history if row["anchor"] == name] for name in ("initial", "twin")}
    assert len(rows["twin"]) == len(rows["initial"]) == 2
    for one, two in zip(rows["initial"], rows["twin"], strict=True):
        assert one["score"] == two["score"], "it is the model that the learner began with"
    assert any("anchor twin" in pair for pair in callback.table)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"snapshot_every": 0}, "snapshot_every is 0"),
        ({"pool_size": 1}, "pool_size is 1"),
    ],
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SelfPlay(**options)
    with pytest.raises(ConfigurationError, match="games is 0"):
        AnchorGames(games=0)
    with pytest.raises(ConfigurationError, match="'initial'"):
        AnchorGames(models={"initial": "builtin:tiny"})
    with pytest.raises(ConfigurationError, match=r"CollapseAlarm: margin is 0\.0"):
        CollapseAlarm(margin=0.0)
    with pytest.raises(ConfigurationError, match=r"CollapseAlarm: floor is 2\.0"):
        CollapseAlarm(floor=2.0)


def test_policies_that_do_not_fit_are_refused(duel: Any, quiet_trainer: Any, model_folder: Path) -> None:
    algorithm, data, callback = duel()
    for options in ({"learner": "opponent"}, {"opponent": "learner"}, {"opponent": "absent"}):
        with pytest.raises(ConfigurationError, match=r"SelfPlay needs a (trained|frozen) policy"):
            quiet_trainer(callbacks=[SelfPlay(**options)]).fit(algorithm, data)

    rounded = {"learner": Policy(str(model_folder)), "opponent": Policy(trained=False, int8="weights")}
    with pytest.raises(ConfigurationError, match="snapshots in float32, but its int8 is 'weights'; leave `int8` out"):
        quiet_trainer(callbacks=[callback]).fit(GRPO(rounded, seats=algorithm.seats), data)

    others = {"learner": Policy(str(model_folder)), "opponent": Policy(trained=False)}
    larger = GRPO(others, seats=algorithm.seats)
    with pytest.raises(ConfigurationError, match="no counterpart of their shape"):
        quiet_trainer(callbacks=[callback]).fit(larger, data)

    others = {"learner": Policy(str(model_folder)), "opponent": Policy(str(model_folder), trained=False)}
    others["opponent"].tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(ConfigurationError, match="another vocabulary or chat template"):
        quiet_trainer(callbacks=[callback]).fit(GRPO(others, seats=algorithm.seats), data)

    alone = GRPO(others, seats={"near": "learner", "far": "learner"})
    others["opponent"].tokenizer.chat_template = others["learner"].tokenizer.chat_template
    with pytest.raises(ConfigurationError, match="in no environment"):
        quiet_trainer(callbacks=[callback]).fit(alone, data)


def test_split_weights_are_refused(duel: Any) -> None:
    algorithm, data, callback = duel()
    trainer: Any = SimpleNamespace(strategy=FSDP(), lightning_module=algorithm, datamodule=data)
    data.trainer = trainer
    with pytest.raises(ConfigurationError, match=r"FSDP splits over processes; use one device or .*ddp"):
        callback.setup(trainer, algorithm, "fit")


def test_training_on_files_is_refused(duel: Any) -> None:
    algorithm, _, callback = duel()
    with pytest.raises(
        ConfigurationError, match="SelfPlay plays episodes; NoneType has no environment: use a RolloutD"
    ):
        callback.setup(SimpleNamespace(datamodule=None), algorithm, "fit")


@pytest.mark.slow
def test_two_processes_hold_the_same_pool_and_opponent(tmp_path: Path, model_folder: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    for variable in ("MASTER_ADDR", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"):
        environment.pop(variable, None)
    command = [sys.executable, "-m", "tests.support.environments.duel", str(tmp_path), str(model_folder)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr[-4000:]
    one, two = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    assert one == two
    # 5 collections of 12 games, and 8 games against the anchor at iterations 2, 4 and 5, on both ranks together.
    assert sum(games for *_, games in one["games"]) == 5 * 12 + 3 * 8


def test_no_score_is_known_before_the_first_game(duel: Any) -> None:
    assert math.isnan(duel()[2].state_dict()["score"])


def test_games_in_which_a_stale_snapshot_decided_are_not_the_learners(duel: Any, quiet_trainer: Any) -> None:
    algorithm, data, callback = duel({"cross_policy": CrossPolicy(share=0.5, refresh=2), "iterations": 2})
    games: list[tuple[int, int, int]] = []
    book = callback.on_collection

    def booked() -> int:
        return sum(number for _, number in callback.table.values())

    def on_collection(trainer: Any, episodes: Any) -> None:
        before = booked()
        book(trainer, episodes)
        games.append((booked() - before, sum(not stale_turns(episode) for episode in episodes), len(episodes)))

    callback.on_collection = on_collection
    quiet_trainer(callbacks=[callback]).fit(algorithm, data)
    assert len(games) == 2
    assert all(counted == own for counted, own, _ in games)
    assert 0 < sum(own for _, own, _ in games) < sum(played for *_, played in games)
