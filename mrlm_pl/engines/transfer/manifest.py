"""The weights to send: a model's changed tensors, cut into buckets, with checksums."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
import xxhash
from torch import Tensor

SMALL_BYTES = 2**20


@dataclass(frozen=True)
class TensorRecord:
    """One tensor to send.

    Args:
        name: name of the weight.
        shape: shape of the tensor.
        dtype: dtype of the tensor.
        size: number of bytes.
        checksum: XXH3 (64 bits) of the bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    size: int
    checksum: int


@dataclass(frozen=True)
class Manifest:
    """The tensors to send, in order, and the most bytes that are sent at a time."""

    tensors: tuple[TensorRecord, ...]
    bucket_bytes: int

    def blocks(self) -> list[list[TensorRecord]]:
        """Return the tensors in blocks, each in one memory: small ones of a dtype in a row, and larger ones alone.

        A message takes as long as about 100 KB of data, and adapters have hundreds of tensors of a few KB. As a block
        is a copy, its small tensors begin within one bucket.
        """
        begins = accumulate((item.size for item in self.tensors), initial=0)
        rows = groupby(
            zip(self.tensors, begins, strict=False),
            lambda at: (at[0].dtype, at[1] // self.bucket_bytes) if at[0].size < SMALL_BYTES else at[0].name,
        )
        return [[item for item, _ in row] for _, row in rows]

    def buckets(self, data: Tensor) -> tuple[Tensor, ...]:
        """Return a block's bytes ``[N]`` in parts, in the same memory.

        >>> [len(part) for part in Manifest((), 4).buckets(torch.empty(10, dtype=torch.uint8))]
        [4, 4, 2]
        """
        return data.split(self.bucket_bytes) if len(data) else ()


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes ``[N]`` of a tensor, its own memory if that is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum(data: Tensor) -> int:
    """Return the XXH3 (64 bits) of a tensor's bytes.

    >>> checksum(torch.tensor([97, 98, 99], dtype=torch.uint8)) == xxhash.xxh3_64_intdigest(b"abc")
    True
    """
    return xxhash.xxh3_64_intdigest(as_bytes(data).cpu().numpy().data)


def weights_digest(tensors: Mapping[str, Tensor], precision: str) -> str:
    """Return a digest of named weights and their compute precision; it changes with any bit of either.

    >>> weights = {"w": torch.zeros(2)}
    >>> weights_digest(weights, "32-true") == weights_digest({"w": torch.zeros(2)}, "32-true")
    True
    >>> weights_digest(weights, "32-true") == weights_digest(weights, "bf16-mixed")
    False
    """
    facts = [precision, *((name, tensor.dtype, checksum(tensor)) for name, tensor in sorted(tensors.items()))]
    return xxhash.xxh3_64_hexdigest(repr(facts).encode())


@dataclass
class _Kept:
    data: Tensor  # its bytes; a copy is on the CPU
    record: TensorRecord
    place: tuple[int, int] | None  # its memory and ``torch``'s count of changes; None for a copy


class WeightSnapshot:
    """The tensors that engines serve, to fill receivers while training continues.

    Trained tensors (``requires_grad``) are copied to the CPU; all others are referred to in place, and read again only
    if their memory or ``torch``'s count of in-place changes differs. The receiver detects other changes by a wrong
    checksum.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def take(self, tensors: Mapping[str, Tensor], passing: bool = False) -> None:
        """Replace the tensors.

        Args:
            tensors: tensors by name.
            passing: copy all tensors, because their memory is temporary.
        """
        self._kept = {name: self._keep(name, tensor, passing) for name, tensor in tensors.items()}

    def _keep(self, name: str, tensor: Tensor, passing: bool) -> _Kept:
        old, memory = self._kept.get(name), None
        if not (tensor.requires_grad or passing or tensor.is_inference()):
            memory = tensor.data_ptr(), tensor._version
            if old is not None and old.place == memory:
                return old
        data = as_bytes(tensor)
        if memory is None:
            reuse = old is not None and old.place is None and old.data.shape == data.shape
            data = old.data.copy_(data) if old is not None and reuse else data.to("cpu", copy=True)
        record = TensorRecord(name, tuple(tensor.shape), tensor.dtype, data.numel(), checksum(data))
        return _Kept(data, record, memory)

    def checksums(self) -> dict[str, int]:
        """Return the checksum of each tensor by name."""
        return {name: entry.record.checksum for name, entry in self._kept.items()}

    def __getitem__(self, name: str) -> Tensor:
        """Return the bytes ``[N]`` of a tensor."""
        return self._kept[name].data

    def missing(self, checksums: Sequence[Mapping[str, int]], bucket_bytes: int) -> Manifest:
        """Return the manifest of the tensors that a receiver lacks.

        Args:
            checksums: checksums of the tensors of each receiver.
            bucket_bytes: size of a bucket.
        """
        records = [entry.record for entry in self._kept.values()]
        changed = (item for item in records if any(has.get(item.name) != item.checksum for has in checksums))
        return Manifest(tuple(changed), bucket_bytes)
