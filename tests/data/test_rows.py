from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from mrlm_pl.data.rows import read_rows
from mrlm_pl.errors import DataError

ROWS = [{"a": 1, "b": "x"}, {"a": 2, "b": "é"}]


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def test_every_local_format_gives_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "d.jsonl").write_text(lines(ROWS))
    (tmp_path / "d.json").write_text(json.dumps(ROWS))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines(ROWS).encode()))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "d.parquet")
    for name in ("d.jsonl", "d.json", "d.jsonl.gz", "d.parquet"):
        assert read_rows(str(tmp_path / name), None, ("a", "b")) == ROWS, name


def test_a_missing_field_is_named_with_its_row(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(lines([*ROWS, {"a": 3, "c": 1}]))
    with pytest.raises(DataError, match=r"d\.jsonl.*3.*'?b'?"):
        read_rows(str(tmp_path / "d.jsonl"), None, ("a", "b"))


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"a": 1}\nnonsense\n')
    with pytest.raises(DataError, match=r"d\.jsonl.*2"):
        read_rows(str(tmp_path / "d.jsonl"), None, ())


def test_a_missing_file_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(lines(ROWS))
    with pytest.raises(DataError, match=r"trian\.jsonl.*train\.jsonl"):
        read_rows(str(tmp_path / "trian.jsonl"), None, ())


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("a,b\n")
    with pytest.raises(DataError, match=r"csv"):
        read_rows(str(tmp_path / "d.csv"), None, ())
