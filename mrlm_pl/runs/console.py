"""The console of a run: progress, models, hints on the machine, the files that it leaves."""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, ProgressBar, Timer
from rich.columns import Columns
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

from mrlm_pl.data import RolloutDataModule
from mrlm_pl.errors import counted, tell
from mrlm_pl.policy import Policy
from mrlm_pl.policy.compilation import compilation_seconds
from mrlm_pl.policy.forward.devices import computes_bf16
from mrlm_pl.runs.records.run import read_run, recorded_iterations
from mrlm_pl.settings import PositiveInt, check_arguments
from mrlm_pl.trainer.bounds import batches_in_all

logger = logging.getLogger(__name__)

_NOISE = (
    r"^Seed set to",
    r"^(GPU|TPU) available: False",
    r"^Trainer already configured with model summary callbacks",
    r"litlogger",
    r"litmodels",
    r"does not have many workers",
    r"Couldn't infer the batch indices",
    r"isinstance\(treespec, LeafSpec\)",
    r"Total length of `list` across ranks is zero",  # there is no validation data
    r"your dataloader is not resumable",  # the position in the stream is in the data module
    r"module\(s\) in eval mode",
    r"recommended to use `self\.log\('(val|test)/",  # they are of all ranks already
    r"Please add the following callbacks: \['RunProgress'\]",  # a resumed run may show no progress
    r"Checkpoint directory .* exists and is not empty",
    r"will override existing callbacks passed to Trainer: (ActAfterValidations|ExactResume)",
    r"`Trainer.fit` stopped: `max_epochs=1` reached",  # a run is an epoch, also one that a callback stops
    r"^(Restoring states|Restored all states) from the checkpoint",  # the run says from which, and where it continues
    r"recommend passing in an `attention_mask`",  # rows without a mask are not padded: the model sampled its pad token
    r"^Token indices sequence length is longer",  # a prompt beyond the window ends the episode, and the run warns of it
    r"Received SIGTERM",  # the end of the run says so in its own words
)
_PACKAGE = Path(__file__).parents[1]
_BUSY = 1.5
"""Load average per core above which a machine counts as busy."""


def silence_noise() -> None:
    """Drop messages that advertise or do not concern a run of ours, and bars for reading and writing weights.

    Warnings from code of this project are printed without the line of code.
    """
    disable_progress_bar()
    if not isinstance(warnings.formatwarning, partial):
        warnings.formatwarning = partial(_warning_text, warnings.formatwarning)
    for text in _NOISE:
        warnings.filterwarnings("ignore", message=f".*{text}")
    for name in (
        "lightning.pytorch.utilities.rank_zero",
        "lightning.fabric.utilities.rank_zero",
        "lightning.fabric.utilities.seed",
        "lightning.pytorch.trainer.connectors.signal_connector",
        "transformers.modeling_utils",
        "transformers.tokenization_utils_base",
    ):
        logging.getLogger(name).addFilter(_is_no_noise)


def _warning_text(
    default_format: Callable[..., str], message: object, kind: Any, filename: str, *args: Any, **options: Any
) -> str:
    is_ours = Path(filename).is_relative_to(_PACKAGE)
    return f"mrlm: warning: {message}\n" if is_ours else default_format(message, kind, filename, *args, **options)


def _is_no_noise(record: logging.LogRecord) -> bool:
    return not any(re.search(text, record.getMessage()) for text in _NOISE)


def warn_of_emulated_bf16(precision: str) -> None:
    """Say on stderr that bf16 is slow on this CPU, if a run on it has that precision."""
    if "bf16" in precision and not computes_bf16(torch.device("cpu")):
        text = "this CPU has no instructions for bf16 and emulates them, which takes several times as long as 32-true"
        tell(f"trainer.precision {precision}: {text}")


def warn_of_busy_machine() -> None:
    """Log a warning if other processes use the cores that the threads of a run on the CPU would spin on."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    limited = {"OMP_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ)
    if load > _BUSY * cores and not limited:
        remedy = "set OMP_NUM_THREADS to the number of free cores, or GOMP_SPINCOUNT=1000, before Python starts"
        text = "the load average is %.1f on %d cores: threads that spin while they wait slow a run down severalfold"
        logger.warning(f"{text}; {remedy} (docs/scaling/README.md)", load, cores)


_LINES = 50
"""Maximum number of lines of a run without collections where there is no terminal."""


class RunProgress(ProgressBar):
    """Shows the progress of ``fit``, with the metrics that are logged with ``prog_bar=True``.

    Their names are those of ``metrics.csv``, without ``rollout/``. It counts complete iterations for a rollout data
    module and batches for any other; files and commands number iterations from 0. A terminal gets a live display; a
    file, a pipe and a notebook get lines.

    Args:
        live: whether to draw the live display; None draws it on a terminal.
        every: number of iterations or batches per line; None prints each iteration, or about 50 lines for a run over
            batches.

    Raises:
        ConfigurationError: ``every`` is below 1.
    """

    @check_arguments
    def __init__(self, live: bool | None = None, every: PositiveInt | None = None) -> None:
        super().__init__()
        self.live, self.every = live, every
        self._enabled = True
        self._display: Live | None = None
        self._bar: Progress | None = None
        self._logs: list[Any] = []
        self._began, self._first = 0.0, 0
        self._metrics: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the last metrics in their order, for the lines of a resumed run."""
        return {"metrics": self._last_metrics(self.trainer)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the value of :meth:`state_dict`."""
        self._metrics = state_dict["metrics"]

    def disable(self) -> None:
        """Show nothing; Lightning calls this on all ranks but the first."""
        self._enabled = False

    def enable(self) -> None:
        """Show progress again."""
        self._enabled = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the display at the position of a resumed run."""
        self._began, self._first = time.monotonic(), _done(trainer)
        if self._enabled and trainer.ckpt_path is not None:
            tell(_resume_text(trainer, self._first, _total(trainer)))
        console = Console()
        live = self.live if self.live is not None else console.is_terminal and not console.is_jupyter
        if not self._enabled or not live:
            return
        self._bar = _bar(console)
        self._bar.add_task(_unit(trainer), total=_total(trainer), completed=self._first)
        self._display = Live(self._bar, console=console, refresh_per_second=4)
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        handlers = [handler for item in loggers for handler in getattr(item, "handlers", ())]
        self._logs = [item for item in handlers if type(item) is logging.StreamHandler and item.stream is sys.stderr]
        self._display.start()
        for handler in self._logs:
            handler.setStream(sys.stderr)  # the display's, which prints above it

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Update the display, or print a line when an iteration is complete."""
        data = _rollout(trainer)
        if not self._enabled or (data is not None and data.stream.position) or self._draw(trainer):
            return
        done, total = _done(trainer), _total(trainer)
        every = 1 if data else max(1, -(-total // _LINES)) if total else 10
        if done % (self.every or every) == 0 or done == total:
            seconds = time.monotonic() - self._began
            print(_line(_unit(trainer), done, total, self._metrics, seconds, done - self._first), flush=True)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Update the display, or print a line, with the metrics of a validation during ``fit``."""
        if not self._enabled or trainer.state.fn != "fit" or trainer.sanity_checking or self._draw(trainer):
            return
        if texts := _metric_texts({name: value for name, value in self._metrics.items() if name.startswith("val/")}):
            print("  ".join(("validation", *texts)), flush=True)

    def _draw(self, trainer: Trainer) -> bool:
        """Take the last metrics, draw them on the live display, and return whether there is one."""
        metrics = self._last_metrics(trainer)
        if self._display is None or self._bar is None:
            return False
        self._bar.update(self._bar.task_ids[0], completed=_done(trainer), total=_total(trainer))
        self._display.update(Group(self._bar, Columns(map(Text, _metric_texts(metrics)), padding=(0, 2))))
        return True

    def _stop(self, *_: Any, **__: Any) -> None:
        """End the display; its last state stays on the screen."""
        display, self._display, self._bar = self._display, None, None
        if display is not None:
            display.stop()
            for handler in self._logs:
                handler.setStream(sys.stderr)

    on_train_end = on_exception = teardown = _stop

    def print(self, *values: Any, **options: Any) -> None:
        """Print above the live display."""
        if self._enabled:
            print(*values, file=sys.stdout, **{key: value for key, value in options.items() if key in ("sep", "end")})

    def _last_metrics(self, trainer: Trainer) -> dict[str, float]:
        """Return the last values of the progress bar's metrics, and behind them the components of the reward."""
        data = _rollout(trainer)
        metrics = trainer.callback_metrics
        components = data.collection.components if data is not None else ()
        reward_components = {name: float(metrics[name]) for name in components if name in metrics}
        self._metrics = {**self._metrics, **trainer.progress_bar_metrics, **reward_components}
        return self._metrics


class _Outliving:
    """A stream whose reader may end, as `tee` or `head` do: the rest is dropped."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._forward(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._forward(self._stream.flush)

    def _forward(self, call: Callable[..., Any], *arguments: str) -> None:
        try:
            call(*arguments)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            if self._name == "stdout":
                tell("the reader of the output has ended; the run continues without output")


@contextmanager
def outliving_readers() -> Iterator[None]:
    """In this block the readers of stdout and stderr may end: a run must not end with its ``tee``."""
    before = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    for name, stream in before.items():
        if stream is not None and not stream.isatty():
            setattr(sys, name, _Outliving(stream, name))
    try:
        yield
    finally:
        for name, stream in before.items():
            setattr(sys, name, stream)


class EpisodeProgress(AbstractContextManager["EpisodeProgress"]):
    """Shows on stderr the number of played episodes: a bar on a terminal, else about 20 lines."""

    def __init__(self) -> None:
        self._began, self._twentieths = time.monotonic(), 0
        self._display: Progress | None = None

    def __exit__(self, *_: Any) -> None:
        if self._display is not None:
            self._display.stop()

    def __call__(self, done: int, total: int) -> None:
        """Show the number of played episodes out of all; the first call sets the total."""
        if done == 0:
            tell(f"playing {counted(total, 'episode')}")
            console = Console(stderr=True)
            if console.is_terminal and not console.is_jupyter:
                self._display = _bar(console)
                self._display.add_task("episodes", total=total)
                self._display.start()
        elif self._display is not None:
            self._display.update(self._display.task_ids[0], completed=done)
        elif done < total and 20 * done // total > self._twentieths:
            self._twentieths = 20 * done // total
            tell(_line("episodes", done, total, {}, time.monotonic() - self._began, done))


def _resume_text(trainer: Trainer, done: int, total: int | None) -> str:
    """Return where a resumed run continues, and how many iterations of the earlier part it plays again."""
    data = _rollout(trainer)
    text = f"continuing at {'iteration' if data else 'batch'} {done}{f' of {total}' if total else ''}"
    # The checkpoint has the episodes of an iteration that has begun.
    begun = done + (data.stream.position > 0) if data else 0
    lost = recorded_iterations(Path(trainer.default_root_dir)) - begun if data else 0
    return f"{text}; {counted(lost, 'iteration is', 'iterations are')} played again" if lost > 0 else text


def _bar(console: Console) -> Progress:
    times = (TimeElapsedColumn(), "elapsed,", TimeRemainingColumn(), "left")
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), *times)
    return Progress(*columns, console=console, speed_estimate_period=math.inf)  # an iteration may outlast any window


def _rollout(trainer: Trainer) -> RolloutDataModule | None:
    data = trainer.datamodule  # type: ignore[attr-defined]
    return data if isinstance(data, RolloutDataModule) else None


def _done(trainer: Trainer) -> int:
    """Return the number of complete iterations, or of batches over all epochs."""
    data = _rollout(trainer)
    return data.stream.iteration if data else trainer.fit_loop.epoch_loop.total_batch_idx + 1


def _total(trainer: Trainer) -> int | None:
    """Return the number of iterations or batches in the whole run; None if the trainer has no such bound."""
    data = _rollout(trainer)
    total = batches_in_all(trainer) / (data.stream.batches if data else 1)
    return None if math.isinf(total) else math.ceil(total)


def timed_out(trainer: Trainer) -> bool:
    """Return whether the time of ``trainer.max_time``, or of another timer, is over."""
    timers = (item for item in trainer.callbacks if isinstance(item, Timer))  # type: ignore[attr-defined]
    return any((left := timer.time_remaining()) is not None and left <= 0 for timer in timers)


def early_stop(trainer: Trainer) -> str | None:
    """Return where its time or a callback has stopped a run before its last iteration or batch; None if none has."""
    done, total = _done(trainer), _total(trainer)
    if not trainer.should_stop or done == total:
        return None
    by = "trainer.max_time" if timed_out(trainer) else "a callback"
    return f"stopped by {by} after {done}{f' of {total}' if total else ''} {_unit(trainer)}"


def _unit(trainer: Trainer) -> str:
    return "iterations" if _rollout(trainer) else "batches"


def _metric_texts(metrics: Mapping[str, float]) -> list[str]:
    """Return the metrics as texts, those of rollouts, which are most, without the beginning of their names.

    >>> _metric_texts({"rollout/reward": -1.67e-17, "rollout/tokens_per_second": 591.962, "train/kl": 0.01})
    ['reward 0.000', 'tokens_per_second 592', 'train/kl 0.010']
    """
    return [f"{name.removeprefix('rollout/')} {_number(value)}" for name, value in metrics.items()]


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}" if 1e-12 < abs(value) < 0.001 else f"{value:z.3f}"


def _line(unit: str, done: int, total: int | None, metrics: Mapping[str, float], seconds: float, of: int) -> str:
    """Return one line of progress.

    >>> _line("iterations", 3, 120, {"rollout/reward": 0.5}, 6.0, 3)
    'iterations   3/120  reward 0.500  0:00:06 elapsed, 0:03:54 left'
    """
    count = f"{done:>{len(str(total))}}/{total}" if total else str(done)
    left = f", {_clock(seconds / of * (total - done))} left" if total and of else ""
    return "  ".join((f"{unit} {count}", *_metric_texts(metrics), f"{_clock(seconds)} elapsed{left}"))


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


_FILES = {
    "policies": "trained models, each a Hugging Face folder",
    "episodes": "every episode, as JSON lines",
    "checkpoints": "to resume from",
    "metrics.csv": "all metrics",
    "tensorboard": "the same for TensorBoard",
    "config.yaml": "the whole configuration",
}


def run_summary(folder: str | Path, played: bool = True) -> str:
    """Return a few lines on the files of a run folder and the commands that continue from there.

    Args:
        folder: run folder.
        played: whether the run played episodes, in which case ``mrlm eval`` knows its environment.
    """
    folder = Path(folder)
    files = {name: text for name, text in _FILES.items() if (folder / name).exists()}
    lines = [f"mrlm: the run is in {folder}", *(f"  {name:<12} {text}" for name, text in files.items())]
    lines += [f"  {path.name}" for path in sorted(folder.glob("evaluation_*.json"))]
    commands, quoted = [], shlex.quote(str(folder))
    if shutil.which("mrlm") is None and (activate := Path(sys.prefix) / "bin" / "activate").is_file():
        commands.append(f". {min(os.path.relpath(activate), str(activate), key=len)}")
    if "policies" in files:
        if played and "config.yaml" in files:
            commands.append(" ".join(["mrlm eval --model", quoted, *read_run(str(folder)).eval_options(folder)]))
        elif not played and (heads := sorted(folder.glob("policies/*/value_head.safetensors"))):
            commands.append(f"mrlm serve --verifier {shlex.quote(str(heads[0].parent))}")
        elif "config.yaml" in files:
            commands.append(f"mrlm eval --model {quoted} --environment NAME")
        else:
            commands.append(f'mrlm_pl.evaluate("{folder}", environment)  # in Python')
    commands.append(f"mrlm view {quoted}  # {'runs, curves and episodes' if played else 'curves'} in a browser")
    if "tensorboard" in files:
        commands.append(f"tensorboard --logdir {shlex.quote(str(folder / 'tensorboard'))}  # curves")
    lines += ["next:", *(f"  {command}" for command in commands)]
    return "\n".join(lines)


class PolicySummary(ModelSummary):
    """Prints a line for each policy, critic and data set when ``fit`` starts, instead of Lightning's table of layers.

    An update is followed by a line with the seconds of compilations (``compile`` of a policy or engine) since the last.
    """

    def __init__(self) -> None:
        super().__init__()
        self._compiled = 0.0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the lines on the first rank."""
        if trainer.is_global_zero:
            for name, module in pl_module.named_modules():
                if isinstance(module, Policy):
                    print(f"{name}: {describe(module)}", flush=True)
            data = _rollout(trainer)
            for name, source in data.tasks.stream.sources.items() if data else ():
                if source.size is not None:
                    print(f"{name}: {counted(source.size, 'task')} in the training split", flush=True)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Print the seconds of new compilations on the first rank."""
        seconds = compilation_seconds()
        if seconds > self._compiled and trainer.is_global_zero:
            print(f"layers compiled in {seconds - self._compiled:.1f} s", flush=True)
        self._compiled = seconds


def describe(policy: Policy) -> str:
    """Return the model, its number of weights and how it is trained.

    >>> policy = Policy("builtin:tiny", learning_rate=1e-3)
    >>> policy.load(reference=True)
    >>> describe(policy)
    'builtin:tiny (llama), 166,848 weights, trained at learning rate 0.001, with a reference copy'
    """
    kind = f"{policy.name_or_path} ({policy.config.model_type})"
    if policy.served_by is not None:
        return f"{kind}, served by {policy.served_by}"
    weights = [weight for module in (policy.model, policy.value_head) if module for weight in module.parameters()]
    total = sum(weight.numel() for weight in weights)
    trained = sum(weight.numel() for weight in weights if weight.requires_grad)
    share = "" if trained == total else f"{trained:,} "
    how = f"{share}trained at learning rate {policy.learning_rate:g}" if trained else "frozen"
    copy = ", with a reference copy" if policy.reference is not None else ""
    return f"{kind}, {total:,} weights, {how}{copy}"
