"""Pretrained models: where they are, their configuration and tokenizer, and their folders as we write them."""

from __future__ import annotations

import pickle
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from mrlm_pl.durable_files import draft_of, replacing
from mrlm_pl.errors import EngineError, PolicyError, StorageError, first_line, nearest_path
from mrlm_pl.model_folders import CRITIC_FILE, policy_folder
from mrlm_pl.policy.lora import is_adapter, merged_state
from mrlm_pl.policy.tiny import tiny_model_path

BUILTIN_TINY = "builtin:tiny"
LONGEST_NAME = 1024
"""Maximum number of characters in a model's name; file systems take no longer paths."""

KEPT = 2
"""Versions to keep: the current one, and the one that running requests may still name."""

_READING = threading.RLock()
"""Transformers sets the default dtype and initializers of all threads while one reads weights."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")


def source_of(model: str) -> str:
    """Return the folder or hub id behind a policy's ``model``.

    Raises:
        PolicyError: there is no such built-in model or folder, or it holds several policies.
    """
    if model == BUILTIN_TINY:
        return str(tiny_model_path())
    if model.startswith("builtin:"):
        raise PolicyError(f"model {model!r} does not exist; the built-in model is {BUILTIN_TINY!r}")
    if len(model) > LONGEST_NAME:
        raise PolicyError(f"model {model[:40]!r}... has {len(model)} characters; give a folder or a hub id")
    return policy_folder(model, "model")


def read_config(model: str, source: str, revision: str) -> Any:
    """Return the configuration of a model.

    Args:
        model: model as the user named it, for messages.
        source: folder or hub id of the model.
        revision: branch, tag or commit on the hub.

    Raises:
        PolicyError: the configuration cannot be read.
    """
    try:
        return AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception as error:  # transformers raises many classes for damaged files
        if Path(source).is_dir():
            reason = " ".join(str(error).split()).partition(". ")[0]  # advice follows, such as to run a folder's code
            remedy = "copy, download or export it again, or give a model that Transformers reads without other code"
            raise PolicyError(f"model {model!r}: its config.json cannot be read ({reason}); {remedy}") from error
        near = nearest_path(Path(model), folders=True)
        meant = f"did you mean {str(near)!r}? Otherwise give" if near else "give"
        remedy = f"{meant} a folder, a hub id or {BUILTIN_TINY!r}"
        if model.rpartition(":")[2].isdecimal():
            remedy = "give its tokenizer's model, and the address as `served_by`"
        elif model.endswith(".ckpt") and not near:
            remedy = "a checkpoint must be in RUN/checkpoints with RUN/config.yaml; of a script's run give its folder"
        fault = f"model {model!r} is neither a folder here nor a readable model on the hub ({first_line(error)})"
        raise PolicyError(f"{fault}; {remedy}") from error


def read_tokenizer(model: str, source: str, revision: str) -> Any:
    """Return the tokenizer of a model; see :func:`read_config`."""
    remedy = "save one there with `AutoTokenizer.from_pretrained(...).save_pretrained(folder)`"
    if Path(source).is_dir() and not any((Path(source) / name).is_file() for name in _TOKENIZER_FILES):
        raise PolicyError(f"model folder {model!r} has no tokenizer ({', '.join(_TOKENIZER_FILES)}); {remedy}")
    try:
        return AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    except Exception as error:  # as in `read_config`
        raise PolicyError(f"the tokenizer of {model!r} cannot be read ({first_line(error)}); {remedy}") from error


def context_window(config: Any) -> int | None:
    """Return the context length in tokens of a configuration's text model; None if it has no bound or names none.

    >>> from transformers import Gemma3Config, MptConfig, XLNetConfig
    >>> of_images = Gemma3Config(text_config={"max_position_embeddings": 96}, vision_config={"num_hidden_layers": 1})
    >>> context_window(of_images), context_window(MptConfig(max_seq_len=64)), context_window(XLNetConfig())
    (96, 64, None)
    """
    text = config.get_text_config(decoder=True)
    window = getattr(text, "max_position_embeddings", getattr(text, "max_seq_len", None))
    return window if window and window > 0 else None  # XLNet's is -1


def with_dropout(config: Any, dropout: float, model: str) -> Any:
    """Return a copy of a configuration with every dropout probability set to ``dropout``.

    Raises:
        PolicyError: the model has no dropout, and ``dropout`` is above 0.
    """
    config = type(config).from_dict(config.to_dict())
    has_dropout = False
    for section in {id(section): section for section in (config, config.get_text_config(decoder=True))}.values():
        for name, value in section.to_dict().items():
            is_probability = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_probability and ("dropout" in name or name.endswith(("_pdrop", "_drop"))):
                setattr(section, name, dropout)
                has_dropout = True
    if dropout and not has_dropout:
        raise PolicyError(
            f"model {model!r} has dropout {dropout}, but models of the family {config.model_type!r} have no "
            "dropout; set it to 0"
        )
    return config


@contextmanager
def reading_weights(folder: str | Path) -> Iterator[None]:
    """In this block an error of the library that reads weights is one that names the file in a model's folder.

    Threads enter it one after another.

    Raises:
        PolicyError: a file is truncated or no file of weights, or holds more than these.
    """
    try:
        with _READING:
            yield
    except SafetensorError as error:
        damaged = next(filter(_is_damaged, sorted(Path(folder).glob("*.safetensors"))), folder)
        raise PolicyError(
            f"weights: {str(damaged)!r} is truncated or damaged ({error}); copy, download or export it again"
        ) from error
    except pickle.UnpicklingError as error:  # its text proposes to run the file
        raise PolicyError(
            f"weights: a file in {str(folder)!r} is damaged or holds more than tensors, such as a program; use a model "
            "with `safetensors`"
        ) from error


def _is_damaged(file: Path) -> bool:
    try:
        with safe_open(file, "numpy"):
            return False
    except SafetensorError:
        return True


def read_weights(model: str, source: str, revision: str, config: Any, needs_head: bool) -> Any:
    """Return the model of a folder or hub id, in fp32.

    Args:
        model: model as the user named it, for messages.
        source: folder or hub id of the model.
        revision: branch, tag or commit on the hub.
        config: configuration of the model.
        needs_head: whether the files must hold the output head.

    Raises:
        PolicyError: the files cannot be read, lack weights, or have weights of another shape.
    """
    read: Any = AutoModelForCausalLM.from_pretrained  # whose type has no report
    try:
        with reading_weights(source):
            network, report = read(
                source,
                revision=revision,
                config=config,
                dtype=torch.float32,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # they are in the report, and rejected below
                output_loading_info=True,
            )
    except PolicyError:
        raise
    except Exception as error:  # transformers raises many classes for damaged files
        raise PolicyError(f"model {model!r}: its weights cannot be read: {error}") from error
    owner = f"model {model!r}: its files"
    for key, stored_shape, configured_shape in sorted(report["mismatched_keys"]):
        raise PolicyError(
            f"{owner} have {key!r} of shape {list(stored_shape)}, and its config.json says "
            f"{list(configured_shape)}; copy, download or export it again"
        )
    prefix = "" if needs_head else f"{network.base_model_prefix}."
    missing = [key for key in sorted(report["missing_keys"]) if key.startswith(prefix)]
    if missing:
        raise PolicyError(
            f"{owner} lack the weights {missing[0]!r} ({len(missing)} in all); copy, download or export it "
            "again, or set `random_init_seed` for random ones"
        )
    head = network.get_output_embeddings()
    if head is not None and head.weight is not network.get_input_embeddings().weight:
        network.config.tie_word_embeddings = False  # the files have both, whatever their config.json says
    with torch.device("meta"):
        fresh = type(network)(network.config)
    for name, weight in fresh.named_parameters():  # the reader unfreezes them, such as a router's bias
        if not weight.requires_grad:
            network.get_parameter(name).requires_grad_(False)
    return network


def end_ids(config: Any, source: str, revision: str) -> list[int]:
    """Return the tokens that end a reply by a model's configuration and by its generation config, if it has one.

    Raises:
        PolicyError: the file is not a generation config.
    """
    try:
        configs = [config, GenerationConfig.from_pretrained(source, revision=revision)]
    except OSError:  # there is none, or the reader of the weights raises the same
        configs = [config]
    except Exception as error:  # as in `read_config`
        raise PolicyError(f"the generation_config.json of {source!r} cannot be read: {first_line(error)}") from error
    id_lists = [getattr(section, "eos_token_id", None) for section in configs]
    tokens = [token for ids in id_lists for token in (ids if isinstance(ids, list) else [ids])]
    return [token for token in tokens if isinstance(token, int) and token >= 0]


def write_model(model: PreTrainedModel, folder: str | Path, weights: Mapping[str, Tensor]) -> None:
    """Write a folder that ``from_pretrained`` reads, without a progress bar.

    Args:
        model: model with the configuration; its adapters are left out.
        folder: folder to write; it is created.
        weights: weights of the model, with adapters merged; see :func:`~mrlm_pl.policy.lora.merged_state`.
    """
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        with torch.device("meta"):
            plain = AutoModelForCausalLM.from_config(model.config, dtype=model.dtype)
        plain.generation_config = model.generation_config
        model = plain
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # in a notebook's live display, bar and display call each other
    try:
        model.save_pretrained(folder, state_dict=dict(weights))
    finally:
        if shown:
            logging.enable_progress_bar()


def write_policy(save: Callable[..., None], name: str, final: Path, write: bool, critic: bool = False) -> None:
    """Write a policy's folder, atomically.

    Args:
        save: method :meth:`~mrlm_pl.policy.Policy.save_pretrained` of the policy.
        name: name of the policy, for messages.
        final: folder to write.
        write: whether this rank writes; False on ranks that only take part in gathering the weights.
        critic: whether the policy estimates returns and plays no agent.

    Raises:
        StorageError: the folder cannot be written, for example because the disk is full.
    """
    try:
        with replacing(final) if write else nullcontext(draft_of(final)) as draft:
            save(draft, write=write)
            if critic and write:
                (draft / CRITIC_FILE).write_text("This model estimates returns; it plays no agent.\n")
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"policy {name!r} cannot be written to {str(final)!r}: {error}; free space on the disk, then "
            "resume the run, which writes it from its last checkpoint"
        ) from error


def write_version(root: Path, policy: str, model: PreTrainedModel, version: int, also: Callable[[Path], None]) -> Path:
    """Write the folder ``ROOT/POLICY/version-N`` with a model, adapters merged, for ``from_pretrained``; return it.

    Args:
        root: folder of all policies; it is created.
        policy: name of the policy.
        model: model with the weights.
        version: number of the version; it replaces a folder of the same number.
        also: function that writes extra files into the folder, such as a tokenizer's.

    Raises:
        EngineError: the folder cannot be written.
    """
    home = root / policy
    target = home / f"version-{version:08d}"
    try:
        with replacing(target) as draft:
            write_model(model, draft, merged_state(model))
            also(draft)
        # By age, not by number: another run may have left greater ones here.
        for old in sorted(home.glob(f"version-{'[0-9]' * 8}"), key=lambda folder: folder.stat().st_mtime_ns)[:-KEPT]:
            if old != target:
                shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise EngineError(f"policy {policy!r}: its weights cannot be written to {home}: {error}") from error
    return target.resolve()
