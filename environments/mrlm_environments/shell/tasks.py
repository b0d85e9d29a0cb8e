"""Tasks for a shell: AgentBench's rows, small generated ones, and how answers are compared."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

from mrlm_pl.sandbox import Sandbox

ROW_FORM = "{description, create: {init}, start, evaluation: {match} or {check, example}}"
_UNITS = {"": 1, "B": 1, "BYTE": 1, "BYTES": 1}
_UNITS |= {f"{letter}{tail}": 1024**power for power, letter in enumerate("KMGTP", 1) for tail in ("", "B", "IB")}
_WORDS = ("error", "linux", "login", "cache", "disk", "retry", "alpha", "delta")
_SUFFIXES = ("txt", "log", "csv", "cfg")


def _text(value: str) -> str:
    return value.replace("\r\n", "\n").replace("\r", "\n").strip()


def _integer(value: str) -> int | None:
    return int(value) if re.fullmatch(r"\s*[-+]?[0-9]{1,18}\s*", value) else None


def _size(value: str) -> float | None:
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)\s*", value)
    unit = _UNITS.get(found[2].upper()) if found else None
    return float(found[1]) * unit if found and unit else None


def _equal_values(read: Callable[[str], Any]) -> Callable[[str, str], bool]:
    return lambda answer, output: read(answer) is not None and read(answer) == read(output)


COMPARISONS: dict[str, Callable[[str, str], bool]] = {
    "integer-match": _equal_values(_integer),
    "size-match": _equal_values(_size),
    "string-match": lambda answer, output: _text(answer) == _text(output) != "",
    "containing": lambda answer, output: _text(output) != "" and _text(output) in _text(answer),
    "in": lambda answer, output: _text(answer) != "" and _text(answer) in _text(output),
}
"""AgentBench's check programs by name: whether an answer agrees with the reference's output. Nothing agrees with an
empty text, which the published ``in`` and ``string-match`` allow."""


def matches(answer: str, rule: Mapping[str, Any], sandbox: Sandbox) -> bool:
    """Return whether an answer meets a ``match`` rule: an exact text, or a regular expression for all of it.

    >>> matches(" 42\\n", {"answer": "42"}, Sandbox()), matches("x v1", {"regex": r"v[0-9.]+"}, Sandbox())
    (True, False)
    """
    text = answer.strip() if rule.get("strip", True) else answer
    if "regex" not in rule:
        return text == str(rule["answer"])
    # In the sandbox: for some patterns, an answer can make the match endless.
    return sandbox.run(f"import re; re.fullmatch({rule['regex']!r}, {text!r}) is not None").output == "True\n"


def task_data(row: Mapping[str, Any], scripts: str | None = None) -> dict[str, Any]:
    """Return a task's data, of a row in AgentBench's format.

    Args:
        row: row of the data set.
        scripts: folder that holds the files of scripts that rows name.

    Raises:
        ValueError: the file of a script is missing, or outside ``scripts``; also
            :data:`~mrlm_pl.environment.rows.REFUSALS`: a field is missing or of another form.
    """
    row = _with_code(row, scripts)
    create, evaluation = row.get("create") or {}, row["evaluation"]
    if isinstance(create, list) and create == evaluation.get("check"):
        create = {}  # published rows repeat their check there, which AgentBench ignores
    if not isinstance(create, Mapping):
        raise TypeError(f"create is {create!r:.80}, not an object with init")
    made: dict[str, Any] = {
        "description": str(row["description"]),
        "init": _script(create.get("init")),
        "start": _script(row.get("start")),
        "match": None,
        "checks": [],
        "reference": _script(evaluation.get("example") or row.get("example")),
    }
    if "match" in evaluation:
        rule = evaluation["match"]
        made["match"] = _rule({"answer": rule} if isinstance(rule, str) else dict(rule))
    else:
        checks = evaluation["check"]
        made["checks"] = [_check(item) for item in (checks if isinstance(checks, list) else [checks])]
        if not made["checks"]:
            raise ValueError("there is no check, so that anything would pass")
        if isinstance(made["checks"][0], str):
            raise ValueError(f"{made['checks'][0]} comes first; put null, which runs the example, before it")
        if None in made["checks"] and not made["reference"]:
            raise ValueError("a check runs the example, and there is none")
    return made


def generate_data(rng: Random) -> dict[str, Any]:
    """Return a small task: files in the home folder, and a question on them or a change to make."""
    folder, suffix, word = f"d{rng.randrange(10_000)}", rng.choice(_SUFFIXES), rng.choice(_WORDS)
    kind = rng.choice(("count", "lines", "sum", "largest", "create"))
    sizes = rng.sample(range(1, 60), rng.randint(3, 7))
    init = [f"mkdir -p ~/{folder}"]
    checks: list[Any] = [None, "integer-match"]
    if kind == "count":
        names = [f"f{index}.{rng.choice(_SUFFIXES)}" for index in range(len(sizes))]
        init += [f"touch ~/{folder}/{name}" for name in names]
        text = f"How many files in ~/{folder} end in .{suffix}?"
        reference = f"find ~/{folder} -name '*.{suffix}' | wc -l"
    elif kind == "lines":
        init += [f"echo '{rng.choice(_WORDS)} {size}' >> ~/{folder}/app.log" for size in sizes]
        text = f"How many lines of ~/{folder}/app.log contain the word {word}?"
        reference = f"grep -cw {word} ~/{folder}/app.log || true"
    elif kind == "sum":
        init += [f"echo {size} >> ~/{folder}/numbers" for size in sizes]
        text = f"What is the sum of the numbers in ~/{folder}/numbers, one on each line?"
        reference = f"awk '{{s+=$1}} END {{print s}}' ~/{folder}/numbers"
    elif kind == "largest":
        init += [f"head -c {100 * size} /dev/zero > ~/{folder}/f{index}" for index, size in enumerate(sizes)]
        text = f"What is the name of the largest file in ~/{folder}?"
        reference, checks = f"ls -S ~/{folder} | head -n 1", [None, "string-match"]
    else:
        text = f"Write the word {word} into the file ~/{folder}/{sizes[0]}.{suffix}, then finish."
        reference = f"echo {word} > ~/{folder}/{sizes[0]}.{suffix}"
        checks = [{"language": "bash", "code": f'[ "$(cat ~/{folder}/{sizes[0]}.{suffix})" = {word} ]'}]
    evaluation = {"check": checks, "example": reference}
    return task_data({"description": text, "create": {"init": "\n".join(init)}, "evaluation": evaluation})


def _rule(rule: dict[str, Any]) -> dict[str, Any]:
    if "regex" in rule:
        re.compile(rule["regex"])
    elif not str(rule["answer"]).strip():
        raise ValueError("match expects an empty answer")
    return rule


def _with_code(value: Any, scripts: str | None) -> Any:
    """Return a part of a row with the text of each script's file as its ``code``; comparisons keep their names."""
    if isinstance(value, list):
        return [_with_code(item, scripts) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "file" not in value or "code" in value or _comparison(value["file"]) in COMPARISONS:
        return {key: _with_code(item, scripts) for key, item in value.items()}
    if scripts is None:
        raise ValueError(f"the script {value!r} is in a file; set `scripts` to the folder of such files")
    folder = Path(scripts).resolve()
    path = (folder / value["file"]).resolve()
    if not path.is_relative_to(folder) or not path.is_file():
        raise ValueError(f"the script {value!r} is not a file in {folder}")
    return {**value, "code": path.read_text(encoding="utf-8")}


def _comparison(file: Any) -> str:
    return str(file).rpartition("/")[2].removesuffix(".py")


def _language(value: Mapping[str, Any]) -> str:
    language = value.get("language", "bash")
    if language not in ("bash", "python"):
        raise ValueError(f"scripts and checks are in bash or python, not {language!r}")
    return language


def _script(value: Any) -> str:
    """Return the text of a script for ``bash``."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, list):
        return "\n".join(map(_script, value))
    python = _language(value) == "python"
    return f"python3 -c {shlex.quote(str(value['code']))}" if python else str(value["code"])


def _check(item: Any) -> Any:
    """Return a check: None for the example, the name of a comparison, or a program."""
    if item is None:
        return None
    if isinstance(item, str):
        item = {"file": item} if item in COMPARISONS else {"code": item}
    name = _comparison(item.get("file", ""))
    return name if name in COMPARISONS else {"language": _language(item), "code": str(item["code"])}
