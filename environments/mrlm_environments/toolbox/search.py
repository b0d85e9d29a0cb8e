"""Search for agents, with a pluggable back end. The default one searches a local corpus and says so."""

from __future__ import annotations

import functools
import json
import re
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from mrlm_pl.concurrency.backoff import Backoff
from mrlm_pl.concurrency.event_loop import shared_loop
from mrlm_pl.environment.rows import numbered_rows
from mrlm_pl.environment.tools import Tool, ToolError, clip, tool_schema
from mrlm_pl.errors import ConfigurationError, DataError, RemoteError
from mrlm_pl.settings import ChecksArguments, PositiveFloat, PositiveInt, between

MAX_WORDS = 32
"""Words of a query that are searched for; others are left out."""

MAX_RESULTS = 20
EMBEDDED_CORPUS = Path(__file__).with_name("web_corpus.jsonl")
_WORD = re.compile(r"\w{1,64}")
_OVERLOADED = (429, 502, 503, 504)
_building = threading.Lock()


@dataclass(frozen=True)
class SearchResult:
    """A document that was found: its title and text, and its address where it has one."""

    title: str
    text: str
    address: str = ""


class SearchBackend(ChecksArguments, ABC):
    """The index of :class:`WebSearch`. Copies of an environment copy it; keep connections out of a copy's state."""

    label: str = "the search engine"
    """Name of the searched collection, which the agent reads."""

    def prepare(self) -> None:
        """Build or reach the index, at the start of a run and before each episode; an error says why that fails."""

    @abstractmethod
    def search(self, query: str, k: int) -> Sequence[SearchResult]:
        """Return at most ``k`` results, best first.

        Raises:
            ToolError: the query failed; the agent reads the text. Any other error fails the episode.
        """


class CorpusSearch(SearchBackend):
    """Full-text search of a corpus by BM25 with word stems (SQLite's FTS5, in memory).

    The index is built once in a process.

    Args:
        path: a ``.jsonl``, ``.json`` or ``.parquet`` file, each also with ``.zst`` or ``.gz``, whose rows have a
            ``title`` and a ``text``, or ``contents`` whose first line is the title; None is the small corpus that comes
            with the package.

    Raises:
        DataError: there is no such file.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = Path(path) if path is not None else EMBEDDED_CORPUS
        if not self.path.is_file():
            remedy = "give a .jsonl file of rows with a title and a text, or with contents"
            raise DataError(f"corpus {str(path)!r} is not a file; {remedy}")

    @property
    def label(self) -> str:  # type: ignore[override]
        """Name of the searched collection, which is never the web."""
        return f"a local corpus of {_index(self.path)[1]} documents (not the web)"

    def prepare(self) -> None:
        """Build the index; see :meth:`SearchBackend.prepare`.

        Raises:
            DataError: the file cannot be read, or a row has another form.
            ConfigurationError: this Python's SQLite cannot search text.
        """
        _index(self.path)

    def search(self, query: str, k: int) -> list[SearchResult]:
        """Return documents that hold any of the query's words, those with the most telling words first."""
        words = _WORD.findall(query)[:MAX_WORDS]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        connection, _, lock = _index(self.path)
        with lock:
            rows = connection.execute(
                "SELECT title, text FROM documents WHERE documents MATCH ? "
                "ORDER BY bm25(documents, 2.0, 1.0), rowid LIMIT ?",
                (match, k),
            )
            return [SearchResult(title, text) for title, text in rows]


class RetrievalServer(SearchBackend):
    """A retrieval server with Search-R1's interface.

    A query is posted as ``{"queries": [QUERY], "topk": k, "return_scores": true}`` and answered by ``{"result":
    [[{"document": {"contents": "TITLE\\nTEXT"}}, ...]]}``. A query that the server rejects is a :class:`ToolError`. A
    server that cannot be reached or is overloaded is asked again; after the deadline the episode fails.

    Args:
        url: address of the endpoint, such as ``http://127.0.0.1:8000/retrieve``.
        seconds: deadline of a query, with all its attempts.

    Raises:
        ConfigurationError: the URL is not an HTTP address, or the deadline is not above 0.
    """

    def __init__(self, url: str, seconds: PositiveFloat = 20.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError(f"retrieval server: url is {url!r}; give one like http://127.0.0.1:8000/retrieve")
        self.url, self.seconds, self._reached = url, seconds, False

    def prepare(self) -> None:
        """Ask the server once; see :meth:`SearchBackend.prepare`.

        Raises:
            RemoteError: no retrieval server answers there.
        """
        if not self._reached:
            try:
                self.search("test", 1)
            except ToolError as error:
                raise self._error(str(error)) from error
            self._reached = True

    def search(self, query: str, k: int) -> list[SearchResult]:
        """Return the server's results; see :meth:`SearchBackend.search`.

        Raises:
            RemoteError: the server cannot be reached or is overloaded until the deadline, or answers in another form.
        """
        text = shared_loop().submit_watched(self._post(query, k)).result()
        try:
            (found,) = json.loads(text)["result"]
            return [SearchResult(*_title_and_text(item["document"])) for item in found[:k]]
        except (ValueError, RecursionError, LookupError, TypeError, AttributeError, DataError) as error:
            raise self._error(f"its answer has another form ({error}): {text[:200]!r}") from error

    async def _post(self, query: str, k: int) -> str:
        """Return the body of the server's answer."""
        import aiohttp  # imported here: it takes a quarter of a second

        backoff, asked = Backoff(self.seconds), {"queries": [query], "topk": k, "return_scores": True}
        while True:
            try:
                limit = aiohttp.ClientTimeout(total=max(backoff.left, 0.01))
                async with aiohttp.request("POST", self.url, json=asked, timeout=limit) as response:
                    text = await response.text(errors="replace")
                if response.ok:
                    return text
                fault = f"status {response.status}: {text[:200]}"
                if response.status not in _OVERLOADED:
                    raise ToolError(f"the search failed with {fault}")
            except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
                fault = f"{type(error).__name__}: {error}"
            if not await backoff.pause():
                raise self._error(f"no results within {self.seconds:g} s, at last {fault}")

    def _error(self, fault: str) -> RemoteError:
        return RemoteError(f"retrieval server {self.url}: {fault}; see whether it runs there, and its log")


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

    def tools(self) -> Sequence[Tool]:
        """Return the tool, after a check that it can search; see :meth:`SearchBackend.prepare`."""
        self.backend.prepare()
        return super().tools()

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


def _title_and_text(row: Mapping[str, Any]) -> tuple[str, str]:
    """Return the title and the text of a passage.

    >>> _title_and_text({"contents": '"Mont Blanc"\\nThe highest mountain of the Alps.'})
    ('Mont Blanc', 'The highest mountain of the Alps.')

    Raises:
        DataError: the passage has no title and text, and no contents.
    """
    title, text = row.get("title"), row.get("text")
    contents = row.get("contents")
    if isinstance(contents, str) and not ("title" in row and "text" in row):
        title, _, text = contents.partition("\n")
        title = title.strip().removeprefix('"').removesuffix('"')
    if not isinstance(title, str) or not isinstance(text, str):
        raise DataError(f"the fields are {sorted(row)}; title and text must be texts, or contents one")
    return title, text


def _index(path: Path) -> tuple[sqlite3.Connection, int, threading.Lock]:
    """Return the index of a corpus, its number of documents, and the lock for searching it; built by one thread."""
    with _building:
        return _build_index(path)


@functools.lru_cache(maxsize=8)
def _build_index(path: Path) -> tuple[sqlite3.Connection, int, threading.Lock]:
    connection = sqlite3.connect(":memory:", check_same_thread=False)
    try:
        connection.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='porter unicode61')")
        count = connection.executemany("INSERT INTO documents VALUES (?, ?)", _documents(path)).rowcount
        connection.commit()
    except sqlite3.OperationalError as error:
        connection.close()
        raise ConfigurationError(
            f"this Python's SQLite cannot search text ({error}); use a Python whose SQLite has FTS5"
        ) from error
    except DataError:
        connection.close()
        raise
    return connection, count, threading.Lock()


def _documents(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the title and the text of each row of a corpus."""
    for number, row in numbered_rows(str(path), None, ()):
        try:
            yield _title_and_text(row)
        except DataError as error:
            raise DataError(f"corpus {str(path)!r}, row {number}: {error}") from error
