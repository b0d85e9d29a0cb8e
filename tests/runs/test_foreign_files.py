"""Files from strangers: checkpoints and model folders that would run code when they are read."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from enum import Enum
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mrlm_pl.cli.commands.consolidate import consolidate
from mrlm_pl.engines.http.text_dialect import TransformersDialect
from mrlm_pl.errors import ConfigurationError, PolicyError
from mrlm_pl.policy import Policy
from mrlm_pl.reward_models import RewardModel
from mrlm_pl.runs.checkpoint import DurableCheckpointIO
from mrlm_pl.trainer.fsdp import FSDP

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
STATE = {
    "state_dict": {"weight": torch.arange(6.0).reshape(2, 3), "half": torch.ones(2, dtype=torch.bfloat16)},
    "optimizer_0": {
        "state": {"weight": {"step": torch.tensor(3.0)}},
        "param_groups": [{"lr": 0.5, "betas": (0.9, 0.99), "params": ["weight"]}],
    },
}


class Creates:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """The file that an attack makes."""
    return tmp_path / "attacked"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A sharded checkpoint as a run writes it."""
    folder = tmp_path / "sharded.ckpt"
    dcp.save(dict(STATE), checkpoint_id=folder)
    torch.save({"global_step": 7}, folder / "meta.pt")
    return folder


def changed(folder: Path, change: Callable[[Any], Any]) -> None:
    """Write the metadata again, changed."""
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    file.write_bytes(pickle.dumps(change(metadata) or metadata))


def in_metadata(folder: Path, mark: Path) -> None:
    changed(folder, lambda metadata: metadata.planner_data.update(x=Creates(mark)))


def before_metadata(folder: Path, mark: Path) -> None:
    """A program whose result is thrown away before the genuine content comes."""
    program = pickle.dumps(Creates(mark), protocol=0)[:-1] + b"0"
    file = folder / ".metadata"
    file.write_bytes(program + file.read_bytes())


def by_dotted_name(folder: Path, mark: Path) -> None:
    """Of an allowed class, the attribute that leads to everything."""
    name = b"StorageMeta.__init__.__globals__.__getitem__"
    module = b"torch.distributed.checkpoint.metadata"
    text = [b"\x8c" + bytes([len(item)]) + item for item in (module, name, b"os")]
    program = b"\x80\x04" + text[0] + text[1] + b"\x93" + text[2] + b"\x85R."
    (folder / ".metadata").write_bytes(program)


def by_an_attribute(folder: Path, mark: Path) -> None:
    """The same by the function that members of an enumeration may be written with."""

    class Reaches:
        def __reduce__(self) -> Any:
            return (getattr, (Path, "touch"))

    changed(folder, lambda metadata: metadata.planner_data.update(x=Reaches()))


def in_an_entry(folder: Path, mark: Path) -> None:
    shutil.rmtree(folder)
    state = {**STATE, "optimizer_0": {"param_groups": [{"lr": Creates(mark)}]}}
    dcp.save(state, checkpoint_id=folder)
    torch.save({}, folder / "meta.pt")


def in_another_folder(folder: Path, mark: Path) -> None:
    def move(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = f"../{mark.name}"

    shutil.copy(next(folder.glob("*.distcp")), mark.parent / "other")
    changed(folder, move)


def by_a_link(folder: Path, mark: Path) -> None:
    shard = next(folder.glob("*.distcp"))
    shard.rename(folder.parent / "secret")
    shard.symlink_to(folder.parent / "secret")


def through_an_extension(folder: Path, mark: Path) -> None:
    def extend(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.transform_descriptors = ["stream.zstd"]

    changed(folder, extend)


def in_the_rest(folder: Path, mark: Path) -> None:
    torch.save({"global_step": Creates(mark)}, folder / "meta.pt")


ATTACKS = (
    in_metadata,
    before_metadata,
    by_dotted_name,
    by_an_attribute,
    in_an_entry,
    in_another_folder,
    by_a_link,
    through_an_extension,
)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_a_foreign_sharded_checkpoint_runs_nothing(attack: Any, checkpoint: Path, mark: Path) -> None:
    attack(checkpoint, mark)
    for read in (lambda: consolidate(checkpoint, mark.with_name("whole")), lambda: FSDP().load_checkpoint(checkpoint)):
        with pytest.raises(ConfigurationError, match=r"sharded\.ckpt' is refused: .*one that `mrlm fit` has written"):
            read()
    assert not mark.exists()


def test_the_part_beside_the_shards_runs_nothing(checkpoint: Path, mark: Path) -> None:
    in_the_rest(checkpoint, mark)
    with pytest.raises(pickle.UnpicklingError):
        consolidate(checkpoint, mark.with_name("whole"))
    assert not mark.exists()


def test_a_genuine_sharded_checkpoint_is_read_as_before(checkpoint: Path, tmp_path: Path) -> None:
    consolidate(checkpoint, tmp_path / "whole.ckpt")
    whole = torch.load(tmp_path / "whole.ckpt")
    assert whole["global_step"] == 7
    assert whole["state_dict"]["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert whole["optimizer_states"][0]["param_groups"] == [{"lr": 0.5, "betas": (0.9, 0.99), "params": [0]}]


def test_a_sharded_checkpoint_of_an_early_python_3_11_is_read(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its members of enumerations are written as calls of ``getattr``."""
    with monkeypatch.context() as early:
        early.setattr(Enum, "__reduce_ex__", lambda member, _: (getattr, (type(member), member.name)))
        changed(checkpoint, lambda metadata: None)
    assert b"getattr" in (checkpoint / ".metadata").read_bytes()
    consolidate(checkpoint, tmp_path / "whole.ckpt")
    assert torch.load(tmp_path / "whole.ckpt")["state_dict"]["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def web(tmp_path: Path) -> Any:
    """Address of a web server over the folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("remote", [False, True])
def test_a_foreign_whole_checkpoint_runs_nothing(
    remote: bool, tmp_path: Path, mark: Path, web: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "downloads"))
    torch.save({"callbacks": Creates(mark)}, tmp_path / "foreign.ckpt")
    with pytest.raises(pickle.UnpicklingError):
        DurableCheckpointIO().load_checkpoint(f"{web}/foreign.ckpt" if remote else str(tmp_path / "foreign.ckpt"))
    assert not mark.exists()


@pytest.fixture
def program_folder(model_folder: Path, tmp_path: Path, mark: Path) -> Path:
    """A model of its own kind, with the program that it wants to be read with."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    classes = {
        f"Auto{kind}": "program.Own" for kind in ("Config", "ModelForCausalLM", "ModelForSequenceClassification")
    }
    config |= {"model_type": "own_kind", "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "program.py").write_text(f"open({str(mark)!r}, 'w')")
    return folder


def test_the_program_of_a_model_folder_is_neither_run_nor_offered(
    program_folder: Path, mark: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    for read in (
        lambda: Policy(model=str(program_folder)).load(),
        lambda: TransformersDialect(str(program_folder)),
        lambda: RewardModel(str(program_folder)).score_texts(["1 + 1 = ?"], ["2"]),
    ):
        with pytest.raises(PolicyError):
            read()
    assert not mark.exists()


def test_pickled_weights_of_a_model_folder_run_nothing(model_folder: Path, tmp_path: Path, mark: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    torch.save({"lm_head.weight": Creates(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(Exception, match=r"(?i)weights"):
        Policy(model=str(folder)).load()
    assert not mark.exists()
