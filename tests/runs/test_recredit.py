"""Recorded episodes credited again: with the run's own settings, with others, and where that cannot be."""

from __future__ import annotations

import json
import logging
import re
import statistics
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mrlm_environments import LengthRatioGame
from transformers import AutoModelForCausalLM

from mrlm_pl.advantages import group_centered_advantages
from mrlm_pl.algorithms import C3, CISPO, COMA, GRPO, IGPO, IPPO, MAGRPO, MAREMAX, RAE, RLOO, SFT, ReMax
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.data.rollout.tasks import TaskSettings
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import CREDIT, Episode, Turn
from mrlm_pl.episode_files import iteration_file, read_episodes, write_episodes
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import Policy
from mrlm_pl.runs import recredit
from mrlm_pl.runs.records import gradients
from tests.support.models.device_without_float64 import WithoutFloat64
from tests.support.runs.logs import logged_here

SIZES = {"groups": 2, "group_size": 4, "iterations": 2, "sampling": Sampling(max_tokens=6)}


def played(algorithm: Any, environment: Any, trainer: Any, **settings: Any) -> Path:
    trainer.fit(algorithm, RolloutDataModule(environment, **{**SIZES, **settings}))
    return Path(trainer.default_root_dir)


def told(run: Path, algorithm: Any, **data: Any) -> None:
    """Write a configuration, as a run of the command line has it."""
    model = {"class_path": f"mrlm_pl.{type(algorithm).__name__}"}
    (run / "config.yaml").write_text(json.dumps({"model": model, "data": {"init_args": data}}))


def turns_of(folder: Path) -> dict[tuple[str, str, int], Turn]:
    return {
        (episode.id, turn.agent, turn.index): turn
        for episode in read_episodes(folder / "episodes")
        for row in episode.rows()
        for turn in row.turns
    }


@pytest.fixture
def main(model_folder: Path) -> dict[str, Policy]:
    return {"main": Policy(str(model_folder), learning_rate=1e-3)}


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (GRPO, {}),
        (GRPO, {"credit": "turn", "gamma": 0.5}),
        (MAGRPO, {}),
        (COMA, {"gamma": 0.5}),
        (ReMax, {}),
        (MAREMAX, {}),
        (RAE, {}),
        (C3, {"alternatives": 1}),
    ],
)
@pytest.mark.long_after(3)
def test_the_runs_own_settings_give_the_recorded_advantages_exactly(
    cls: Any, settings: dict[str, Any], main: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    run = played(cls(main, **settings), LengthRatioGame(rounds=2), quiet_trainer(), group_size=2)
    told(run, cls(main))
    output = tmp_path / "again"
    report = recredit(run, cls(main, **settings), output=output)
    recorded, new = turns_of(run), turns_of(output)
    credit = [{key: [getattr(turn, name) for name in CREDIT] for key, turn in of.items()} for of in (new, recorded)]
    assert credit[0] == credit[1]
    assert len({turn.advantage for turn in recorded.values()}) > 2
    assert report.largest == ()
    assert all(change.one_sided == 0 for change in report.agents.values())
    assert json.loads((output / "recredit.json").read_text())["episodes"] == report.episodes > 0


def test_changes_are_reported_by_turn(main: Any, quiet_trainer: Any) -> None:
    settings = {"credit": "turn", "advantage": "group_centered"}
    run = played(GRPO(main, **settings, gamma=0.5), LengthRatioGame(rounds=2), quiet_trainer())
    told(run, GRPO(main))
    report = recredit(run, GRPO(main, **settings, gamma=1.0))
    for agent, (first, last) in ((agent, parts.values()) for agent, parts in report.turns.items()):
        assert first.turns + last.turns == report.agents[agent].turns == 2 * 16
        assert first.correlation is not None
        assert first.correlation < 1 - 1e-6, "the discount counts in the return from the first turn on"
        assert last.correlation == pytest.approx(1), "nothing follows the last turn"


def test_an_agent_of_a_frozen_policy_has_no_change(model_folder: Path, quiet_trainer: Any) -> None:
    policies = {
        "first": Policy(str(model_folder), learning_rate=1e-2),
        "second": Policy(str(model_folder), trained=False),
    }
    report = recredit(played(GRPO(policies), LengthRatioGame(rounds=1), quiet_trainer()), GRPO(policies))
    assert {agent: change.turns for agent, change in report.agents.items()} == {"first": 16}
    assert list(report.turns) == ["first"]


def test_rewards_are_scaled_as_in_the_run(main: Any, quiet_trainer: Any, echo: Any, tmp_path: Path) -> None:
    scaled = {"task_settings": {"echo": TaskSettings(reward_scale=3.0)}}
    run = played(GRPO(main, advantage="group_centered"), echo(), quiet_trainer(), iterations=1, **scaled)
    told(run, GRPO(main), task_settings={"echo": {"reward_scale": 3.0}})
    report = recredit(run, GRPO(main, advantage="group_centered"))
    assert report.agents["agent"].correlation == pytest.approx(1)
    assert report.largest == ()


def test_a_run_of_a_script_names_the_settings_that_it_does_not_record(
    main: Any, quiet_trainer: Any, echo: Any, caplog: pytest.LogCaptureFixture
) -> None:
    scaled = {"task_settings": {"echo": TaskSettings(reward_scale=3.0)}}
    run = played(GRPO(main, advantage="group_centered"), echo(), quiet_trainer(), iterations=1, **scaled)
    caplog.clear()
    with caplog.at_level(logging.WARNING, "mrlm_pl.runs.records.credit"):
        assert recredit(run, GRPO(main, advantage="group_centered"), **scaled).largest == ()
        assert not logged_here(caplog)
        assert recredit(run, GRPO(main, advantage="group_centered")).largest
    assert "has no config.yaml: rewards have no `reward_scale`" in caplog.text
    with pytest.raises(ConfigurationError, match=r"overlong_buffer needs the limit on .* no config.yaml"):
        recredit(run, GRPO(main, overlong_buffer=2))
    assert recredit(run, GRPO(main, overlong_buffer=2), sampling=SIZES["sampling"]).episodes == 8


def test_the_algorithm_stays_as_it_is(main: Any, quiet_trainer: Any, echo: Any) -> None:
    algorithm, trainer = RAE(main), quiet_trainer()
    run = played(algorithm, echo(), trainer)
    told(run, algorithm)
    progress, rollout = algorithm.progress(), dict(algorithm.metrics.rollout)
    assert progress["role_baselines"]["echo/agent"] != 0
    first = recredit(run, algorithm)
    assert first.largest == ()
    assert recredit(run, algorithm) == first
    assert algorithm.trainer is trainer
    assert (algorithm.progress(), algorithm.metrics.rollout) == (progress, rollout)


def test_a_job_of_several_tasks_credits_in_each_of_them(
    main: Any, quiet_trainer: Any, echo: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = played(GRPO(main), echo(), quiet_trainer(), iterations=1)
    job = {"JOB_NAME": "train", "NTASKS": "2", "PROCID": "1", "LOCALID": "1", "NODEID": "0", "NTASKS_PER_NODE": "2"}
    for name, value in {**job, "NODELIST": "localhost", "JOB_ID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setattr("lightning.fabric.plugins.environments.slurm._is_srun_used", lambda: True)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert recredit(run, GRPO(main)).episodes == 8
    assert "GPU available" not in caplog.text


def test_replaced_groups_do_not_count(main: Any, quiet_trainer: Any, echo: Any, tmp_path: Path) -> None:
    environment = echo(reward=1.0)  # no group has a signal, so each is replaced once
    run = played(GRPO(main), environment, quiet_trainer(), resample_rounds=1)
    report = recredit(run, GRPO(main), output=tmp_path / "again")
    assert report.episodes == 2 * 2 * 4
    again = list(read_episodes(tmp_path / "again" / "episodes"))
    assert sum(episode.excluded == "replaced" for episode in again) == 2 * 2 * 4
    (change,) = report.agents.values()
    assert (change.zero_groups, change.correlation) == ((1.0, 1.0), None)


def test_another_baseline_gives_the_numbers_of_a_calculation_by_hand(
    main: Any, quiet_trainer: Any, echo: Any, tmp_path: Path
) -> None:
    run = played(GRPO(main), echo(), quiet_trainer())
    recorded = turns_of(run)
    report = recredit(run, RLOO(main), output=tmp_path / "again")
    groups = groups_of(tmp_path / "again")
    pairs = []
    for members in groups.values():
        for episode in members:
            others = [other.reward for other in members if other is not episode]
            (turn,) = episode.rows()[0].turns
            assert turn.advantage == pytest.approx(episode.reward - sum(others) / 3, abs=1e-6)
            pairs.append((recorded[episode.id, "agent", 0].advantage, turn.advantage))
    (change,) = report.agents.values()
    assert change.turns == 16
    assert change.correlation == pytest.approx(statistics.correlation(*zip(*pairs, strict=True)))
    assert change.correlation < 1
    assert change.sign_changes == 0
    silent = sum(len({episode.reward for episode in members}) == 1 for members in groups.values()) / 4
    assert change.zero_groups == (silent, silent)
    largest = max(pairs, key=lambda pair: abs(pair[0] - pair[1]))
    assert (report.largest[0].recorded, report.largest[0].new) == largest


def test_another_discount_of_a_turn_tree_is_that_of_its_steps(main: Any, quiet_trainer: Any, tmp_path: Path) -> None:
    run = played(MAGRPO(main), LengthRatioGame(rounds=2), quiet_trainer(), group_size=2)
    report = recredit(run, MAGRPO(main, gamma=0.0, weighting="equal"), output=tmp_path / "again")
    assert [change.turns for change in report.agents.values()] == [2 * 2 * (2 + 4)] * 2  # decisions, not paths
    states: dict[tuple[str, str], dict[int, tuple[float, list[float | None]]]] = defaultdict(dict)
    for episode in read_episodes(tmp_path / "again" / "episodes"):
        for turn in (turn for row in episode.rows() for turn in row.turns):
            step = sum(episode.step_rewards[turn.index].values()) / 2
            states[episode.group, turn.node].setdefault(turn.sample, (step, []))[1].append(turn.advantage)
    assert len(states) == 2 * 2 * 3
    for joint in states.values():
        mean = sum(step for step, _ in joint.values()) / 2
        for step, advantages in joint.values():
            assert advantages == pytest.approx([step - mean] * len(advantages), abs=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [
        (lambda main: IPPO(main), "the credit of IPPO needs weights for a critic"),
        (lambda main: IGPO(main), "the credit of IGPO needs weights for the information gains"),
        (lambda main: GRPO(main, top_entropy=0.5), "needs weights for `top_entropy`"),
        (lambda main: SFT(main), "SFT gives the turns of episodes no advantage"),
        (lambda main: COMA(main), "COMA compares with turn trees, which '.*' does not have"),
        (lambda main: ReMax(main), "ReMax compares with a greedy episode of each task"),
        (lambda main: C3(main), r"C3 compares with the branch episodes .* \(no config.yaml names"),
        (lambda main: RLOO(), r"of \['first'\], and the policies are \['main'\]"),
    ],
)
def test_credit_that_needs_weights_or_other_play_is_refused(
    algorithm: Any, reason: str, model_folder: Path, quiet_trainer: Any, echo: Any
) -> None:
    first = {"first": Policy(str(model_folder), learning_rate=1e-3)}
    run = played(GRPO(first), echo(), quiet_trainer(), iterations=1)
    with pytest.raises(ConfigurationError, match=reason):
        recredit(run, algorithm(first))


def test_a_baseline_of_earlier_iterations_needs_them(main: Any, quiet_trainer: Any, echo: Any) -> None:
    run = played(GRPO(main), echo(), quiet_trainer(), save_episodes={"last": 1})
    assert recredit(run, RLOO(main)).episodes == 8
    with pytest.raises(ConfigurationError, match="RAE compares with earlier iterations, and iteration 0 is not among"):
        recredit(run, RAE(main))
    with pytest.raises(ConfigurationError, match="1` leaves them out; credit all iterations, or choose another"):
        recredit(run, RAE(main), iteration=1)
    gone = r"no episode of iteration 0; the episodes of 1 of 2 iterations are not kept \(see `data.save_episodes`\)"
    with pytest.raises(ConfigurationError, match=gone):
        recredit(run, RLOO(main), iteration=0)


def test_the_run_is_never_written_to(main: Any, quiet_trainer: Any, echo: Any, tmp_path: Path) -> None:
    run = played(GRPO(main), echo(), quiet_trainer(), iterations=1)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ConfigurationError, match=r"is inside the run .* name a new folder outside the run"):
        recredit(run, GRPO(main), output=run / "again")
    with pytest.raises(ConfigurationError, match="needs weights"):
        recredit(run, IPPO(main), output=tmp_path / "again")
    recredit(run, CISPO(main), output=tmp_path / "again")
    with pytest.raises(ConfigurationError, match="exists"):
        recredit(run, GRPO(main), output=tmp_path / "again")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert not list(tmp_path.glob("*.part"))


def test_the_output_holds_this_credit_alone(main: Any, quiet_trainer: Any, echo: Any, tmp_path: Path) -> None:
    run = played(GRPO(main), echo(), quiet_trainer())
    left = iteration_file(tmp_path / "again.part", 7)
    write_episodes(left, list(read_episodes(run / "episodes")))
    recredit(run, RLOO(main), iteration=0, output=tmp_path / "again")
    assert [path.name for path in (tmp_path / "again" / "episodes").iterdir()] == ["iteration-000000.jsonl.zst"]
    assert not left.exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"output: '.*' cannot be written: Not a directory; name a place"):
        recredit(run, RLOO(main), output=tmp_path / "file" / "again")


def test_a_run_without_an_episode_to_credit_is_refused(
    main: Any, quiet_trainer: Any, echo: Any, tmp_path: Path
) -> None:
    run = played(GRPO(main), echo(), quiet_trainer(), iterations=1)
    for path in (run / "episodes").iterdir():
        write_episodes(path, [replace(item, excluded="replaced") for item in read_episodes(path)])
    with pytest.raises(ConfigurationError, match=r"RLOO gives none of the chosen episodes of .* credit"):
        recredit(run, RLOO(main), output=tmp_path / "again")
    assert not list(tmp_path.glob("again*"))


@pytest.mark.long
def test_the_command_takes_the_runs_algorithm_or_another(
    mrlm: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    config = Path(__file__).parents[2] / "configs" / "tasks" / "teams" / "debate.yaml"
    run, output = tmp_path / "run", tmp_path / "again"
    sizes = {"iterations": "1", "groups": "2", "group_size": "4"}
    options = [word for name, value in sizes.items() for word in (f"--data.{name}", value)]
    assert (
        mrlm("fit", "--config", str(config), *options, "--trainer.limit_val_batches", "0", "--output", str(run))[0] == 0
    )
    status, out, _ = mrlm("recredit", str(run))
    assert status == 0
    assert "8 episodes with the credit of GRPO" in out
    assert len(re.findall(r"(?:con|pro): \d+ turns, correlation 1\.0000, 0 sign changes", out)) == 2
    status, out, err = mrlm("recredit", str(run), "--model", "RLOO", "--output", str(output), "--policies", str(run))
    assert status == 0, err
    assert len(re.findall(r"(?:con|pro): .* cosine of the gradients [01]\.\d", out)) == 2
    assert len(re.findall(r"policy (?:first|second): cosine of the gradients [01]\.\d", out)) == 2
    assert "with the credit of RLOO" in out
    assert " -> " in out
    rewards = [episode.rewards()["pro"] for episode in read_episodes(output / "episodes") if episode.group == "0-0"]
    (first, *_) = read_episodes(output / "episodes")
    expected = rewards[0] - sum(rewards[1:]) / 3
    assert first.trajectories["pro"][0].turns[0].advantage == pytest.approx(expected, abs=1e-6)
    assert mrlm("view", str(output), "--text")[0] == 0
    status, _, err = mrlm("recredit", str(run), "--model", "PPO")
    assert status == 2
    assert "the credit of PPO needs weights for a critic; choose an algorithm without it" in err
    status, _, err = mrlm("recredit", str(run), "--device", "cpu")
    assert (status, "device: 'cpu' does nothing without policies; leave it out" in err) == (2, True)


def negated(returns: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    return -group_centered_advantages(returns, groups)


def test_the_cosine_of_gradients_needs_no_float64_of_their_device() -> None:
    sums = torch.tensor([[3.0, 0.0], [3.0, 4.0]]).as_subclass(WithoutFloat64)  # of one weight, under both credits
    assert gradients._cosine([[[sums], [sums]]]) == pytest.approx(0.6)


def test_the_cosine_of_the_gradients_is_that_of_autograd(model_folder: Path, quiet_trainer: Any) -> None:
    environment = LengthRatioGame(rounds=1)
    first, second = environment.agents
    policies = {name: Policy(str(model_folder), learning_rate=1e-3) for name in ("one", "two")}
    trained = GRPO(policies, {first: "one", second: "two"}, advantage="group_centered")
    run = played(trained, environment, quiet_trainer(), iterations=1)

    def cosines(algorithm: Any) -> list[float | None]:
        report = recredit(run, algorithm, policies=run, device="cpu")
        assert [change.gradient_cosine for change in report.agents.values()] == [*report.gradient_cosines.values()]
        return [*report.gradient_cosines.values()]

    assert cosines(trained) == pytest.approx([1.0, 1.0])
    assert cosines(GRPO(policies, trained.seats, advantage=negated)) == pytest.approx([-1.0, -1.0])
    found = cosines(GRPO(policies, trained.seats, advantage=first_alone))
    for cosine, agent in zip(found, environment.agents, strict=True):
        model = AutoModelForCausalLM.from_pretrained(run / "policies" / trained.seats[agent]).eval()
        gradients = []
        for rule in (group_centered_advantages, first_alone):
            model.zero_grad()
            for members in groups_of(run).values():
                advantages = rule(torch.tensor([item.rewards()[agent] for item in members]), torch.zeros(4).long())
                for item, advantage in zip(members, advantages.tolist(), strict=True):
                    (row,) = item.trajectories[agent]
                    logp = model(torch.tensor([row.token_ids])).logits[0, :-1].log_softmax(-1)
                    chosen = logp.gather(1, torch.tensor(row.token_ids[1:])[:, None])[:, 0]
                    (advantage * chosen * torch.tensor(row.action_mask[1:])).sum().backward()
            gradients.append(torch.cat([weight.grad.flatten() for weight in model.parameters()]))
        assert cosine == pytest.approx(float(torch.cosine_similarity(*gradients, dim=0)), abs=1e-4)
        assert abs(cosine) < 0.999
    with pytest.raises(
        ConfigurationError, match=r"policies: the episodes are of 'one', and the policies are \['main'\]"
    ):
        recredit(run, trained, policies=model_folder, device="cpu")


def first_alone(returns: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return an advantage of 1 for the first return of each group."""
    return torch.tensor([float(number not in groups[:place]) for place, number in enumerate(groups)])


def groups_of(run: Path) -> dict[str, list[Episode]]:
    found: dict[str, list[Episode]] = defaultdict(list)
    for item in read_episodes(run / "episodes"):
        found[item.group].append(item)
    return found


def test_the_loss_of_a_run_is_no_argument_of_another_algorithm(
    main: Any, quiet_trainer: Any, echo: Any, mrlm: Callable[..., tuple[int, str, str]]
) -> None:
    run = played(GRPO(main), echo(), quiet_trainer(), iterations=1)
    settings = {"clip": {"low": 0.1}, "reduction": "constant_length", "max_length": 8}
    (run / "config.yaml").write_text(json.dumps({"model": {"class_path": "mrlm_pl.GRPO", "init_args": settings}}))
    status, out, err = mrlm("recredit", str(run), "--model", "RLOO")
    assert (status, "4 episodes with the credit of RLOO" in out or "8 episodes" in out) == (0, True), err
