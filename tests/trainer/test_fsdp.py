"""Two processes on gloo equal one process: gradients, episodes, checkpoints, exported policies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint
from transformers import AutoModelForCausalLM

from mrlm_pl.algorithms import GRPO
from mrlm_pl.cli.commands.consolidate import consolidate
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.trainer.fsdp import FSDP
from tests.support.runs import distributed_run
from tests.support.servers.ports import free_port

ROOT = Path(__file__).parents[2]


def start(model_folder: Path, runs: Mapping[Path, Mapping[str, Any]]) -> subprocess.CompletedProcess[str]:
    """Train runs, by folder, one after the other in the same processes."""
    # Lightning would choose a port that the system may give to another process before it listens.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    for variable in ("MASTER_ADDR", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK"):
        environment.pop(variable, None)
    words = [word for folder, options in runs.items() for word in (str(folder), json.dumps(options))]
    command = [sys.executable, "-m", distributed_run.__name__, str(model_folder), *words]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=environment, check=False, cwd=ROOT
    )
    assert "returned a view tensor" not in result.stderr, "FSDP2 warns of such an output of a model on every rank"
    return result


@pytest.fixture
def launch(tmp_path: Path, model_folder: Path) -> Any:
    """Return a function that trains a run and returns its folder; runs of one process train in this one."""

    def run(name: str, fails: bool = False, model_folder: Path = model_folder, **options: Any) -> Path:
        folder = tmp_path / name
        if options.get("devices", 1) == 1 and not fails:
            with torch.random.fork_rng(devices=[]):
                distributed_run.main(folder, str(model_folder), options)
            return folder
        result = start(model_folder, {folder: options})
        assert (result.returncode != 0) == fails, result.stderr[-4000:]
        return folder

    return run


def gradients(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "gradients.pt")


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    largest = max(float(value.norm()) for value in want.values())
    assert largest > 0
    for name, value in want.items():
        assert (got[name] - value).norm() <= 1e-5 * value.norm() + 1e-6 * largest, name


def metrics_of_ranks(folder: Path) -> list[dict[str, float]]:
    """Return the metrics of both processes, but for the seconds, of which each has its own clock."""
    found = [json.loads((folder / f"metrics-{rank}.json").read_text()) for rank in (0, 1)]
    assert min(metrics.pop("progress/seconds") for metrics in found) > 0
    return found


def episodes(folder: Path) -> list[Any]:
    return list(read_episodes(folder / "episodes"))


@pytest.mark.parametrize("shards", [False, True])
def test_a_checkpoint_of_a_run_without_the_adapters_is_refused_before_torch_reads_it(
    shards: bool, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, adapted = (GRPO({"main": Policy(str(model_folder), lora=lora)}) for lora in (None, LoRA(rank=2)))
    saved, strategy = tmp_path / "last.ckpt", FSDP()
    for algorithm in (plain, adapted):
        algorithm.read_weights()
    if shards:
        checkpoint.save({"state_dict": plain.state_dict()}, checkpoint_id=saved, no_dist=True)
    else:
        torch.save({"state_dict": plain.state_dict(), "pytorch-lightning_version": "2.5.0"}, saved)
    monkeypatch.setattr(FSDP, "broadcast", lambda self, path: path)
    monkeypatch.setattr(ModelParallelStrategy, "load_checkpoint", lambda *_: {})
    strategy._lightning_module = adapted
    with pytest.raises(ConfigurationError, match=r"the checkpoint is of other policies .* use the model, lora and"):
        strategy.load_checkpoint(saved)
    strategy._lightning_module = plain
    assert strategy.load_checkpoint(saved) == {}


@pytest.mark.parametrize("shards", [False, True])
def test_weights_that_no_update_has_changed_have_no_moments_after_a_resume(
    shards: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("frozen", "still", "moved")})
        groups = [{"params": list(module[name].parameters()), "name": name} for name in ("still", "moved")]
        module["frozen"].requires_grad_(False)
        return module, torch.optim.AdamW(groups)

    module, optimizer = parts()
    strategy, saved = FSDP(save_distributed_checkpoint=True), tmp_path / "last.ckpt"
    strategy._model = module
    assert strategy.optimizer_state(optimizer)["state"] == {} == optimizer.state, "a checkpoint changes no optimizer"
    module["moved"].weight.grad = torch.ones(2, 2)
    optimizer.step()
    if shards:
        weights, state = {"state_dict": module.state_dict()}, strategy.optimizer_state(optimizer)
        checkpoint.save({**weights, "optimizer_0": state}, checkpoint_id=saved, no_dist=True)
    else:
        about = {"pytorch-lightning_version": "2.5.0", "optimizer_states": [optimizer.state_dict()]}
        torch.save({"state_dict": module.state_dict(), **about}, saved)
    monkeypatch.setattr(FSDP, "broadcast", lambda self, path: path)
    found = {} if shards else torch.load(saved)
    monkeypatch.setattr(ModelParallelStrategy, "load_checkpoint", lambda *_: found)
    strategy._lightning_module, resumed = parts()
    strategy._optimizers = [resumed]
    strategy.load_checkpoint(saved)
    moved = strategy._lightning_module["moved"].weight
    assert set(resumed.state) == {moved}
    assert resumed.state[moved]["step"] == 1
    assert torch.equal(resumed.state[moved]["exp_avg"], optimizer.state[module["moved"].weight]["exp_avg"])


def test_a_file_of_something_else_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FSDP, "broadcast", lambda self, path: path)
    torch.save({"weight": torch.ones(1)}, tmp_path / "last.ckpt")
    strategy = FSDP()
    strategy._lightning_module = GRPO({"main": Policy(random_init_seed=0)})
    with pytest.raises(ConfigurationError, match=r"last\.ckpt' is not a checkpoint of Lightning"):
        strategy.load_checkpoint(tmp_path / "last.ckpt")


@pytest.mark.long
def test_two_processes_have_the_gradient_of_one_with_twice_the_rows(
    launch: Any, tmp_path: Path, model_folder: Path
) -> None:
    options = {"clip": 1.0, "callbacks": ["held_out"]}
    one = launch("one", **options)
    two = {tmp_path / name: {"strategy": name, "devices": 2, **options} for name in ("ddp", "fsdp")}
    done = start(model_folder, two)
    assert done.returncode == 0, done.stderr[-4000:]
    for folder in two:
        check_like_one(folder, one)


def check_like_one(two: Path, one: Path) -> None:
    """Compare the folder of two processes with that of one process with twice the trajectories."""
    assert_same(gradients(two), gradients(one))
    held_out = [json.loads((run / "evaluation_before.json").read_text())["echo"] for run in (two, one)]
    assert held_out[0]["transcripts"] == held_out[1]["transcripts"], "all episodes, in their order, by all ranks"
    files = sorted(path.name for path in (two / "episodes").iterdir())
    assert files == [f"iteration-00000{n}-rank{rank}.jsonl.zst" for n in (0, 1) for rank in (0, 1)]
    first = {item.id: item for item in episodes(one) if item.iteration == 0}
    shared = [item for item in episodes(two) if item.iteration == 0]
    assert {item.id for item in shared} == set(first), "every episode is played once, by one of the ranks"
    assert all(item.rows()[0].token_ids == first[item.id].rows()[0].token_ids for item in shared)
    # The exported policy is complete, has tied weights once, and equals that of one process up to rounding.
    written = [load_file(run / "policies" / "main" / "model.safetensors") for run in (two, one)]
    assert written[0].keys() == written[1].keys()
    exported, single = (AutoModelForCausalLM.from_pretrained(run / "policies" / "main") for run in (two, one))
    ids = torch.arange(8, 20)[None]
    torch.testing.assert_close(exported(ids).logits, single(ids).logits, rtol=1e-3, atol=1e-3)
    metrics = [json.loads((two / f"metrics-{rank}.json").read_text()) for rank in (0, 1)]
    assert metrics[0]["val/reward"] == metrics[1]["val/reward"]
    one_metrics = json.loads((one / "metrics-0.json").read_text())
    assert metrics[0]["val/reward"] == pytest.approx(one_metrics["val/reward"], abs=0.2)
    steps = [name for name in one_metrics if name.startswith("train/")]
    assert {"train/loss", "train/approx_kl", "train/clip_fraction", "train/mismatch_k3"} <= set(steps)
    for of_rank in metrics:
        for name in steps:  # means over all tokens of all ranks
            assert of_rank[name] == pytest.approx(one_metrics[name], rel=0.02, abs=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "ppo", "model": {"kl": {"coefficient": 0.05, "target": 0.1}, "entropy": {"coefficient": 0.01}}},
        {"algorithm": "rae"},
        {"algorithm": "dr_mas", "model": {"zero_variance": "exclude"}},
        {"accumulate": 2, "data": {"groups": 4, "minibatches": 1}},
        {"accumulate": 4, "data": {"groups": 2}, "model": {"recompute_old_logp": True}},
        {"max_forward_tokens": 40, "max_tokens": 30},
        {"data": {"groups": 2, "resample_rounds": 2}},
        {"lora": True, "model": {"kl": {"coefficient": 0.1}}},
        {"model": {"kl": {"coefficient": 0.5}, "reference_sync": {"every": 1, "decay": 0.5}, "top_entropy": 0.5}},
        {"lora": True, "model": {"kl": {"coefficient": 0.5}, "reference_sync": {"every": 1, "decay": 0.5}}},
        {"model": {"entropy": {"target": 9.0, "delta": 0.05}}},
        {"gradient_checkpointing": True, "max_forward_tokens": 40, "max_tokens": 30},
    ],
    ids=[
        *("ppo", "rae", "dr_mas", "accumulation", "parts", "chunks", "resampling", "lora", "sync", "sync_lora"),
        "entropy",
        "recomputation",
    ],
)
def test_everything_that_is_shared_out_adds_up(strategy: str, options: dict[str, Any], launch: Any) -> None:
    one, two = launch("one", **options), launch("two", strategy=strategy, devices=2, **options)
    assert_same(gradients(two), gradients(one))
    alone, *ranks = (json.loads((run / f"metrics-{n}.json").read_text()) for run, n in ((one, 0), (two, 0), (two, 1)))
    for name in {"train/kl", "train/entropy", "train/entropy_coefficient"} & set(alone):  # of the last update
        assert [metrics[name] for metrics in ranks] == pytest.approx([alone[name]] * 2, rel=0.02), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "form"),
    [("ddp", "full"), ("ddp", "top_k"), ("ddp", "sampled"), ("fsdp", "sampled"), ("fsdp", "full")],
)
def test_teachers_score_the_trajectories_of_all_ranks(strategy: str, form: str, launch: Any) -> None:
    distillation = {"teachers": [{"reprompt": "feedback"}], "form": form}
    options = {"algorithm": "onpolicydistillation", "model": {"distillation": distillation}, "strategy": strategy}
    if (strategy, form) == ("fsdp", "full"):  # whole output heads, which no rank has
        launch("two", fails=True, devices=2, **options)
        return
    assert_same(
        gradients(launch("two", devices=2, **options)), gradients(launch("one", **{**options, "strategy": "auto"}))
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_several_environments_are_one_run_on_all_ranks(strategy: str, launch: Any) -> None:
    """Normalize advantages and measure success over all ranks."""
    options = {
        "levels": True,
        "model": {"advantage": "group_centered"},
        "data": {"groups": 8, "iterations": 1, "retries": 0, "failed_members": "resample", "member_rounds": 1},
    }
    one, two = launch("one", **options), launch("two", strategy=strategy, devices=2, **options)
    assert_same(gradients(two), gradients(one))
    alone = json.loads((one / "metrics-0.json").read_text())
    names = [name for name in alone if name.startswith("rollout/") and "second" not in name]
    assert {"rollout/short/advantage_std", "rollout/long/success_rate", "rollout/dropped_groups"} <= set(names)
    assert alone["rollout/resampled_members"] > 0
    for rank in (0, 1):
        metrics = json.loads((two / f"metrics-{rank}.json").read_text())
        for name in names:
            assert metrics[name] == pytest.approx(alone[name], rel=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 8, "model": {"recompute_old_logp": True}}], ids=["whole", "parts"]
)
def test_a_rank_whose_groups_carry_no_signal_takes_part(strategy: str, options: dict[str, Any], launch: Any) -> None:
    """With four parts for the three rows of a group, one of them is empty."""
    folder = launch("flat", strategy=strategy, devices=2, flat=True, **options)
    metrics = [json.loads((folder / f"metrics-{rank}.json").read_text()) for rank in (0, 1)]
    clocks = [own.pop("progress/seconds") for own in metrics]  # each process has its own clock
    assert min(clocks) > 0
    assert metrics[0] == metrics[1]
    assert metrics[0]["rollout/zero_variance_groups"] == 0.5
    assert metrics[0]["train/grad_norm"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("algorithm", ["magrpo", "maremax"])
def test_turn_trees_of_two_policies_are_shared_out(strategy: str, algorithm: str, launch: Any) -> None:
    options = {"algorithm": algorithm, "policies": ["left", "right"], "duet": True, "data": {"groups": 4}}
    one, two = launch("one", **options), launch("two", strategy=strategy, devices=2, **options)
    assert_same(gradients(two), gradients(one))
    assert len({item.id for item in episodes(two) if item.iteration == 0 and item.stop_reason == "end"}) >= 4 * 9
    metrics = [json.loads((run / "metrics-0.json").read_text()) for run in (one, two)]
    for name in ("train/left/comparison_groups", "train/right/comparison_groups"):
        assert metrics[0][name] == metrics[1][name] == 4 * (1 + 3)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    ("algorithm", "branches"),
    [
        ("c3", 4 * 3 * (2 * 2) * 3),
        ("treegrpo", 4 * 3 * 2),
        ("ccpo", 4 * 3 * 2),
        ("shapley", 4 * (3 * 2 + 1)),  # without both agents all episodes of a group are equal
    ],
)
def test_branch_episodes_are_shared_out(strategy: str, algorithm: str, branches: int, launch: Any) -> None:
    options = {"algorithm": algorithm, "policies": ["left", "right"], "duet": True, "data": {"groups": 4}}
    one, two = launch("one", **options), launch("two", strategy=strategy, devices=2, **options)
    assert_same(gradients(two), gradients(one))
    alone, shared = (json.loads((folder / "metrics-0.json").read_text()) for folder in (one, two))
    assert alone["rollout/branch_episodes"] == shared["rollout/branch_episodes"] == branches
    for name in (name for name in alone if name.startswith("train/contribution")):  # CCPO's history
        assert shared[name] == pytest.approx(alone[name], rel=0.02), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("lora", [False, True])
def test_policies_may_have_rows_on_one_rank_only(strategy: str, lora: bool, launch: Any) -> None:
    """Play two groups, one on each rank, each for one of two policies."""
    data = {"groups": 2, "iterations": 4, "validation_episodes": 1}
    options = {"policies": ["left", "right"], "data": data, "lora": lora}
    one = launch("one", **options)
    two = launch("two", strategy=strategy, devices=2, **options)
    seats = {item.iteration: set() for item in episodes(two)}
    for item in episodes(two):
        seats[item.iteration] |= set(item.trajectories)
    assert {"left", "right"} in seats.values(), "both policies have rows, each on another rank"
    assert any(len(seat) == 1 for seat in seats.values()), "a policy has no rows at all"
    assert_same(gradients(two), gradients(one))
    ids = torch.arange(8, 20)[None]
    for name in ("left", "right"):
        got, want = (AutoModelForCausalLM.from_pretrained(run / "policies" / name) for run in (two, one))
        torch.testing.assert_close(got(ids).logits, want(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "options",
    [{"algorithm": "mappo"}, {"algorithm": "ippo", "critics": ["left", "right"]}],
    ids=["mappo", "ippo"],
)
def test_critics_with_rows_of_their_own_add_up(strategy: str, options: dict[str, Any], launch: Any) -> None:
    """Play two groups, each on one rank and for one policy: ranks lack data of a policy and of its critic."""
    options = {**options, "policies": ["left", "right"], "data": {"groups": 2, "iterations": 3, "passes": 2}}
    one, two = launch("one", **options), launch("two", strategy=strategy, devices=2, **options)
    assert_same(gradients(two), gradients(one))
    assert any("critic" in name for name in gradients(two))
    names = sorted(path.name for path in (one / "policies").iterdir())
    assert sum("critic" in name for name in names) == (1 if options["algorithm"] == "mappo" else 2)
    ids = torch.arange(8, 20)[None]
    for name in names:
        got, want = (AutoModelForCausalLM.from_pretrained(run / "policies" / name) for run in (two, one))
        torch.testing.assert_close(got(ids).logits, want(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize(
    "options",
    [
        {"policies": ["ann", "bob"], "discussion": {}},
        {
            "policies": ["first", "second"],
            "discussion": {"turns": 2, "by_turn": True},
            "critics": ["ann@1", "ann@2", "bob@1", "bob@2"],
            "model": {
                "seats": {"ann@1": "first", "bob@1": "first", "ann@2": "second", "bob@2": "second"},
                "critic_reads": "answer",
                "turn_schedule": [[2], [1]],
            },
        },
        {
            "policies": ["first", "second"],
            "lora": True,
            "discussion": {"turns": 2, "by_turn": True},
            "model": {
                "seats": {"ann@1": "first", "bob@1": "first", "ann@2": "second", "bob@2": "second"},
                "turn_schedule": [[1], [2]],
            },
        },
    ],
    ids=["persons", "turns", "adapters"],
)
def test_discussions_are_paid_and_scheduled_over_all_ranks(
    strategy: str, options: dict[str, Any], launch: Any, model_folder: Path
) -> None:
    options = {**options, "algorithm": "maporl", "max_tokens": 4, "data": {"groups": 2, "iterations": 1}}
    one, two = launch("one", **options), launch("two", strategy=strategy, devices=2, **options)
    # An idle policy has no gradient in one process and zeros in two.
    found = [{name: value for name, value in gradients(run).items() if value.any()} for run in (two, one)]
    assert_same(*found)
    scheduled = options.get("model", {}).get("turn_schedule")
    if scheduled:
        resting = "second" if scheduled[0] == [1] else "first"
        after, before = (
            AutoModelForCausalLM.from_pretrained(path) for path in (two / "policies" / resting, model_folder)
        )
        for name, weight in before.state_dict().items():
            assert torch.equal(weight, after.state_dict()[name]), name
    metrics = [json.loads((run / "metrics-0.json").read_text()) for run in (one, two)]
    paid = {name for name in metrics[0] if name.startswith(("train/influence", "train/incentive", "train/trained"))}
    assert len(paid) >= 8
    for name in (*paid, "train/ties"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], abs=1e-9), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("algorithm", ["dpo", "sft"])
def test_data_files_are_shared_out_to_the_last_row(strategy: str, algorithm: str, launch: Any, tmp_path: Path) -> None:
    pairs = [{"prompt": f"Say {n} ", "chosen": f"{n} it is", "rejected": f"{n + 1}"} for n in range(9)]
    chats: list[Any] = [{"messages": _chat(f"Say {n}", str(n))} for n in range(9)]
    chats[4] = {"messages": _chat("Say 4", "5", "Wrong", "4")}  # the only row with an answer of the environment
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in (pairs if algorithm == "dpo" else chats)))
    options = {
        "dpo": {"algorithm": "dpo", "pairs": str(source), "model": {"loss": "ipo"}},
        "sft": {"algorithm": "sft", "rows": str(source), "model": {"objective": "combined"}},
    }[algorithm]
    one = launch("one", batch_size=8, **options)
    two = launch("two", batch_size=4, strategy=strategy, devices=2, **options)
    assert_same(gradients(two), gradients(one))
    # The second update is on one row, which one of the ranks has; validation reads all nine.
    got, want = (json.loads((run / "metrics-0.json").read_text()) for run in (two, one))
    names = {"dpo": ["loss", "reward_margin", "preference_accuracy"], "sft": ["nll", "observation_nll"]}[algorithm]
    for name in names:
        assert got[f"val/{name}"] == pytest.approx(want[f"val/{name}"], rel=1e-3, abs=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
def test_other_pairs_are_compared_with_the_initial_weights_also_where_a_rank_has_none(
    lora: bool, launch: Any, tmp_path: Path
) -> None:
    pairs = [{"prompt": f"Say {n} ", "chosen": f"{n} it is", "rejected": f"{n + 1}"} for n in range(9)]
    # The last batch of the others, 4 pairs of up to 8, is the first rank's alone.
    files = {"pairs": (tmp_path / "pairs.jsonl", pairs[:8]), "others": (tmp_path / "others.jsonl", pairs[5:])}
    for path, rows in files.values():
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {"algorithm": "dpo", "lora": lora, **{name: str(path) for name, (path, _) in files.items()}}
    for name, share in (("one", {"batch_size": 8}), ("two", {"batch_size": 4, "strategy": "fsdp", "devices": 2})):
        launch(name, save=str(tmp_path / f"{name}.ckpt"), **share, **options)
    want, *got = (
        json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one/others-0", "two/others-0", "two/others-1")
    )
    assert got[0] == got[1] == pytest.approx(want, rel=1e-3, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("algorithm", ["correctness", "pairwise"])
def test_reward_models_are_trained_and_measured_over_all_ranks(
    strategy: str, algorithm: str, launch: Any, tmp_path: Path
) -> None:
    pairs = [{"prompt": f"Say {n} ", "chosen": f"{n} it is", "rejected": f"{n + 1}"} for n in range(9)]
    answers = [{"question": f"Say {n // 2}", "answer": f"{n} it is", "correct": n % 2 == 0} for n in range(9)]
    source = tmp_path / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in (pairs if algorithm == "pairwise" else answers)))
    # Two epochs: the head starts at 0, where all scores are equal.
    options = {"algorithm": algorithm, "pairs": str(source), "rows": str(source), "epochs": 2}
    one = launch("one", batch_size=8, **options)
    two = launch("two", batch_size=4, strategy=strategy, devices=2, **options)
    assert_same(gradients(two), gradients(one))
    # The second update is on one row, which one of the ranks has; validation reads all nine.
    got, want = (json.loads((run / "metrics-0.json").read_text()) for run in (two, one))
    names = {
        "pairwise": ["loss", "pair_accuracy", "margin"],
        "correctness": ["loss", "auc", "accuracy", "calibration_error", "question_only_auc"],
    }[algorithm]
    for name in names:
        assert got[f"val/{name}"] == pytest.approx(want[f"val/{name}"], rel=1e-3, abs=1e-4), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_joint_pairs_are_shared_out_to_the_last_one(strategy: str, launch: Any, tmp_path: Path) -> None:
    """Give every third pair one agent only, so that a policy may have rows on one rank only."""
    source = tmp_path / "joint.jsonl"
    with source.open("w") as file:
        for n in range(9):
            part = {"prompt": f"Say {n} ", "chosen": f"{n} it is", "rejected": f"{n + 1}"}
            agents = ("left",) if n % 3 == 2 else ("right",) if n % 3 == 1 else ("left", "right")
            file.write(json.dumps({"agents": dict.fromkeys(agents, part)}) + "\n")
    options = {"algorithm": "madpo", "pairs": str(source), "policies": ["left", "right"], "model": {"loss": "ipo"}}
    one = launch("one", batch_size=4, **options)
    for name, share in (("two", {"batch_size": 2}), ("pieces", {"batch_size": 1, "accumulate": 2})):
        two = launch(name, strategy=strategy, devices=2, **share, **options)
        assert_same(gradients(two), gradients(one))
        got, want = (json.loads((run / "metrics-0.json").read_text()) for run in (two, one))
        for metric in ("loss", "reward_margin", "preference_accuracy"):
            assert got[f"val/{metric}"] == pytest.approx(want[f"val/{metric}"], rel=1e-3, abs=1e-4), metric


def _chat(*turns: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "stale", "model"),
    [
        ("ddp", {}, {}),
        ("fsdp", {}, {"kl": {"coefficient": 0.5}, "reference_sync": {"every": 1, "decay": 0.5}}),
        ("ddp", {"cross_policy": {"share": 0.5, "refresh": 9}}, {}),
    ],
)
def test_two_processes_go_on_bit_for_bit(
    strategy: str, stale: dict[str, Any], model: dict[str, Any], launch: Any
) -> None:
    data = {"iterations": 2, "minibatches": 2, "passes": 2, **stale}
    options = {"strategy": strategy, "devices": 2, "data": data, "model": model}
    through = launch("through", callbacks=["keep"], **options)
    for step in (3, 4):  # within a rollout, and between two
        again = launch(f"from {step}", resume=str(through / f"step={step}.ckpt"), **options)
        got, want = (AutoModelForCausalLM.from_pretrained(run / "policies" / "main") for run in (again, through))
        for (name, left), right in zip(got.named_parameters(), want.parameters(), strict=True):
            assert torch.equal(left, right), name


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_fails_ends_the_run(strategy: str, launch: Any) -> None:
    launch("run", fails=True, strategy=strategy, devices=2, callbacks=["fails"])


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "lora"), [("ddp", False), ("ddp", True), ("fsdp", False), ("fsdp", True)])
def test_a_checkpoint_of_two_processes_goes_on_in_one_and_in_the_other_strategy(
    strategy: str, lora: bool, launch: Any, tmp_path: Path
) -> None:
    saved = tmp_path / "half.ckpt"
    data = {"iterations": 3, "minibatches": 2, "groups": 4}
    launch("half", strategy=strategy, devices=2, data=data, limit=3, save=str(saved), lora=lora)
    other = "fsdp" if strategy == "ddp" else "ddp"
    for name, options in (
        ("one", {}),
        ("same", {"strategy": strategy, "devices": 2}),
        ("other", {"strategy": other, "devices": 2}),
    ):
        # The checkpoint is after the first of two updates on rollout 1. Two processes continue with the second; one
        # process cannot have their rows and starts rollout 2.
        folder = launch(name, data=data, epochs=2, resume=str(saved), lora=lora, **options)
        assert {item.iteration for item in episodes(folder)} == {2, 3, 4}, name
    first, second = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "policies" / "main") for name in ("same", "other")
    )
    ids = torch.arange(8, 20)[None]
    torch.testing.assert_close(first(ids).logits, second(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_sharded_checkpoint_goes_on_sharded_and_as_a_whole_file(launch: Any, tmp_path: Path) -> None:
    saved, file = tmp_path / "sharded.ckpt", tmp_path / "whole.ckpt"
    options: dict[str, Any] = {"data": {"iterations": 2}, "model": {"kl": {"coefficient": 0.1}}}
    launch("first", strategy="fsdp", devices=2, sharded=True, save=str(saved), **options)
    assert saved.is_dir()
    consolidate(saved, file)
    runs = {
        "sharded": {"strategy": "fsdp", "devices": 2, "sharded": True, "resume": str(saved)},
        "whole": {"strategy": "ddp", "devices": 2, "resume": str(file)},
    }
    models = []
    for name, how in runs.items():
        folder = launch(name, epochs=2, **how, **options)
        models.append(AutoModelForCausalLM.from_pretrained(folder / "policies" / "main"))
    ids = torch.arange(8, 20)[None]
    torch.testing.assert_close(models[0](ids).logits, models[1](ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_tensor_parallel_ranks_play_the_same_episodes_and_have_the_gradient_of_one(launch: Any) -> None:
    one = launch("one")
    two = launch("two", strategy="fsdp", devices=2, tensor_parallel=2)
    assert_same(gradients(two), gradients(one))
    exported, single = (AutoModelForCausalLM.from_pretrained(run / "policies" / "main") for run in (two, one))
    ids = torch.arange(8, 20)[None]
    torch.testing.assert_close(exported(ids).logits, single(ids).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_pairs_of_tensor_parallel_ranks_share_the_data_out(launch: Any) -> None:
    one = launch("one", clip=1.0)
    four = launch("four", strategy="fsdp", devices=4, tensor_parallel=2, clip=1.0, callbacks=["held_out"])
    assert_same(gradients(four), gradients(one))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_with_another_model_family_play_while_they_update(strategy: str, launch: Any, gpt2_folder: Path) -> None:
    options = {"data": {"mode": "async", "max_lag": 1, "iterations": 4}, "model_folder": gpt2_folder}
    one, two = launch("one", **options), launch("two", strategy=strategy, devices=2, **options)
    assert_same(gradients(two), gradients(one))
    assert {item.id for item in episodes(two)} == {item.id for item in episodes(one)}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("lora", [False, True])
def test_ranks_play_while_they_update(strategy: str, lora: bool, launch: Any) -> None:
    options = {"data": {"mode": "async", "max_lag": 1, "iterations": 4}, "lora": lora}
    one = launch("one", **options)
    two = launch("two", strategy=strategy, devices=2, **options)
    assert_same(gradients(two), gradients(one))  # of the first update, whose episodes have the initial weights
    assert {item.id for item in episodes(two)} == {item.id for item in episodes(one)}
    lags = [item.iteration - turn.version for item in episodes(two) for row in item.rows() for turn in row.turns]
    assert set(lags) <= {0, 1}
    assert max(lags) == 1
    metrics = metrics_of_ranks(two)
    assert metrics[0] == metrics[1]
    assert metrics[0]["async/lag_0"] + metrics[0]["async/lag_1"] == pytest.approx(1.0)
