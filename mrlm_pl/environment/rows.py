"""Rows of a data set: a local file, or a hub name through ``datasets``. Free of torch."""

from __future__ import annotations

import csv
import functools
import io
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

from mrlm_pl.compressed_files import unpacked
from mrlm_pl.environment.tasks import SPLITS, split_of
from mrlm_pl.errors import ConfigurationError, DataError, nearest_path

logger = logging.getLogger(__name__)
_warn_once = functools.cache(logger.warning)

T = TypeVar("T")
Rows: TypeAlias = str | Sequence[Mapping[str, Any]]
"""A file, a hub name, or the rows themselves."""

NAMED_ROWS = 10
"""Skipped rows that a warning names."""

REFUSALS = (LookupError, TypeError, ValueError, AttributeError, SyntaxError, RecursionError, MemoryError, re.error)
"""Errors of code that converts a row which is not of the expected form."""

_BLANK = object()
"""Stands for an empty line, which has a number and no row."""

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
MAX_UNPACKED_BYTES = 4 << 30
"""Size of an unpacked file; a small file may unpack to a thousand times its size."""


def read_rows(source: Rows, split: str | None, fields: Sequence[str]) -> list[dict[str, Any]]:
    """Return all rows of a data set, in order, each with at least the given fields.

    Args:
        source: rows, or a pandas ``DataFrame``, whose missing cells become None; a local ``.jsonl``, ``.json`` (a
            list of objects, one object whose only list is the rows, or one row whose only list holds other values),
            ``.csv`` (with a header; all cells are text) or ``.parquet`` file, each optionally with ``.zst`` or ``.gz``;
            or a hub name, ``owner/name`` or ``owner/name:configuration``, either with its own split behind ``#``,
            as in ``facebook/anli#test_r1`` or ``owner/name#test[:33]``.
        split: split of a hub data set whose name gives none; ignored for a local file, which is one split.
        fields: names that every row must have.

    Raises:
        DataError: the source is missing or unreadable, or a row is not an object or lacks a field. The message names
            the file and the row (in JSONL the line), counted from 1.
    """
    return [row for _, row in numbered_rows(source, split, fields)]


def numbered_rows(source: Rows, split: str | None, fields: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of :func:`read_rows` with their numbers."""
    for number, row in rows_or_faults(source, split, fields):
        if isinstance(row, DataError):
            raise DataError(f"{data_name(source)}, row {number}: {row}") from row
        yield number, row


def rows_or_faults(
    source: Rows, split: str | None, fields: Sequence[str]
) -> Iterator[tuple[int, dict[str, Any] | DataError]]:
    """Yield each row of a source, or its fault, with its number, from 1; few rows are held at a time.

    Raises:
        DataError: the source is missing or unreadable, or has no rows.
    """
    rows: Any = source
    if hasattr(rows, "iterrows"):  # a pandas DataFrame
        rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
    if isinstance(source, str):
        rows = _local_rows(Path(source)) if _is_local(source) else _hub_rows(source, split)
    empty = True
    for number, row in enumerate(rows, start=1):
        if row is not _BLANK:
            empty = False
            yield number, _row_or_fault(row, fields)
    if empty:
        raise DataError(f"{data_name(source)} has no rows")


def _row_or_fault(row: Any, fields: Sequence[str]) -> dict[str, Any] | DataError:
    if not isinstance(row, dict):
        return row if isinstance(row, DataError) else DataError(f"{row!r:.80} is not an object with named fields")
    if surrogate := _lone_surrogate(row):
        return DataError(f"{surrogate} is half of a character (a lone surrogate); replace it")
    if missing := [name for name in fields if name not in row]:
        return DataError(f"no field {missing[0]!r}; the row has the fields {sorted(row)}")
    return row


def read_split(
    data: Rows | Mapping[str, Rows],
    split: str,
    fields: Sequence[str],
    identity: Callable[[Mapping[str, Any]], str],
    make: Callable[[Mapping[str, Any]], T],
    form: str = "",
    read: dict[Any, dict[str, list[tuple[int, T]]]] | None = None,
) -> list[tuple[int, T]]:
    """Return the rows of one split of a data set, converted by ``make``, with their numbers; the splits share no row.

    Rows, one local file, or a hub data set with a single split, is divided by the hash of each row's identity: 8 in 10
    ``train``, 1 each ``validation`` and ``test``. A mapping names a source for each split, and other hub data sets have
    splits of their own; where these give no ``validation``, it is the tenth of ``train`` that the hash assigns to it,
    which is logged. Rows that lack a field or that ``make`` rejects are skipped, with a warning that names them.

    Args:
        data: rows, a local file or a hub name, or a mapping from splits to these.
        split: ``train``, ``validation`` or ``test``.
        fields: names that every row must have.
        identity: text that is equal for equal problems.
        make: converts a row; raises a :class:`DataError` or one of :data:`REFUSALS` if it cannot be used. It is called
            for the rows of other splits that the source holds as well, so that a row which it rejects is named
            whatever split is asked for.
        form: the form of a row, for messages; by default the ``fields``.
        read: files and hub data that were read for other splits, which are not read again; this call's are added.

    Raises:
        DataError: the data cannot be read, or no row of it can be used; the message names the first row.
        ConfigurationError: the split is unknown, the mapping names no source for it, or no row belongs to it.
    """
    if split not in SPLITS:
        raise ConfigurationError(f"there is no split {split!r}; use {', '.join(SPLITS)}")
    source, source_split, assigned_splits = _split_source(data, split)
    form = form or (f"{{{', '.join(fields)}}}" if fields else "")
    read = read if isinstance(source, str) and read is not None else {}
    name = data_name(source)
    key = name, source_split
    if key not in read:
        converted: dict[str, list[tuple[int, T]]] = {assigned: [] for assigned in SPLITS}
        faults: list[DataError] = []
        for number, row in rows_or_faults(source, source_split, fields):
            try:
                if isinstance(row, DataError):
                    raise row
                entry = number, make(row)
                converted[split_of(identity(row))].append(entry)
            except (DataError, *REFUSALS) as error:
                faults.append(DataError(f"{name}, row {number}: {_refusal_reason(error, row, form)}"))
        count = len(faults) + sum(map(len, converted.values()))
        if faults and len(faults) == count:
            raise faults[0]
        if faults:
            lines = "\n".join(map(str, faults[:NAMED_ROWS]))
            lines += f"\nand {len(faults) - NAMED_ROWS} more" if len(faults) > NAMED_ROWS else ""
            logger.warning("skipped %d of %d rows of %s:\n%s", len(faults), count, name, lines)
        read[key] = converted
    rows, count = read[key], sum(map(len, read[key].values()))
    split_rows = sorted((row for assigned in assigned_splits for row in rows[assigned]), key=lambda row: row[0])
    if not split_rows:
        raise ConfigurationError(
            f"no row of {data_name(data)}, {count} in all, belongs to split {split!r}; give it more rows or "
            f"a file for it: `data: {_with_source(data, 'validation' if split == 'train' else split)}`"
        )
    if split == "train" and "test" in assigned_splits and len(split_rows) < count:
        logger.warning(
            "%s: %d rows in the training split, %d held out for validation; to train on all give `validation: FILE`",
            name,
            len(split_rows),
            count - len(split_rows),
        )
    return split_rows


def _refusal_reason(error: Exception, row: Any, form: str) -> str:
    """Return why a row cannot be used; without a form of rows, by its fields alone.

    >>> _refusal_reason(KeyError("test"), {"prompt": "P"}, "{prompt, test}")
    "the field 'test' is missing; a row is {prompt, test}, and this one has the fields ['prompt']"
    """
    if isinstance(error, DataError):
        return str(error)
    reason = f"the field {error} is missing" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
    return f"{reason}; {f'a row is {form}, and this one' if form else 'the row'} has the fields {sorted(row)}"


def data_name(data: Any) -> str:
    """Return a data set in a message.

    >>> data_name("a.jsonl"), data_name([{"a": 1}]), data_name({"train": "a.jsonl"})
    ('a.jsonl', 'the given rows', "{'train': 'a.jsonl'}")
    """
    return data if isinstance(data, str) else repr(data)[:200] if isinstance(data, Mapping) else "the given rows"


def _with_source(data: Rows | Mapping[str, Rows], split: str) -> str:
    """Return a data set in a message, with its own file for one more split.

    >>> _with_source("a.jsonl", "test"), _with_source({"test": "b.jsonl"}, "train")
    ('{train: a.jsonl, test: FILE}', '{test: b.jsonl, train: FILE}')
    """
    sources = data if isinstance(data, Mapping) else {"train": data}
    names = {name: source if isinstance(source, str) else "ROWS" for name, source in sources.items()}
    return f"{{{', '.join(f'{name}: {source}' for name, source in {**names, split: 'FILE'}.items())}}}"


def _split_source(data: Rows | Mapping[str, Rows], split: str) -> tuple[Rows, str | None, tuple[str, ...]]:
    """Return the source of a split's rows, the split in it if it has some, and the assigned splits that are taken."""
    if not isinstance(data, (str, Mapping)) or (isinstance(data, str) and (_is_local(data) or "#" in data)):
        return data, None, (split,)
    sources: dict[str, Rows]
    if isinstance(data, str):
        import datasets

        available = list(_from_hub(data, datasets.get_dataset_split_names))
        if len(available) == 1:
            return f"{data}#{available[0]}", None, (split,)
        if not set(available) & set(SPLITS):
            raise ConfigurationError(
                f"data set {data!r} has the splits {', '.join(available)}; name one for each of ours, as in "
                f"{{train: '{data}#{available[0]}', test: '{data}#{available[-1]}'}}"
            )
        sources = dict.fromkeys(available, data)
    else:
        sources = dict(data)
        if unknown := set(sources) - set(SPLITS):
            raise ConfigurationError(f"data names the split {sorted(unknown)[0]!r}; use {', '.join(SPLITS)}")
    warn_of_training_rows(sources, split)
    if split in sources and (split != "train" or "validation" in sources):
        return sources[split], split, SPLITS
    if "train" not in sources or split == "test":
        other = next((name for name in ("validation", *sources) if name in sources), "NAME")
        raise ConfigurationError(
            f"data {data_name(data)} has no split {split!r}; it has {', '.join(sources) or 'none'}: play another, as "
            f"with `--split {other}` or `split: {other}` of HeldOutEvaluation, give it as "
            f"`data: {_with_source(sources, split)}`, or give one file for all splits, `data: FILE`, which is divided "
            "8 : 1 : 1"
        )
    assigned_splits = ("validation",) if split == "validation" else ("train", "test")
    return sources["train"], "train", assigned_splits


def warn_of_training_rows(sources: Mapping[Any, Rows], split: str) -> None:
    """Warn, once, if a split to validate or test on has the source of the training split."""
    split_source, training_source = sources.get(split), sources.get("train")
    if split == "train" or not isinstance(split_source, str) or not isinstance(training_source, str):
        return
    split_source, training_source = (
        os.path.realpath(os.path.expanduser(name)) for name in (split_source, training_source)
    )
    # A data set on the hub has its own splits.
    if split_source == training_source and ("#" in split_source or os.path.exists(split_source)):
        _warn_once(
            "%s holds the rows of both the training and the %s split: results on them are not those on new rows; give "
            "each split rows of its own",
            str(sources[split]),
            split,
        )


def _is_local(source: str) -> bool:
    """Return whether a source means a file: it exists, has a data suffix, or could not be a hub name."""
    path = Path(source)
    if path.exists() or _stem_suffix(path) in SUFFIXES or path.suffix in (".zst", ".gz", ".txt"):
        return True
    return source.startswith((".", "/", "~", "\\")) or source.count("/") > 1 or "\\" in source


def without_arrow_nulls(source: str, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a source without the null fields that Arrow gives its objects: each has the fields of all.

    Parquet files and hub data sets cannot tell null from an absent field; rows of other files are as they are.

    >>> row = {"arguments": {"a": 1, "b": None}}
    >>> without_arrow_nulls("owner/name", row), without_arrow_nulls("rows.jsonl", row) == row
    ({'arguments': {'a': 1}}, True)
    """
    arrow = not _is_local(source) or _stem_suffix(Path(source)) == ".parquet"
    return _without_null(row) if arrow else row


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_null(child) for name, child in value.items() if child is not None}
    return [_without_null(child) for child in value] if isinstance(value, list) else value


def _stem_suffix(path: Path) -> str:
    """Return the file's kind, such as ``.jsonl`` for ``rows.jsonl`` and ``rows.jsonl.gz``."""
    return (path.with_suffix("") if path.suffix in (".zst", ".gz") else path).suffix


def _local_rows(path: Path) -> Iterator[Any]:
    """Yield the rows of a file, with a :class:`DataError` for each that cannot be read."""
    path = path.expanduser()
    if not path.is_file():
        raise DataError(_missing_file_message(path))
    suffix = _stem_suffix(path)
    if suffix not in SUFFIXES:
        raise DataError(
            f"{path}: the suffix {suffix or '(none)'!r} is unknown; use {', '.join(SUFFIXES)}, or one with .zst or .gz"
        )
    try:
        with io.BytesIO(_read_compressed(path)) if path.suffix in (".zst", ".gz") else path.open("rb") as file:
            if suffix == ".parquet":
                yield from _parquet_rows(file)
            else:
                text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n")
                yield from {".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows}[suffix](text)
    except DataError as fault:
        raise DataError(f"{path}: {fault}") from fault
    except (OSError, EOFError, ValueError, MemoryError) as error:
        remedy = "let your user read it" if isinstance(error, PermissionError) else "restore it from a copy"
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}; {remedy}") from error


def _read_compressed(path: Path) -> bytes:
    """Return the content of a compressed file.

    Raises:
        ValueError: it is larger than :data:`MAX_UNPACKED_BYTES`.
    """
    content = bytearray()
    for piece in unpacked(path):
        content += piece
        if len(content) > MAX_UNPACKED_BYTES:
            raise ValueError(f"it unpacks to more than {MAX_UNPACKED_BYTES} bytes; split it into several files")
    return bytes(content)


def _missing_file_message(path: Path) -> str:
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir() if entry.is_file())
        return f"{path} is a folder; name a file in it, such as {next(iter(names), 'rows.jsonl')}"
    if path.exists():
        return f"{path} is a pipe or a device; write its content to a file"
    if near := nearest_path(path):
        return f"data file {path} does not exist; did you mean {near}?"
    return f"data file {path} does not exist; it is looked for in the folder {path.parent.resolve()}, check the path"


def _jsonl_rows(text: IO[str]) -> Iterator[Any]:
    for line in text:
        try:
            yield json.loads(line) if line.strip() else _BLANK
        except (ValueError, RecursionError) as error:
            yield DataError(f"not JSON ({error}); each line must be a JSON object")


def _csv_rows(text: IO[str]) -> Iterator[Any]:
    cell_fault = DataError("the row has more or fewer cells than the header")
    try:
        for row in csv.DictReader(text, strict=True):
            yield cell_fault if None in row or None in row.values() else row
    except csv.Error as error:
        raise DataError(f"not CSV ({error})") from error


def _json_rows(text: IO[str]) -> list[Any]:
    whole = text.read()
    try:
        content = json.loads(whole)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not JSON ({error})") from error
    if isinstance(content, dict):
        lists = [value for value in content.values() if isinstance(value, list)]
        is_one_row = len(lists) == 1 and lists[0] and not isinstance(lists[0][0], dict)  # its list is a field of it
        content = [content] if is_one_row else lists[0] if len(lists) == 1 else None
    if not isinstance(content, list):
        raise DataError("must hold a list of objects, or one object with a single list of them")
    return content


def _parquet_rows(file: IO[bytes]) -> Iterator[Any]:
    # Imported here: an environment server that reads JSON does not wait for Arrow.
    import pyarrow.parquet

    try:
        # Few at a time: they are objects before they are converted.
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(1000):
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(str(error)) from error


def _hub_rows(source: str, split: str | None) -> Iterator[dict[str, Any]]:
    import datasets

    load = functools.partial(datasets.load_dataset, split=source.partition("#")[2] or split or "train")
    return map(dict, _from_hub(source, load))


def _from_hub(source: str, load: Callable[[str, str | None], T]) -> T:
    """Return the result of a function of ``datasets`` for a data set's name and configuration."""
    name, _, configuration = source.partition("#")[0].partition(":")
    try:
        return load(name, configuration or None)
    except Exception as error:  # the hub client raises errors of many unrelated classes
        raise DataError(
            f"data set {source!r} is not a local file and cannot be loaded from the hub ({type(error).__name__}: "
            f"{error}); check the name (owner/name, owner/name:configuration, either with #split) or give a path to a "
            f"{', '.join(SUFFIXES)} file"
        ) from error


def _lone_surrogate(value: Any) -> str | None:
    """Return the first lone surrogate in a JSON-like value; neither files nor tokenizers take it."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return ascii(value[error.start])
        return None
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple)):
        return next(filter(None, map(_lone_surrogate, value)), None)
    return None
