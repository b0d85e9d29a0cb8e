from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from mrlm_pl.algorithms import GRPO, MADPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.data.rollout import collection as collecting
from mrlm_pl.data.rollout.collectors.players import Players, public_attributes
from mrlm_pl.data.rollout.evaluation import EpisodeBatch
from mrlm_pl.data.rollout.metrics import CollectionSums, outcome_sums, path_weights
from mrlm_pl.engines import InProcessEngine, Sampling
from mrlm_pl.engines.base import PolicySampling
from mrlm_pl.episode import Episode, Task, Trajectory, Turn
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError, NonFiniteError, RolloutError
from mrlm_pl.learner.metrics import Metrics
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.rollout.rounds import RoundOptions
from mrlm_pl.trainer.bounds import batches_served
from tests.support.runs.short_fits import fingerprint, make


def test_an_iteration_is_one_collection_and_its_updates(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, echo(), minibatches=2, passes=2)
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    assert trainer.global_step == 3 * 2 * 2
    assert (data.stream.iteration, data.stream.position) == (3, 0)
    episodes = list(read_episodes(Path(trainer.default_root_dir) / "episodes"))
    assert len(episodes) == 3 * 16
    versions = {episode.iteration: episode.rows()[0].turns[0].version for episode in episodes}
    assert versions == {0: 0, 1: 4, 2: 8}, "every collection is made with the weights of its moment"


def test_a_data_module_returns_to_an_earlier_checkpoint(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    algorithm, data = make(model_folder, echo())
    kept = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    quiet_trainer(callbacks=[kept], enable_checkpointing=True).fit(algorithm, data)
    want = fingerprint(algorithm)
    quiet_trainer().fit(algorithm, data, ckpt_path=tmp_path / "step=1.ckpt")
    assert fingerprint(algorithm) == want


class Raise(Callback):
    """Let every reply of iteration ``k`` earn ``k / 4``."""

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        (environment,) = trainer.datamodule.environments.values()
        environment.reward = trainer.datamodule.stream.iteration / 4

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.on_train_start(trainer)


@pytest.mark.parametrize("options", [{}, {"rounds": RoundOptions(3, 2)}, {"processes": 1}])
@pytest.mark.long_after(1)
def test_a_changed_attribute_of_an_environment_counts_from_the_next_rollout_on(
    options: dict[str, Any], model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    def rewards(trainer: Any) -> dict[int, set[float]]:
        found: dict[int, set[float]] = {}
        for episode in read_episodes(Path(trainer.default_root_dir) / "episodes"):
            found.setdefault(episode.iteration, set()).add(episode.reward)
        return found

    def parts() -> tuple[GRPO, RolloutDataModule]:
        return make(model_folder, echo(), minibatches=2, **options)

    kept = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = quiet_trainer(callbacks=[Raise(), kept], enable_checkpointing=True, default_root_dir=tmp_path / "whole")
    whole.fit(*parts())
    assert rewards(whole) == {0: {0.0}, 1: {0.25}, 2: {0.5}}
    resumed = quiet_trainer(callbacks=[Raise()], default_root_dir=tmp_path / "resumed")
    resumed.fit(*parts(), ckpt_path=tmp_path / "step=3.ckpt")  # in the middle of iteration 1
    assert rewards(resumed) == {2: {0.5}}


def test_a_changed_collection_of_a_wrapped_environment_is_a_change(model_folder: Path, echo: Any) -> None:
    class Wrapper(echo):  # type: ignore[misc,valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.weights, self._rows = echo(), {"digits": 1.0}, None
            self.inner.outer = self

    environment = Wrapper()
    before = public_attributes(environment)
    environment.inner.reward = 0.5
    environment.weights["digits"] = 0.5
    environment._rows = []  # read when they are first needed
    now = public_attributes(environment)
    assert {name: found for name, found in now.items() if found != before[name]} == {
        "inner.reward": [0.5],
        "weights": [{"digits": 0.5}, "digits", 0.5],
    }


def test_an_asynchronous_run_takes_a_change_before_its_first_rollout(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    class Set(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.datamodule.environments["echo"].reward = 0.5

    options: dict[str, Any] = {"limit_val_batches": 1, "num_sanity_val_steps": 1}  # which plays before
    trainer = quiet_trainer(callbacks=[Set()], **options)
    trainer.fit(*make(model_folder, echo(), mode="async", iterations=1, validation_episodes=2))
    found = read_episodes(Path(trainer.default_root_dir) / "episodes")
    assert {episode.reward for episode in found} == {0.5}


def test_a_change_that_could_not_hold_for_a_whole_rollout_is_refused(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    with pytest.raises(ConfigurationError, match=r"'reward' of environment 'echo' has changed while data\.mode"):
        quiet_trainer(callbacks=[Raise()]).fit(*make(model_folder, echo(), mode="async"))


class Anneal(Callback):
    """Sample iteration ``k`` with temperature ``1 - k / 4``."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        data = trainer.datamodule
        data.sampling = replace(data.sampling, temperature=1 - data.stream.iteration / 4)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.on_train_start(trainer, pl_module)


@pytest.mark.parametrize("rounds", [None, RoundOptions()])
@pytest.mark.parametrize("greedy", [False, True])
def test_the_temperature_can_change_between_rollouts(
    model_folder: Path, echo: Any, quiet_trainer: Any, rounds: RoundOptions | None, greedy: bool
) -> None:
    algorithm, data = make(model_folder, echo(), rounds=rounds)
    algorithm.uses_greedy_baseline = greedy
    seen, prepare = [], algorithm.prepare

    def spy(episodes: Any, sampling: Sampling, baselines: Any = ()) -> Any:
        batches = prepare(episodes, sampling, baselines)
        seen.append((sampling.temperature, batches["main"].temperature.unique().tolist()))
        assert len(data.players._players) == 1 + greedy, "schedules of any length keep the players"
        return batches

    algorithm.prepare = spy
    quiet_trainer(callbacks=[Anneal()]).fit(algorithm, data)
    assert seen == [(1.0, [1.0]), (0.75, [0.75]), (0.5, [0.5])]


def test_a_run_whose_temperature_changes_goes_on_bit_for_bit(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    kept = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    algorithm, data = make(model_folder, echo())
    quiet_trainer(callbacks=[Anneal(), kept], enable_checkpointing=True).fit(algorithm, data)
    want = fingerprint(algorithm)
    plain, data = make(model_folder, echo())
    quiet_trainer().fit(plain, data)
    assert fingerprint(plain) != want
    again, data = make(model_folder, echo())
    quiet_trainer(callbacks=[Anneal()]).fit(again, data, ckpt_path=tmp_path / "step=1.ckpt")
    assert fingerprint(again) == want


@pytest.mark.parametrize(
    ("mode", "sampling", "message"),
    [
        ("async", {"temperature": 0.5}, r"data\.sampling has changed while data\.mode async plays"),
        ("sync", {"policies": {"mian": {"top_k": 5}}}, "mian"),
    ],
)
def test_a_sampling_that_cannot_be_trained_on_is_refused_when_it_is_set(
    model_folder: Path, echo: Any, quiet_trainer: Any, mode: str, sampling: dict[str, Any], message: str
) -> None:
    class Set(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            trainer.datamodule.sampling = replace(trainer.datamodule.sampling, **sampling)

    algorithm, data = make(model_folder, echo(), mode=mode)
    before = data.sampling
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer(callbacks=[Set()]).fit(algorithm, data)
    assert data.sampling == before


def test_environments_cannot_be_replaced(model_folder: Path, echo: Any) -> None:
    _, data = make(model_folder, echo())
    with pytest.raises(ConfigurationError, match=r"data\.environments cannot change once the data module is made"):
        data.environments = {}
    with pytest.raises(TypeError, match="does not support item assignment"):
        data.environments["echo"] = echo()  # type: ignore[index]


def test_another_algorithm_begins_with_the_first_rollout(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, echo(), minibatches=2)
    quiet_trainer().fit(algorithm, data)
    want = fingerprint(algorithm)
    for steps in (1, -1):  # the first leaves half of its rollout
        algorithm, _ = make(model_folder, echo(), minibatches=2)
        quiet_trainer(max_steps=steps).fit(algorithm, data)
    assert fingerprint(algorithm) == want


def test_members_of_a_group_share_the_prompt_and_differ_in_the_sample(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    algorithm, data = make(model_folder, echo(), iterations=1)
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    groups: dict[str, list[Any]] = {}
    for episode in read_episodes(Path(trainer.default_root_dir) / "episodes"):
        groups.setdefault(episode.group, []).append(episode.rows()[0])
    assert len(groups) == 4
    for rows in groups.values():
        prompts = {row.token_ids[: row.action_mask.index(True)] for row in rows}
        assert len(prompts) == 1
        assert len({row.token_ids for row in rows}) == len(rows)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    prints = []
    for seed in (0, 0, 1):
        algorithm, data = make(model_folder, echo(), seed=seed)
        quiet_trainer().fit(algorithm, data)
        prints.append(fingerprint(algorithm))
    assert prints[0] == prints[1]
    assert prints[0] != prints[2]


@pytest.mark.parametrize("rounds", [None, RoundOptions(3, 2)])
@pytest.mark.long_after(1)
def test_validation_does_not_change_training(
    model_folder: Path, echo: Any, quiet_trainer: Any, rounds: RoundOptions | None
) -> None:
    prints = []
    for limit in (0, 1.0):
        algorithm, data = make(model_folder, echo(), validation_episodes=8, rounds=rounds)
        trainer = quiet_trainer(limit_val_batches=limit, val_check_interval=1)
        trainer.fit(algorithm, data)
        prints.append(fingerprint(algorithm))
    assert prints[0] == prints[1]
    assert 0 <= trainer.callback_metrics["val/accuracy"] <= 1


def test_a_split_with_fewer_tasks_than_episodes_is_told_once(
    model_folder: Path, echo: Any, quiet_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def told(episodes: int | None, **settings: Any) -> list[str]:
        caplog.clear()
        algorithm, data = make(model_folder, echo(size=16), iterations=2, validation_episodes=episodes)
        quiet_trainer(**{"limit_val_batches": 1.0, "val_check_interval": 1, **settings}).fit(algorithm, data)
        return [record.getMessage() for record in caplog.records if "validation_episodes" in record.getMessage()]

    assert told(20, reload_dataloaders_every_n_epochs=1, max_epochs=2) == [
        "the validation split has fewer tasks than data.validation_episodes, 20: 'echo' has 16; each is played once"
    ]
    assert told(16) == []
    assert told(None) == [], "no number was asked for"
    assert told(20, limit_val_batches=0) == []


@pytest.mark.parametrize("rounds", [None, RoundOptions(3, 2)])
def test_a_resumed_run_equals_an_uninterrupted_one(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path, rounds: RoundOptions | None
) -> None:
    """Checkpoints lie between mini-batches of a rollout (odd steps) and between rollouts (even steps)."""
    algorithm, data = make(model_folder, echo(), minibatches=2, rounds=rounds)
    keep = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    quiet_trainer(callbacks=[keep], enable_checkpointing=True).fit(algorithm, data)
    whole = fingerprint(algorithm)
    for step in (1, 2, 5):
        algorithm, data = make(model_folder, echo(), minibatches=2, rounds=rounds)
        trainer = quiet_trainer()
        trainer.fit(algorithm, data, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert trainer.global_step == 6
        assert fingerprint(algorithm) == whole


def test_a_rollout_in_rounds_has_the_tokens_of_lockstep_in_batches_of_its_own(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    class Counted(InProcessEngine):
        calls = 0

        async def sample(self, requests: Any) -> Any:
            self.calls += 1
            return await super().sample(requests)

    tokens, calls = [], []
    for rounds in (None, RoundOptions(3)):
        engine = Counted()
        algorithm, data = make(model_folder, echo(turns=2), iterations=1, engine=engine, rounds=rounds)
        trainer = quiet_trainer()
        trainer.fit(algorithm, data)
        episodes = read_episodes(Path(trainer.default_root_dir) / "episodes")
        tokens.append({episode.id: [row.token_ids for row in episode.rows()] for episode in episodes})
        calls.append(engine.calls)
    assert tokens[0] == tokens[1]
    assert calls[0] == 2 < calls[1]


def test_rounds_of_another_mode_or_below_one_are_refused(echo: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"data\.rounds is of data\.mode sync, and the mode is async"):
        RolloutDataModule(echo(), mode="async", rounds=RoundOptions())
    for name in ("chunk_tokens", "answer"):
        with pytest.raises(ConfigurationError, match=rf"RoundOptions: {name} is 0; it must be 1 or above"):
            RoundOptions(**{name: 0})
    RolloutDataModule(echo(), mode="async", max_lag=0, rounds=RoundOptions())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_first_ratio_is_one(model_folder: Path, echo: Any, quiet_trainer: Any, temperature: float) -> None:
    """The model folder asks for attention dropout of 0.1; neither it nor the temperature may show in the ratio."""
    algorithm, data = make(
        model_folder, echo(turns=2), iterations=1, sampling=Sampling(temperature=temperature, max_tokens=8)
    )
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    metrics = trainer.callback_metrics
    assert metrics["train/ratio_deviation"] < 1e-4
    assert metrics["train/approx_kl"] < 1e-6
    assert metrics["train/clip_fraction"] == 0


def test_truncated_sampling_takes_the_old_log_probabilities_from_the_learner(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    deviations = {}
    for recompute in (None, False):
        algorithm, data = make(
            model_folder,
            echo(),
            {"recompute_old_logp": recompute},
            iterations=1,
            sampling=Sampling(top_p=0.5, max_tokens=8),
        )
        trainer = quiet_trainer()
        trainer.fit(algorithm, data)
        deviations[recompute] = float(trainer.callback_metrics["train/ratio_deviation"])
    assert deviations[None] < 1e-4
    assert deviations[False] > 0.1, "mu is not the learner's distribution when its tail was cut"


@pytest.mark.parametrize("options", [{}, {"correction": {"kind": "truncated"}, "loss": "cispo"}])
def test_the_only_update_on_a_rollout_takes_the_old_log_probabilities_from_its_own_pass(
    model_folder: Path, echo: Any, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    class HalfSilent(echo):  # type: ignore[misc]
        """Groups of every second task have equal returns, hence no gradient: they count in the metrics alone."""

        def begin(self, task: Task) -> str:
            self.reward = 1.0 if task.index % 2 else None
            return str(super().begin(task))

    rows, found = Counter[str](), {}
    forward, meet = Policy.forward, GRPO.check_rollouts

    def counted(policy: Policy, given: Any, **options: Any) -> Any:
        rows[kind] += len(given.token_ids)
        return forward(policy, given, **options)

    monkeypatch.setattr(Policy, "forward", counted)
    for kind in ("own", "apart"):
        algorithm, data = make(
            model_folder, HalfSilent(), options, iterations=1, sampling=Sampling(top_p=0.5, max_tokens=8)
        )
        if kind == "apart":  # an algorithm that does not know the number of updates makes its own pass
            monkeypatch.setattr(GRPO, "check_rollouts", lambda self, met: meet(self, replace(met, updates=None)))
        trainer = quiet_trainer(accumulate_grad_batches=2)
        trainer.fit(algorithm, data)
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("train/")}
        found[kind] = metrics, [weight.clone() for weight in algorithm.parameters()]
    assert rows == {"own": 8 + 8, "apart": 16 + 8}, "the trained rows are evaluated once"
    assert found["own"][0] == pytest.approx(found["apart"][0], rel=1e-5, abs=1e-6)
    for own, apart in zip(found["own"][1], found["apart"][1], strict=True):
        torch.testing.assert_close(own, apart, rtol=1e-4, atol=1e-6)


class Preparing(GRPO):
    """Reads pi_old when a rollout is prepared."""

    def prepare(self, *given: Any) -> Any:
        tables = super().prepare(*given)
        self.deviations = [
            float((rows.old_logp - self.policy(name)(rows.inputs())).abs().max()) for name, rows in tables.items()
        ]
        return tables


class OwnLoss(GRPO):
    """Reads pi_old in a policy loss of its own."""

    def policy_loss(self, name: str, rows: Any, batch: Any) -> Any:
        loss, found = super().policy_loss(name, rows, batch), self.policy(name)(rows.inputs())
        self.deviations = [float((rows.old_logp - found).detach().abs().max())]
        return loss


class Wrapped(Preparing):
    """Has the name of the method that it replaces."""

    @functools.wraps(GRPO.prepare)
    def prepare(self, *given: Any) -> Any:
        return super().prepare(*given)


@pytest.mark.parametrize("kind", [Preparing, OwnLoss, Wrapped])
def test_a_class_that_reads_the_old_log_probabilities_elsewhere_has_those_of_the_learner(
    model_folder: Path, echo: Any, quiet_trainer: Any, kind: Any
) -> None:
    algorithm = kind({"main": Policy(str(model_folder), learning_rate=1e-3)})
    _, data = make(model_folder, echo(), iterations=1, sampling=Sampling(top_p=0.5, max_tokens=8))
    quiet_trainer().fit(algorithm, data)
    assert max(algorithm.deviations) < 1e-4, "those of truncated sampling are further away"


@pytest.mark.parametrize(("limit", "updates"), [(1.0, 1), (4, 1), (3, None), (0.5, None), (9, 1)])
def test_epochs_that_end_within_an_update_have_no_fixed_number_of_updates_on_a_rollout(
    model_folder: Path, echo: Any, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch, limit: Any, updates: int | None
) -> None:
    """Three rollouts, an update of two micro-batches on each: the trainer steps early at the end of an epoch."""
    told: list[Any] = []
    monkeypatch.setattr(GRPO, "check_rollouts", lambda self, met: told.append(met.updates))
    algorithm, data = make(model_folder, echo())
    trainer = quiet_trainer(accumulate_grad_batches=2, limit_train_batches=limit)
    algorithm.trainer = trainer
    monkeypatch.setattr(data, "algorithm", lambda: algorithm)
    data.setup("validate")
    assert told == [updates]


def test_accumulation_and_micro_batches_do_not_change_the_update(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    weights = []
    for accumulation in (1, 2, 4, 8, 12):
        algorithm, data = make(model_folder, echo(), {"kl": {"coefficient": 0.1}}, iterations=1)
        trainer = quiet_trainer(accumulate_grad_batches=accumulation)
        trainer.fit(algorithm, data)
        assert trainer.global_step == 1
        weights.append(algorithm.trainer.optimizers[0].state_dict()["state"])
    for other in weights[1:]:
        for index, state in weights[0].items():
            # After one step AdamW's first moment is (1 - beta1) times the gradient.
            assert torch.allclose(state["exp_avg"], other[index]["exp_avg"], atol=1e-7, rtol=1e-4)


def test_failed_episodes_are_counted_and_stay_out_of_the_loss(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    algorithm, data = make(model_folder, echo(fail_every=4), iterations=4, retries=0)
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    episodes = list(read_episodes(Path(trainer.default_root_dir) / "episodes"))
    assert sum(episode.failed for episode in episodes) == 16, "4 of the 16 tasks fail, 4 episodes each"


def test_a_run_in_which_everything_fails_stops_with_the_reason(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    algorithm, data = make(model_folder, echo(fail_every=1), retries=0)
    with pytest.raises(
        RolloutError, match=r"every episode .* failed, 16 in all.*the back end is away.*try `mrlm_pl.check_environment"
    ):
        quiet_trainer().fit(algorithm, data)


def test_a_reward_of_nan_stops_the_run(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, echo(reward=float("nan")))
    with pytest.raises(NonFiniteError, match="reward of agent 'agent' is nan"):
        quiet_trainer().fit(algorithm, data)


def test_a_group_of_one_is_refused_before_the_model_loads(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, echo(), group_size=1)
    with pytest.raises(ConfigurationError, match="group_size is 1"):
        quiet_trainer().fit(algorithm, data)
    assert algorithm.policy("main").model is None


def test_a_validation_after_more_micro_batches_than_an_epoch_has_is_refused(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    algorithm, data = make(model_folder, echo(), minibatches=2, validation_episodes=2)  # 3 iterations of 2 updates
    options: dict[str, Any] = {"limit_val_batches": 1.0, "accumulate_grad_batches": 2}
    for limit, batches in ((1.0, 12), (5, 5), (0.5, 6)):
        trainer = quiet_trainer(val_check_interval=batches + 1, limit_train_batches=limit, **options)
        fault = rf"trainer\.val_check_interval is {batches + 1} micro-batches, but an epoch has {batches} \(data\.iter"
        with pytest.raises(ConfigurationError, match=fault):
            data.check(algorithm, trainer)
        data.check(algorithm, quiet_trainer(val_check_interval=batches, limit_train_batches=limit, **options))
    for allowed in ({"limit_val_batches": 0}, {"check_val_every_n_epoch": None}):
        data.check(algorithm, quiet_trainer(val_check_interval=13, **{**options, **allowed}))


def test_groups_that_cannot_be_shared_evenly_are_refused(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, echo(), minibatches=3)
    with pytest.raises(
        ConfigurationError, match=r"1 rank x 3 mini-batches x 1 accumulation step cannot.* multiple of 3"
    ):
        quiet_trainer().fit(algorithm, data)
    algorithm, data = make(model_folder, echo())
    with pytest.raises(ConfigurationError, match=r"make it a multiple of 6; .*a divisor of 4 or a multiple of 4"):
        quiet_trainer(accumulate_grad_batches=6).fit(algorithm, data)


def test_a_loss_that_compares_the_rows_of_a_group_has_them_in_one_micro_batch(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    _, data = make(model_folder, echo())
    algorithm = MADPO({"main": Policy(str(model_folder))})
    with pytest.raises(ConfigurationError, match=r"make trainer\.accumulate_grad_batches a divisor of 4$"):
        quiet_trainer(accumulate_grad_batches=8).fit(algorithm, data)


def test_a_policy_gradient_with_a_loss_of_its_own_says_whether_groups_may_be_divided(model_folder: Path) -> None:
    class Ranked(GRPO):
        """Its loss compares the rows of a group."""

        def token_losses(self, logp: Any, old_logp: Any, rows: Any) -> Any:
            return logp * (rows.comparisons == rows.comparisons[0])[:, None], {}

    class Single(Ranked):
        divides_groups = True

    policies = {"main": str(model_folder)}
    found = [cls(policies).divides_groups for cls in (GRPO, Ranked, Single, MADPO)]
    assert found == [True, False, True, False]


def test_equal_rewards_give_no_gradient(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, echo(reward=0.5), iterations=1)
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    assert trainer.callback_metrics["train/grad_norm"] == 0
    assert trainer.callback_metrics["rollout/zero_variance_groups"] == 1


def test_the_finished_run_leaves_a_policy_folder(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    from transformers import AutoModelForCausalLM

    algorithm, data = make(model_folder, echo(), iterations=1)
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    model = AutoModelForCausalLM.from_pretrained(Path(trainer.default_root_dir) / "policies" / "main")
    trained = algorithm.policy("main").model.get_input_embeddings().weight
    assert torch.equal(model.get_input_embeddings().weight, trained)


def test_another_way_to_serve_a_collection_is_refused_in_its_middle(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    algorithm, data = make(model_folder, echo(), minibatches=2, passes=2)
    quiet_trainer(enable_checkpointing=True, callbacks=[saver]).fit(algorithm, data)
    algorithm, data = make(model_folder, echo(), minibatches=2, passes=1)
    with pytest.raises(ConfigurationError, match=r"data\.passes is 1, .* with 2"):
        quiet_trainer().fit(algorithm, data, ckpt_path=tmp_path / "step=3.ckpt")
    algorithm, data = make(model_folder, echo(), minibatches=2, passes=1)
    quiet_trainer(max_epochs=2).fit(algorithm, data, ckpt_path=tmp_path / "step=4.ckpt")
    assert data.stream.iteration > 1, "between two collections it may change"


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1)])
@pytest.mark.parametrize("done", [1, 2])
def test_other_numbers_of_updates_leave_the_number_of_iterations(
    before: int, after: int, done: int, model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    """From the end of an iteration on, even the last one, with more iterations."""
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    algorithm, data = make(model_folder, echo(), iterations=2, passes=before)
    quiet_trainer(enable_checkpointing=True, callbacks=[saver]).fit(algorithm, data)
    algorithm, data = make(model_folder, echo(), iterations=4, passes=after)
    trainer = quiet_trainer()
    trainer.fit(algorithm, data, ckpt_path=tmp_path / f"step={done * before}.ckpt")
    assert (data.stream.iteration, data.stream.position) == (4, 0)
    assert trainer.global_step == done * before + (4 - done) * after
    trainer.fit_loop.max_epochs = 2
    trainer.fit(algorithm, data)
    assert trainer.global_step == done * before + (8 - done) * after
    assert batches_served(trainer) == 8 * after, "the past ones are adjusted once"


def test_a_limit_of_batches_holds_for_other_numbers_of_updates(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    algorithm, data = make(model_folder, echo(), iterations=4)
    quiet_trainer(enable_checkpointing=True, callbacks=[saver], limit_train_batches=3).fit(algorithm, data)
    algorithm, data = make(model_folder, echo(), iterations=4, passes=2)
    trainer = quiet_trainer(limit_train_batches=3)
    trainer.fit(algorithm, data, ckpt_path=tmp_path / "step=1.ckpt")
    assert trainer.global_step == 3


@pytest.mark.parametrize("done", [1, 3])
def test_a_rollout_of_other_processes_is_left_out_and_counts_as_an_iteration(
    done: int, model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    algorithm, data = make(model_folder, echo(), iterations=2, minibatches=2)
    quiet_trainer(enable_checkpointing=True, callbacks=[saver]).fit(algorithm, data)
    checkpoint = torch.load(tmp_path / f"step={done}.ckpt", weights_only=False)
    state = checkpoint["RolloutDataModule"]
    assert (state["iteration"], state["position"]) == (done // 2, 1)
    state["rows"] *= 2
    torch.save(checkpoint, tmp_path / "of_two.ckpt")
    algorithm, data = make(model_folder, echo(), iterations=2, minibatches=2)
    trainer = quiet_trainer()
    trainer.fit(algorithm, data, ckpt_path=tmp_path / "of_two.ckpt", weights_only=False)
    assert (data.stream.iteration, data.stream.position, trainer.global_step) == (2, 0, 3)


def test_the_first_epoch_may_become_longer_and_not_shorter(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    algorithm, data = make(model_folder, echo(), iterations=2)
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    quiet_trainer(callbacks=[saver], enable_checkpointing=True).fit(algorithm, data)
    algorithm, data = make(model_folder, echo(), iterations=1)
    with pytest.raises(ConfigurationError, match=r"in epochs of 2.*data\.iterations 2.*max_epochs"):
        quiet_trainer(max_epochs=2).fit(algorithm, data, ckpt_path=tmp_path / "step=2.ckpt")
    for step, epochs in ((1, 1), (2, 1), (2, 2)):
        algorithm, data = make(model_folder, echo(), iterations=4)
        quiet_trainer(max_epochs=epochs).fit(algorithm, data, ckpt_path=tmp_path / f"step={step}.ckpt")
        assert data.stream.iteration == 4 * epochs


def judged(success: bool | None, environment: str = "a", reward: float = 0.0) -> Episode:
    turn = Turn("x", 0, 1, 2, reward, {"r": reward}, "stop", "main", 0, "e")
    row = Trajectory("x", "main", (1, 2), (False, True), (0.0, -0.5), (turn,))
    return Episode("0", Task(environment, "train", 0), "g", 0, 0, {"x": (row,)}, "end", success=success)


def test_a_cut_episode_is_a_failure_where_the_environment_judges() -> None:
    episodes = [judged(True), judged(None), judged(False), judged(None, "unjudged")]
    assert accuracies([episodes]) == {"val/accuracy": 1 / 3}
    assert CollectionSums.of(episodes, 1.0).metrics()["rollout/success"] == pytest.approx(1 / 3)


def accuracies(batches: Sequence[Sequence[Episode]], by_task: bool = False) -> dict[str, float]:
    metrics = Metrics(["main"])
    for episodes in batches:
        batch = EpisodeBatch(episodes, by_task)
        metrics.add_evaluation("val", batch.means(), batch.counts(), batch.outcomes())
    found = metrics.take_evaluation("val")
    return {name: value for name, value in found.items() if "accuracy" in name}


def test_a_batch_of_cut_episodes_counts_where_the_environment_judges_in_another() -> None:
    """The accuracy was 1: that of the batches in which an episode ended, and on several ranks of those ranks."""
    batches = [[judged(None)] * 2, [judged(True)], [judged(None), judged(None, "unjudged")]]
    assert accuracies(batches) == {"val/accuracy": 1 / 4}
    assert accuracies(batches, by_task=True) == {"val/accuracy": 1 / 4, "val/a/accuracy": 1 / 4}
    assert accuracies([[judged(None)]]) == {}


def test_failed_episodes_of_a_rank_add_no_accuracy_where_the_environment_never_judges() -> None:
    """It was NaN beside the reward of the others, and not there in one process, which has them in one batch."""
    failed = replace(judged(None), error="no server", stop_reason="error")
    assert accuracies([[failed], [judged(None)]]) == {}
    assert accuracies([[failed], [judged(True)]]) == {"val/accuracy": 1}
    assert math.isnan(accuracies([[failed], [failed]])["val/accuracy"])


def test_an_environment_that_judges_on_one_rank_judges_on_all(
    model_folder: Path, echo: Any, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cut(echo):  # type: ignore[misc]
        def reply(self, message: Any) -> Any:
            return replace(super().reply(message), success=None)

    def gather(trainer: Any, own: Any) -> list[Any]:
        return [own, (None, {"echo"})] if isinstance(own, tuple) else [own]

    monkeypatch.setattr(collecting, "gather_ranks", gather)
    algorithm, data = make(model_folder, Cut(), iterations=1)
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    assert trainer.callback_metrics["rollout/success"] == 0


def test_a_rank_without_episodes_changes_no_mean() -> None:
    """It counted as a turn of no tokens, and as a token without surprise."""
    some, none = CollectionSums.of([judged(True)], 1.0), CollectionSums.of([], 1.0)
    assert some.plus(none).metrics() == some.metrics()


def test_the_sums_of_ranks_add_up() -> None:
    first = CollectionSums.of([judged(True, reward=1.0), judged(False)], seconds=2.0)
    second = CollectionSums.of([judged(True, "b", reward=4.0)], seconds=0.5)
    metrics = first.plus(second).metrics()
    assert metrics["rollout/reward"] == pytest.approx(5 / 3)
    assert metrics["rollout/a/r"] == 0.5
    assert metrics["rollout/b/r"] == 4.0
    assert metrics["rollout/tokens_per_second"] == 2 / 2.0 + 1 / 0.5
    assert metrics["rollout/entropy"] == 0.5
    assert metrics["rollout/response_tokens"] == 1.0


def test_dynamic_sampling_logs_the_reward_of_all_groups_beside_that_of_the_kept(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    class OftenEqual(echo):  # type: ignore[misc]
        def begin(self, task: Task) -> str:
            self.reward = None if task.index % 2 else 5.0
            return super().begin(task)

    seen: list[dict[str, float]] = []

    class Seen(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    algorithm, data = make(model_folder, OftenEqual(), iterations=1, resample_rounds=1)
    trainer = quiet_trainer(callbacks=[Seen()])
    trainer.fit(algorithm, data)
    rewards = [episode.reward for episode in read_episodes(Path(trainer.default_root_dir) / "episodes")]
    assert len(rewards) == 16 + 4 * seen[0]["rollout/resampled_groups"] > 16
    assert seen[0]["rollout/reward_of_all_groups"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-5)
    assert seen[0]["rollout/reward"] < seen[0]["rollout/reward_of_all_groups"], "equal rewards of 5 are replaced"


def test_the_reward_of_all_groups_counts_the_paths_of_a_tree_by_their_probability() -> None:
    """One decision of the root ends the episode, the other is followed by two."""

    def path(name: str, *steps: tuple[str, float]) -> Episode:
        turns = tuple(
            Turn("x", number, 1, 2, reward, {}, "stop", "main", 0, "e", node)
            for number, (node, reward) in enumerate(steps)
        )
        row = Trajectory("x", "main", (1, 2), (False, True), (0.0, -0.5), turns)
        return Episode(name, Task("a", "train", 0), "g", 0, 0, {"x": (row,)}, "end")

    short = path("g-0", ("g", 1.0))
    long = [path(f"g-1-{after}", ("g", 0.0), ("g-1", 4.0)) for after in (0, 1)]
    paths = [short, *long]
    found = outcome_sums(paths, path_weights(paths), (), by_task=False)
    assert found == {"rollout/reward": (0.5 * 1.0 + 2 * 0.25 * 4.0, 1.0)}


def test_the_rate_counts_what_was_sampled_for_others_and_retries_are_told() -> None:
    again = replace(judged(True), attempts=3)
    metrics = CollectionSums.of([again, judged(False)], seconds=2.0, earlier_tokens=4.0).metrics()
    assert metrics["rollout/tokens_per_second"] == (2 + 4) / 2.0
    assert metrics["rollout/retries"] == 2.0


def test_the_reward_of_an_environment_is_the_whole_where_some_turns_have_named_parts() -> None:
    episode = judged(True, reward=4.0)
    turn = episode.rows()[0].turns[0]
    turn.components.clear()
    turn.components.update({"reward": 0.0, "right": 4.0})  # the first a turn's without named parts
    metrics = CollectionSums.of([episode], seconds=1.0).metrics()
    assert (metrics["rollout/a/reward"], metrics["rollout/a/right"]) == (4.0, 4.0)


def test_the_engine_of_the_module_ends_with_its_stage(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    algorithm, data = make(model_folder, echo(), iterations=1)
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    assert data.players._own is None
    trainer.validate(algorithm, data, verbose=False)


@pytest.mark.parametrize("option", [{"retries": -1}, {"processes": -1}, {"step_timeout": 0.0}])
def test_numbers_out_of_range_are_refused_before_a_model_is_read(option: dict[str, Any], echo: Any) -> None:
    ((name, value),) = option.items()
    with pytest.raises(ConfigurationError, match=rf"^RolloutDataModule: {name} is {value}; it must be "):
        RolloutDataModule(echo(), **option)


def test_failed_environments_are_closed(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    closed: list[bool] = []

    class Closing(echo):  # type: ignore[misc]
        def close(self) -> None:
            closed.append(True)

    algorithm, data = make(model_folder, Closing(fail_every=2), iterations=1, retries=1)
    quiet_trainer().fit(algorithm, data)
    episodes = list(read_episodes(Path(data.trainer.default_root_dir) / "episodes"))
    failed = sum(item.failed for item in episodes)
    assert failed
    # Each failed episode was begun twice; those that did not fail were closed at the end.
    assert len(closed) == 2 * failed + (len(episodes) - failed)


def test_updates_without_any_gradient_pass_also_with_adapters(
    model_folder: Path, echo: Any, quiet_trainer: Any
) -> None:
    """All rewards are equal, so the adapter stays as it was."""
    algorithm = GRPO({"main": Policy(str(model_folder), learning_rate=1e-3, lora=LoRA(rank=2))})
    data = RolloutDataModule(echo(reward=0.5), groups=2, group_size=2, iterations=2, sampling=Sampling(max_tokens=4))
    trainer = quiet_trainer(max_epochs=0)
    trainer.fit(algorithm, data)
    before = fingerprint(algorithm)
    quiet_trainer().fit(algorithm, data)
    assert fingerprint(algorithm) == before


def test_the_throughput_is_that_of_the_rollout_alone(
    model_folder: Path, echo: Any, quiet_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = [0.0]

    def lasting(owner: Any, name: str, took: float) -> None:
        whole = getattr(owner, name)

        def slow(*args: Any, **options: Any) -> Any:
            seconds[0] += took
            return whole(*args, **options)

        monkeypatch.setattr(owner, name, slow)

    monkeypatch.setattr(collecting, "time", SimpleNamespace(perf_counter=lambda: seconds[0]))
    algorithm, data = make(model_folder, echo(), iterations=1)
    lasting(collecting.SyncCollector, "collect", 2.0)
    lasting(collecting.EpisodeWriter, "write", 30.0)
    lasting(algorithm, "prepare", 50.0)
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    episodes = list(read_episodes(Path(trainer.default_root_dir) / "episodes"))
    tokens = sum(row.num_actions for episode in episodes for row in episode.rows())
    assert seconds[0] == 82.0
    assert float(trainer.callback_metrics["rollout/tokens_per_second"]) == pytest.approx(tokens / 2.0)


def test_an_evaluation_refuses_a_sampling_with_settings_of_an_unknown_policy() -> None:
    players = Players({}, None, False, {})
    players.learner = SimpleNamespace(trainer=None, policies={"main": None})  # type: ignore[assignment]
    sampling = Sampling(policies={"mian": PolicySampling(temperature=0.5)})
    with pytest.raises(ConfigurationError, match=r"sampling\.policies: there is no policy 'mian'; did you mean 'main'"):
        players.play([], sampling)


def test_turns_beyond_the_context_window_are_told(
    model_folder: Path, echo: Any, quiet_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    window = Policy(str(model_folder)).context_window
    for options in (
        {"sampling": Sampling(max_tokens=window)},
        {"validation_sampling": Sampling(policies={"main": PolicySampling(max_tokens=window + 1)})},
        {"sampling": Sampling(max_tokens=window - 1)},
    ):
        algorithm, data = make(model_folder, echo(), **options)
        data.check(algorithm, quiet_trainer())
    assert [message for message in caplog.messages if "context window" in message] == [
        f"data.{option}.max_tokens is {limit}, but the context window of policy 'main' is {window} tokens, prompts "
        "included; its turns are truncated there"
        for option, limit in (("sampling", window), ("validation_sampling", window + 1))
    ]


def test_a_checkpoint_is_validated_and_tested(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    algorithm, data = make(model_folder, echo(), iterations=1, validation_episodes=4)
    trainer = quiet_trainer(limit_val_batches=1.0)
    trainer.fit(algorithm, data)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    for stage in ("validate", "test"):
        expected, found = (
            getattr(quiet_trainer(limit_val_batches=1.0), stage)(*parts, ckpt_path=path, verbose=False)
            for parts, path in (
                ((algorithm, data), None),
                (make(model_folder, echo(), iterations=1, validation_episodes=4), tmp_path / "last.ckpt"),
            )
        )
        assert found == expected


def test_environments_may_be_any_sequence(echo: Any) -> None:
    """A list of one class is no ``list[Environment]`` to a type checker."""
    (name,) = RolloutDataModule((echo(),)).environments
    assert name == echo().name
    assert "Sequence[Environment]" in str(RolloutDataModule.__init__.__annotations__["environment"])
