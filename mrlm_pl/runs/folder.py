"""The folder of a run: one for each run, the same for all its processes."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import tempfile
import zipfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from mrlm_pl.durable_files import former_of
from mrlm_pl.errors import ConfigurationError, MRLMError, tell, writing
from mrlm_pl.runs.state import LOCK, STATE, in_training, in_use, state_in
from mrlm_pl.trainer.fsdp import SHARDED_CHECKPOINT_FILES

RUN_VARIABLE = "MRLM_RUN_FOLDER"
"""Environment variable in which the first process tells the processes that it starts where the run writes."""

TENSORBOARD = "tensorboard"
RUN_ENTRIES = ("config.yaml", "checkpoints", "episodes", "tokens", "metrics.csv", "policies", TENSORBOARD)
"""Files and folders of a run; a folder that has one of these holds a run."""

PRECISION = "precision.json"
"""The precision that a run has chosen, with its measurement."""

LAST_CHECKPOINT = Path("checkpoints") / "last.ckpt"
_AGREEMENT_DEADLINE = timedelta(seconds=120)
_NOT_A_PATH = ("best", "hpc")  # values of ckpt_path that the trainer resolves itself
_REMOTE = re.compile(r"^\w+:")


@dataclass(frozen=True)
class FolderRequest:
    """The user's options on the folder.

    Args:
        stage: ``fit``, or the loop that runs without training.
        root: folder that the user named; None derives one from ``stem``.
        stem: name for a derived folder, ``runs/STEM``.
        checkpoint: ``last``, a path, a name that the trainer resolves, or None.
        resume: None gives a new run the next free folder. True continues at the last checkpoint if there is one, else
            starts a run in the folder; False rejects a folder that holds a run, unless it failed before a checkpoint.
    """

    stage: str
    root: str | None
    stem: str
    checkpoint: str | None = None
    resume: bool | None = None

    @property
    def base(self) -> Path:
        """The named folder, else the derived one."""
        return Path(self.root) if self.root else Path("runs") / self.stem


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run.

    Args:
        path: path of the folder.
        checkpoint: checkpoint that the run starts from, or None.
    """

    path: str
    checkpoint: str | None = None


def agree_on_run_folder(request: FolderRequest) -> RunFolder:
    """Return the folder that all processes of this run use; decided and created by the first one.

    Processes that the first one starts read an environment variable; those of ``torchrun`` read its store. Other
    launchers give the processes no way to talk before the run, so there the folder must not hold a run yet.

    Raises:
        ConfigurationError: there is no such checkpoint, or the folder holds a run and may not be numbered.
    """
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        return _agree_in_group(request)  # as in the second run of a script
    if RUN_VARIABLE in os.environ and int(os.environ.get("LOCAL_RANK", "0")) > 0:
        return RunFolder(**json.loads(os.environ[RUN_VARIABLE]))
    rank = _external_rank()
    if rank is not None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return _agree_by_store(request, rank)
    folder = _decide(request, rank)
    os.environ[RUN_VARIABLE] = json.dumps(asdict(folder))
    return folder


def scratch_folder(request: FolderRequest) -> RunFolder:
    """Return a temporary folder, for a run that leaves nothing; the caller removes it."""
    return RunFolder(tempfile.mkdtemp(prefix="mrlm-"), _checkpoint(request))


def discard_if_empty(folder: RunFolder, *, mistaken: bool = False) -> None:
    """Remove the folder of a run that did not begin, and clear the environment variable for child processes.

    Such a folder is empty, or has only the files that a logger opens at its start.

    Args:
        folder: folder of the run.
        mistaken: whether a mistake in its configuration ended the run; the folder may then hold that configuration too.
    """
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        os.environ.pop(RUN_VARIABLE, None)
        config = ["config.yaml"] if mistaken else []
        if {path.name for path in Path(folder.path).glob("*")} <= {TENSORBOARD, STATE, LOCK, PRECISION, *config}:
            shutil.rmtree(folder.path, ignore_errors=True)
    with suppress(OSError):  # it is in use, as it should be
        os.rmdir(folder.path)


def holds_run(folder: Path) -> bool:
    """Return True if a run has written into the folder."""
    return any((folder / entry).exists() for entry in RUN_ENTRIES)


def is_first_process() -> bool:
    """Return True in the only process of a run, or in the one that prints."""
    return (_external_rank() or 0) == 0 and int(os.environ.get("LOCAL_RANK", "0")) == 0


def _decide(request: FolderRequest, rank: int | None = None) -> RunFolder:
    """Return the folder, which the first rank creates.

    Args:
        request: the user's options on the folder.
        rank: rank of a process that cannot talk to the others; None allows ``NAME-2`` and so on.
    """
    base, checkpoint = request.base, _checkpoint(request)
    owner = run_of(checkpoint)
    if request.stage != "fit":
        base = (base if request.root or owner is None else owner) / request.stage
    elif owner is not None and owner.resolve() in [folder.resolve() for folder in _candidates(request)]:
        tell(f"continuing {owner} from {checkpoint}")
        return RunFolder(str(owner), checkpoint)
    if request.resume is not None:
        return _exact(request, base, not rank, checkpoint)
    if rank is not None:
        if rank == 0 and base.exists() and (not base.is_dir() or holds_run(base)):
            fault = f"the run folder {base} holds a run, and processes of an outside launcher cannot agree on another"
            remedy = "name a new one with `--trainer.default_root_dir FOLDER`, or continue with `--ckpt_path last`"
            raise ConfigurationError(f"{fault}; {remedy}")
        return RunFolder(str(base), checkpoint)
    places = itertools.chain([base], (base.with_name(f"{base.name}-{number}") for number in itertools.count(2)))
    folder = next(place for place in places if _claim(place, named=request.root is not None and place == base))
    if folder != base:
        tell(f"{base} holds an earlier run, so this one writes to {folder}")
    return RunFolder(str(folder), checkpoint)


def _exact(request: FolderRequest, base: Path, first: bool, checkpoint: str | None) -> RunFolder:
    """Return the folder that ``output`` names."""
    if first and holds_run(base):
        failed = last_checkpoint(base) is None and state_in(base)[0] == "failed"
        if not request.resume and not failed:
            remedy = "add `--resume` (in Python `resume=True`) to continue it, or name another `output`"
            raise ConfigurationError(f"the output folder {base} holds a run; {remedy}")
        if in_training(base):
            raise in_use(base)
        if state_in(base)[0] == "finished":
            remedy = f"put {LAST_CHECKPOINT} back to continue it, or name another `output`"
            raise ConfigurationError(f"the run in the output folder {base} is finished and has no checkpoint; {remedy}")
        _set_aside(base)
    with writing("output", base):
        base.mkdir(parents=True, exist_ok=True)
    return RunFolder(str(base), checkpoint)


def _set_aside(folder: Path) -> None:
    """Move the files of a run without a checkpoint aside, for a new run in its folder."""
    candidates = (folder / f"without-checkpoint-{number}" for number in itertools.count(1))
    aside = next(place for place in candidates if not place.exists())
    aside.mkdir()
    patterns = (*RUN_ENTRIES, "config-*.yaml", "evaluation_*.json", "self_play.json")
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        path.rename(aside / path.name)
    begins = f"{folder} has no checkpoint, so the run starts from the beginning"
    tell(f"{begins}; the files of the earlier one are in {aside}")


def _checkpoint(request: FolderRequest) -> str | None:
    """Return the path of the checkpoint to start from, after a check that it is complete."""
    path = request.checkpoint
    if request.resume and (last := last_checkpoint(request.base)):
        path = str(last)
    elif path == "last":
        path = next((str(last) for last in map(last_checkpoint, reversed(_candidates(request))) if last), None)
        if path is None:
            fault = f"ckpt_path: the run folder {request.base} has no {LAST_CHECKPOINT}; start without `--ckpt_path`"
            raise ConfigurationError(f"{fault}, or name the folder of the run with `--trainer.default_root_dir FOLDER`")
    elif path is None or path in _NOT_A_PATH:
        return path
    elif not Path(path).exists() and not _REMOTE.match(path):
        raise ConfigurationError(f"ckpt_path: there is no checkpoint {path!r}; check the path, or use `last`")
    files = [Path(path) / name for name in SHARDED_CHECKPOINT_FILES]
    # The table of contents of a zip file is at its end.
    complete = all(map(Path.is_file, files)) if Path(path).is_dir() else zipfile.is_zipfile(path)
    if Path(path).exists() and not complete:
        raise ConfigurationError(f"ckpt_path: {path!r} is not a complete checkpoint; name another")
    return path


def last_checkpoint(folder: Path) -> Path | None:
    """Return the last checkpoint of a run; the one before if a kill came while a sharded one was put in its place."""
    last = folder / LAST_CHECKPOINT
    return next((path for path in (last, former_of(last)) if path.exists()), None)


def _candidates(request: FolderRequest) -> list[Path]:
    """Return the folders that a run may continue: the named one, else ``NAME``, ``NAME-2``, ... by their numbers."""
    base = request.base
    if request.root:
        return [base]
    siblings = base.parent.iterdir() if base.parent.is_dir() else ()
    matches = [(path, re.fullmatch(re.escape(base.name) + r"-(\d+)", path.name)) for path in siblings]
    return [base, *(path for _, path in sorted((int(match[1]), path) for path, match in matches if match))]


def run_of(checkpoint: str | None) -> Path | None:
    """Return the run folder of a checkpoint, or None."""
    if checkpoint is None or Path(checkpoint).parent.name != LAST_CHECKPOINT.parent.name:
        return None
    return Path(checkpoint).parent.parent


def _claim(folder: Path, *, named: bool) -> bool:
    """Claim the folder by making it, so that two runs never get the same one; return False if another has it."""
    with writing("output", folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            folder.mkdir()
            return True
        except FileExistsError:  # made by the user for this run, or filled by a loop without training alone
            return folder.is_dir() and not holds_run(folder) and (named or any(folder.iterdir()))


def _external_rank() -> int | None:
    """Return this process's rank under an outside launcher of several, else None."""
    for size, rank in (("WORLD_SIZE", "RANK"), ("SLURM_NTASKS", "SLURM_PROCID")):
        if rank in os.environ and int(os.environ.get(size, "1")) > 1:
            return int(os.environ[rank])
    return int(os.environ["NODE_RANK"]) if "NODE_RANK" in os.environ else None


def _agree_in_group(request: FolderRequest) -> RunFolder:
    """Return the folder that rank 0 decides on, through the process group."""
    message: list[Any] = [None]
    if distributed.get_rank() == 0:
        try:
            message = [_decide(request)]
        except ConfigurationError as error:
            message = [error]
    distributed.broadcast_object_list(message, src=0)
    if isinstance(message[0], ConfigurationError):
        raise message[0]
    return message[0]


def _agree_by_store(request: FolderRequest, rank: int) -> RunFolder:
    """Return the folder that rank 0 decides on, through the key-value store of ``torchrun``."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = distributed.TCPStore(address, port, is_master=False, timeout=_AGREEMENT_DEADLINE)
    key = f"{RUN_VARIABLE}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if rank == 0:
        store.set(key, json.dumps(asdict(_decide(request))))
    try:
        return RunFolder(**json.loads(store.get(key)))
    except distributed.DistError as error:  # the store is gone, or the deadline has passed
        raise MRLMError("rank 0 has not begun the run; its own output names the cause") from error
