"""The commands that run a trainer: ``fit``, ``validate``, ``test`` and ``predict``, configured by the signatures."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from jsonargparse import Namespace
from jsonargparse.typing import restricted_number_type
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.callbacks import LambdaCallback, ModelSummary, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.plugins import CheckpointIO
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException

from mrlm_pl.algorithms import Algorithm
from mrlm_pl.cli.commands.consolidate import METADATA
from mrlm_pl.cli.parsing.changed_settings import changed_settings, check_resumable, read_settings
from mrlm_pl.cli.parsing.parser import ShortErrors
from mrlm_pl.cli.parsing.policy_options import declare_policies
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.errors import ConfigurationError, nearest
from mrlm_pl.runs import BatchCount, PolicySummary, RunProgress, run_summary
from mrlm_pl.runs.checkpoint import DurableCheckpointIO, LastCheckpoint, place_checkpoints
from mrlm_pl.runs.configuration import SaveConfig
from mrlm_pl.runs.console import silence_noise
from mrlm_pl.runs.folder import (
    FolderRequest,
    RunFolder,
    agree_on_run_folder,
    discard_if_empty,
    is_first_process,
    last_checkpoint,
    run_of,
)
from mrlm_pl.runs.interrupts import ending_in_order
from mrlm_pl.runs.metrics_file import default_loggers
from mrlm_pl.runs.plugins import load_package, load_plugins
from mrlm_pl.runs.predictions import PredictedEpisodes
from mrlm_pl.runs.recorded_run import latest_configuration
from mrlm_pl.trainer.termination import EndTogether

FSDP_CLASS = "mrlm_pl.trainer.fsdp.FSDP"
OWN_PACKAGES = ("mrlm_pl.algorithms", "mrlm_pl.data", "mrlm_pl.engines", "mrlm_pl.serving")
"""Packages of this one whose classes may be named without their path."""


Seed = restricted_number_type("Seed", int, [(">=", 0), ("<=", 2**32 - 1)])
"""What numpy takes for a seed."""


class RunParser(ShortErrors, LightningArgumentParser):
    """Lightning's parser with short messages."""


class RunCommand(LightningCLI):
    """Parses, builds and runs one stage of a trainer.

    Args:
        stage: the trainer's method.
        arguments: its options.
        resume: what to do with a folder that holds a run; see :class:`FolderRequest`.

    Raises:
        ConfigurationError: a mistake in the options or files; nothing has been loaded or written then.
    """

    folder: RunFolder | None = None

    def __init__(self, stage: str, arguments: Sequence[str], *, resume: bool | None = None) -> None:
        self.stage, self.resume = stage, resume
        self.ended = False
        try:
            super().__init__(
                Algorithm,
                LightningDataModule,
                save_config_callback=SaveConfig,
                save_config_kwargs={"save_to_log_dir": False},
                trainer_defaults={"log_every_n_steps": 1},
                seed_everything_default=0,
                parser_kwargs={"prog": "mrlm", "allow_abbrev": False, "default_env": True, "env_prefix": "MRLM"},
                parser_class=RunParser,
                subclass_mode_model=True,
                subclass_mode_data=True,
                args=[stage, *declare_policies(own_strategies(arguments))],
                auto_configure_optimizers=False,
                load_from_checkpoint_support=False,
            )
        except SIGTERMException:
            self.ended = True
        finally:
            if self.folder is not None:
                discard_if_empty(self.folder)

    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]
        """The one stage that is wanted: building a parser takes a while."""
        # Predictions go to files: collecting them would keep all episodes of the loop in memory.
        return {self.stage: LightningCLI.subcommands()[self.stage] | {"return_predictions"}}

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        return {**kwargs, "return_predictions": False} if subcommand == "predict" else kwargs

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the seed. It is a number by default, so that a run can be repeated without having asked for it."""
        parser.add_argument(
            "--seed_everything",
            type=Seed,
            default=self.seed_everything_default,
            help="Seed of the run: initialization, and through `data.seed` tasks, sampling and shuffling.",
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``checkpoint``, and let the data module have the seed."""
        parser.add_lightning_class_args(LastCheckpoint, "checkpoint")
        parser.link_arguments("seed_everything", "data.init_args.seed")

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; unlike the base class without a warning when the process has arguments too."""
        self.config = parser.parse_args(args)

    def _parse_ckpt_path(self) -> None:
        """Nothing: the base class would replace the configured model by the one that the checkpoint was made with."""

    def before_instantiate_classes(self) -> None:
        """Check what a trainer would find out too late, and choose the run folder."""
        config = self.config[self.stage]
        check_strategy(config.trainer)
        self._play_what_training_skips(config.trainer)
        if config.trainer.strategy == "fsdp":
            config.trainer.strategy = Namespace(class_path=FSDP_CLASS, init_args=Namespace())
        warn_of_emulated_bf16(config.trainer)
        if config.trainer.max_epochs is None and config.trainer.max_steps == -1 and config.trainer.max_time is None:
            # The trainer's own default is 1000 epochs, each of which is a whole run of `iterations` collections here.
            config.trainer.max_epochs = 1
        files = [path for path in config.get("config") or [] if path is not None]
        request = FolderRequest(
            stage=self.stage,
            root=config.trainer.default_root_dir,
            stem=Path(str(files[0])).stem if files else "run",
            checkpoint=config.get("ckpt_path"),
            resume=self.resume,
        )
        self.folder = agree_on_run_folder(request)
        config.trainer.default_root_dir = self.folder.path
        config.ckpt_path = self.folder.checkpoint
        self._check_sharded(config)
        if self.stage == "fit":
            self._compare_settings(config)

    def _compare_settings(self, config: Namespace) -> None:
        """Say which settings differ from those of the run whose checkpoint this one starts from.

        Raises:
            ConfigurationError: one of them is decided by the checkpoint.
        """
        owner = run_of(config.ckpt_path)
        before = latest_configuration(owner) if owner is not None and owner.is_dir() else None
        if before is None:
            return
        now = yaml.safe_load(self._parser(self.stage).dump(config, skip_unset=False))
        changed = changed_settings(read_settings(before), now)
        check_resumable(changed, adaptive_kl=bool(now["model"].get("init_args", {}).get("kl_target")))
        if changed and is_first_process():
            told = ", ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed.items())
            print(f"mrlm: changed since {before}: {told}", file=sys.stderr)

    def _play_what_training_skips(self, trainer: Namespace) -> None:
        """Play the loop that the command names, also where the configuration turns it off for training."""
        loop = {"validate": "val", "test": "test", "predict": "predict"}.get(self.stage)
        if loop is not None and trainer[f"limit_{loop}_batches"] == 0:
            trainer[f"limit_{loop}_batches"] = None
            rank_zero_only(print)(
                f"mrlm: `trainer.limit_{loop}_batches: 0` is left to `mrlm fit`; `mrlm {self.stage}` runs the loop",
                file=sys.stderr,
            )

    @staticmethod
    def _check_sharded(config: Namespace) -> None:
        """Nothing when the strategy can read the checkpoint.

        Raises:
            ConfigurationError: it is a folder of shards, and the strategy does not shard.
        """
        strategy, path = config.trainer.strategy, config.ckpt_path
        sharded = path is not None and (Path(path) / METADATA).is_file()
        if sharded and (strategy.get("class_path") if isinstance(strategy, Namespace) else None) != FSDP_CLASS:
            raise ConfigurationError(
                f"ckpt_path: {path!r} is a sharded checkpoint, which only `--trainer.strategy fsdp` reads; "
                f"make a whole one of it with `mrlm consolidate {path} FILE`"
            )

    def after_fit(self) -> None:
        """Say where the run is and what to do next."""
        if self.trainer.is_global_zero and not self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            assert self.folder is not None
            if self.folder.checkpoint is not None and not self.batches.count:
                print("mrlm: nothing was trained: the run was complete; raise trainer.max_epochs to train further")
            print(run_summary(self.folder.path, played=isinstance(self.datamodule, RolloutDataModule)))

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The trainer, with loggers that write to the run folder unless others are configured."""
        assert self.folder is not None
        trainer = self._get(self.config_init, "trainer")
        if trainer.logger in (None, True) and not trainer.barebones:
            kwargs["logger"] = default_loggers(self.folder.path)
        try:
            return super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError, TypeError) as error:
            raise ConfigurationError(f"trainer: {error}") from error

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        assert self.folder is not None
        given = config["callbacks"] or []
        everything = [*(given if isinstance(given, list) else [given]), *callbacks]
        if self.folder.notice is not None:
            everything.insert(0, LambdaCallback(setup=self._tell_of_folder))  # the data module's setup comes before
        if self.stage == "predict":
            everything.append(PredictedEpisodes())
        if self.stage == "fit":
            everything.append(EndTogether())  # checkpoint callbacks come after it, wherever they are
            self.batches = BatchCount()
            everything += [self.batches, *own_displays(config, everything)]
        if config["barebones"]:
            config = {**config, "log_every_n_steps": None}  # the trainer refuses to be told how often not to log
        if config["enable_checkpointing"] is False or config["barebones"]:
            everything = [item for item in everything if not isinstance(item, LastCheckpoint)]
        place_checkpoints(everything, self.folder.path)
        plugins = config["plugins"] or []
        plugins = plugins if isinstance(plugins, list) else [plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            config = {**config, "plugins": [*plugins, DurableCheckpointIO()]}
        return super()._instantiate_trainer({**config, "callbacks": everything}, [])

    @rank_zero_only
    def _tell_of_folder(self, *_: object, **__: object) -> None:
        assert self.folder is not None
        print(f"mrlm: {self.folder.notice}", file=sys.stderr)


def own_displays(config: dict[str, Any], callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the progress display and the model summary that replace Lightning's, unless switched off or configured."""
    if config["barebones"]:
        return []
    found: list[Callback] = []
    if config["enable_progress_bar"] is not False and not any(isinstance(item, ProgressBar) for item in callbacks):
        found.append(RunProgress())
    if config["enable_model_summary"] is not False and not any(isinstance(item, ModelSummary) for item in callbacks):
        found.append(PolicySummary())
    return found


def check_strategy(trainer: Namespace) -> None:
    """Nothing when the trainer's strategy and accelerator exist.

    Raises:
        ConfigurationError: a name does not exist; the message has the nearest.
    """
    registered = {
        "strategy": StrategyRegistry.available_strategies(),
        "accelerator": [*AcceleratorRegistry.available_accelerators(), "gpu"],
    }
    for key, names in registered.items():
        value, known = trainer.get(key), sorted({"auto", *names})
        if not isinstance(value, str) or value in known:
            continue
        if key == "strategy" and "." in value:
            raise ConfigurationError(
                f"trainer.strategy: a class must be written as `strategy: {{class_path: {value}}}` in a file, "
                f"or as `--trainer.strategy {value}` followed by one of its options"
            )
        near = nearest(value, known)
        hint = f"did you mean {near!r}? Known" if near else "known"
        raise ConfigurationError(f"trainer.{key}: there is no {key} {value!r}; {hint} are: {', '.join(known)}")


def own_strategies(arguments: Sequence[str]) -> list[str]:
    """The arguments, with ``fsdp`` spelt as its class where options for it follow: a name takes none.

    >>> own_strategies(["--trainer.strategy", "fsdp", "--trainer.strategy.tensor_parallel_size", "2"])[1]
    'mrlm_pl.trainer.fsdp.FSDP'
    """
    if not arguments or not any(argument.startswith("--trainer.strategy.") for argument in arguments):
        return list(arguments)
    spelt = {"--trainer.strategy=fsdp": f"--trainer.strategy={FSDP_CLASS}", "fsdp": FSDP_CLASS}
    before = ["", *arguments[:-1]]
    return [
        spelt.get(argument, argument) if argument != "fsdp" or previous == "--trainer.strategy" else argument
        for previous, argument in zip(before, arguments, strict=True)
    ]


def warn_of_emulated_bf16(trainer: Namespace) -> None:
    """Say on stderr that bf16 is slow on this CPU, when that is what the trainer will use."""
    on_cpu = trainer.accelerator == "cpu" or (
        trainer.accelerator in ("auto", None) and not torch.accelerator.is_available()
    )
    if on_cpu and "bf16" in str(trainer.precision) and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        print(
            f"mrlm: trainer.precision {trainer.precision}: this CPU has no instructions for bf16 and emulates them, "
            "which takes several times as long as 32-true",
            file=sys.stderr,
        )


def run_stage(stage: str, arguments: Sequence[str], *, resume: bool | None = None) -> int:
    """Run a stage and return its exit status: 0, or 130 and 143 when Ctrl-C and SIGTERM have ended it.

    Of several processes the first returns the status of a signal, the others 0.

    Raises:
        ConfigurationError: a mistake in the options or files, or a combination that the trainer refuses.
    """
    silence_noise()
    for package in OWN_PACKAGES:
        load_package(package)
    load_plugins()
    with ending_in_order(sigterm=False) as interruption:
        try:
            command = RunCommand(stage, arguments, resume=resume)
        except MisconfigurationException as error:
            raise ConfigurationError(str(error)) from error
        except (KeyboardInterrupt, SystemExit):  # the trainer exits on KeyboardInterrupt
            if interruption.received is None:
                raise
            print(f"mrlm: {interruption.name} has ended {stage} before its first batch", file=sys.stderr)
            return interruption.status
    if not command.ended:
        return 0
    if getattr(rank_zero_only, "rank", 0) != 0:
        return 0  # for any other status the launcher kills the first process, which has logs to finish
    remedy = _how_to_continue(command.folder) if stage == "fit" and command.folder is not None else ""
    print(f"mrlm: {interruption.name} has ended {stage}{remedy}", file=sys.stderr)
    return interruption.status


def _how_to_continue(folder: RunFolder) -> str:
    if last_checkpoint(Path(folder.path)) is None:
        return "; there is no checkpoint yet, so start it again"
    return f"; continue with `mrlm train --output {shlex.quote(folder.path)} --resume`"


def fit(arguments: Sequence[str]) -> int:
    """Exit status of ``mrlm fit``."""
    return run_stage("fit", arguments)


def validate(arguments: Sequence[str]) -> int:
    """Exit status of ``mrlm validate``."""
    return run_stage("validate", arguments)


def test(arguments: Sequence[str]) -> int:
    """Exit status of ``mrlm test``."""
    return run_stage("test", arguments)


def predict(arguments: Sequence[str]) -> int:
    """Exit status of ``mrlm predict``."""
    return run_stage("predict", arguments)
