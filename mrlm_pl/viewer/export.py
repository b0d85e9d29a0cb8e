"""One page that holds runs and opens without a server."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import Any

import msgspec

from mrlm_pl.viewer.comparison import compare_runs
from mrlm_pl.viewer.records import Summary
from mrlm_pl.viewer.runs import Run
from mrlm_pl.viewer.server import answer, pages

EPISODES = 64
"""Newest episodes of each run in an exported page without a selection; the last group or turn tree is whole."""

COMPARED = 4
"""Runs of which each pair is compared in an exported page."""

_IMPORT = re.compile(r'^import \{.*\} from "\./(\w+\.js)";\n', re.MULTILINE)


def export_page(runs: Mapping[str, Run], iteration: int | None = None, episode: str | None = None) -> str:
    """Return an HTML page with episodes of the runs, their curves, configurations and health.

    Args:
        runs: runs by name.
        iteration: iteration whose episodes the page holds; None for the newest of each run.
        episode: id of the episode that the page holds with its group, instead of an iteration.

    Raises:
        ConfigurationError: a run has no episode of the iteration.
        DataError: a run has no such episode.
    """
    files = {name: body.decode() for name, body in pages().items()}
    script, style = "".join(_modules("main.js", files, set())), files["style.css"]
    policy = f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; base-uri 'none'"
    data = msgspec.json.encode(dict(_answers(runs, iteration, episode))).decode().replace("<", "\\u003c")
    charset = '<meta charset="utf-8">'
    replacements = {
        charset: f'{charset}\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<link rel="icon" href="favicon.svg">\n': "",
        '<link rel="stylesheet" href="style.css">': f"<style>{style}</style>",
        '<script type="module" src="main.js"></script>\n': "",
        "</body>": f'<script type="application/json" id="data">{data}</script>\n'
        f'<script type="module">{script}</script>\n</body>',
    }
    page = files["index.html"]
    for old, new in replacements.items():
        page = page.replace(old, new)
    return page


def _answers(runs: Mapping[str, Run], iteration: int | None, episode: str | None) -> Iterator[tuple[str, Any]]:
    """Yield the addresses that the page may ask for, each with its data, or with the address that has the same data."""
    yield "runs", answer(runs, "runs", {})
    shown_ids: dict[str, set[str]] = {}
    for run in runs:
        for path in ("run", "metrics", "health"):
            yield f"{path}?run={run}", answer(runs, path, {"run": run})
        table = _table(runs[run], iteration, episode)
        yield f"episodes?run={run}", table
        shown_ids[run] = {row.id for row in table["rows"]}
        trees: dict[str, str] = {}  # the address of its tree, by path
        for row in table["rows"]:
            query = {"run": run, "id": row.id}
            yield f"episode?run={run}&id={row.id}", answer(runs, "episode", query)
            if row.tree:
                address = f"tree?run={run}&id={row.id}"
                if (first := trees.get(row.id)) is None:
                    tree = answer(runs, "tree", query)
                    trees |= {action["path"]: address for action in tree["actions"]}
                yield address, first or tree
    for run, other in permutations(list(runs)[:COMPARED], 2):
        both_ids = (shown_ids[run], shown_ids[other])
        yield f"compare?run={run}&other={other}", compare_runs(runs[run], runs[other], both_ids)


def _table(run: Run, iteration: int | None, episode: str | None) -> dict[str, Any]:
    """Return the table of the episodes in the page, with a note that says which of the run's they are."""
    if episode is not None:
        record = run.index.record(episode)
        table = run.index.table(record["iteration"])
        group_key = (record["iteration"], record["group"])
        files = run.index.newest_first(*[record["iteration"]] * 2)  # the table is bounded
        rows = [row for file in files for row in reversed(file.rows) if (row.iteration, row.group) == group_key]
        note = f"the exported page holds episode {episode} and its group"
    elif iteration is not None:
        table = run.index.iteration(iteration)
        rows = table["rows"]
        note = f"the exported page holds the episodes of iteration {iteration}"
    else:
        table = run.index.table()
        rows = _newest(table["rows"])
        whole = not table["more"] and len(rows) == len(table["rows"])
        note = "" if whole else f"the exported page holds the newest {len(rows)} of {run.total(table)} episodes"
    notes = [*table["notes"], *filter(None, [note])]
    return {**table, "rows": rows, "more": False, "older": None, "notes": notes, "total": run.total(table)}


def _newest(rows: list[Summary]) -> list[Summary]:
    """Return the newest rows, to the end of a group."""
    end = min(EPISODES, len(rows))
    while end < len(rows) and rows[end].group == rows[end - 1].group:
        end += 1
    return rows[:end]


def _modules(name: str, files: Mapping[str, str], seen: set[str]) -> Iterator[str]:
    """Yield the text of a module after those that it imports, without imports and exports."""
    if name not in seen:
        seen.add(name)
        for other in _IMPORT.findall(files[name]):
            yield from _modules(other, files, seen)
        yield re.sub(r"^export ", "", _IMPORT.sub("", files[name]), flags=re.MULTILINE)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
