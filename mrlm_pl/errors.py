"""Errors: one class per boundary where input or the outside world can fail, and help for their messages.

Every message names the thing, the value that was found and the remedy. ``ConfigurationError`` (and its subclasses)
mean a mistake in the user's input: the command line exits with code 2 and prints no traceback.
"""

from __future__ import annotations

import difflib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEBUG_VARIABLE = "MRLM_DEBUG"
"""Environment variable: if it is set, errors that are otherwise one line are printed with their traceback."""


class MRLMError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigurationError(MRLMError):
    """A setting, path, name or file given by the user cannot be used."""


class DataError(ConfigurationError):
    """A data file is missing, unreadable, or one of its rows lacks a field (the row number is in the message)."""


class PolicyError(ConfigurationError):
    """A model folder or name cannot be loaded as a policy."""


class EnvironmentContractError(MRLMError):
    """An environment broke its contract, or was called out of order (step before reset, unknown agent, ...)."""


class EngineError(MRLMError):
    """An engine cannot serve a request: unknown policy, empty prompt, prompt longer than the context window."""


class RolloutError(MRLMError):
    """A rollout has no data to train on, for example because every episode failed."""


class StorageError(MRLMError):
    """A file cannot be written, for example because the disk is full; complete files are kept."""


class NonFiniteError(MRLMError):
    """A reward, loss or gradient is NaN or infinite; the run stops rather than train on it."""


class SandboxError(MRLMError):
    """Untrusted code cannot be run: the machine does not offer the isolation, or the sandbox failed."""


class RemoteError(MRLMError):
    """A server could not be reached, rejected a request, or violated the protocol."""


class RemoteTimeoutError(RemoteError, TimeoutError):
    """No server answered within a deadline: of a reset, a step, tasks, samples or scores."""


class ProgramError(MRLMError):
    """The program of an episode crashed, hung, or ended without a reward."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message; without a message the name of its class.

    >>> first_line(ValueError("no such file\\nsee above")), first_line(EOFError())
    ('no such file', 'EOFError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun; without ``many`` several have an s.

    >>> counted(1, "episode"), counted(1200, "episode"), counted(0, "line is", "lines are")
    ('1 episode', '1,200 episodes', '0 lines are')
    """
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"


ROLLOUT_ERRORS = (EngineError, ProgramError, RemoteError, RolloutError)
"""Failures of a rollout, after which a run continues from the weights that it had; not those of the weights."""


def tell(message: str) -> None:
    """Print a message for the user, apart from the output of a command."""
    print(f"mrlm: {message}", file=sys.stderr)


@contextmanager
def writing(option: str, path: str | Path) -> Iterator[None]:
    """In this block an error of the system is one that names the option and the path to be written.

    Raises:
        ConfigurationError: the path cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise ConfigurationError(
            f"{option}: {str(path)!r} cannot be written: {error.strerror or error}; name a place where you can write"
        ) from error


def moved(folder: Path) -> StorageError:
    """Return the error for a run folder that is gone; a write would make another in its place."""
    fault = f"the run folder {str(folder)!r} was moved or deleted while the run trains"
    return StorageError(f"{fault}; put it back, then resume the run")


@contextmanager
def storing(what: str) -> Iterator[None]:
    """Name the object in the error of a write that fails, with the remedy of a run.

    Raises:
        StorageError: it cannot be written, for example because the disk is full.
    """
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{what} cannot be written: {error.strerror or error}; free space on the disk, then resume the run"
        ) from error


SYNONYMS = {
    "accuracy": "success",
    "algorithm": "model",
    "beta": "kl",
    "dapo": "grpo",
    "discount": "gamma",
    "epsilon": "clip",
    "eval_steps": "val_check_interval",
    "gae_lambda": "lam",
    "gradient_accumulation_steps": "accumulate_grad_batches",
    "kl_coef": "kl",
    "logging_steps": "log_every_n_steps",
    "lora_alpha": "alpha",
    "lr": "learning_rate",
    "max_completion_length": "max_tokens",
    "max_grad_norm": "gradient_clip_val",
    "max_model_len": "max_context",
    "max_new_tokens": "max_tokens",
    "max_response_length": "max_tokens",
    "max_seq_len": "max_context",
    "num_generations": "group_size",
    "num_iterations": "passes",
    "num_train_epochs": "max_epochs",
    "num_turns": "max_turns",
    "peft_config": "lora",
    "per_device_train_batch_size": "groups",
    "ppo_epochs": "passes",
    "report_to": "logger",
    "reward_funcs": "rewards",
    "save_steps": "every_n_train_steps",
    "share": "reward",
    "termination_threshold": "stop_above",
    "whiten": "whiten_advantages",
}
"""Names of our algorithms, settings and metrics in other frameworks, by theirs."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most likely meant by ``name``, or None.

    Candidates in order: two adjacent letters swapped, ``name`` as a prefix, a synonym, the closest spelling, ``name``
    as a suffix. Case does not matter.

    >>> nearest("GPRO", ["GSPO", "GRPO"])
    'GRPO'
    >>> nearest("mathenvironmet", ["MathEnvironment", "math", "code"])
    'MathEnvironment'
    >>> nearest("clip", ["value_clip", "lam"])
    'value_clip'
    >>> nearest("discount", ["joint_mode", "gamma"])
    'gamma'
    >>> nearest("rollout/accuracy", ["rollout/reward", "rollout/success"])
    'rollout/success'
    """
    word = name.lower()
    folded = {item.lower(): item for item in known}
    swaps = {word[:at] + word[at + 1] + word[at] + word[at + 2 :] for at in range(len(word) - 1)}
    swapped = [item for item in folded if item in swaps]
    longer = sorted((item for item in folded if word and item.startswith(word)), key=len)
    group, slash, last = word.rpartition("/")
    meant = [item for item in folded if item == f"{group}{slash}{SYNONYMS.get(last)}"]
    ends = [item for item in folded if item.endswith(f"_{word}")]
    candidates = swapped or longer or meant or difflib.get_close_matches(word, folded, n=1) or ends
    return folded[candidates[0]] if candidates else None


def did_you_mean(name: str, names: Iterable[str], rest: str) -> str:
    """Return the end of a message on an unknown name, which asks for the nearest one, if there is any.

    >>> did_you_mean("GPRO", ["GRPO", "PPO"], "known are GRPO, PPO"), did_you_mean("x", ["GRPO"], "known are GRPO")
    ("did you mean 'GRPO'? Known are GRPO, PPO", 'known are GRPO')
    """
    near = nearest(name, names)
    return f"did you mean {near!r}? {rest[0].upper()}{rest[1:]}" if near else rest


def nearest_path(path: Path, *, folders: bool = False) -> Path | None:
    """Return the file or folder next to a missing ``path`` with the nearest name, or None; files by their stems."""

    def stem(name: str) -> str:
        return name if folders else name.partition(".")[0] or name

    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    names = {path_beside.name: stem(path_beside.name) for path_beside in beside if path_beside.is_dir() == folders}
    near = nearest(stem(path.name), sorted(names.values()))
    candidates = [name for name, name_stem in names.items() if name_stem == near]
    return path.parent / difflib.get_close_matches(path.name, candidates, n=1, cutoff=0)[0] if candidates else None


def meant(near: Path | None) -> str:
    """Return the end of a message on a missing path, which asks for the nearest one, if there is any."""
    return f"did you mean {str(near)!r}?" if near else "check the path"


def source_line(method: Any) -> str:
    """Return ``file:line`` of a function; the file relative to the working folder if it is below it."""
    code = inspect.unwrap(method).__code__
    return f"{_relative(code.co_filename)}:{code.co_firstlineno}"


def name_and_place(function: Callable[..., Any]) -> tuple[str, str]:
    """Return the name of a function, and its place in parentheses, empty for a callable object."""
    place = f" ({source_line(function)})" if hasattr(inspect.unwrap(function), "__code__") else ""
    return getattr(function, "__qualname__", type(function).__qualname__), place


def source_line_of_error(error: BaseException) -> str:
    """Return ``file:line`` of the innermost frame outside installed packages; empty if there is none."""
    innermost = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if "site-packages" not in file and not file.startswith(_OWN_FILES) and Path(file).is_file():
            innermost = f"{_relative(file)}:{line}"
    return innermost


_OWN_FILES = (str(Path(__file__).parent), str(Path(inspect.__file__).parent))
"""Folders of this package and of the standard library."""


def source_line_of_class(cls: type) -> str:
    """Return `` (file:line)`` of a class; empty if it has no source."""
    try:
        return f" ({_relative(inspect.getsourcefile(cls) or '')}:{inspect.getsourcelines(cls)[1]})"
    except (OSError, TypeError):
        return ""


def _relative(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
