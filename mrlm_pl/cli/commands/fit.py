"""The commands that run a trainer: ``fit``, ``validate``, ``test`` and ``predict``, configured by the signatures."""

from __future__ import annotations

import re
import textwrap
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from jsonargparse.typing import restricted_number_type
from lightning.pytorch import LightningDataModule
from lightning.pytorch.accelerators import AcceleratorRegistry
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from mrlm_pl.cli.parsing.config_files import config_files, option_values
from mrlm_pl.cli.parsing.parser import ShortErrors
from mrlm_pl.cli.parsing.run_configuration import SaveConfig
from mrlm_pl.cli.start_up import resume_garbage_collection
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.errors import ConfigurationError, did_you_mean, tell
from mrlm_pl.grouping import grouped
from mrlm_pl.learner.algorithm import Algorithm
from mrlm_pl.runs import LastCheckpoint, Trainer
from mrlm_pl.runs.console import outliving_readers, silence_noise
from mrlm_pl.runs.plugins import import_exports, import_packages, imported, is_offered
from mrlm_pl.runs.records.run import latest_configuration

Seed = restricted_number_type("Seed", int, [(">=", 0), ("<=", 2**32 - 1)])
"""The range of numpy's seeds."""

_INDENT = " " * 24
"""Indentation of the options' texts in a help."""

_CLASSES = re.compile(r",\s+known\s+subclasses:([^)]*)")
_LINKED = re.compile(r"^Linked arguments:\n(?:  .*\n)+\n", re.MULTILINE)
"""In a help, the classes that an option takes, and Lightning's linked arguments."""

BUILT = {"model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders", "return_predictions"}
"""Arguments of a stage that no option gives."""

_NO_DEVICE = "backend found"
"""In Lightning's error for an accelerator that is not there."""


class RunParser(ShortErrors, LightningArgumentParser):
    """Lightning's parser with short messages."""

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Return the help; that of a stage without Lightning's classes."""
        text = super().format_help(*args, **kwargs)
        if not self.usage:  # that of a class
            return text
        return _CLASSES.sub(_nameable_classes, _LINKED.sub("", text))


def _nameable_classes(classes: re.Match[str]) -> str:
    """Return the list of classes in a help without Lightning's and those that have no short name."""
    paths = "".join(classes[1].split()).split(",")  # the help breaks lines within long names
    nameable = [name for name in paths if not name.startswith("lightning.") and _can_be_named(name)]
    if not nameable:
        return ""
    lines = textwrap.wrap(
        ", ".join(nameable), 80, initial_indent=_INDENT, subsequent_indent=_INDENT, break_long_words=False
    )
    return "\n".join([", known subclasses:", *lines])


def _can_be_named(path: str) -> bool:
    try:
        return is_offered(imported(path))
    except ImportError:  # a class that its module no longer has: of a program run in this process, or of a notebook
        return False


class RunCommand(LightningCLI):
    """Parses, builds and runs one stage of a :class:`~mrlm_pl.runs.Trainer`.

    Args:
        stage: name of the trainer's method.
        arguments: options of the stage.

    Raises:
        ConfigurationError: a mistake in the options or files; nothing has been loaded or written then.
    """

    def __init__(self, stage: str, arguments: Sequence[str]) -> None:
        self.stage, self.arguments = stage, arguments
        super().__init__(
            Algorithm,
            LightningDataModule,
            trainer_class=Trainer,
            save_config_callback=SaveConfig,
            save_config_kwargs={"save_to_log_dir": False},
            seed_everything_default=0,
            parser_kwargs={
                "prog": f"mrlm {stage}",
                "usage": f"mrlm {stage} [options]",
                "description": "Train, validate, test or predict with a configuration, in a run folder.",
                "allow_abbrev": False,
            },
            parser_class=RunParser,
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=list(arguments),
            run=False,  # the stage is chosen already, and needs no parser of subcommands
            auto_configure_optimizers=False,
            load_from_checkpoint_support=False,
        )

    def add_default_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add seed, folder and resume. The seed has a default, so that every run can be repeated."""
        add = parser.add_argument
        text = "Seed of the run: initialization, and through `data.seed` tasks, sampling and shuffling."
        add("--seed_everything", type=Seed, default=self.seed_everything_default, help=text)
        text = "Run folder; a folder that holds a run needs --resume. The default is runs/NAME, numbered."
        add("--output", type=str | None, metavar="FOLDER", help=text)
        text = "Continue from the folder's last checkpoint, if any; without --config, with the run's own."
        add("--resume", action="store_true", help=text)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add ``checkpoint`` and the arguments of the stage; link the seed to the data, the folder to the trainer."""
        parser.add_lightning_class_args(LastCheckpoint, "checkpoint")
        parser.link_arguments("seed_everything", "data.init_args.seed")
        parser.link_arguments("output", "trainer.output")
        parser.link_arguments("resume", "trainer.resume")
        self.stage_arguments = parser.add_method_arguments(Trainer, self.stage, skip=BUILT)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse; unlike the base class without a warning when the process has arguments too."""
        given = next((word[2:] for word in args if word.startswith("--checkpoint")), "")
        if given and self.stage != "fit":
            raise ConfigurationError(f"{given.partition('=')[0]}: `mrlm {self.stage}` saves none; leave the option out")
        bases = {"model": Algorithm, "data": LightningDataModule, "trainer": Trainer, "checkpoint": LastCheckpoint}
        self.config = parser.read(args, bases)  # type: ignore[attr-defined] # a RunParser

    def before_instantiate_classes(self) -> None:
        """Check names that Lightning answers late or without the nearest one; everything is imported and parsed now."""
        resume_garbage_collection()
        trainer, data = self.config.trainer, imported(self.config.data.class_path)
        check_strategy(trainer)
        if self.stage == "predict" and data.predict_dataloader is LightningDataModule.predict_dataloader:
            remedy = "score its rows with `mrlm test`, or play episodes with `mrlm collect`"
            raise ConfigurationError(f"data: {data.__name__} plays no episodes to write; {remedy}")
        loop = {"validate": "val", "test": "test", "predict": "predict"}.get(self.stage)
        if loop is not None and trainer[f"limit_{loop}_batches"] == 0:
            trainer[f"limit_{loop}_batches"] = None
            ignored = f"ignoring `trainer.limit_{loop}_batches: 0`"
            rank_zero_only(tell)(f"{ignored}, which leaves `mrlm {self.stage}` nothing to do")

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Return the trainer; its run folder has the name of the first configuration file."""
        try:
            trainer: Any = super().instantiate_trainer(**kwargs)
        except (MisconfigurationException, ValueError, TypeError) as error:
            remedy = "; set `--trainer.accelerator auto`, or install a PyTorch for it"
            raise ConfigurationError(f"trainer: {error}{remedy if _NO_DEVICE in str(error) else ''}") from error
        files = config_files(self.arguments)
        trainer.name = files[0].stem if files else None
        return trainer

    def after_instantiate_classes(self) -> None:
        """Run the stage."""
        chosen = {name: self.config[name] for name in self.stage_arguments}
        if self.stage == "predict":  # its episodes go to files: collecting them would keep all of them in memory
            chosen["return_predictions"] = False
        getattr(self.trainer, self.stage)(self.model, datamodule=self.datamodule, **chosen)


class OptionCheck(RunCommand):
    """Parses the options of a stage, and builds its classes, which read no weights yet."""

    def _set_seed(self) -> None:
        """Leave the seeds of this process."""

    def after_instantiate_classes(self) -> None:
        """Validate rollouts against the algorithm, and run nothing."""
        if isinstance(data := self.datamodule, RolloutDataModule):
            self.model.check_agents([agent for item in data.environments.values() for agent in item.agents])
            if self.trainer.world_size == 1:  # ranks are counted once their processes run
                data.check(self.model, self.trainer)


def check_strategy(trainer: Namespace) -> None:
    """Validate the names of the trainer's strategy and accelerator.

    Raises:
        ConfigurationError: a name does not exist; the message has the nearest.
    """
    registered = {
        "strategy": StrategyRegistry.available_strategies(),
        "accelerator": [*AcceleratorRegistry.available_accelerators(), "gpu"],
    }
    for key, names in registered.items():
        value = trainer.get(key)
        choices = sorted({"auto", *names})
        if not isinstance(value, str) or value in choices:
            continue
        if key == "strategy" and "." in value:
            fault = f"trainer.strategy: a class must be written as `strategy: {{class_path: {value}}}` in a file"
            raise ConfigurationError(f"{fault}, or as `--trainer.strategy {value}` followed by one of its options")
        hint = did_you_mean(value, choices, f"known are: {', '.join(choices)}")
        raise ConfigurationError(f"trainer.{key}: there is no {key} {value!r}; {hint}")


def check_options(stage: str, arguments: Sequence[str]) -> None:
    """Validate the options of a stage as :func:`run_stage` does, without running it.

    Raises:
        ConfigurationError: a mistake in the options or files, or a combination that the trainer rejects.
    """
    _prepare(arguments)
    _build(OptionCheck, stage, arguments)


def _build(command: type[RunCommand], stage: str, arguments: Sequence[str]) -> None:
    try:
        command(stage, arguments)
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        # Lightning raises these two itself for settings such as a long interval or a missing metric.
        if isinstance(error, MisconfigurationException) or frame.f_globals["__name__"].startswith("lightning.pytorch."):
            raise ConfigurationError(str(error).strip()) from error
        raise


def _prepare(arguments: Sequence[str]) -> None:
    """Import the packages of classes, and all classes for a help, which lists them."""
    silence_noise()
    import_packages()
    if any("help" in word or word == "-h" for word in arguments):
        import_exports()


def run_stage(stage: str, arguments: Sequence[str]) -> int:
    """Run a stage and return its exit status.

    Raises:
        ConfigurationError: a mistake in the options or files, or a combination that the trainer rejects.
        SystemExit: Ctrl-C or SIGTERM has ended the stage.
    """
    _prepare(arguments)
    for option, values in grouped(option_values(arguments)).items():
        if option.startswith("--") and option != "--config" and not option.endswith("+") and len({*values}) > 1:
            rank_zero_only(tell)(f"warning: {option} is given {len(values)} times; the last one counts: {values[-1]}")
    with outliving_readers() if stage == "fit" else nullcontext():
        _build(RunCommand, stage, with_own_configuration(arguments))
    return 0


def with_own_configuration(arguments: Sequence[str]) -> list[str]:
    """Return the arguments; those that resume a run without a configuration have the run's own.

    Raises:
        ConfigurationError: no folder is named, or it holds no run with a configuration, and no option names a model.
    """
    options = dict(option_values(arguments))
    output = options.get("--output")
    if "--resume" not in arguments or "--config" in options:
        return list(arguments)
    config = latest_configuration(Path(output)) if output and Path(output).is_dir() else None
    if config is not None:
        return ["--config", str(config), *arguments]
    if any(option.startswith("--model") for option in options):
        return list(arguments)
    if not output:
        raise ConfigurationError("resume needs the folder of the run; name it with `output` (`--output FOLDER`)")
    raise ConfigurationError(f"{output!r} holds no run with a configuration to resume; name one with `--config FILE`")


fit, validate, test, predict = (partial(run_stage, stage) for stage in ("fit", "validate", "test", "predict"))
