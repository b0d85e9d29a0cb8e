"""The weights to send: a model's changed tensors as one stream of bytes, with checksums."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import xxhash
from torch import Tensor

ALIGNMENT = 16
"""Bytes: tensors begin at multiples of this in the stream, and can be viewed as any dtype."""


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a stream.

    Args:
        name: of the weight.
        shape: of the tensor.
        dtype: of the tensor.
        start: first byte in the stream.
        size: number of bytes.
        checksum: XXH3 (64 bits) of the bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    size: int
    checksum: int


@dataclass(frozen=True)
class Manifest:
    """The tensors to send in the order of the stream, which is split into buckets."""

    tensors: tuple[TensorRecord, ...]
    bucket_bytes: int

    @property
    def total(self) -> int:
        """Bytes of the stream."""
        return self.tensors[-1].start + self.tensors[-1].size if self.tensors else 0

    def buckets(self) -> Iterator[tuple[int, int]]:
        """Yield the first byte and the one after the last of each bucket.

        >>> list(Manifest((TensorRecord("w", (10,), torch.uint8, 0, 10, 0),), 4).buckets())
        [(0, 4), (4, 8), (8, 10)]
        """
        for start in range(0, self.total, self.bucket_bytes):
            yield start, min(start + self.bucket_bytes, self.total)

    def at(self, byte: int) -> str:
        """Return the name of the tensor at a byte of the stream."""
        return next((record.name for record in self.tensors if byte < record.start + record.size), "the end")


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes ``[N]`` of a tensor, its own memory if that is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum(data: Tensor) -> int:
    """Return the XXH3 (64 bits) of a tensor's bytes.

    >>> checksum(torch.tensor([97, 98, 99], dtype=torch.uint8)) == xxhash.xxh3_64_intdigest(b"abc")
    True
    """
    return xxhash.xxh3_64_intdigest(as_bytes(data).cpu().numpy().data)


@dataclass
class _Kept:
    data: Tensor  # its bytes; a copy is on the CPU
    record: TensorRecord  # in a stream of its own
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
            tensors: by name.
            passing: copy all of them, because their memory is temporary.
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
        record = TensorRecord(name, tuple(tensor.shape), tensor.dtype, 0, data.numel(), checksum(data))
        return _Kept(data, record, memory)

    def checksums(self) -> dict[str, int]:
        """Return the checksum of each tensor by name."""
        return {name: entry.record.checksum for name, entry in self._kept.items()}

    def __getitem__(self, name: str) -> Tensor:
        """Return the bytes ``[N]`` of a tensor."""
        return self._kept[name].data

    def missing(self, checksums: Iterable[Mapping[str, int]], bucket_bytes: int) -> Manifest:
        """Return the manifest of the tensors that a receiver lacks.

        Args:
            checksums: for each receiver, the checksums of its tensors.
            bucket_bytes: size of a bucket.
        """
        receivers = list(checksums)
        records: list[TensorRecord] = []
        start = 0
        for name, entry in self._kept.items():
            if any(has.get(name) != entry.record.checksum for has in receivers):
                records.append(replace(entry.record, start=start))
                start += -(-entry.record.size // ALIGNMENT) * ALIGNMENT
        return Manifest(tuple(records), bucket_bytes)
