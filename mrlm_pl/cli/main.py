"""The entry point ``mrlm``: finds the command and imports only its modules."""

from __future__ import annotations

import errno
import importlib
import io
import logging
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Sequence

from mrlm_pl.cli.start_up import pause_garbage_collection, read_model_folders_once, resume_garbage_collection
from mrlm_pl.errors import DEBUG_VARIABLE, ConfigurationError, MRLMError, did_you_mean, source_line_of_error
from mrlm_pl.runs.interrupts import ending_in_order

COMMANDS = {
    "fit": ("mrlm_pl.cli.commands.fit:fit", "train policies; --output FOLDER names the run, --resume continues it"),
    "train": ("mrlm_pl.cli.commands.fit:fit", "the same as fit"),
    "validate": ("mrlm_pl.cli.commands.fit:validate", "run the validation loop"),
    "test": ("mrlm_pl.cli.commands.fit:test", "run the test loop"),
    "predict": ("mrlm_pl.cli.commands.fit:predict", "play test episodes with the policies"),
    "eval": ("mrlm_pl.cli.commands.evaluation_table:eval_run", "score runs and models on environments"),
    "arena": ("mrlm_pl.cli.commands.evaluate:arena_run", "play runs against each other in all seatings, with Elo"),
    "collect": ("mrlm_pl.cli.commands.collect:run", "play episodes with a run or a model and write them to a file"),
    "gateway": (
        "mrlm_pl.cli.commands.collect:gateway_run",
        "serve a model to programs that call OpenAI's API, and write their episodes",
    ),
    "replay": ("mrlm_pl.cli.commands.replay:replay_run", "replay the episodes of a run and compare them"),
    "rescore": ("mrlm_pl.cli.commands.replay:rescore_run", "replay the episodes of a run with other rewards"),
    "recredit": ("mrlm_pl.cli.commands.recredit:run", "credit the episodes of a run with another algorithm"),
    "whatif": ("mrlm_pl.cli.commands.replay:whatif_run", "replace a recorded decision and play the rest"),
    "view": ("mrlm_pl.cli.commands.view:run", "look at runs in a browser or a terminal"),
    "sweep": ("mrlm_pl.cli.commands.sweep:run", "train several seeds and settings in parallel and compare them"),
    "report": ("mrlm_pl.cli.commands.report:run", "compare runs over their seeds at equal cost"),
    "balance": ("mrlm_pl.cli.commands.balance:run", "balance right and wrong answers per question, for a verifier"),
    "export": ("mrlm_pl.cli.commands.export:run", "write the policies of a checkpoint as Hugging Face folders"),
    "consolidate": ("mrlm_pl.cli.commands.consolidate:run", "write a sharded checkpoint as one file"),
    "serve": ("mrlm_pl.cli.commands.serve:run", "host environments, policies and a verifier over gRPC"),
    "sessions": ("mrlm_pl.cli.commands.sessions:run", "list the live sessions of a server"),
    "check-env": ("mrlm_pl.cli.commands.check_env:run", "check that an environment fulfills the contract"),
    "init": ("mrlm_pl.cli.commands.init:run", "write a package with an environment, an algorithm and a callback"),
    "push": ("mrlm_pl.cli.commands.push:run", "publish a run's policy on the Hugging Face Hub"),
    "completion": ("mrlm_pl.cli.commands.completion:run", "print a script that completes commands in bash or zsh"),
    "info": ("mrlm_pl.cli.commands.info:run", "list versions, devices and installed classes"),
}
"""The function and the summary of each command. A function takes arguments and returns an exit status."""

TRAINING = ("fit", "train", "validate", "test", "predict")
"""Commands with a trainer; their configuration is checked before torch is imported."""

PARSED = ("eval", "arena", "collect", "gateway", "replay", "rescore", "whatif", "check-env")
"""Commands whose parsers are in :mod:`mrlm_pl.cli.parsing.play_options`; they answer a help without torch."""

PLAYING = (*PARSED, "serve")
"""Commands that take environments by name; the names are checked before torch is imported."""

IMPORTING = (*TRAINING, "info")
"""Commands that import most modules while they run; a trainer's resumes the collection of garbage itself."""

INTERRUPTED = {
    **dict.fromkeys(("collect", "gateway"), "; the written episodes are kept; continue with"),
    "arena": "; nothing was written; start again with",
    "eval": "; a table keeps its finished cells; start again with",
    "sweep": "; its runs have ended; continue with",
    **dict.fromkeys(TRAINING, " before its first batch; start again with"),
}
"""Rest of the message of a command that a signal has ended; a trainer that has begun has its own message."""

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
RESUMES = "complete files are kept; `mrlm train --output RUN --resume` and `mrlm collect` continue from them"

USAGE = """usage: mrlm COMMAND [options]

Train language models with reinforcement learning, alone or as teams of agents.

commands:
{commands}

options:
  -h, --help  this text; `mrlm COMMAND --help` lists the options of a command
  --version   the version of mrlm

example:
  mrlm fit --config run.yaml --trainer.max_epochs 2
"""


class MessageFormat(logging.Formatter):
    """Formats warnings of this project like the command's other messages."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record, behind its level where it is this project's."""
        text = super().format(record)
        return f"mrlm: {record.levelname.lower()}: {text}" if record.name.startswith("mrlm_") else text


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 0 done, 1 failed, 2 a mistake in the command or configuration.

    Args:
        argv: arguments; None takes those of the process. ``sys.argv`` stays as it is, because launchers start it again.

    Raises:
        Exception: an error that is neither an :class:`~mrlm_pl.errors.MRLMError` nor from a file of the user's; its
            traceback is shown.
    """
    if argv is None:  # the process is the command's
        pause_garbage_collection()
        if logging.lastResort is not None:
            logging.lastResort.setFormatter(MessageFormat())
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors repeat its log
    if sys.stdout is None:  # closed; the parser library writes to it
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):  # of a terminal that may lack the characters
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        status = _dispatch(arguments[0] if arguments else "--help", arguments[1:])
        sys.stdout.flush()  # here, because an error at the interpreter's end is no message
        return status
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        _discard_output()
        return 1
    except MRLMError as error:
        return _fail(error, 2 if isinstance(error, ConfigurationError) else 1)
    except Exception as error:  # all but the cases here is raised again
        if isinstance(error, OSError) and error.errno in FULL_DISK:
            try:
                sys.stdout.flush()
            except OSError:
                _discard_output()
            lacking = f" for {error.filename}" if error.filename else ""
            return _fail(f"no space is left on the device{lacking} ({error.strerror}); free some: {RESUMES}", 1)
        if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
            return _fail(f"{error.filename!r} is not a path: its name is too long; name a shorter one", 2)
        line = source_line_of_error(error)
        if not line or DEBUG_VARIABLE in os.environ:
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return _fail(f"{text} ({line}); for the traceback set {DEBUG_VARIABLE}=1", 1)
    finally:
        if argv is None:  # the command has its status, and no signal changes it while the interpreter ends
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _dispatch(command: str, arguments: list[str]) -> int:
    """Run a command, or print the help or the version, and return the exit status."""
    if command in ("-h", "--help"):
        print(USAGE.format(commands="\n".join(f"  {name:<11} {text}" for name, (_, text) in COMMANDS.items())), end="")
        return 0
    if command == "--version":
        from importlib.metadata import version

        print(f"mrlm {version('mrlm')}")
        return 0
    if command.startswith("-"):
        raise ConfigurationError(f"option {command!r} must follow a command, as in `mrlm fit {command} ...`")
    if command not in COMMANDS:
        hint = did_you_mean(command, COMMANDS, "commands are: " + ", ".join(COMMANDS))
        raise ConfigurationError(f"there is no command {command!r}; {hint}")
    try:
        return _run(command, arguments)
    except SystemExit as end:  # argparse ends the process after --help and after a wrong option
        return _fail(end.code, 1) if isinstance(end.code, str) else int(end.code or 0)


def _discard_output() -> None:
    """Let the interpreter's end write the rest of the output nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(command: str, arguments: Sequence[str]) -> int:
    """Run a command and return its exit status: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP.

    Servers have their own handlers from the moment that they listen, and end with status 0.
    """
    with ending_in_order() as interruption:
        try:
            return _run_function(command, arguments)
        except KeyboardInterrupt:
            if interruption.received is None:
                raise
            again = shlex.join(["mrlm", command, *arguments])
            rest = INTERRUPTED.get(command, "; start again with")
            print(f"\nmrlm: {interruption.name} has ended {command}{rest} `{again}`", file=sys.stderr)
            return interruption.status


def _run_function(command: str, arguments: Sequence[str]) -> int:
    """Run a command's function on checked arguments."""
    from mrlm_pl.cli.parsing.config_files import with_underscores
    from mrlm_pl.cli.parsing.early_check import check, check_environment_names
    from mrlm_pl.runs.plugins import use_working_folder

    use_working_folder()
    arguments = with_underscores(arguments)
    options = [word for word in arguments if word.startswith("-")]
    if command in TRAINING:
        check(arguments)
        read_model_folders_once()
    elif command in PARSED and any(word == "-h" or word.partition("=")[0].endswith("help") for word in options):
        from mrlm_pl.cli.parsing import environment_option, play_options

        parser = getattr(play_options, f"{command.replace('-', '_')}_parser")()
        environment_option.read(parser, arguments)  # prints the help and ends the command
    elif command in PLAYING:
        check_environment_names(arguments)
    module, function = COMMANDS[command][0].split(":")
    run = getattr(importlib.import_module(module), function)
    if command not in IMPORTING:
        resume_garbage_collection()
    return int(run(arguments))


def _fail(message: object, status: int) -> int:
    """Print an error and return the exit status."""
    if isinstance(message, Exception) and DEBUG_VARIABLE in os.environ:
        traceback.print_exception(message)
    sys.stderr.write(f"mrlm: error: {message}\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
