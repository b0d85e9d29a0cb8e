"""Lines of a file that may still grow, compressed or not, each reachable by its offset in the text."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator
from pathlib import Path

from mrlm_pl.compressed_files import CHUNK, decoder_of

POINTS_APART = 8 << 20
"""Bytes of text between the points at which reading may start."""

LONGEST_LINE = 64 << 20
"""Bytes of a line that is kept; a longer one is skipped and counted."""


class LineFile:
    """Read the complete lines of a file, and any of them again by its offset.

    Memory is bounded: a chunk, the longest line, and per 8 MB of text at most one place.
    Reading starts again at these places, where frames and members begin; a ``.gz`` file of a single member, as ``gzip``
    writes it, has none but its beginning, from which it is unpacked for each line.

    Args:
        path: path of the file.

    Attributes:
        skipped: number of lines above :data:`LONGEST_LINE`.
        fault: reason for which the rest of the file cannot be read, or None.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = -1
        self._restart()

    def _restart(self) -> None:
        self._decoder = decoder_of(self.path)
        self._read = self._text = 0
        self._start = self._length = 0
        self._line, self._too_long = bytearray(), False
        self._points = [(0, 0)]  # where reading may start: offsets in the text and in the file
        self.skipped = 0
        self.fault: str | None = None

    @property
    def truncated(self) -> bool:
        """Return True if the file ends within a line or a compressed member."""
        return bool(self._line) or self._too_long or not self._decoder.whole

    def new_lines(self) -> Iterator[tuple[int, bytes] | None]:
        """Yield (offset, line) of each line that was completed since the last call; None first for a replaced file."""
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._read:
                self._inode = status.st_ino
                self._restart()
                yield None
            file.seek(self._read)
            while self.fault is None and (data := file.read(CHUNK)):
                self._read += len(data)
                try:
                    for chunk in self._decoder.feed(data):
                        self._text += len(chunk)
                        yield from self._split(chunk)
                        if self._decoder.whole and self._text - self._points[-1][0] >= POINTS_APART:
                            self._points.append((self._text, self._read - self._decoder.pending))
                except ValueError as error:
                    self.fault = str(error)

    def _split(self, chunk: bytes) -> Iterator[tuple[int, bytes]]:
        *complete, rest = chunk.split(b"\n")
        for text in complete:
            if self._too_long:
                self.skipped += 1
            elif line := bytes(self._line + text):
                yield self._start, line
            self._start += self._length + len(text) + 1
            self._line, self._too_long, self._length = bytearray(), False, 0
        self._length += len(rest)
        if not self._too_long:
            self._line += rest
            if len(self._line) > LONGEST_LINE:
                self._line, self._too_long = bytearray(), True

    def line(self, offset: int) -> bytes:
        """Return the line at an offset that :meth:`new_lines` gave."""
        text_offset, file_offset = self._points[bisect.bisect(self._points, offset, key=lambda point: point[0]) - 1]
        decoder = decoder_of(self.path)
        line = bytearray()
        with self.path.open("rb") as file:
            file.seek(file_offset)
            while data := file.read(CHUNK):
                for chunk in decoder.feed(data):
                    remainder = chunk[max(0, offset - text_offset) :]
                    text_offset += len(chunk)
                    head, end, _ = remainder.partition(b"\n")
                    line += head
                    if end:
                        return bytes(line)
        return bytes(line)
