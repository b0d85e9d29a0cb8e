"""Files that are compressed as their suffix says: ``.zst`` with zstandard, ``.gz`` with gzip, others not."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import zstandard

CHUNK = 1 << 16
"""Bytes that are read at a time."""

PIECE = 1 << 18
"""Bytes that gzip unpacks at a time: a small chunk may expand a thousandfold."""

FED = 1 << 9
"""Bytes that zstandard unpacks at a time, whose blocks of four bytes may expand to 128 KiB."""

FRAME = 8 << 20
"""Bytes of text in a frame of zstandard, at whose end reading may start again."""

LEVEL = 6
"""Of zstandard; see ``benchmarks/results/records.json``."""


class Decoder(Protocol):
    """Unpacks a file chunk by chunk.

    Attributes:
        pending: bytes of the last chunk that are not unpacked yet.
        whole: the data end with a complete member.
    """

    pending: int
    whole: bool

    @property
    def seekable(self) -> bool:
        """A copy can start at the pending bytes."""

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the content of the next bytes in pieces of bounded size.

        Raises:
            ValueError: they are damaged.
        """

    def copy(self) -> Decoder:
        """Return a decoder for the pending and later bytes, where ``seekable``."""


class _Plain:
    pending = 0
    whole = seekable = True

    def feed(self, data: bytes) -> Iterator[bytes]:
        yield data

    def copy(self) -> Decoder:
        return self


class _Gzip:
    """A decoder of concatenated members, whose state can be copied anywhere."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(31)
        self.pending, self.whole, self.seekable = 0, True, True

    def feed(self, data: bytes) -> Iterator[bytes]:
        while True:
            if self.whole:
                data = data.lstrip(b"\0")  # members may be padded
                self.whole = not data
            try:
                piece = self._member.decompress(data, PIECE)
            except zlib.error as error:
                raise ValueError(str(error)) from error
            data = self._member.unconsumed_tail
            if self._member.eof:
                data, self.whole = self._member.unused_data, True
                self._member = zlib.decompressobj(31)
            self.pending = len(data)
            yield piece
            if not data and len(piece) < PIECE:
                return

    def copy(self) -> Decoder:
        other = _Gzip()
        other._member, other.whole = self._member.copy(), self.whole
        return other


class _Zstandard:
    """A decoder of concatenated frames, which can start at the beginning of any."""

    def __init__(self) -> None:
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self.pending = 0
        self.whole = True

    def feed(self, data: bytes) -> Iterator[bytes]:
        start = 0
        while start < len(data):
            fed = data[start : start + FED]
            try:
                piece = self._frame.decompress(fed)
            except zstandard.ZstdError as error:
                raise ValueError(str(error)) from error
            self.whole = self._frame.eof
            start += len(fed)
            if self.whole:
                start -= len(self._frame.unused_data)
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self.pending = len(data) - start
            yield piece

    @property
    def seekable(self) -> bool:
        return self.whole

    def copy(self) -> Decoder:
        return _Zstandard()


def decoder_of(path: Path) -> Decoder:
    """Return the decoder of a file from its beginning."""
    if path.suffix == ".zst":
        return _Zstandard()
    return _Gzip() if path.suffix == ".gz" else _Plain()


def unpacked(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in pieces of bounded size.

    Raises:
        EOFError: it ends within a compressed member.
        OSError: it cannot be read.
        ValueError: it is damaged.
    """
    decoder = decoder_of(path)
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            yield from decoder.feed(data)
    if not decoder.whole:
        raise EOFError("the compressed data end early")


def packed(path: Path, text: bytes) -> bytes:
    """Return whole lines of text as they are appended to a file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "lines.jsonl.zst"
    >>> path.write_bytes(packed(path, b"one") + packed(path, b"two")) < 50
    True
    >>> b"".join(unpacked(path))
    b'onetwo'
    """
    if path.suffix == ".gz":
        return gzip.compress(text, mtime=0) if text else b""
    if path.suffix != ".zst":
        return text
    compressor, frames, start = zstandard.ZstdCompressor(level=LEVEL), bytearray(), 0
    while start < len(text):
        end = text.find(b"\n", start + FRAME - 1) + 1 or len(text)
        frames += compressor.compress(text[start:end])
        start = end
    return bytes(frames)
