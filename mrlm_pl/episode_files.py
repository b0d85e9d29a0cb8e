"""Episodes on disk: a compressed JSON-lines file per rollout, enough to replay, rescore and recredit."""

from __future__ import annotations

import gzip
import itertools
import json
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from mrlm_pl.durable_files import replacing
from mrlm_pl.episode import Episode, TurnTree, branches, episodes_of
from mrlm_pl.errors import DataError, StorageError


def write_episodes(path: str | Path, episodes: Sequence[Episode]) -> None:
    """Write episodes as gzipped JSON lines, atomically; the paths of a turn tree make one line."""
    lines = []
    for tree, paths in itertools.groupby(episodes, lambda episode: episode.group if branches(episode) else None):
        records = [*paths]
        if tree is not None:
            with suppress(ValueError):  # episodes of several runs, which stay single ones
                lines.append(TurnTree.of(records).to_json())
                continue
        lines += [episode.to_json() for episode in records]
    text = "".join(f"{line}\n" for line in lines)
    with replacing(path) as draft:
        draft.write_bytes(gzip.compress(text.encode(), compresslevel=1, mtime=0))


class EpisodeWriter:
    """Write files of episodes in a background thread, in order.

    Args:
        behind: files that may be pending before :meth:`write` blocks.
    """

    def __init__(self, behind: int = 2) -> None:
        self.behind = behind
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mrlm-episodes")
        self._waiting: deque[tuple[Path, Future[None]]] = deque()

    def write(self, path: str | Path, episodes: Sequence[Episode]) -> None:
        """Schedule a file; blocks while ``behind`` files are pending.

        Raises:
            StorageError: an earlier file could not be written.
        """
        while len(self._waiting) >= self.behind or (self._waiting and self._waiting[0][1].done()):
            self._settle()
        self._waiting.append((Path(path), self._thread.submit(write_episodes, path, list(episodes))))

    def finish(self) -> None:
        """Wait until all files are written.

        Raises:
            StorageError: a file could not be written.
        """
        while self._waiting:
            self._settle()

    def _settle(self) -> None:
        path, written = self._waiting.popleft()
        try:
            written.result()
        except OSError as error:
            raise StorageError(
                f"the episodes of {str(path)!r} cannot be written: {error.strerror or error}; free space on the disk, "
                "then resume the run"
            ) from error


def read_episodes(path: str | Path) -> Iterator[Episode]:
    """Yield the episodes of a JSON-lines file, gzipped or not, or of all ``*.jsonl.gz`` files of a folder by name.

    Raises:
        DataError: there is no such file, or a line is not an episode record.
    """
    path = Path(path)
    files = sorted(path.glob("*.jsonl.gz")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise DataError(f"there are no episodes at {str(path)!r}; name a run's `episodes` folder or a file in it")
    for file in files:
        try:
            with (
                gzip.open(file, "rt", encoding="utf-8")
                if file.suffix == ".gz"
                else file.open(encoding="utf-8") as lines
            ):
                for number, line in enumerate(lines, start=1):
                    yield from _episodes(line, f"{file}, line {number}")
        except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
            raise DataError(f"{file} cannot be read: {type(error).__name__}: {error}") from error


def _episodes(line: str, where: str) -> Sequence[Episode]:
    try:
        return episodes_of(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not an episode record: {error}") from error
