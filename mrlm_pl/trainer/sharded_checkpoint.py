"""Check sharded checkpoints for code before PyTorch reads them.

A sharded checkpoint is a folder of ``torch.distributed.checkpoint``, whose reader unpickles two kinds of content
without restriction: the file ``.metadata``, and every entry that is not a tensor.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata, MetadataIndex

from mrlm_pl.errors import ConfigurationError, first_line

METADATA_FILE = ".metadata"
_WEIGHTS = "state_dict."
"""Prefix of the weights' names in sharded checkpoints."""

REMEDY = "a checkpoint from elsewhere may run programs when it is read; use one that `mrlm fit` has written"
_RECORDS = "torch.distributed.checkpoint.metadata"
_ALLOWED = frozenset(
    (
        *((_RECORDS, name) for name in ("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex")),
        *((_RECORDS, name) for name in ("StorageMeta", "TensorProperties", "TensorStorageMetadata")),
        (_RECORDS, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        *(("pathlib", name) for name in ("Path", "PosixPath", "WindowsPath")),
    )
)
"""The classes and functions in PyTorch's own ``.metadata``, except dtypes; none has effects."""


def _member(cls: Any, name: str) -> Any:
    """Stand in for ``getattr``, by which Python 3.11.0 to 3.11.3 pickle the members of an enumeration."""
    if cls is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError(f"it asks {cls!r} for {name}")
    return cls[name]


class _Unpickler(pickle.Unpickler):
    """An unpickler that loads only the names of :data:`_ALLOWED`."""

    def find_class(self, module: str, name: str) -> Any:
        if name == "getattr" and module in ("builtins", "__builtin__"):
            return _member
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def check_sharded_checkpoint(folder: Path) -> Metadata:
    """Return a sharded checkpoint's metadata; it runs no code and reads no files outside its folder.

    Raises:
        ConfigurationError: the metadata or an entry names an unneeded function or class, an entry is outside the
            folder, or the metadata is damaged.
    """
    try:
        with (folder / METADATA_FILE).open("rb") as file:
            metadata = _Unpickler(file).load()
        return _check_entries(folder, metadata)
    except Exception as error:  # damaged pickles raise any class of error
        raise ConfigurationError(f"checkpoint {str(folder)!r} is refused: {first_line(error)}; {REMEDY}") from error


def sharded_shapes(folder: Path) -> dict[str, torch.Size]:
    """Return the shape of each weight of a sharded checkpoint, by its name in the module.

    Raises:
        ConfigurationError: see :func:`check_sharded_checkpoint`.
    """
    entries: dict[str, Any] = check_sharded_checkpoint(folder).state_dict_metadata
    return {name.removeprefix(_WEIGHTS): entries[name].size for name in entries if name.startswith(_WEIGHTS)}


def _check_entries(folder: Path, metadata: Any) -> Metadata:
    if type(metadata) is not Metadata or type(metadata.storage_data) is not dict:
        raise ValueError(f"{METADATA_FILE} does not hold the metadata of a checkpoint")
    plain = {name for name, kind in metadata.state_dict_metadata.items() if type(kind) is BytesStorageMetadata}
    for index, place in metadata.storage_data.items():
        if type(index) is not MetadataIndex or type(place) is not _StorageInfo or place.transform_descriptors:
            raise ValueError(f"entry {index!r} of {METADATA_FILE} is of an unknown form")
        shard = folder / place.relative_path
        if Path(place.relative_path).name != place.relative_path or shard.is_symlink() or not shard.is_file():
            raise ValueError(f"entry {index.fqn!r} lies in {place.relative_path!r}, which is not a file of the folder")
        if index.fqn in plain:
            with shard.open("rb") as file:
                file.seek(place.offset)
                torch.load(io.BytesIO(file.read(place.length)), weights_only=True)
    return metadata
