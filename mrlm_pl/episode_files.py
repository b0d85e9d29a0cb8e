"""Episodes on disk: a compressed JSON-lines file per rollout, enough to replay, rescore and recredit."""

from __future__ import annotations

import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mrlm_pl.compressed_files import packed, unpacked
from mrlm_pl.durable_files import replacing
from mrlm_pl.episode import Episode, is_tree_path
from mrlm_pl.errors import DataError, moved, storing
from mrlm_pl.settings import PositiveInt, Settings
from mrlm_pl.turn_tree import TurnTree, episodes_of

BEHIND = 2
"""Files that may be pending while the learner continues."""

_REMEDY = "{}, or leave it out: move it elsewhere, or name other files"
_RESTORE = _REMEDY.format("restore the file from a copy")
"""Remedy for an unreadable file of episodes."""


def iteration_file(folder: Path, iteration: int, rank: tuple[int, int] = (0, 1), kind: str = "episodes") -> Path:
    """Return the path of a rank's episodes of an iteration, or of its measures of tokens, in a run folder.

    Args:
        folder: run folder.
        iteration: index of the iteration, from 0.
        rank: index of the rank and the number of ranks.
        kind: kind of the file: ``episodes`` or ``tokens``.

    >>> iteration_file(Path("runs/a"), 3, (1, 2)).as_posix()
    'runs/a/episodes/iteration-000003-rank1.jsonl.zst'
    """
    suffix = f"-rank{rank[0]}" if rank[1] > 1 else ""
    return folder / kind / f"iteration-{iteration:06d}{suffix}.jsonl.zst"


@dataclass(frozen=True)
class EpisodeRetention(Settings):
    """The iterations whose episodes a run keeps; without values all of them.

    The file of an iteration that is no longer among the newest is removed once the newest is written. Files that only
    an earlier setting kept stay. A resumed run reads none of them.

    Args:
        every: interval N: keep the iterations 0, N, 2 N, ...
        last: number N of newest iterations to keep.
        tokens: interval N: for the iterations 0, N, 2 N, ... that are kept, write also ``RUN/tokens``: the importance
            ratio, entropy and divergence from the reference policy of each token, as far as the first updates on it
            compute them. None writes none.

    Raises:
        ConfigurationError: a value below 1.
    """

    every: PositiveInt | None = None
    last: PositiveInt | None = None
    tokens: PositiveInt | None = None

    def keeps(self, iteration: int, newest: int) -> bool:
        """Return True if an iteration is kept when ``newest`` is the last one.

        >>> retention = EpisodeRetention(every=4, last=2)
        >>> [iteration for iteration in range(8) if retention.keeps(iteration, 7)]
        [0, 4, 6, 7]
        """
        if self.every is None and self.last is None:
            return True
        return (self.every is not None and iteration % self.every == 0) or newest - iteration < (self.last or 0)

    def keeps_tokens(self, iteration: int) -> bool:
        """Return True if the measures of an iteration's tokens are written."""
        every = self.tokens
        return every is not None and iteration % every == 0 and self.keeps(iteration, iteration)

    def remove_displaced(self, newest: Path, last: int) -> None:
        """Remove the files that are kept no longer, beside the ``last``, once the newest is written.

        Those of all ranks: a run that is resumed with fewer has none that would remove the files of the others.
        """
        number = iteration_of(newest)
        displaced = number - last
        if displaced >= 0 and not self.keeps(displaced, number):
            for folder in (newest.parent, newest.parent.with_name("tokens")):
                for path in folder.glob(f"iteration-{displaced:06d}*.jsonl.zst"):
                    path.unlink(missing_ok=True)


def iteration_of(path: Path) -> int:
    """Return the iteration of a file of episodes by its name; -1 for another file."""
    match = re.match(r"iteration-(\d+)", path.name)
    return int(match[1]) if match else -1


def episode_files(folder: Path) -> list[Path]:
    """Return the compressed files of episodes in a folder, by name."""
    return sorted(path for path in folder.glob("*.jsonl.*") if path.suffix in (".zst", ".gz"))


def remove_repeated(folder: Path, first: int, ranks: int) -> None:
    """Remove the files of the iterations that a resumed run collects again, if other numbers of ranks wrote them.

    Args:
        folder: run folder.
        first: iteration that is collected next.
        ranks: number of ranks of the resumed run, which replaces the files of as many ranks.
    """
    for kind in ("episodes", "tokens"):
        for path in (folder / kind).glob("iteration-*"):
            number = iteration_of(path)
            if number >= first and path not in [iteration_file(folder, number, (n, ranks), kind) for n in range(ranks)]:
                path.unlink()


def not_kept(files: Iterable[Path], collected: int = 0) -> str:
    """Return a note on the iterations of a run that have no file; empty if all have one.

    Args:
        files: files of episodes.
        collected: number of iterations by ``progress/iteration``; the last :data:`BEHIND` of them may still be written.

    >>> not_kept([iteration_file(Path("a"), number) for number in (0, 4, 8)], 12)
    'the episodes of 9 of 12 iterations are not kept (see `data.save_episodes`)'
    """
    numbers = {number for number in map(iteration_of, files) if number >= 0}
    newest = max(numbers, default=-1) + 1
    count = max(newest, collected)
    if len(numbers) == newest and count <= newest + BEHIND:
        return ""
    return f"the episodes of {count - len(numbers)} of {count} iterations are not kept (see `data.save_episodes`)"


def write_episodes(path: str | Path, episodes: Sequence[Episode], parents: bool = True) -> None:
    """Write episodes as :func:`write_lines` does; a turn tree is one line."""
    write_lines(path, _records(episodes), parents)


def _records(episodes: Sequence[Episode]) -> Iterator[str]:
    for tree, paths in itertools.groupby(episodes, lambda episode: episode.group if is_tree_path(episode) else None):
        records = [*paths]
        if tree is not None:
            with suppress(ValueError):  # episodes of several runs, which stay single ones
                yield TurnTree.of(records).to_json()
                continue
        yield from (episode.to_json() for episode in records)


def write_lines(path: str | Path, lines: Iterable[str], parents: bool = True) -> None:
    """Write a file of lines, compressed as its suffix says, atomically.

    Args:
        path: path of the file.
        lines: lines of JSON.
        parents: whether all missing folders are made, or only that of the file.
    """
    text = "".join(f"{line}\n" for line in lines)
    with replacing(path, parents=parents) as draft:
        draft.write_bytes(packed(Path(path), text.encode()))


def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="mrlm-episodes")


class EpisodeWriter:
    """Write files of episodes in a background thread, in order.

    Args:
        retention: iterations that are kept.
    """

    def __init__(self, retention: EpisodeRetention = EpisodeRetention()) -> None:
        self.retention = retention
        self._thread = _thread()
        self._waiting: deque[tuple[Path, Future[None]]] = deque()
        self._has_written = False

    def write(self, path: str | Path, episodes: Sequence[Episode]) -> None:
        """Schedule a file, unless its iteration is not kept; blocks while :data:`BEHIND` files are pending.

        Raises:
            StorageError: an earlier file could not be written.
        """
        number = iteration_of(Path(path))
        is_kept = self.retention.keeps(number, number)
        while self._waiting and (self._waiting[0][1].done() or (is_kept and len(self._waiting) >= BEHIND)):
            self._settle()
        if is_kept:
            self._schedule(Path(path), partial(self._write, Path(path), list(episodes)))

    def write_lines(self, path: Path, lines: Iterable[str]) -> None:
        """Schedule a file of lines, which the thread computes."""
        self._schedule(path, partial(write_lines, path, lines))

    def _schedule(self, path: Path, write: Callable[[bool], None]) -> None:
        def write_in_run() -> None:
            try:
                write(not self._has_written)  # else the run folder has been there
            except FileNotFoundError:
                if not self._has_written:
                    raise
                raise moved(path.parents[1]) from None
            self._has_written = True

        self._waiting.append((path, self._thread.submit(write_in_run)))

    def _write(self, path: Path, episodes: Sequence[Episode], parents: bool) -> None:
        write_episodes(path, episodes, parents)
        if path.suffix == ".zst":
            path.with_suffix(".gz").unlink(missing_ok=True)  # of an earlier version, whose run was resumed
        if self.retention.last is not None:
            self.retention.remove_displaced(path, self.retention.last)

    def finish(self) -> None:
        """Wait until all files are written.

        Raises:
            StorageError: a file could not be written.
        """
        while self._waiting:
            self._settle()

    def close(self) -> None:
        """Wait as :meth:`finish` does, and end the thread; a later file starts another."""
        thread, self._thread = self._thread, _thread()
        thread.shutdown()
        self.finish()

    def _settle(self) -> None:
        path, written = self._waiting.popleft()
        with storing(f"the episodes of {str(path)!r}"):
            written.result()


def read_episodes(path: str | Path) -> Iterator[Episode]:
    """Yield the episodes of a JSON-lines file, compressed or not, or of all :func:`episode_files` of a folder.

    A file of a folder that its run removes meanwhile is left out.

    Raises:
        DataError: there is no such file, or a line is not an episode record.
    """
    path = Path(path)
    whole_folder = path.is_dir()
    files = episode_files(path) if whole_folder else [path]
    if not files or not (whole_folder or path.is_file()):
        raise DataError(f"there are no episodes at {str(path)!r}; name a run's `episodes` folder or a file in it")
    for file in files:
        try:
            for number, line in enumerate(_lines(file), start=1):
                yield from _episodes(line, f"{file}, line {number}")
        except (OSError, EOFError, ValueError) as error:
            if whole_folder and isinstance(error, FileNotFoundError):
                continue
            remedy = _REMEDY.format("let your user read it") if isinstance(error, PermissionError) else _RESTORE
            raise DataError(f"{file} cannot be read: {type(error).__name__}: {error}; {remedy}") from error


def _lines(file: Path) -> Iterator[bytes]:
    if iteration_of(file) >= 0 and not file.stat().st_size:  # as after a power failure; each iteration has episodes
        raise EOFError("it is empty")
    rest = b""
    for piece in unpacked(file):
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
    if rest:
        yield rest


def _episodes(line: bytes, where: str) -> Sequence[Episode]:
    try:
        return episodes_of(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not an episode record: {error}; {_RESTORE}") from error
