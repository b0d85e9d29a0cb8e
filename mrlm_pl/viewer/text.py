"""Runs and episodes in a terminal."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from mrlm_pl.errors import counted
from mrlm_pl.evaluation.intervals import with_interval
from mrlm_pl.viewer.runs import Run

ROWS = 50
"""Maximum number of episodes in a list."""

ENDS = 5
"""Number of iterations at either end of a run whose mean reward is printed."""

WIDEST = 1000
"""Number of columns of the widest table."""

LEAST = 12
"""Width up to which a narrow terminal shows a column whole; of a cut column it shows that much or nothing."""

SHORTENED = {"stop": 60, "prompt": 24, "reply": 24}
"""Columns with long texts and their least widths; they fill the terminal."""

OMITTED = ("algorithm", "iteration")
"""Columns that a narrow terminal lacks before it folds a name; an episode's id begins with its iteration."""

SUMMARY = re.compile(
    r"rollout/(success|entropy|response_tokens|failed_episodes)|train/kl|(held_out|curve)/.*"
    r"|(train|val)/(nll|auc|(preference_|pair_)?accuracy)"
)
"""Metrics whose last values are printed."""

_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
_STYLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}


def visible(text: str) -> Text:
    """Return a text that models or others wrote, with control characters and direction marks made visible.

    >>> visible("a\\x1b[31mb\\u202ec").plain
    'a␛[31mb<U+202E>c'
    """
    return Text(_HIDDEN.sub(_visible_form, text))


def _visible_form(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 32 else f"<U+{code:04X}>"


def print_runs(runs: Mapping[str, Run], console: Console) -> None:
    """Print a line for each run."""
    environment = Column("environment", no_wrap=True, overflow="ellipsis", max_width=60)
    table = Table("run", "state", "algorithm", environment)
    for measure in ("iterations", "episodes", "last reward [95 %]"):
        table.add_column(measure, justify="right", no_wrap=True)
    for run in runs.values():
        head = run.head()
        shown = with_interval(head["reward"], head["ci95"])
        values = (head["key"], head["state"], head["algorithm"], ", ".join(head["environments"]))
        table.add_row(
            *map(visible, values), number_text(head["iterations"]), number_text(head["episodes"]), Text(shown)
        )
    _print_whole(table, console)


def print_episodes(run: Run, console: Console, iteration: int | None = None, failed: bool = False) -> None:
    """Print a line for each of the first episodes, or for all of an iteration, with the beginnings of long texts.

    Above them are the state and, without an iteration, the course of the rewards or of the loss, and the last values
    of the main metrics.

    Columns that are empty in all lines are left out. A failed episode shows its error instead of a reward.

    The largest advantage in magnitude comes first; episodes without one are the last, the newest first.

    Args:
        run: run whose episodes are printed.
        console: console to print to.
        iteration: iteration whose episodes are printed.
        failed: print only the episodes that failed.

    Raises:
        ConfigurationError: the iteration has no episodes.
    """
    listing = run.index.table() if iteration is None else run.index.iteration(iteration)
    rows = [row for row in listing["rows"] if row.error or not failed]
    rows.sort(key=lambda row: -1.0 if row.advantage is None else row.advantage, reverse=True)
    state = ": ".join(filter(None, run.state()))
    if state != "file":
        console.print(visible(f"{run.key}: {state}"), soft_wrap=True)
    if iteration is None and (course := _course(run)):
        console.print(course, highlight=False, soft_wrap=True)
    if failed and not rows:
        console.print("no episode failed" + (" among the newest" if listing["more"] else ""))
        return
    heads: list[str | Column] = ["episode", "iteration", "task", "group"]
    heads += [Column(head, justify="right", no_wrap=True) for head in ("reward", "turns", "tokens", "advantage")]
    widths = {**SHORTENED, "stop": None} if failed else SHORTENED
    heads += [Column(head, no_wrap=True, overflow="ellipsis", max_width=width) for head, width in widths.items()]
    cells = []
    for row in rows[: ROWS if iteration is None else None]:
        texts = (row.id, _iteration(row.iteration), row.task, "" if row.group == row.task else row.group)
        numbers = (None if row.error else row.reward, row.turns, row.tokens, row.signed_advantage)
        long_texts = (" ".join((row.error or row.excluded or row.stop).split()), row.prompt, row.reply)
        cells.append([*map(visible, texts), *map(Text, map(number_text, numbers)), *map(visible, long_texts)])
    filled = [(head, column) for head, column in zip(heads, zip(*cells, strict=True), strict=False) if any(column)]
    table = Table(*(head for head, _ in filled))
    for line in zip(*(column for _, column in filled), strict=True):
        table.add_row(*line)
    _print_whole(table, console)
    if iteration is None and len(rows) > ROWS:
        more = "`--iteration N` lists those of an iteration, `--episode ID` prints one"
        ordered = rows[0].advantage is not None
        if failed:
            more = f"{len(rows)} of them failed; {more}"
        shown = f"the {ROWS} largest advantages" if ordered else f"the newest {ROWS}"
        among = f"the newest {len(rows)} of " if ordered and listing["more"] else ""
        console.print(f"{shown} of {among}{run.total(listing)} episodes; {more}", highlight=False)
    for note in listing["notes"]:
        console.print(visible(note), style="yellow")


def _course(run: Run) -> str:
    """Return the mean reward, else loss, of the first and of the last values, and the last main metrics.

    The text is empty with fewer than two values.
    """
    curves = {name: [value for value in values if value is not None] for name, values in sorted(run.curves().items())}
    column = next((name for name in ("rollout/reward", "train/loss") if name in curves), "")
    logged = curves.get(column, [])
    count = min(ENDS, len(logged) // 2)
    if not count:
        return ""
    first, last = (math.fsum(values) / count for values in (logged[:count], logged[-count:]))
    ends = f"{number_text(first)} in the first {count}, {number_text(last)} in the last {count}"
    kind, unit = ("reward", "iterations") if column == "rollout/reward" else ("loss", "logged updates")
    last_values = ", ".join(
        f"{name} {number_text(values[-1])}" for name, values in curves.items() if values and SUMMARY.fullmatch(name)
    )
    return f"mean {kind} {ends} of {len(logged)} {unit}" + (f"\nlast {last_values}" if last_values else "")


def _print_whole(table: Table, console: Console) -> None:
    """Print a table with whole names: a narrow terminal folds long ones, elsewhere lines are as wide as needed.

    Cut columns share the remaining width.
    """

    def excess() -> int:
        return console.measure(table, options=console.options.update(max_width=WIDEST)).maximum - console.width

    narrow = console.is_terminal and excess() > 0
    if narrow:
        table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)
    longest = {
        column.header: max((cell.cell_len for cell in column.cells if isinstance(cell, Text)), default=0)
        for column in table.columns
    }
    cut = [
        (column, min(column.max_width, longest[column.header]))
        for column in table.columns
        if column.max_width and longest[column.header] > (LEAST if narrow else column.max_width)
    ]
    free = -excess() // max(1, len(cut))
    for column, width in cut:
        column.max_width = width + (free if narrow else max(0, free))
        if column.max_width < LEAST:
            table.columns.remove(column)
    for column in list(table.columns):
        if narrow and column.header in OMITTED and excess() > 0:
            table.columns.remove(column)
    for column in table.columns if narrow else ():
        column.overflow = "ellipsis" if column.no_wrap else "fold"
        column.no_wrap |= longest[column.header] <= LEAST
    folded = [column for column in table.columns if narrow and not column.no_wrap]
    for column in folded:
        column.max_width = LEAST // 2  # shown in any terminal
    console.width += max(0, excess())
    for column in folded:
        column.max_width = None
    console.print(table)


def print_episode(record: Mapping[str, Any], console: Console) -> None:
    """Print an episode by agent and turn, with rewards and advantages."""
    task = record["task"]
    iteration = _iteration(record["iteration"])
    console.print(visible(f"episode {record['id']}  group {record['group']}  iteration {iteration}"))
    console.print(visible(f"task {task['environment']}/{task['split']}/{task['index']}  seed {record['seed']}"))
    ending = f"failed: {record['error']}" if record["error"] else f"ended: {record['stop_reason']}"
    console.print(visible(ending if record["error"] else f"reward {number_text(record['reward'])}  {ending}"))
    if record.get("excluded"):
        console.print(visible(f"not trained on: {record['excluded']}"))
    for rows in record["trajectories"].values():
        for number, row in enumerate(rows, 1):
            position = f"  (trajectory {number} of {len(rows)})" if len(rows) > 1 else ""
            console.rule(visible(f"{row['agent']}  policy {row['policy']}{position}"), align="left")
            for message in row["messages"]:
                body = Text()
                if "turn" in message:
                    body.append(_turn(row["turns"][message["turn"]]) + "\n", style="bold")
                calls = "".join(f"\n{call['name']}({call['arguments']})" for call in message.get("tool_calls", ()))
                body.append(visible(message["content"] + calls))
                title = visible(f"{message['role']} {message.get('name') or ''}".strip())
                style = _STYLES.get(message["role"], "")
                console.print(Panel(body, title=title, title_align="left", border_style=style))


def _turn(turn: Mapping[str, Any]) -> str:
    """Return the numbers of a turn."""
    known = [name for name in ("return", "baseline", "advantage") if turn.get(name) is not None]
    credit = "".join(f"  {name} {number_text(turn[name])}" for name in known)
    if len(known) == 3:
        difference = turn["return"] - turn["baseline"]
        factor = turn["advantage"] / difference if difference else 1.0
        credit += "" if math.isclose(factor, 1.0, rel_tol=1e-3) else f" (x {number_text(factor)})"
    tokens = turn["stop"] - turn["start"]
    components = visible(", ".join(f"{name} {number_text(value)}" for name, value in turn["components"].items())).plain
    return (
        f"turn {turn['index']}  reward {number_text(turn['reward'])}{f' ({components})' if components else ''}{credit}"
        f"  {counted(tokens, 'token')}  version {turn['version']}  {visible(turn['finish_reason'])}"
    )


def _iteration(number: int) -> str:
    """Return the number of an episode's iteration; empty for one that was played outside training."""
    return "" if number < 0 else str(number)


def number_text(value: float | None) -> str:
    """Return a number with four digits, from 1,000 on rounded to an integer, below 1e-12 to 0; empty for none.

    >>> [number_text(value) for value in (15360, 1234.5678, 0.123456, -2.6e-18, math.nan, None)]
    ['15,360', '1,235', '0.1235', '0', 'nan', '']
    """
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{0 if abs(value) < 1e-12 else value:.4g}"
