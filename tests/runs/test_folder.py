"""The folder of a run, decided without a trainer."""

import json
import os
from datetime import timedelta
from pathlib import Path

import pytest

from mrlm_pl.errors import ConfigurationError, MRLMError
from mrlm_pl.runs import folder as folder_module
from mrlm_pl.runs.folder import RUN_VARIABLE, FolderRequest, RunFolder, agree_on_run_folder, discard_if_empty
from mrlm_pl.runs.state import Training, write_state


def request(**changes) -> FolderRequest:
    return FolderRequest(**{"stage": "fit", "root": None, "stem": "toy", **changes})


def hold_run(folder: str, *, checkpoint: bool = True) -> Path:
    """Write the files of a run; return its checkpoint."""
    path = Path(folder, "checkpoints", "last.ckpt")
    path.parent.mkdir(parents=True)
    if checkpoint:
        path.write_bytes(b"PK\x05\x06" + bytes(18))  # an archive without members, but a whole one
    return path


def agree(**changes) -> RunFolder:
    folder = agree_on_run_folder(request(**changes))
    os.environ.pop(RUN_VARIABLE, None)
    return folder


def test_derived_folder_is_named_after_the_file_and_numbered():
    assert agree() == RunFolder("runs/toy")
    hold_run("runs/toy")
    assert agree() == RunFolder("runs/toy-2")
    hold_run("runs/toy-2")
    assert agree() == RunFolder("runs/toy-3")


def test_two_runs_that_start_at_once_get_two_folders():
    assert [agree().path, agree().path] == ["runs/toy", "runs/toy-2"]  # neither has written yet


def test_named_folder_is_used_when_free_and_numbered_when_not(capsys):
    Path("mine").mkdir()
    assert agree(root="mine") == RunFolder("mine")
    hold_run("mine")
    assert agree(root="mine") == RunFolder("mine-2")
    assert capsys.readouterr().err == "mrlm: mine holds an earlier run, so this one writes to mine-2\n"


def test_last_continues_the_latest_run_of_a_file():
    hold_run("runs/toy")
    hold_run("runs/toy-2")
    hold_run("runs/toy-10")
    hold_run("runs/toy-11", checkpoint=False)
    hold_run("runs/toy-other-12")
    assert agree(checkpoint="last") == RunFolder("runs/toy-10", "runs/toy-10/checkpoints/last.ckpt")


def test_last_of_a_named_folder_is_of_that_folder():
    hold_run("mine")
    hold_run("mine-2")
    assert agree(root="mine", checkpoint="last") == RunFolder("mine", "mine/checkpoints/last.ckpt")
    with pytest.raises(ConfigurationError, match=r"runs/toy has no checkpoints/last.ckpt"):
        agree(checkpoint="last")


def test_checkpoint_of_another_run_begins_a_new_run():
    other = str(hold_run("runs/other"))
    hold_run("runs/toy")
    assert agree(checkpoint=other) == RunFolder("runs/toy-2", other)
    assert agree(root="new", checkpoint=other) == RunFolder("new", other)
    assert agree(root="runs/other", checkpoint=other) == RunFolder("runs/other", other)


def test_stage_without_training_writes_below_the_run():
    checkpoint = str(hold_run("runs/toy"))
    assert agree(stage="validate", checkpoint="last") == RunFolder("runs/toy/validate", checkpoint)
    hold_run("runs/toy/validate")
    assert agree(stage="validate", checkpoint=checkpoint) == RunFolder("runs/toy/validate-2", checkpoint)
    assert agree(stage="test", root="elsewhere", checkpoint=checkpoint) == RunFolder("elsewhere/test", checkpoint)


def test_validation_first_leaves_the_folder_free_for_the_run():
    assert agree(stage="validate") == RunFolder("runs/toy/validate")
    assert agree() == RunFolder("runs/toy")


def test_train_refuses_continues_or_starts():
    assert agree(root="mine", resume=False) == RunFolder("mine")
    assert agree(root="mine", resume=True) == RunFolder("mine")
    checkpoint = hold_run("mine")
    assert agree(root="mine", resume=True) == RunFolder("mine", str(checkpoint))
    with pytest.raises(ConfigurationError, match=r"mine holds a run; add `--resume`"):
        agree(root="mine", resume=False)
    checkpoint.unlink()
    left = ("tokens/iteration-000004.jsonl.zst", "evaluation_after.json", "self_play.json")
    for name in left:
        Path("mine", name).parent.mkdir(exist_ok=True)
        Path("mine", name).touch()
    write_state(Path("mine"), {"state": "finished", "reason": ""})
    with pytest.raises(ConfigurationError, match=r"mine is finished and has no checkpoint; put checkpoints/last\.ckpt"):
        agree(root="mine", resume=True)
    Path("mine/state.json").unlink()
    assert agree(root="mine", resume=True) == RunFolder("mine")
    assert [path.name for path in Path("mine").iterdir()] == ["without-checkpoint-1"], "else they are the new run's"
    assert all(Path("mine/without-checkpoint-1", name).is_file() for name in left)


def test_a_folder_that_cannot_be_written_is_named():
    Path("file").touch()
    for root, resume in (("file", False), ("file/run", False), ("file/run", None)):
        with pytest.raises(ConfigurationError, match=rf"output: '{root}' cannot be written: .*; name a place"):
            agree(root=root, resume=resume)
    with pytest.raises(ConfigurationError, match=r"output: 'file' cannot be written: "):
        Training(Path("file"))


@pytest.mark.parametrize("state", ["failed", "interrupted"])
def test_a_run_that_failed_before_a_checkpoint_starts_again_in_its_folder(state, capsys):
    checkpoint = hold_run("mine")
    write_state(Path("mine"), {"state": state, "reason": "all episodes failed"})
    with pytest.raises(ConfigurationError, match="holds a run"):
        agree(root="mine", resume=False)
    checkpoint.unlink()
    if state == "failed":
        assert agree(root="mine", resume=False) == RunFolder("mine")
        assert "mine has no checkpoint, so the run starts from the beginning; the files" in capsys.readouterr().err
        assert not checkpoint.parent.exists()
    else:
        with pytest.raises(ConfigurationError, match="holds a run"):
            agree(root="mine", resume=False)


def test_processes_started_by_the_first_one_follow_it(monkeypatch):
    folder = agree_on_run_folder(request())
    hold_run(folder.path)  # the first process writes while the others start
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert agree_on_run_folder(request()) == folder
    monkeypatch.setenv("LOCAL_RANK", "0")
    discard_if_empty(folder)
    assert RUN_VARIABLE not in os.environ
    assert Path(folder.path).is_dir()


def test_folder_in_which_nothing_was_written_disappears():
    folder = agree_on_run_folder(request())
    assert json.loads(os.environ[RUN_VARIABLE]) == {"path": "runs/toy", "checkpoint": None}
    discard_if_empty(folder)
    assert not Path("runs/toy").exists()


def test_a_run_that_did_not_begin_leaves_no_folder_and_one_that_did_keeps_all():
    """A logger opens its file before a mistake in the data is found; the configuration is saved after that."""
    for begun in (False, True):
        folder = agree_on_run_folder(request())
        events = Path(folder.path) / "tensorboard" / "events.out.tfevents.0"
        events.parent.mkdir()
        events.write_text("")
        if begun:
            hold_run(folder.path)
        discard_if_empty(folder)
        assert (Path("runs/toy").exists(), events.exists()) == (begun, begun)


@pytest.mark.parametrize("variables", [{"RANK": "0", "WORLD_SIZE": "2"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}])
def test_outside_launcher_may_not_be_given_a_used_folder(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert agree() == RunFolder("runs/toy")
    hold_run("runs/toy")
    with pytest.raises(ConfigurationError, match="name a new one"):
        agree()
    rank = next(iter(variables))
    monkeypatch.setenv(rank, "1")
    assert agree() == RunFolder("runs/toy")  # the first process decides, and ends the job if it must


def test_torchrun_processes_agree_through_its_store(monkeypatch):
    from torch.distributed import TCPStore

    hold_run("runs/toy")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**variables, "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    first = agree()
    hold_run(first.path)
    monkeypatch.setenv("RANK", "1")
    assert first == agree() == RunFolder("runs/toy-2")


def test_a_torchrun_process_names_the_first_that_never_decides(monkeypatch):
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**variables, "WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(folder_module, "_AGREEMENT_DEADLINE", timedelta(seconds=1))
    with pytest.raises(MRLMError, match="rank 0 has not begun the run; its own output"):
        agree()


def test_sharded_checkpoint_must_have_all_its_tables_and_leaves_the_former_one_until_it_has_its_name():
    path = hold_run("runs/toy", checkpoint=False)
    path.mkdir()
    (path / "__0_0.distcp").touch()
    (path / ".metadata").touch()
    with pytest.raises(ConfigurationError, match=r"last\.ckpt' is not a complete checkpoint"):
        agree(checkpoint="last")
    (path / "meta.pt").touch()
    assert agree(checkpoint="last") == RunFolder("runs/toy", str(path))
    former = path.rename(path.with_name("last.ckpt.old"))
    assert agree(checkpoint="last") == RunFolder("runs/toy", str(former))
    assert agree(root="runs/toy", resume=True) == RunFolder("runs/toy", str(former))


def test_processes_that_exchange_tensors_already_agree_in_their_group(monkeypatch):
    """As in the second run of a script: the launcher's variable is of the first."""
    from torch import distributed

    sent, rank = [], [0]

    def broadcast(values, src):
        if rank[0] == src:
            sent[:] = values
        values[:] = sent

    fakes = {"is_initialized": lambda: True, "get_world_size": lambda: 2, "broadcast_object_list": broadcast}
    for name, fake in {**fakes, "get_rank": lambda: rank[0]}.items():
        monkeypatch.setattr(distributed, name, fake)
    monkeypatch.setenv(RUN_VARIABLE, json.dumps({"path": "runs/first", "checkpoint": None}))
    hold_run("runs/toy")
    first = agree_on_run_folder(request())
    rank[0] = 1
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert first == agree_on_run_folder(request()) == RunFolder("runs/toy-2")
    rank[0] = 0
    with pytest.raises(ConfigurationError, match="runs/toy holds a run"):
        agree_on_run_folder(request(root="runs/toy", resume=False))
    rank[0] = 1
    with pytest.raises(ConfigurationError, match="runs/toy holds a run"):
        agree_on_run_folder(request(root="runs/toy", resume=False))
