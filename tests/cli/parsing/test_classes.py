"""Names and values of a configuration against the types of parameters."""

from __future__ import annotations

import sys
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from jsonargparse.typing import Path_fr, PositiveInt

from mrlm_pl.cli.parsing.classes import find_mistake, resolve
from mrlm_pl.cli.parsing.config_files import MistakeError
from mrlm_pl.engines import Engine
from mrlm_pl.environment import Environment


@pytest.mark.parametrize(
    ("value", "annotation"),
    [
        ("rows.jsonl", Path_fr | None),
        ("3", PositiveInt | None),
        ("2", float),
        ("1:00", str | dict[str, int]),
        ("false", Environment | bool),
        (["a", "b"], list[Literal["a", "b"]]),
        ({"x": "1"}, dict[str, int]),
        (None, Environment | None),
    ],
)
def test_plain_values_stay_as_they_are(value: Any, annotation: Any) -> None:
    Path("rows.jsonl").touch()
    assert resolve(value, annotation, "key") == value
    assert find_mistake(value, annotation, "key") is None


@pytest.mark.parametrize(
    ("value", "annotation", "text"),
    [
        ("rovs.jsonl", Path_fr, r"key: File does not exist: .*rovs\.jsonl'; did you mean 'rows\.jsonl'\?"),
        ("-1", PositiveInt, "key: expected a number > 0, but the value is -1"),
        ("fast", float | None, "key: expected a number such as 0.5, but the value is 'fast'"),
        (["a", "c"], list[Literal["ab", "a"]], "key: expected one of 'ab', 'a', but the value is 'c'"),
        ("a.b", list[int] | None, r"key: expected list, but the value is 'a\.b'; write a list, as in `\[a\.b\]`"),
        ("solver", Sequence[str], r"key: expected list, but the value is 'solver'; write a list, as in `\[solver\]`"),
        ("many", PositiveInt, "key: expected an integer such as 2, but the value is 'many'"),
        ("3", tuple[int, ...], "key: expected a list, but the value is '3'"),
        ("3", tuple[int, int], "key: expected a list of 2 values, but the value is '3'"),
        ("3", dict[str, int] | None, r"key: expected a mapping, as in `{NAME: VALUE}`, but the value is '3'"),
        ({"x": "y"}, dict[str, int], r"key\.x: expected an integer such as 2, but the value is 'y'"),
    ],
)
def test_a_value_of_another_type_is_named(value: Any, annotation: Any, text: str) -> None:
    Path("rows.jsonl").touch()
    with pytest.raises(MistakeError, match=text):
        raise find_mistake(value, annotation, "key") or AssertionError("it fits")


RULE = """
def rank(rewards, groups):
    return rewards

number = 3
"""


@pytest.mark.parametrize("name", ["own_rule.rank", "./own_rule.py:rank"])
@pytest.mark.parametrize("function", [Callable[..., Any], Callable, typing.Callable])
def test_a_function_is_named_by_path_or_file(
    function: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rule.py").write_text(RULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rule", raising=False)
    path = resolve(name, Literal["group_normalized"] | function, "model.advantage")
    assert path == "own_rule.rank"
    assert find_mistake(path, Literal["group_normalized"] | function, "model.advantage") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_rule.rnk", "module 'own_rule' has no 'rnk'; did you mean 'rank'"),
        ("own_rul.rank", "there is no module 'own_rul'; did you mean 'own_rule'"),
        ("own_rule.number", "own_rule.number is a int, and not a function"),
    ],
)
def test_a_wrong_function_is_answered_with_the_nearest(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rule.py").write_text(RULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rule", raising=False)
    with pytest.raises(MistakeError, match=message):
        resolve(name, Literal["group_normalized"] | Callable[..., Any], "model.advantage")


def test_a_function_without_its_package_is_asked_for_the_path() -> None:
    fault = find_mistake("rank", Literal["group_normalized"] | Callable[..., Any], "model.advantage")
    assert str(fault) == (
        "model.advantage: expected a function (its import path `package.function`, or its name in a plugin) or one of "
        "'group_normalized', but the value is 'rank'"
    )


def test_a_dtype_is_a_value_and_no_class() -> None:
    engine = {"class_path": "InProcessEngine", "init_args": {"dtype": "torch.bfloat16"}}
    found = resolve(engine, Engine, "engine")
    assert (found, find_mistake(found, Engine, "engine")) == (engine | {"class_path": "mrlm_pl.InProcessEngine"}, None)
    found["init_args"]["dtype"] = "bfloat16"
    assert str(find_mistake(found, Engine, "engine")) == (
        "engine.dtype: expected a dtype, as in `torch.bfloat16`, but the value is 'bfloat16'"
    )


def test_the_class_that_a_function_without_arguments_makes_is_found_by_its_name() -> None:
    value = {"class_path": "OpenAICompatible", "init_args": {"url": "http://127.0.0.1:8000"}}
    found = resolve(value, Callable[[], Engine], "engine")
    assert found == value | {"class_path": "mrlm_pl.OpenAICompatible"}
    with pytest.raises(MistakeError, match="no engine 'OpenAICompatibl'; did you mean 'OpenAICompatible'"):
        resolve({"class_path": "OpenAICompatibl"}, Callable[[], Engine], "engine")
    assert resolve("InProcessEngine", Callable[[], Engine], "engine") == {"class_path": "mrlm_pl.InProcessEngine"}
    assert resolve("mrlm_pl.InProcessEngine", Callable[[], Engine], "engine") == "mrlm_pl.InProcessEngine"
    with pytest.raises(MistakeError, match="no engine 'InProcesEngine'; did you mean 'InProcessEngine'"):
        resolve("InProcesEngine", Callable[[], Engine], "engine")
    of_default = {"dtype": "torch.bfloat16"}
    assert resolve(of_default, Callable[[], Engine], "engine") == of_default
    own = {"class_path": "some.Loss"}
    assert resolve(own, Callable[[Engine], Engine], "loss") == own
