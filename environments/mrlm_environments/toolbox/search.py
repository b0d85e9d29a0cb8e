"""Search for agents, with a pluggable back end. The default one searches a local corpus and says so."""

from __future__ import annotations

import functools
import re
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from mrlm_pl.environment.rows import read_rows
from mrlm_pl.environment.tools import Tool, ToolError, clip, tool_schema
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.settings import PositiveInt, between

MAX_WORDS = 32
"""Words of a query that are searched for; others are left out."""

MAX_RESULTS = 20
EMBEDDED_CORPUS = Path(__file__).with_name("web_corpus.jsonl")
_WORD = re.compile(r"\w{1,64}")


@dataclass(frozen=True)
class SearchResult:
    """A document that was found: its title and text, and its address where it has one."""

    title: str
    text: str
    address: str = ""


class SearchBackend(ABC):
    """The index of :class:`WebSearch`. Copies of an environment copy it; keep connections out of a copy's state."""

    label: str = "the search engine"
    """Name of the searched collection, which the agent reads."""

    @abstractmethod
    def search(self, query: str, k: int) -> Sequence[SearchResult]:
        """Return at most ``k`` results, best first.

        Raises:
            ToolError: the search failed or a deadline has passed; the agent reads the text.
        """


class CorpusSearch(SearchBackend):
    """Full-text search of a corpus by BM25 with word stems (SQLite's FTS5, in memory).

    The index is built at the first search, once in a process.

    Args:
        path: a ``.jsonl``, ``.json`` or ``.parquet`` file, each also with ``.zst`` or ``.gz``, whose rows have a
            ``title`` and a ``text``; None is the small corpus that comes with the package.

    Raises:
        DataError: there is no such file.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = Path(path) if path is not None else EMBEDDED_CORPUS
        if not self.path.is_file():
            raise DataError(f"corpus {str(path)!r} is not a file; give a .jsonl file of rows with a title and a text")

    @property
    def label(self) -> str:  # type: ignore[override]
        """Name of the searched collection, which is never the web."""
        return f"a local corpus of {_build_index(self.path)[1]} documents (not the web)"

    def search(self, query: str, k: int) -> list[SearchResult]:
        """Return documents that hold any of the query's words, those with the most telling words first."""
        words = _WORD.findall(query)[:MAX_WORDS]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        connection, _, lock = _build_index(self.path)
        with lock:
            rows = connection.execute(
                "SELECT title, text FROM documents WHERE documents MATCH ? "
                "ORDER BY bm25(documents, 2.0, 1.0), rowid LIMIT ?",
                (match, k),
            )
            return [SearchResult(title, text) for title, text in rows]


class WebSearch(Tool):
    """Finds documents for a query.

    Args:
        backend: index to search; None is the local corpus.
        corpus: path of the local corpus; see :class:`CorpusSearch`.
        results: documents of one answer.
        max_characters: characters of a document that are shown.

    Raises:
        ConfigurationError: a value is out of its range, or both a back end and a corpus are given.
        DataError: there is no such corpus.
    """

    schema = tool_schema("web_search", "Search for documents.", {"query": {"type": "string"}})

    def __init__(
        self,
        backend: SearchBackend | None = None,
        corpus: str | None = None,
        results: Annotated[int, between(1, MAX_RESULTS)] = 3,
        max_characters: PositiveInt = 500,
    ) -> None:
        if backend is not None and corpus is not None:
            raise ConfigurationError("web_search: backend and corpus are both given; give one of them")
        self.backend = backend or CorpusSearch(corpus)
        self.results, self.max_characters = results, max_characters

    @property
    def searches_embedded_corpus(self) -> bool:
        """True if the documents are those that come with the package."""
        return isinstance(self.backend, CorpusSearch) and self.backend.path == EMBEDDED_CORPUS

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the name of the collection, then the documents; see :meth:`Tool.call`."""
        query = arguments["query"].strip()
        if not query:
            raise ToolError("the query is empty")
        found = self.backend.search(query, self.results)[: self.results]
        if not found:
            return f"No document of {self.backend.label} matches; try other words."
        parts = [f"Results from {self.backend.label}:"]
        for number, result in enumerate(found, start=1):
            address = f" ({result.address})" if result.address else ""
            parts.append(f"[{number}] {result.title}{address}\n{clip(result.text, self.max_characters)}")
        return "\n".join(parts)


@functools.lru_cache(maxsize=8)
def _build_index(path: Path) -> tuple[sqlite3.Connection, int, threading.Lock]:
    """Return the index of a corpus, its number of documents, and the lock for searching it."""
    rows = read_rows(str(path), None, ("title", "text"))
    for number, row in enumerate(rows, start=1):
        if not isinstance(row["title"], str) or not isinstance(row["text"], str):
            raise DataError(f"corpus {str(path)!r}, row {number}: title and text must be texts")
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    try:
        connection.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='porter unicode61')")
    except sqlite3.OperationalError as error:
        connection.close()
        raise ConfigurationError(
            f"this Python's SQLite cannot search text ({error}); use a Python whose SQLite has FTS5"
        ) from error
    connection.executemany("INSERT INTO documents VALUES (?, ?)", [(row["title"], row["text"]) for row in rows])
    connection.commit()
    return connection, len(rows), threading.Lock()
