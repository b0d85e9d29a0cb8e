"""The episodes of a run by id, read lazily from the newest file back, and never held in memory whole."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from mrlm_pl.episode_files import iteration_of, not_kept
from mrlm_pl.errors import ConfigurationError, DataError, counted, did_you_mean
from mrlm_pl.grouping import grouped
from mrlm_pl.viewer.line_file import LONGEST_LINE, LineFile
from mrlm_pl.viewer.records import (
    EpisodeHead,
    Summary,
    branches_of,
    episode_heads,
    report_records,
    report_summary,
    summarize,
    whole_record,
)

NEWEST = 20_000
"""Episodes in a table; older ones are named by their iteration."""


class EpisodeFile:
    """A file of episodes: a summary of each and its place; follows a file that grows.

    Args:
        path: path of the file.

    Attributes:
        rows: summaries of the episodes.
        faults: number of lines that are not an episode record.
    """

    def __init__(self, path: Path) -> None:
        self.lines = LineFile(path)
        self.rows: list[Summary] = []
        self.faults = 0
        self._offsets: dict[str, int] = {}

    def update(self) -> None:
        """Read the lines that were added."""
        for item in self.lines.new_lines():
            if item is None:
                self.rows, self._offsets, self.faults = [], {}, 0
                continue
            offset, line = item
            try:
                episodes = episode_heads(line)
            except (ValueError, RecursionError):
                self.faults += 1
                continue
            for head in episodes:
                self.rows.append(summarize(head, len(episodes) > 1))
                self._offsets[head.id] = offset

    def newest_heads(self, count: int) -> Iterator[EpisodeHead]:
        """Yield the last episodes of the file, in order, up to a number; a turn tree is whole."""
        if not self.rows:
            return
        first = min(self._offsets[row.id] for row in self.rows[-count:])
        with suppress(FileNotFoundError):  # removed meanwhile
            for item in LineFile(self.lines.path).new_lines():
                if item and item[0] >= first:
                    with suppress(ValueError, RecursionError):  # counted in ``faults``
                        yield from episode_heads(item[1])

    def line(self, episode: str) -> bytes | None:
        """Return the line that holds an episode; None if the file does not hold it or was removed."""
        with suppress(KeyError, FileNotFoundError):
            return self.lines.line(self._offsets[episode])
        return None

    def record(self, episode: str) -> dict[str, Any] | None:
        """Return the whole record of an episode; None if the file does not hold it.

        Raises:
            DataError: its fields have other types.
        """
        if (line := self.line(episode)) is None:
            return None
        try:
            return whole_record(line, episode)
        except (ValueError, RecursionError) as error:
            raise DataError(f"episode {episode!r} of {self.lines.path.name} cannot be read: {error}") from error

    def notes(self) -> Iterator[str]:
        """Yield notes on unreadable parts."""
        name, lines = self.lines.path.name, self.lines
        if lines.fault is not None:
            yield f"{name} is damaged ({lines.fault}); the episodes before the damage are shown"
        elif lines.truncated:
            yield f"{name} ends within an episode, as after a kill or while it is written"
        elif not (self.rows or self.faults or lines.skipped):
            yield f"{name} holds no episodes"
        if lines.skipped:
            yield f"{name}: {counted(lines.skipped, 'line is', 'lines are')} too long to show"
        if self.faults:
            yield f"{name}: {counted(self.faults, 'line is not an episode record', 'lines are not episode records')}"


class ReportFile:
    """The transcripts in a report of ``mrlm eval --output``, with the interface of :class:`EpisodeFile`.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[Summary] = []
        self._records: dict[str, dict[str, Any]] = {}
        self._changed = -1

    def update(self) -> None:
        """Read the file if it was replaced."""
        with self.path.open("rb") as file:
            if (changed := os.fstat(file.fileno()).st_mtime_ns) == self._changed:
                return
            text = file.read(LONGEST_LINE)
        self.rows, self._records, self._changed = [], {}, changed
        with suppress(KeyError, ValueError, RecursionError):  # it is said by the notes
            records = list(report_records(text))
            self.rows, self._records = list(map(report_summary, records)), {record["id"]: record for record in records}

    def record(self, episode: str) -> dict[str, Any] | None:
        """Return a transcript as a record without turns and tokens; None if the file does not hold it."""
        return copy.deepcopy(self._records.get(episode))

    def notes(self) -> Iterator[str]:
        """Yield the reason for missing transcripts."""
        if not self.rows:
            yield f"{self.path.name} holds no transcripts"


class EpisodeIndex:
    """The episodes of a run's files.

    Args:
        files: function that returns the present files, in order.
        collected: function that returns the number of iterations by the metrics of a run, 0 without any; None for a
            single file.
    """

    def __init__(self, files: Callable[[], Sequence[Path]], collected: Callable[[], int | None]) -> None:
        self._files, self._collected = files, collected
        self._read: dict[Path, EpisodeFile | ReportFile] = {}

    def _notes(self) -> Iterator[str]:
        """Yield a note on the iterations of a folder that have no file."""
        collected = self._collected()
        if collected is not None and (missing := not_kept(self._files(), collected)):
            yield missing

    def newest_first(self, last: float = inf, first: int = -1, episode: str = "") -> Iterator[EpisodeFile | ReportFile]:
        """Yield the files, up to date, from the last back.

        Args:
            last: newest iteration; files whose names have a newer one are left out.
            first: oldest iteration; files whose names have an older one are left out.
            episode: id, which begins with its iteration; the files whose names have the same one come first.
        """
        files, rows_read = self._files(), 0
        cached = {path: self._read[path] for path in reversed(files) if path in self._read}
        newer = itertools.accumulate((len(file.rows) for file in cached.values()), initial=0)
        # Those of a table; with all that a viewer has read, its memory would grow as long as the run.
        self._read = {path: cached[path] for path, count in zip(cached, newer, strict=False) if count <= NEWEST}
        within = [path for path in reversed(files) if (number := iteration_of(path)) < 0 or first <= number <= last]
        for path in sorted(within, key=lambda path: not episode.startswith(f"{iteration_of(path)}-")):
            file = self._read.get(path) or (ReportFile(path) if path.suffix == ".json" else EpisodeFile(path))
            if rows_read <= NEWEST:
                self._read[path] = file
            with suppress(OSError):  # replaced or removed meanwhile
                file.update()
                rows_read += len(file.rows)
                yield file

    def table(self, last: float = inf, first: int = -1) -> dict[str, Any]:
        """Return the summaries of the newest episodes: columns, rows, whether there are more, and notes on faults.

        Args:
            last: newest iteration to show.
            first: oldest iteration to show.
        """
        rows: list[Summary] = []
        notes = list(self._notes())
        older: int | None = None
        for file in self.newest_first(last, first):
            rows += [row for row in reversed(file.rows) if first <= row.iteration <= last]
            notes += file.notes()
            older = max((row.iteration for row in rows[NEWEST:] if row.iteration < rows[0].iteration), default=None)
            if older is not None:
                break
        if len(rows) > NEWEST and rows[NEWEST].iteration == rows[0].iteration:
            notes.append(f"iteration {rows[0].iteration} has more episodes; its newest {NEWEST} are shown")
        newest, more = rows[:NEWEST], len(rows) > NEWEST
        return {"columns": Summary._fields, "rows": newest, "more": more, "older": older, "notes": notes}

    def iteration(self, number: int) -> dict[str, Any]:
        """Return the table of an iteration.

        Raises:
            ConfigurationError: the iteration has no episodes.
        """
        table = self.table(number, number)
        if not table["rows"]:
            remedy = "; ".join(["leave out `--iteration` to see the newest", *self.table()["notes"]])
            raise ConfigurationError(f"iteration: the run has no episode of iteration {number}; {remedy}")
        return table

    def record(self, episode: str) -> dict[str, Any]:
        """Return the whole record of an episode.

        Raises:
            DataError: there is no such episode, or it cannot be read.
        """
        notes: list[str] = []
        for file in self.newest_first(episode=episode):
            if (record := file.record(episode)) is not None:
                return record
            notes += file.notes()
        listed = "; ".join(["`mrlm view RUN` lists them", *self._notes(), *notes])
        ids = itertools.islice((row.id for file in self.newest_first() for row in reversed(file.rows)), NEWEST)
        raise DataError(f"there is no episode {episode!r} in this run; {did_you_mean(episode, ids, listed)}")

    def branches(self, episode: str) -> dict[str, Any]:
        """Return the turn tree that an episode is a path of; see :func:`mrlm_pl.viewer.records.branches_of`.

        Raises:
            DataError: there is no such episode, or it is not a path of a tree.
        """
        for file in self.newest_first(episode=episode):
            if isinstance(file, EpisodeFile) and (line := file.line(episode)) is not None:
                try:
                    return branches_of(line)
                except (ValueError, RecursionError, KeyError) as error:
                    raise DataError(f"episode {episode!r} is not a path of a turn tree: {error}") from error
        raise DataError(f"there is no episode {episode!r} in this run")

    def newest_heads(self, count: int) -> Iterator[EpisodeHead]:
        """Yield the newest episodes, file by file, up to a number; a turn tree is whole."""
        for file in self.newest_first():
            heads = list(file.newest_heads(count)) if isinstance(file, EpisodeFile) else []
            yield from heads
            count -= len(heads)
            if count <= 0:
                return

    def last_rewards(self) -> list[list[float]]:
        """Return the rewards of the newest file's ordinary episodes by group: no failures, branches, excluded ones."""
        rows = next((file.rows for file in self.newest_first() if file.rows), [])
        ordinary = [row for row in rows if not (row.error or row.branch or row.excluded)]
        return list(grouped((row.group, row.reward) for row in ordinary).values())
