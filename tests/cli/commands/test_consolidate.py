"""``mrlm consolidate``: its refusals. tests/trainer/test_fsdp.py tests its file with two processes."""

from pathlib import Path

from mrlm_pl.trainer.fsdp import SHARDED_CHECKPOINT_FILES


def test_what_is_no_sharded_checkpoint_is_named(mrlm):
    Path("folder").mkdir()
    status, _, message = mrlm("consolidate", "folder", "whole.ckpt")
    assert status == 2
    assert "'folder' is not a sharded checkpoint" in message
    Path("folder/meta.pt").write_bytes(b"")
    status, _, message = mrlm("consolidate", "folder", "whole.ckpt")
    assert status == 2
    assert "'folder' is not a sharded checkpoint: it has no file '.metadata'; name a complete one" in message
    Path("folder/.metadata").write_bytes(b"")
    Path("file").touch()
    status, _, message = mrlm("consolidate", "folder", "file/whole.ckpt")
    assert (status, "output: 'file/whole.ckpt' cannot be written: " in message) == (2, True)
    Path("whole.ckpt").write_text("precious")
    status, _, message = mrlm("consolidate", "folder", "whole.ckpt")
    assert status == 2
    assert "output: 'whole.ckpt' exists; name another, or remove it" in message
    assert Path("whole.ckpt").read_text() == "precious"


def test_a_sharded_checkpoint_needs_the_strategy_or_consolidation(mrlm):
    Path("sharded.ckpt").mkdir()
    for name in SHARDED_CHECKPOINT_FILES:
        Path("sharded.ckpt", name).write_bytes(b"")
    options = ("--model", "ToyAlgorithm", "--data", "ToyData", "--trainer.max_epochs", "1")
    status, _, message = mrlm("fit", *options, "--ckpt_path", "sharded.ckpt")
    assert status == 2
    assert "mrlm consolidate sharded.ckpt FILE" in message
