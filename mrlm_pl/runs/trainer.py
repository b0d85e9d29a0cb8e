"""Lightning's trainer with everything that makes a run durable."""

from __future__ import annotations

import functools
import inspect
import json
import shlex
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import lightning.pytorch as pl
from lightning.fabric.connector import _PRECISION_INPUT
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary, ProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

from mrlm_pl.data import RolloutDataModule
from mrlm_pl.durable_files import write_json
from mrlm_pl.episode import Episode
from mrlm_pl.episode_files import write_episodes
from mrlm_pl.errors import ROLLOUT_ERRORS, ConfigurationError, counted, tell
from mrlm_pl.evaluation.report import EvaluationReport
from mrlm_pl.evaluation.summary import summarize
from mrlm_pl.grouping import grouped
from mrlm_pl.learner.ranks import first_error, gather_ranks
from mrlm_pl.policy import Policy
from mrlm_pl.runs.checkpoint import DurableCheckpointIO, LastCheckpoint, continue_best
from mrlm_pl.runs.console import (
    PolicySummary,
    RunProgress,
    early_stop,
    run_summary,
    silence_noise,
    timed_out,
    warn_of_busy_machine,
    warn_of_emulated_bf16,
)
from mrlm_pl.runs.folder import (
    LAST_CHECKPOINT,
    PRECISION,
    FolderRequest,
    RunFolder,
    agree_on_run_folder,
    discard_if_empty,
    is_first_process,
    last_checkpoint,
    run_of,
    scratch_folder,
)
from mrlm_pl.runs.interrupts import Interruption, ending_in_order, in_session
from mrlm_pl.runs.metrics_file import MetricsFile, RunTensorBoard, outlive
from mrlm_pl.runs.publication import write_cards
from mrlm_pl.runs.state import Training
from mrlm_pl.settings import check_instance, check_known
from mrlm_pl.trainer.fsdp import FSDP
from mrlm_pl.trainer.precision import faster, product_seconds, set_precision
from mrlm_pl.trainer.refusals import check_numbers
from mrlm_pl.trainer.termination import EndTogether


class LoopResults(Callback):
    """Writes predicted episodes to ``RUN/episodes``, keeps reports of those of a validation or test, counts batches.

    Attributes:
        batches: number of batches that this process has trained on; 0 if a complete run is resumed.
        training: state of the training in this process; None outside ``fit`` and on the other ranks.
        reports: reports of the environments that the last loop outside ``fit`` played.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.training: Training | None = None
        self.reports: list[EvaluationReport] = []
        self._played: list[Episode] = []

    def on_load_checkpoint(self, trainer: pl.Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let a resumed run keep the best checkpoints of an uninterrupted one."""
        resumed = Path(str(trainer.ckpt_path))
        if trainer.state.fn == TrainerFn.FITTING and resumed.parent == Path(trainer.default_root_dir, "checkpoints"):
            callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
            continue_best(callbacks, resumed, checkpoint["callbacks"])

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Count a batch, note the precision of the first, and check that the run folder is there."""
        if self.training is not None:
            self.training.check_folder()
            self.training.precision = trainer.precision
        self.batches += 1

    def on_predict_batch_end(
        self, trainer: pl.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int, *loader: int
    ) -> None:
        """Write the episodes of a batch, unless a ``predict_step`` of the user's own returns something else."""
        episodes = getattr(outputs, "episodes", outputs)
        if not isinstance(episodes, Sequence) or not all(isinstance(episode, Episode) for episode in episodes):
            return
        rank = f"-rank{trainer.global_rank}" if trainer.world_size > 1 else ""
        name = f"predict-{loader[0] if loader else 0}-{batch_idx:06d}{rank}.jsonl.zst"
        write_episodes(Path(trainer.default_root_dir) / "episodes" / name, episodes)

    def on_validation_batch_end(
        self, trainer: pl.Trainer, pl_module: LightningModule, outputs: Any, batch: Any, *_: Any, **__: Any
    ) -> None:
        """Keep the episodes of a batch."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._played += getattr(batch, "episodes", ())

    def on_validation_epoch_end(self, trainer: Any, pl_module: LightningModule) -> None:
        """Make the reports, on all ranks of all episodes."""
        data: Any = trainer.datamodule
        if trainer.state.fn == TrainerFn.FITTING or not isinstance(data, RolloutDataModule):
            return
        episodes, self._played = self._played, []
        played = [episode for rank_episodes in gather_ranks(trainer, episodes) for episode in rank_episodes]
        policies: Any = getattr(pl_module, "policies", {})
        model = str(trainer.ckpt_path or ", ".join(str(policy.name_or_path) for policy in policies.values()))
        split = "test" if trainer.state.fn == TrainerFn.TESTING else "validation"
        about = dict[str, Any](model=model, split=split, seed=data.seed, sampling=data.validation_sampling)
        by_environment = grouped((episode.task.environment, episode) for episode in played)
        self.reports = [
            summarize(by_environment.get(name, []), environment=name, bounds=settings.bounds, **about)
            for name, settings in data.environments.items()
        ]

    on_test_batch_end = on_validation_batch_end
    on_test_epoch_end = on_validation_epoch_end


_Method = TypeVar("_Method", bound=Callable[..., Any])


def _in_run_folder(method: _Method) -> _Method:
    """Return Lightning's method of a stage, run in a run folder."""
    stage, signature = method.__name__, inspect.signature(method)

    @functools.wraps(method, assigned=("__name__", "__qualname__", "__annotations__"))
    def run(self: Trainer, *args: Any, **options: Any) -> Any:
        """Run the stage in a run folder; the arguments are those of Lightning's method.

        Args:
            ckpt_path: checkpoint to start from: ``last`` continues the latest run of the folder; a checkpoint of
                another run starts a new one. A run that ``resume`` continues starts from its own checkpoint.
            verbose: whether to print the reports and metrics of a validation or test.
            weights_only: whether the checkpoint may hold only tensors and plain values.

        Raises:
            ConfigurationError: the folder holds a run, there is no such checkpoint, the strategy of a fit spawns its
                processes, or an earlier fit has used up the trainer's epochs.
            SystemExit: Ctrl-C or SIGTERM has ended the run; in a notebook KeyboardInterrupt after Ctrl-C.
        """
        start = getattr(self.strategy, "_start_method", "")
        if stage == "fit" and start in ("spawn", "forkserver"):
            fault = f"trainer.strategy starts its processes by {start!r}, which cannot give them the open run folder"
            raise ConfigurationError(f"{fault}; set it to ddp, or in a notebook to ddp_notebook")
        bound = signature.bind(self, *args, **options)
        arguments = bound.arguments
        with self._in_folder(stage, arguments.get("model"), arguments.get("ckpt_path")) as checkpoint:
            if stage == "fit" and checkpoint is None:
                self._refuse_spent()
            arguments["ckpt_path"] = checkpoint
            verbose = arguments.get("verbose", True)
            if "verbose" in signature.parameters:
                arguments["verbose"] = False  # the result is printed below
            result = getattr(super(Trainer, self), stage)(*bound.args[1:], **bound.kwargs)
            if stage == "fit" and self.is_global_zero and not self.fast_dev_run:  # type: ignore[attr-defined]
                write_cards(Path(self.default_root_dir))
            self._print_result(stage, result, checkpoint is not None, verbose)
            return result

    return cast(_Method, run)


class Trainer(pl.Trainer):
    """Lightning's trainer with a run folder, durable checkpoints, a metrics file and a clean shutdown.

    Each ``fit`` writes to its own folder, ``runs/NAME``, ``runs/NAME-2``, ...: ``checkpoints/last.ckpt``,
    ``metrics.csv``, ``tensorboard``, ``episodes`` and ``policies``. Ctrl-C and SIGTERM save a checkpoint, say how to
    continue and end the process with status 130 or 143. A run lasts one epoch unless its length is given. Everything
    else is as in Lightning, whose arguments this trainer accepts; callbacks and plugins that are given replace the
    defaults of their kind, and loggers the one for TensorBoard. A callback's method ``on_run_folder(trainer, stage,
    folder)`` is called before a run begins, and may raise to reject it.

    Args:
        output: run folder; it may hold a run only with ``resume`` or ``ckpt_path="last"``. None derives one from
            ``default_root_dir``, else from the name of the algorithm, and numbers it if it holds a run.
        resume: continue from the last checkpoint in ``output``; start there if there is none.
        precision: one of Lightning's, or ``auto``: a measurement of under a second at the start of a run chooses
            ``bf16-mixed`` where it is at least a fifth faster than ``32-true``. A resumed run keeps the choice.
        options: extra arguments of Lightning's trainer.

    Attributes:
        name: name of a derived folder, ``runs/NAME``; None is the algorithm's name.
        folder: folder of the current run; None before the first.

    Raises:
        ConfigurationError: ``resume`` is given without ``output``, or ``precision: auto`` to several processes.
    """

    name: str | None = None
    folder: RunFolder | None = None
    fit = _in_run_folder(pl.Trainer.fit)
    validate = _in_run_folder(pl.Trainer.validate)
    test = _in_run_folder(pl.Trainer.test)
    predict = _in_run_folder(pl.Trainer.predict)

    def __init__(
        self,
        *,
        output: str | None = None,
        resume: bool = False,
        precision: _PRECISION_INPUT | Literal["auto"] | None = None,
        **options: Any,
    ) -> None:
        if resume and output is None:
            raise ConfigurationError("resume needs the folder of the run; name it with `output` (`--output FOLDER`)")
        if output == "":
            raise ConfigurationError("output is ''; name a folder, or leave it out for `runs/NAME`")
        silence_noise()
        self.output = None if output is None else str(output)
        self.resume = resume
        self._root = options.get("default_root_dir")
        barebones = bool(options.get("barebones"))
        self._own_loggers = options.get("logger") in (None, True) and not barebones and not options.get("fast_dev_run")
        self._loops = LoopResults()
        check_known(options, inspect.signature(pl.Trainer.__init__).parameters, type(self))
        options.update(self._changed_options(options, barebones))
        super().__init__(precision=None if precision == "auto" else precision, **options)
        check_numbers(self)
        self._measures_precision = precision == "auto"
        processes = self.num_devices * self.num_nodes
        if self._measures_precision and processes > 1:
            fault = f"trainer.precision is 'auto', which one process measures, but the run has {processes}"
            remedy = "bf16-mixed on GPUs from Ampere on and on CPUs with AMX or AVX512-BF16, else 32-true"
            raise ConfigurationError(f"{fault}; name one: {remedy}")
        self._given_loggers = [] if self.fast_dev_run else list(self.loggers)  # type: ignore[attr-defined]
        # The folder is known when the run begins.
        callbacks: list[Callback] = self.callbacks  # type: ignore[attr-defined]
        self._without_folder = [
            callback for callback in callbacks if isinstance(callback, ModelCheckpoint) and callback.dirpath is None
        ]
        for callback in self._without_folder:
            callback.save_last = None  # which saves with another checkpoint alone, and would replace a later one

    def _changed_options(self, options: dict[str, Any], barebones: bool) -> dict[str, Any]:
        """Return the options that differ from the given ones."""
        changed: dict[str, Any] = {}
        if self._own_loggers:
            changed["logger"] = False
        if options.get("max_epochs") is None and options.get("max_steps", -1) == -1 and not options.get("max_time"):
            # Lightning's default is 1000 epochs, each of which is a whole run of `iterations` collections here.
            changed["max_epochs"] = 1
        if options.get("log_every_n_steps") is None and not barebones:
            changed["log_every_n_steps"] = 1
        if options.get("strategy") == "fsdp":
            changed["strategy"] = FSDP()
        plugins = _as_list(options.get("plugins"))
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            changed["plugins"] = [*plugins, DurableCheckpointIO()]
        callbacks: list[Callback] = [*_as_list(options.get("callbacks"))]
        for item in callbacks:
            check_instance(Callback, item, "trainer.callbacks", "a callback")
        for item in _as_list(options.get("logger")):
            if not isinstance(item, bool):
                check_instance(Logger, item, "trainer.logger", "a logger")
        # Checkpoint callbacks come after all others, wherever they are.
        callbacks += [self._loops, EndTogether()]
        if not barebones and options.get("enable_progress_bar") is not False and not _has(callbacks, ProgressBar):
            callbacks.append(RunProgress())
        if not barebones and options.get("enable_model_summary") is not False and not _has(callbacks, ModelSummary):
            callbacks.append(PolicySummary())
        if options.get("enable_checkpointing") is False or barebones:
            callbacks = [item for item in callbacks if not isinstance(item, LastCheckpoint)]
        elif not _has(callbacks, LastCheckpoint):
            callbacks.append(LastCheckpoint())
        return {**changed, "callbacks": callbacks}

    @property
    def default_root_dir(self) -> str:
        """The run folder, once a run has begun."""
        return super().default_root_dir if self.folder is None else self.folder.path

    def _print_result(self, stage: str, result: Any, resumed: bool, verbose: bool) -> None:
        """Print the files of a fit, or the reports and metrics of an evaluation."""
        data: Any = self.datamodule  # type: ignore[attr-defined]
        played = isinstance(data, RolloutDataModule)
        if not self.is_global_zero:
            return
        if stage == "fit" and not self.fast_dev_run:  # type: ignore[attr-defined]
            if resumed and not self._loops.batches:
                print(f"mrlm: nothing was trained: the run was complete{self._remedy(data)} to train further")
            elif stop := early_stop(self):
                print(f"mrlm: {stop}")
            counts = data.collection.totals.state() if played else {}
            if failed := counts.get("failed_episodes"):
                listed = f"mrlm view --text {shlex.quote(self.default_root_dir)} --failed"
                total = counted(int(counts["episodes"]), "episode")
                print(f"mrlm: {failed:.0f} of {total} failed; see why with `{listed}`")
            print(run_summary(self.default_root_dir, played=played))
        elif stage == "predict" and not self.fast_dev_run:  # type: ignore[attr-defined]
            episodes = Path(self.default_root_dir) / "episodes"
            view = shlex.join(["mrlm", "view", str(episodes.parent)])
            if episodes.is_dir():
                print(f"mrlm: the episodes are in {episodes}; look at them with `{view}`")
        elif stage in ("validate", "test") and verbose:
            for report in self._loops.reports if played else ():
                print(report, end="\n\n")
            for name, value in {key: value for metrics in result for key, value in metrics.items()}.items():
                print(f"{name} {value:z.4f}")

    def _refuse_spent(self) -> None:
        """Raise a ConfigurationError if an earlier fit has used up the trainer's epochs or steps."""
        for name, done in (("max_epochs", self.current_epoch), ("max_steps", self.global_step)):
            if done and 0 <= (limit := getattr(self, name) or 0) <= done:
                chosen = f"fast_dev_run, {self.fast_dev_run}" if self.fast_dev_run else f"{name}, {limit}"  # type: ignore[attr-defined]
                fault = f"this trainer has trained its trainer.{chosen}, in an earlier fit"
                raise ConfigurationError(f"{fault}, so that another would train nothing; make a new Trainer")

    def _remedy(self, data: Any) -> str:
        """Return the bound that has ended a complete run, but for its epochs, and what to change."""
        if 0 <= self.max_steps <= self.global_step:
            return f" by trainer.max_steps, {self.max_steps}; raise it"
        if timed_out(self):
            return " by trainer.max_time; raise it"
        if stop := early_stop(self):
            return f", {stop}; change that callback"
        if not isinstance(data, RolloutDataModule) or self.max_epochs != 1:
            return "; raise trainer.max_epochs"
        if data.stream.iteration == data.stream.iterations:
            return "; raise data.iterations"
        now = f", {self.limit_train_batches}" if self.num_training_batches < len(data.stream) else " of the run before"
        return f" by trainer.limit_train_batches{now}; raise trainer.max_epochs"

    @contextmanager
    def _in_folder(
        self, stage: str, model: LightningModule | None, ckpt_path: str | Path | None
    ) -> Iterator[str | None]:
        """Enter a run folder, yield the checkpoint to start from, and shut down cleanly."""
        folder_before = self.folder
        model = model if model is not None else self.lightning_module
        with ending_in_order() as interruption:
            folder = training = None
            mistaken = False
            try:
                decided = self._decide_folder(stage, type(model).__name__.lower(), ckpt_path)
                training = Training(Path(decided.path)) if stage == "fit" and is_first_process() else None
                folder = decided  # which is not discarded where another process trains
                if self._measures_precision:
                    self._choose_precision(stage, folder, model)
                self._enter(stage, folder, training)
                yield folder.checkpoint
                if training is not None:
                    training.end("finished")
                self.strategy.barrier("end of the run")  # a script may read the folder next, on all ranks
            except BaseException as raised:  # also an exit: the folder says how the run ended
                error = first_error(raised)
                mistaken = isinstance(error, ConfigurationError)
                exits = isinstance(error, (KeyboardInterrupt, SystemExit))  # Lightning exits on KeyboardInterrupt
                failed = not exits or (interruption.received is None and not isinstance(error, SIGTERMException))
                if training is not None:
                    reason = f"{type(error).__name__}: {error}" if failed else interruption.name
                    if training.former == "finished" and not self._loops.batches:  # a rejected resume changes nothing
                        training.end("finished")
                    else:
                        training.end("failed" if failed else "interrupted", reason)
                if isinstance(error, ROLLOUT_ERRORS) and training is not None and self.folder is not None:
                    tell(f"the rollout has failed{_how_to_continue(self.folder.path)}")
                if error is not raised:
                    raise error from raised
                if failed:
                    raise
                status = self._report_end(stage, interruption)
                if interruption.received == signal.SIGINT and in_session():
                    raise KeyboardInterrupt from None
                raise SystemExit(status) from error
            finally:
                if folder is not None and self.fast_dev_run:  # type: ignore[attr-defined]
                    shutil.rmtree(folder.path, ignore_errors=True)
                elif folder is not None:
                    discard_if_empty(folder, mistaken=mistaken)
                if training is not None:
                    training.release()
                if stage != "fit" and folder_before is not None:
                    self.folder = folder_before

    def _decide_folder(self, stage: str, algorithm: str, ckpt_path: str | Path | None) -> RunFolder:
        fitting = stage == "fit"
        below = self.folder.path if self.folder is not None and not fitting else None
        request = FolderRequest(
            stage=stage,
            root=below or self.output or self._root,
            stem=self.name or algorithm,
            checkpoint=None if ckpt_path is None else str(ckpt_path),
            resume=self.resume if fitting and self.output is not None else None,
        )
        return scratch_folder(request) if self.fast_dev_run else agree_on_run_folder(request)  # type: ignore[attr-defined]

    def _choose_precision(self, stage: str, folder: RunFolder, model: LightningModule | None) -> None:
        """Set the precision of the run that is continued, else the faster one, and record it in the run's folder.

        Raises:
            ConfigurationError: the model has no policy with weights here, whose products could be measured.
        """
        owner = run_of(folder.checkpoint)
        if owner is not None and (owner / PRECISION).is_file():
            set_precision(self, json.loads((owner / PRECISION).read_text())["precision"])
            return
        policies = [module for module in ([] if model is None else model.modules()) if isinstance(module, Policy)]
        widths = [policy.widths for policy in policies if policy.served_by is None]
        if not widths:
            fault = f"{type(model).__name__} has no policy with weights in this process to measure"
            raise ConfigurationError(f"trainer.precision is 'auto', but {fault}; name one: 32-true or bf16-mixed")
        inputs, outputs = max(widths)
        seconds = product_seconds(inputs, outputs, self.strategy.root_device)
        chosen = faster(seconds)
        set_precision(self, chosen)
        measured = {name: round(1000 * value, 3) for name, value in seconds.items()}
        times = ", ".join(f"{name} {value:.3g} ms" for name, value in measured.items())
        tell(f"precision {chosen}: matrix products of {inputs} by {outputs} take {times}")
        if stage == "fit":
            write_json(Path(folder.path) / PRECISION, {"precision": chosen, "milliseconds": measured})

    def _enter(self, stage: str, folder: RunFolder, training: Training | None) -> None:
        """Write to the folder from now on."""
        checkpoint = folder.checkpoint
        if checkpoint is not None and Path(checkpoint).is_dir() and not isinstance(self.strategy, FSDP):
            fault = f"ckpt_path: {checkpoint!r} is a sharded checkpoint, which only `--trainer.strategy fsdp` reads"
            remedy = f"make a whole one of it with `mrlm consolidate {shlex.quote(checkpoint)} FILE`"
            raise ConfigurationError(f"{fault}; {remedy}")
        self.folder = folder
        for callback in self.callbacks:  # type: ignore[attr-defined]
            if on_run_folder := getattr(callback, "on_run_folder", None):
                on_run_folder(self, stage, folder)
        if training is not None:
            training.begin()
        for callback in self._without_folder:
            callback.dirpath = str(Path(folder.path) / LAST_CHECKPOINT.parent)
        if given := [RunTensorBoard(folder.path)] if self._own_loggers else self._given_loggers:
            files = [item for item in given if isinstance(item, MetricsFile)] or [MetricsFile(folder.path)]
            self.loggers = [*(outlive(item) for item in given if item not in files), *files]
        self._loops.batches = 0
        self._loops.training = training
        if self.strategy.root_device.type == "cpu" and is_first_process():
            warn_of_emulated_bf16(self.precision)
            warn_of_busy_machine()

    def _report_end(self, stage: str, interruption: Interruption) -> int:
        """Say that a signal has ended the run and how to continue; return the exit status.

        Of several processes the first returns the status of the signal, the others 0: for any other status the
        launcher kills the first process, which has logs to finish.
        """
        if getattr(rank_zero_only, "rank", 0) != 0:
            return 0
        remedy = _how_to_continue(self.folder.path) if stage == "fit" and self.folder is not None else ""
        tell(f"{interruption.name} has ended {stage}{remedy}")
        return interruption.status


def _how_to_continue(folder: str) -> str:
    if last_checkpoint(Path(folder)) is None:
        return "; there is no checkpoint yet, so start it again"
    if (Path(folder) / "config.yaml").is_file():
        return f"; continue with `mrlm train --output {shlex.quote(folder)} --resume`"
    return f"; continue with `Trainer(output={folder!r}, resume=True)`"


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _has(items: Sequence[Any], kind: type) -> bool:
    return any(isinstance(item, kind) for item in items)
