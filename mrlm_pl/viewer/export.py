"""One page that holds runs and opens without a server."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any

import msgspec

from mrlm_pl.viewer.runs import Run
from mrlm_pl.viewer.server import answer, pages

EPISODES = 64
"""Newest episodes of each run in an exported page; the last group or turn tree is whole."""

COMPARED = 4
"""Runs of which each pair is compared in an exported page."""

_IMPORT = re.compile(r'^import \{.*\} from "\./(\w+\.js)";\n', re.MULTILINE)


def exported(runs: Mapping[str, Run]) -> str:
    """Return an HTML page with the newest episodes of the runs, their curves, configurations and health."""
    files = {name: body.decode() for name, body in pages().items()}
    script, style = "".join(_modules("main.js", files, set())), files["style.css"]
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'"
    data = msgspec.json.encode(dict(_answers(runs))).decode().replace("<", "\\u003c")
    charset = '<meta charset="utf-8">'
    parts = {
        charset: f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<link rel="icon" href="favicon.svg">\n': "",
        '<link rel="stylesheet" href="style.css">': f"<style>{style}</style>",
        '<script type="module" src="main.js"></script>\n': "",
        "</body>": f'<script type="application/json" id="data">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body>',
    }
    page = files["index.html"]
    for old, new in parts.items():
        page = page.replace(old, new)
    return page


def _answers(runs: Mapping[str, Run]) -> Iterator[tuple[str, Any]]:
    """Yield the addresses that the page may ask for, each with its data."""
    yield "runs", answer(runs, "runs", {})
    for run in runs:
        for path in ("run", "metrics", "health"):
            yield f"{path}?run={run}", answer(runs, path, {"run": run})
        table = answer(runs, "episodes", {"run": run})
        rows = _newest(table)
        if len(rows) < len(table["rows"]):
            table["notes"].append(f"the exported page holds the newest {len(rows)} of {len(table['rows'])} episodes")
        yield f"episodes?run={run}", {**table, "rows": rows, "older": None}
        for row in rows:
            episode, tree = (row[table["columns"].index(name)] for name in ("id", "tree"))
            query = {"run": run, "id": episode}
            yield f"episode?run={run}&id={episode}", answer(runs, "episode", query)
            if tree:
                yield f"tree?run={run}&id={episode}", answer(runs, "tree", query)
    for run, other in permutations(list(runs)[:COMPARED], 2):
        yield f"compare?run={run}&other={other}", answer(runs, "compare", {"run": run, "other": other})


def _newest(table: Mapping[str, Any]) -> list[Any]:
    """Return the newest rows, to the end of a group."""
    group = table["columns"].index("group")
    rows = table["rows"]
    end = min(EPISODES, len(rows))
    while end < len(rows) and rows[end][group] == rows[end - 1][group]:
        end += 1
    return list(rows[:end])


def _modules(name: str, files: Mapping[str, str], seen: set[str]) -> Iterator[str]:
    """Yield the text of a module after those that it imports, without imports and exports."""
    if name not in seen:
        seen.add(name)
        for other in _IMPORT.findall(files[name]):
            yield from _modules(other, files, seen)
        yield re.sub(r"^export ", "", _IMPORT.sub("", files[name]), flags=re.MULTILINE)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
