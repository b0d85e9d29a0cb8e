from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml
from mrlm_environments import QuestionEnvironment

from mrlm_pl.data import TrajectoryDataModule
from mrlm_pl.environment import SPLITS
from mrlm_pl.environment import rows as rows_module
from mrlm_pl.environment.rows import read_rows, read_split
from mrlm_pl.environment.tasks import split_of
from mrlm_pl.errors import ConfigurationError, DataError
from tests.support.runs.logs import logged_here

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
    assert read_rows(ROWS, None, ("a", "b")) == ROWS


def test_rows_may_be_a_data_frame() -> None:
    import pandas

    frame: Any = pandas.DataFrame(ROWS)
    assert read_rows(frame, None, ("a", "b")) == ROWS
    gaps = [{"text": "a", "number": 1.5, "whole": 1}, {"text": None, "number": None, "whole": 2}]
    assert read_rows(pandas.DataFrame(gaps), None, ()) == gaps
    with pytest.raises(ConfigurationError, match=r"data\.train is a DataFrame; give the path of a file"):
        TrajectoryDataModule(frame)


def test_a_test_split_of_the_training_rows_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "d.jsonl").write_text(lines(ROWS))
    (tmp_path / "other.jsonl").write_text(lines(ROWS))
    train, again = str(tmp_path / "d.jsonl"), str(tmp_path / ".." / tmp_path.name / "d.jsonl")
    for test in (str(tmp_path / "other.jsonl"), again, again):
        for split in ("train", "test"):
            read_split({"train": train, "test": test}, split, ("a",), lambda row: str(row["a"]), dict)
    warned = [record for record in logged_here(caplog) if "both the training and the test split" in record.getMessage()]
    assert [record.args[0] for record in warned] == [again], "once"
    (tmp_path / "chats.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n')
    TrajectoryDataModule(str(tmp_path / "chats.jsonl"), validation=str(tmp_path / "chats.jsonl"))
    assert "chats.jsonl holds the rows of both the training and the validation split" in caplog.text


def test_cells_of_a_table_are_text_and_complete(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text('a,b\n1,"x, ""y""\nz"\n')
    assert read_rows(str(tmp_path / "d.csv"), None, ("a", "b")) == [{"a": "1", "b": 'x, "y"\nz'}]
    for row in ("1", "1,2,3"):
        (tmp_path / "d.csv").write_text(f"a,b\n1,2\n{row}\n")
        with pytest.raises(DataError, match=r"d\.csv, row 2: the row has more or fewer cells than the header"):
            read_rows(str(tmp_path / "d.csv"), None, ())
    (tmp_path / "d.csv").write_text('a,b\n1,"2\n')
    with pytest.raises(DataError, match=r"d\.csv: not CSV \("):
        read_rows(str(tmp_path / "d.csv"), None, ())


@pytest.mark.parametrize(
    ("text", "fault"),
    [("{", r"not JSON \("), ("5", "must hold a list of objects"), ('{"a": 1}', "must hold a list of")],
)
def test_json_of_another_form_is_named(text: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "d.json").write_text(text)
    with pytest.raises(DataError, match=rf"d\.json: {fault}"):
        read_rows(str(tmp_path / "d.json"), None, ())


def test_a_missing_field_is_named_with_its_row(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(lines([*ROWS, {"a": 3, "c": 1}]))
    with pytest.raises(DataError, match=r"d\.jsonl.*3.*'?b'?"):
        read_rows(str(tmp_path / "d.jsonl"), None, ("a", "b"))


def test_an_object_is_a_row_if_its_only_list_holds_no_objects(tmp_path: Path) -> None:
    row = {"a": "x", "labels": ["file"]}
    (tmp_path / "d.json").write_text(json.dumps(row))
    assert read_rows(str(tmp_path / "d.json"), None, ("a",)) == [row]
    (tmp_path / "d.json").write_text(json.dumps({"a": "x", "rows": ROWS}))
    assert read_rows(str(tmp_path / "d.json"), None, ()) == ROWS


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"a": 1}\nnonsense\n')
    with pytest.raises(DataError, match=r"d\.jsonl.*2"):
        read_rows(str(tmp_path / "d.jsonl"), None, ())


def test_a_missing_file_is_answered_with_the_nearest_name(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(lines(ROWS))
    with pytest.raises(DataError, match=r"trian\.jsonl.*train\.jsonl"):
        read_rows(str(tmp_path / "trian.jsonl"), None, ())


def test_an_unknown_suffix_is_refused(tmp_path: Path) -> None:
    (tmp_path / "d.csv.zip").write_text("a,b\n")
    with pytest.raises(DataError, match=r"'\.zip' is unknown"):
        read_rows(str(tmp_path / "d.csv.zip"), None, ())


def test_a_pipe_is_no_missing_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rows.jsonl")
    with pytest.raises(DataError, match=r"rows\.jsonl is a pipe or a device; write its content to a file"):
        read_rows(str(tmp_path / "rows.jsonl"), None, ())


def test_a_folder_names_a_file_in_it(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(lines(ROWS))
    with pytest.raises(DataError, match=rf"{tmp_path} is a folder; name a file in it, such as train\.jsonl"):
        read_rows(str(tmp_path), None, ())


def test_a_missing_file_with_no_name_like_it_tells_where_it_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text(lines(ROWS))
    with pytest.raises(DataError, match=rf"zebra\.parquet does not exist; it is looked for in the folder {tmp_path}"):
        read_rows(str(tmp_path / "zebra.parquet"), None, ())


def made(row: Mapping[str, Any]) -> str:
    if row["a"] < 0:
        raise DataError(f"a is {row['a']}")
    return f"a {row['a']}"


def identity(row: Mapping[str, Any]) -> str:
    return str(row["a"])


def test_the_rows_of_a_file_are_divided_by_their_identity(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text("\n" + lines([{"a": n} for n in range(100)]))  # a blank line counts as a line
    found = {split: read_split(str(path), split, ("a",), identity, made) for split in SPLITS}
    assert found == {split: [(n + 2, f"a {n}") for n in range(100) if split_of(str(n)) == split] for split in SPLITS}


def test_the_form_of_a_row_is_part_of_the_message(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(lines([{"a": 1}]))
    with pytest.raises(DataError, match=r"row 1: the field 'b' is missing; the row has the fields \['a'\]"):
        read_split([{"a": 1}], "train", [], str, lambda row: row["b"])
    form = r"row 1: the field 'b' is missing; a row is \{a, b\}, and this one has the fields \['a'\]"
    with pytest.raises(DataError, match=form):
        read_split(str(path), "train", ("a",), identity, lambda row: row["b"], form="{a, b}")


@pytest.mark.parametrize("split", SPLITS)
def test_bad_rows_are_skipped_with_their_names(tmp_path: Path, split: str, caplog: pytest.LogCaptureFixture) -> None:
    """A row that is rejected, one without a field, one that is not an object, one that is not JSON."""
    path = tmp_path / "d.jsonl"
    path.write_text(lines([*({"a": n} for n in range(100)), {"a": -1}, {"b": 1}, 5]) + '{"a": \n')
    found = read_split(str(path), split, ("a",), identity, made)
    assert found == [(n + 1, f"a {n}") for n in range(100) if split_of(str(n)) == split]
    assert "skipped 4 of 104 rows" in caplog.text
    for named in (
        "row 101: a is -1",
        "row 102: no field 'a'",
        "row 103: 5 is not an object",
        "row 104: not JSON",
        "; each line must be a JSON object",
    ):
        assert named in caplog.text


def test_the_warning_names_a_few_of_many_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(lines([{"a": 1}, *({"a": -n} for n in range(1, 14))]))
    read_split({"test": str(path)}, "test", ("a",), identity, made)
    read_split({"test": [{"a": 1}]}, "test", ("a",), identity, made)  # skips none, and warns of none
    (record,) = logged_here(caplog)
    assert len(record.getMessage().splitlines()) == 12
    assert record.getMessage().endswith("row 11: a is -10\nand 3 more")


def test_a_file_of_bad_rows_alone_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(lines([{"a": -1}, {"a": -2}]))
    with pytest.raises(DataError, match="row 1: a is -1"):
        read_split(str(path), "train", ("a",), identity, made)


def test_a_mapping_names_a_file_for_each_split(tmp_path: Path) -> None:
    for name, numbers in (("train", range(100)), ("test", range(100, 105))):
        (tmp_path / f"{name}.jsonl").write_text(lines([{"a": n} for n in numbers]))
    data = {name: str(tmp_path / f"{name}.jsonl") for name in ("train", "test")}
    found = {split: read_split(data, split, ("a",), identity, made) for split in SPLITS}
    assert found["test"] == [(n + 1, f"a {100 + n}") for n in range(5)]
    assert found["validation"] == [(n + 1, f"a {n}") for n in range(100) if split_of(str(n)) == "validation"]
    assert sorted([*found["train"], *found["validation"]]) == [(n + 1, f"a {n}") for n in range(100)]


def test_a_mapping_without_a_test_split_advises_its_validation() -> None:
    rows = [{"prompt": "1 + 1 =", "answer": "2"}]
    advice = r"has no split 'test'; .* as with `--split validation` or `split: validation` of HeldOutEvaluation, give"
    with pytest.raises(ConfigurationError, match=advice):
        read_split({"train": rows, "validation": rows}, "test", ["prompt"], str, str)


def test_a_split_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    number = next(n for n in range(100) if split_of(str(n)) == "train")
    path.write_text(lines([{"a": number}]))
    for split in ("test", "validation"):
        with pytest.raises(
            ConfigurationError, match=f"no row of .*, 1 in all, belongs to split '{split}'; give it more rows or"
        ) as told:
            read_split(str(path), split, ("a",), identity, made)
        advised = yaml.safe_load(str(told.value).split("`")[1].replace("FILE", str(path)))["data"]
        assert [len(read_split(advised, name, ("a",), identity, made)) for name in ("train", split)] == [1, 1]
    with pytest.raises(ConfigurationError, match=r"give it as `data: \{test: .*d\.jsonl, train: FILE\}`"):
        read_split({"test": str(path)}, "train", ("a",), identity, made)
    with pytest.raises(ConfigurationError, match="no split 'tests'; use train, validation, test"):
        read_split(str(path), "tests", ("a",), identity, made)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str | None, str]]:
    """A hub with a data set of one split and one with splits of other names; the loads that were asked of it."""
    import datasets

    loads: list[tuple[str, str | None, str]] = []
    splits = {"owner/single": ["test"], "owner/rounds": ["train_r1", "test_r1"], "owner/usual": ["train", "test"]}

    def load(name: str, configuration: str | None, split: str) -> list[dict[str, Any]]:
        loads.append((name, configuration, split))
        return [{"question": f"{split} {number}"} for number in range(100)]

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name, configuration: splits[name])
    return loads


def questions(data: str | Mapping[str, str], split: str) -> set[str]:
    found = read_split(data, split, ("question",), lambda row: row["question"], lambda row: row)
    return {row["question"] for _, row in found}


@pytest.mark.parametrize("data", ["owner/single", "owner/rounds#train_r1", "owner/single:main#test[:33]"])
def test_a_hub_data_set_of_one_split_is_divided_as_a_file_is(hub: Any, data: str) -> None:
    found = {split: questions(data, split) for split in SPLITS}
    assert sum(map(len, found.values())) == len(set.union(*found.values())) == 100
    assert min(map(len, found.values())) > 3
    name, _, own = data.partition("#")
    name, _, configuration = name.partition(":")
    assert set(hub) == {(name, configuration or None, own or "test")}


def test_splits_of_other_names_are_named_in_a_mapping(hub: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"has the splits train_r1, test_r1; name one.*owner/rounds#train_r1"):
        questions("owner/rounds", "train")
    rounds = {"train": "owner/rounds#train_r1", "test": "owner/rounds#test_r1"}
    assert questions(rounds, "test") == {f"test_r1 {number}" for number in range(100)}
    assert all(question.startswith("train_r1") for question in questions(rounds, "validation"))


def test_usual_splits_of_the_hub_are_taken_as_they_are(hub: Any) -> None:
    assert len(questions("owner/usual", "test")) == 100
    assert not questions("owner/usual", "train") & questions("owner/usual", "validation")


def test_files_that_are_damaged_are_named(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"a": 1}\n' * 100)
    damaged = {
        "half.jsonl.gz": whole[: len(whole) // 2],
        "flipped.jsonl.gz": whole[:12] + b"\xff\x00\xff" + whole[15:],
        "plain.jsonl.gz": b'{"a": 1}\n',
        "a.parquet": b"PAR1 and nothing",
        "latin.jsonl": '{"a": "\xe9"}'.encode("latin-1"),
    }
    for name, content in damaged.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name} cannot be read: ") as caught:
            read_rows(str(tmp_path / name), None, ())
        assert len(str(caught.value).splitlines()) == 1


def test_a_gzipped_file_is_unpacked_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = b'{"a": 1}\n' * 1000
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(content[:4500]) + gzip.compress(content[4500:]))
    monkeypatch.setattr(rows_module, "MAX_UNPACKED_BYTES", len(content))
    assert len(read_rows(str(tmp_path / "rows.jsonl.gz"), None, ())) == 1000
    monkeypatch.setattr(rows_module, "MAX_UNPACKED_BYTES", len(content) - 1)
    with pytest.raises(DataError, match=r"rows.jsonl.gz cannot be read: .*unpacks to more than 8999 bytes; split it"):
        read_rows(str(tmp_path / "rows.jsonl.gz"), None, ())


@pytest.mark.parametrize("row", ['{"a": "x\\ud83d"}', '{"\\udc00": 1}', '{"a": [{"b": ["\\ud800y"]}]}'])
def test_half_a_character_is_refused_with_its_row(tmp_path: Path, row: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"a": "\\ud83d\\ude00"}\n' + row + "\n")
    with pytest.raises(DataError, match=r"row 2: '\\u[a-f0-9]{4}' is half of a character \(a lone surrogate\)"):
        read_rows(str(file), None, ())


@pytest.mark.parametrize(
    "value", [MappingProxyType({"b": "\ud800"}), {(1, 2): "\ud800"}, {("\ud800",): 1}, ("\ud800",)], ids=repr
)
def test_half_a_character_is_found_in_rows_of_a_program(value: object) -> None:
    with pytest.raises(DataError, match=r"row 1: '\\ud800' is half of a character"):
        read_rows([{"a": value}], None, ())


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_rows_are_converted_one_after_the_other(tmp_path: Path, suffix: str) -> None:
    import pyarrow
    import pyarrow.csv
    import pyarrow.parquet

    path = tmp_path / f"d{suffix}"
    rows = [{"a": f"{number} " + "word " * 100} for number in range(20_000)]  # 10 MB of text
    if suffix == ".jsonl":
        path.write_text(lines(rows))
    elif suffix == ".csv":
        pyarrow.csv.write_csv(pyarrow.Table.from_pylist(rows), path)
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    tracemalloc.start()
    try:
        found = read_split(str(path), "train", ("a",), lambda row: row["a"], lambda row: len(row["a"]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 15_500 < len(found) < 16_500
    assert found[0][1] == len(rows[found[0][0] - 1]["a"])
    assert peak < 5_000_000


def test_the_rows_of_a_file_are_read_once_for_all_splits(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(lines([{"prompt": str(number)} for number in range(200)]))
    environment = QuestionEnvironment(str(path), [lambda reply, row: 0.0])
    posed = {split: {task.data["prompt"] for task in environment.tasks(split)} for split in ("train",)}
    path.unlink()
    posed |= {split: {task.data["prompt"] for task in environment.tasks(split)} for split in ("validation", "test")}
    assert set().union(*posed.values()) == {str(number) for number in range(200)}
    assert sum(map(len, posed.values())) == 200
