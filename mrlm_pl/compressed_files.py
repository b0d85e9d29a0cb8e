"""Files that are compressed as their suffix says: ``.zst`` with zstandard, ``.gz`` with gzip, others not."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from functools import partial
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
"""Bytes of text in a frame of zstandard or a member of gzip, at whose end reading may start again."""

LEVEL = 6
"""Of zstandard; see ``benchmarks/results/records.json``."""


class Decoder(Protocol):
    """Unpacks a file chunk by chunk.

    Attributes:
        pending: bytes of the last chunk that are not unpacked yet.
        whole: the data end with a complete member, so that another decoder can start at the pending bytes.
    """

    pending: int
    whole: bool

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the content of the next bytes in pieces of bounded size.

        Raises:
            ValueError: they are damaged.
        """


class _Plain:
    pending, whole = 0, True

    def feed(self, data: bytes) -> Iterator[bytes]:
        yield data


class _Gzip:
    """A decoder of concatenated members."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(31)
        self.pending, self.whole = 0, True

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


class _Zstandard:
    """A decoder of concatenated frames."""

    def __init__(self) -> None:
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self.pending, self.whole = 0, True

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
    if path.suffix not in (".gz", ".zst"):
        return text
    compress = partial(gzip.compress, mtime=0) if path.suffix == ".gz" else zstandard.ZstdCompressor(LEVEL).compress
    frames, start = bytearray(), 0
    while start < len(text):
        end = text.find(b"\n", start + FRAME - 1) + 1 or len(text)
        frames += compress(text[start:end])
        start = end
    return bytes(frames)
