"""Files that are compressed as their suffix says: ``.zst`` with zstandard, ``.gz`` with gzip, others not."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import zstandard

CHUNK = 1 << 16
"""Bytes that are read at a time."""

FED = 1 << 9
"""Bytes that are unpacked at a time: those of gzip may expand a thousandfold, zstandard's blocks of four to 128 KiB."""

FRAME = 8 << 20
"""Bytes of text in a frame of zstandard or a member of gzip, at whose end reading may start again."""

LEVEL = 6
"""Compression level of zstandard; see ``benchmarks/results/records.json``."""


class Decoder:
    """Unpacks a file chunk by chunk; this base class reads uncompressed files.

    Attributes:
        pending: bytes of the last chunk that are not unpacked yet.
        whole: True if the data end with a complete member, so that another decoder can start at the pending bytes.
    """

    pending, whole = 0, True

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield the content of the next bytes in pieces of bounded size.

        Raises:
            ValueError: they are damaged.
        """
        yield data


class _Members(Decoder):
    """A decoder of concatenated members or frames.

    Args:
        begin: function that makes the decompressor of one member.
        padding: byte that may occur between members; empty for none.
    """

    def __init__(self, begin: Callable[[], Any], padding: bytes) -> None:
        self._begin, self._padding, self._member = begin, padding, begin()

    def feed(self, data: bytes) -> Iterator[bytes]:
        start = 0
        while start < len(data):
            if self.whole and data[start : start + 1] == self._padding:
                start += 1
                self.pending = len(data) - start
                continue
            fed = data[start : start + FED]
            try:
                piece = self._member.decompress(fed)
            except (zlib.error, zstandard.ZstdError) as error:
                raise ValueError(str(error)) from error
            self.whole = self._member.eof
            start += len(fed)
            if self.whole:
                start -= len(self._member.unused_data)
                self._member = self._begin()
            self.pending = len(data) - start
            yield piece


def decoder_of(path: Path) -> Decoder:
    """Return the decoder of a file from its beginning."""
    if path.suffix == ".zst":
        return _Members(lambda: zstandard.ZstdDecompressor().decompressobj(), b"")
    return _Members(partial(zlib.decompressobj, 31), b"\0") if path.suffix == ".gz" else Decoder()


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
    zstd = zstandard.ZstdCompressor(LEVEL, write_checksum=True)
    compress = partial(gzip.compress, mtime=0) if path.suffix == ".gz" else zstd.compress
    frames, start = bytearray(), 0
    while start < len(text):
        end = text.find(b"\n", start + FRAME - 1) + 1 or len(text)
        frames += compress(text[start:end])
        start = end
    return bytes(frames)
