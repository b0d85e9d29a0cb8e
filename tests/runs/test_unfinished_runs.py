"""The weights that an evaluation of a run reads, while the run trains or after a kill."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mrlm_pl
from mrlm_pl import LoRA, Policy
from mrlm_pl.cli.commands import evaluation_table
from mrlm_pl.errors import PolicyError
from mrlm_pl.runs.records.run import read_run
from mrlm_pl.runs.seated_model import loaded_policies
from tests.support.runs.unfinished_runs import export, weights_of, write_checkpoint, write_run

RUN = Path("run")
POLICIES = {"first": {"random_init_seed": 1}, "second": {}, "judge": {"trained": False, "random_init_seed": 3}}
SAVED = {"first": 11, "second": 12}
HARD = "{name: hard, class_path: math, init_args: {difficulty: [3, 3]}}"
SHORT: dict[str, Any] = {"num_episodes": 2, "device": "cpu", "sampling": mrlm_pl.Sampling(max_tokens=2)}

pytestmark = pytest.mark.usefixtures("outside_the_repository")


def seeds(policies: dict[str, Policy]) -> dict[str, int | None]:
    """Return the seed of each policy's weights; None for those of another origin."""
    known = {seed: weights_of(seed) for seed in (1, 3, 11, 12, 21, 22, 31, 32)}
    return {
        name: next((seed for seed, own in known.items() if _equal(own, dict(policy.state_dict()))), None)
        for name, policy in policies.items()
    }


def _equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize(
    ("state", "exports", "read"),
    [
        ("interrupted", {}, SAVED),
        ("interrupted", {"first": 200}, SAVED),  # killed between two exports
        ("interrupted", {"first": 200, "second": 50}, SAVED),  # likewise, of a run that was continued
        ("interrupted", {"first": 50, "second": 50}, SAVED),
        ("interrupted", {"first": 200, "second": 200}, {"first": 21, "second": 22}),
        ("finished", {"first": 50, "second": 50}, {"first": 21, "second": 22}),
        (None, {"first": 50, "second": 50}, {"first": 21, "second": 22}),
    ],
)
@pytest.mark.long_after(2)
def test_weights_are_of_the_checkpoint_unless_all_policies_were_exported_since_or_the_run_ended(
    state: str | None, exports: dict[str, int], read: dict[str, int]
) -> None:
    write_run(RUN, POLICIES)
    write_checkpoint(RUN, SAVED, 100)
    for name, time in exports.items():
        export(RUN, name, {"first": 21, "second": 22}[name], time)
    (RUN / "state.json").write_text(json.dumps({"state": state}))
    if state is None:
        (RUN / "state.json").unlink()
    assert seeds(loaded_policies(read_run("run").policies, "cpu")) == {**read, "judge": 3}


@pytest.mark.long_after(2)
def test_a_checkpoint_that_is_named_takes_the_place_of_the_exported_weights() -> None:
    write_run(RUN, POLICIES)
    write_checkpoint(RUN, SAVED, 100).rename("run/checkpoints/best.ckpt")
    for name, seed in {"first": 21, "second": 22}.items():
        export(RUN, name, seed, 200)
    (RUN / "state.json").write_text('{"state": "finished"}')
    assert seeds(loaded_policies(read_run("run/checkpoints/best.ckpt").policies, "cpu")) == {**SAVED, "judge": 3}


def test_the_trained_policies_of_a_checkpoint_are_exported(mrlm: Callable[..., Any]) -> None:
    write_run(RUN, POLICIES)
    write_checkpoint(RUN, SAVED, 100).rename("run/checkpoints/best.ckpt")
    export(RUN, "first", 21, 200)
    exporting = ("export", "run/checkpoints/best.ckpt", "--output", "best")
    assert mrlm(*exporting)[:2] == (0, "best/first\nbest/second\n")
    assert seeds(loaded_policies({name: {"model": f"best/{name}"} for name in SAVED}, "cpu")) == SAVED
    status, _, message = mrlm(*exporting)
    assert (status, "output: 'best/first' exists; name another, or remove it" in message) == (2, True)
    status, _, message = mrlm("export", "run/checkpoints/bst.ckpt", "--output", "other")
    meant = "no checkpoint 'run/checkpoints/bst.ckpt'; did you mean 'run/checkpoints/best.ckpt'?"
    assert (status, meant in message) == (2, True)
    status, _, message = mrlm("export", "run", "--outptu", "other")
    assert (status, "there is no option '--outptu'; did you mean '--output'?" in message) == (2, True)
    assert mrlm("export", "best/first", "--output", "copy")[:2] == (0, "copy/main\n")
    assert seeds(loaded_policies({"first": {"model": "copy/main"}}, "cpu")) == {"first": 11}


def test_a_value_head_is_exported_with_its_policy(mrlm: Callable[..., Any]) -> None:
    write_run(RUN, POLICIES)
    write_checkpoint(RUN, SAVED, 100)
    checkpoint = torch.load("run/checkpoints/last.ckpt")
    policy = Policy()
    policy.load()
    policy.add_value_head()
    assert policy.value_head is not None
    head = {f"policies.first.value_head.{key}": value + 0.5 for key, value in policy.value_head.state_dict().items()}
    torch.save({**checkpoint, "state_dict": checkpoint["state_dict"] | head}, "run/checkpoints/last.ckpt")
    assert mrlm("export", "run", "--output", "best")[0] == 0
    read = Policy("best/first")
    read.load()
    read.add_value_head()
    assert read.value_head is not None
    for key, value in read.value_head.state_dict().items():
        torch.testing.assert_close(value, head[f"policies.first.value_head.{key}"])
    assert not Path("best/second/value_head.safetensors").exists()


@pytest.mark.long
def test_all_policies_are_of_the_checkpoint_that_was_opened_though_the_run_replaces_it() -> None:
    write_run(RUN, POLICIES)
    write_checkpoint(RUN, SAVED, 100)
    policies = read_run("run").policies
    assert seeds(loaded_policies({"first": policies["first"]}, "cpu")) == {"first": 11}
    write_checkpoint(RUN, {"first": 31, "second": 32}, 200)
    assert seeds(loaded_policies({"second": policies["second"]}, "cpu")) == {"second": 12}
    assert seeds(loaded_policies(read_run("run").policies, "cpu")) == {"first": 31, "second": 32, "judge": 3}


def test_a_sharded_checkpoint_that_was_replaced_is_refused() -> None:
    write_run(RUN, POLICIES)
    write_checkpoint(RUN, SAVED, 100, shards=True)
    policies = read_run("run").policies
    assert seeds(loaded_policies({"first": policies["first"]}, "cpu")) == {"first": 11}
    write_checkpoint(RUN, {"first": 31, "second": 32}, 200, shards=True)
    with pytest.raises(PolicyError, match=r"'run/checkpoints/last.ckpt' was replaced .*; evaluate again"):
        loaded_policies({"second": policies["second"]}, "cpu")


def _truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


def _without_second(path: Path) -> None:
    write_checkpoint(RUN, {"first": 11}, 100)


def _of_other_shapes(path: Path) -> None:
    saved = torch.load(path)
    saved["state_dict"] = {
        key: value[:1] if "second" in key else value for key, value in saved["state_dict"].items()
    }  # one row would be copied to all
    torch.save(saved, path)


def _sharded_without(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        write_checkpoint(RUN, SAVED, 100, shards=True)
        (path / name).write_bytes(b"")

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b""), "cannot be read .*else put a complete checkpoint in its place"),
        (_truncated, "cannot be read .*else put a complete checkpoint in its place"),
        (lambda path: torch.save([1], path), "cannot be read .it is not a checkpoint of a run"),
        (lambda path: torch.save({"state_dict": {}}, path), "cannot be read .it is not a checkpoint of a run"),
        (lambda path: (path.unlink(), path.mkdir()), "is refused|cannot be read"),
        (_sharded_without("meta.pt"), "cannot be read"),
        (_sharded_without("__0_0.distcp"), "cannot be read"),
        (_without_second, r"has no weights 'policies.second.* evaluate the run that wrote it"),
        (_of_other_shapes, r"has no weights 'policies.second.* of shape .* evaluate the run that wrote it"),
    ],
)
def test_a_checkpoint_that_cannot_be_used_is_named_before_its_iteration(
    damage: Callable[[Path], Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(RUN, POLICIES)
    damage(write_checkpoint(RUN, SAVED, 100))
    with pytest.raises(mrlm_pl.ConfigurationError, match=rf"^checkpoint 'run/checkpoints/last.ckpt' {message}"):
        loaded_policies(read_run("run").policies, "cpu")
    assert "not finished" not in capsys.readouterr().err


def test_reports_and_comparisons_name_the_checkpoint(mrlm: Callable[..., Any]) -> None:
    write_run(RUN, POLICIES)
    for update in (100, 200):
        write_checkpoint(RUN, SAVED, update)
        compared = ("--compare", "100.json") if update > 100 else ()
        words = ("--model", "run", "-n", "2", "--max-tokens", "2", "--device", "cpu", "--output", f"{update}.json")
        status, out, err = mrlm("eval", *words, *compared)
        assert status == 0, err
        assert re.search(rf"^checkpoint +update {update}$", out, re.MULTILINE)
        assert json.loads(Path(f"{update}.json").read_text())["checkpoint"] == f"update {update}"
    assert "over 100.json (checkpoint of update 100), in 2 tasks" in out
    export(RUN, "first", 21, 300)
    export(RUN, "second", 22, 300)
    assert mrlm_pl.evaluate("run", **SHORT).checkpoint == ""


@pytest.mark.long
def test_the_cells_of_a_run_are_of_one_checkpoint(mrlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(RUN, {"main": {}}, "MathEnvironment")
    write_checkpoint(RUN, {"main": 11}, 100)
    finished, later = evaluation_table._finished_report, iter(range(200, 1000, 100))
    cells = [Path("table") / f"run--{name}.json" for name in ("math", "hard")]

    def table() -> tuple[list[str], str]:
        options = ("-n", "2", "--max-tokens", "2", "--device", "cpu", "--output", "table.json")
        status, out, err = mrlm("eval", "--model", "run", "--environment", "math", HARD, *options)
        assert status == 0, err
        return [json.loads(cell.read_text())["checkpoint"] for cell in cells], out

    def replaced(*given: Any) -> Any:
        write_checkpoint(RUN, {"main": 31}, next(later))
        return finished(*given)

    assert table()[0] == ["update 100"] * 2
    cells[1].unlink()
    monkeypatch.setattr(evaluation_table, "_finished_report", replaced)
    found, out = table()
    assert found == ["update 100"] * 2, "the kept cell, and the one that is played beside it"
    assert "table/run--math.json is kept" in out
    assert "run: checkpoint of update 100\n" in out
    weights = json.loads(cells[1].read_text())["asked"]["weights"]
    monkeypatch.setattr(evaluation_table, "_finished_report", finished)
    found, out = table()
    assert found == ["update 300"] * 2, "the kept cell of an earlier checkpoint is played again"
    assert weights != json.loads(cells[1].read_text())["asked"]["weights"]
    assert {item["checkpoint"] for item in json.loads(Path("table.json").read_text())["scores"]} == {"update 300"}


def test_the_cells_of_a_model_record_the_weights_that_were_read_for_all_of_them(
    mrlm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    shutil.copytree(model_folder, "model")

    def rewritten(*_: Any) -> None:
        os.utime("model/config.json", (1, 1))

    monkeypatch.setattr(evaluation_table, "_finished_report", rewritten)
    options = ("-n", "2", "--max-tokens", "2", "--device", "cpu", "--output", "table.json")
    assert mrlm("eval", "--model", "model", "--environment", "math", HARD, *options)[0] == 0
    math, hard = (json.loads(Path(f"table/model--{name}.json").read_text()) for name in ("math", "hard"))
    assert math["asked"]["weights"] == hard["asked"]["weights"]


def test_policies_with_adapters_share_the_base_that_is_read_once() -> None:
    settings = {"model": "builtin:tiny", "lora": LoRA(rank=2)}
    found = loaded_policies({"first": settings, "second": settings}, "cpu")
    first, second = (dict(found[name].network.named_parameters()) for name in ("first", "second"))
    shared = {name for name in first if first[name].data_ptr() == second[name].data_ptr()}
    assert shared == {name for name in first if "lora_" not in name}
