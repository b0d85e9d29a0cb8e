"""Runs on disk as the viewer reads them: configuration, state, metrics, evaluations, episodes."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import yaml
from tokenizers import Tokenizer

from mrlm_pl.episode_files import iteration_of
from mrlm_pl.errors import ConfigurationError, meant, nearest_path
from mrlm_pl.evaluation.intervals import mean_interval
from mrlm_pl.runs.publication import text_without_secrets
from mrlm_pl.runs.records.configuration_file import read_yaml
from mrlm_pl.runs.records.run import latest_configuration
from mrlm_pl.runs.state import STATE, state_of
from mrlm_pl.viewer.episode_index import EpisodeIndex
from mrlm_pl.viewer.line_file import LineFile
from mrlm_pl.viewer.logged_numbers import LoggedNumbers
from mrlm_pl.viewer.records import add_measures, token_values

LARGEST_TEXT = 64 << 20
"""Maximum number of bytes that are read of a configuration or a report."""

MOST_POINTS = 2000
"""Maximum number of points of a curve; of more, every n-th and the last are shown."""

MOST_REPORTS = 1000
"""Maximum number of files of ``mrlm whatif`` that are read."""

SETTINGS = 20_000
DEPTH = 3
"""Depth of the folders below a given one in which runs are looked for."""

_EPISODES = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".json")
_REPORTED = ("environment", "episodes", "mean_reward", "ci95", "accuracy", "accuracy_ci95")
_NOT_COMPARED = re.compile(r"^(seed_everything|output|resume|ckpt_path|trainer\.default_root_dir)$")


class _Outcomes(TypedDict):
    mean: float
    ci95: tuple[float | None, float | None]


_Reports = dict[str, dict[str, Any]]


class _Point(TypedDict):
    step: float
    environments: _Reports


class _Curve(TypedDict):
    points: list[_Point]


class _WhatIf(TypedDict):
    episode: str
    agent: str
    turn: int
    recorded: _Outcomes
    other: _Outcomes
    advantage: float
    ci95: tuple[float | None, float | None]


_WHATIF = msgspec.json.Decoder(_WhatIf)
"""Reads the shown fields of a report of ``mrlm whatif``; the texts of its continuations are left out."""


class Run:
    """A run folder, or a file of episodes, that the viewer may read.

    Args:
        path: path of the folder or file.
        key: name of the run in the viewer.
        root: folder that the user gave; links that lead out of it are not followed.
        named: name of the run in commands; None for a run of the demonstration.
    """

    def __init__(self, path: Path, key: str, root: Path, named: str | None) -> None:
        self.path, self.key, self.named, self._root = path, key, named, root.resolve()
        self.index = EpisodeIndex(self._episode_files, self._collected)
        self.lock = threading.RLock()
        self._numbers = LoggedNumbers(path / "metrics.csv")
        self._tokenizers: dict[str, Tokenizer] = {}

    def head(self) -> dict[str, Any]:
        """Return the line of the table of runs.

        The reward is the last logged one, else the mean of the newest stored episodes without branches and excluded
        ones. Its interval is theirs; None where their mean is another one.
        """
        settings = self.settings()
        rewards = self.index.last_rewards()
        values = [value for group in rewards for value in group]
        stored = math.fsum(values) / len(values) if values else None
        logged = self._last("rollout/reward")
        reward = stored if logged is None else logged
        is_same = stored is not None and reward is not None and math.isclose(stored, reward, rel_tol=1e-5, abs_tol=1e-6)
        return {
            "key": self.key,
            "state": self.state()[0],
            "changed": self._changed(),
            "algorithm": str(settings.get("model.class_path", "")).rpartition(".")[2],
            "environments": sorted(
                {
                    re.split("[.:]", str(value))[-1]
                    for name, value in settings.items()
                    if re.fullmatch(r"data\.environment(\.\d+)?(\.class_path)?", name)
                }
            ),
            "policies": {
                match[1]: value
                for name, value in settings.items()
                if (match := re.fullmatch(r"model\.policies\.([^.]+)\.model", name))
            },
            "seed": settings.get("seed_everything"),
            "family": self.family(),
            "iterations": self._last("progress/iteration"),
            "episodes": self._last("progress/episodes"),
            "failed": self._last("progress/failed_episodes"),
            "reward": reward,
            "ci95": mean_interval(rewards) if is_same else None,
        }

    def total(self, table: Mapping[str, Any]) -> str:
        """Return the number of a run's episodes in words.

        Args:
            table: table of the newest episodes; if it lacks older ones, the metrics count them, and without metrics its
                length is a bound.
        """
        shown = len(table["rows"])
        counted = int(self._last("progress/episodes") or 0)
        return str(shown) if not table["more"] else str(counted) if counted > shown else f"more than {shown}"

    def family(self) -> str:
        """Return as JSON the settings that are equal in runs that differ only in their seed; without any, the key."""
        compared = sorted(
            (name, str(value)) for name, value in self.settings().items() if not _NOT_COMPARED.match(name)
        )
        return json.dumps(compared or self.key)

    def detail(self) -> dict[str, Any]:
        """Return the state, the configuration, its versions, the resumptions and the evaluations."""
        return {
            "named": self.named,
            "state": self.state(),
            "path": str(self.path),
            "configuration": self._configuration(),
            "versions": self._versions(),
            "resumed": self._resumed(),
            "evaluations": [
                {"file": name, **{key: report.get(key) for key in _REPORTED}} for name, report in self._reports()
            ],
        }

    def state(self) -> tuple[str, str]:
        """Return the state of :func:`mrlm_pl.runs.state.state_of`, ``file`` or ``gone``, and its reason."""
        if not self.path.is_dir():
            return ("file" if self.path.exists() else "gone"), ""
        return state_of(self._content(self.path / STATE))

    def _versions(self) -> list[str]:
        """Return the versions that a run has written with its state, as in ``torch 2.9.0``; none of a file."""
        with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
            versions = json.loads(self._content(self.path / STATE))["versions"]
            return [f"{name} {number}" for name, number in versions.items()]
        return []

    def settings(self) -> Mapping[str, Any]:
        """Return the values of the latest configuration by name, as in ``model.gamma``."""
        return _settings_in(self._configuration())

    def metrics(self) -> dict[str, Any]:
        """Return the logged numbers for curves, and the marks of resumes.

        A column with more than :data:`MOST_POINTS` numbers keeps every n-th and the last; all columns share rows.
        """
        columns = self.curves()
        kept_rows: set[int] = set()
        every = 1
        for values in columns.values():
            rows = [row for row, value in enumerate(values) if value is not None]
            step = -(-len(rows) // MOST_POINTS) or 1
            kept_rows.update(rows[step - 1 :: step], rows[-1:])
            every = max(every, step)
        for name in (name for name in columns if name.startswith("progress/")):
            last: float | None = None  # a count is logged by the first update after a rollout, and holds for the others
            for row, value in enumerate(columns[name]):
                last = columns[name][row] = last if value is None else value
        return {
            "columns": {name: [values[row] for row in sorted(kept_rows)] for name, values in columns.items()},
            "every": every,
            "not_finite": {name: count for name, count in self._numbers.not_finite.items() if count},
            "resumed": self._resumed(),
        }

    def record(self, episode: str) -> dict[str, Any]:
        """Return an episode's whole record, with the text of its tokens.

        ``named`` is the name of the run in the command that prints the episode, ``played`` its name in commands that
        play it again; None without a run or without a configuration of its environment.

        Raises:
            DataError: there is no such episode.
        """
        played = self.named if self.path.is_dir() and latest_configuration(self.path) is not None else None
        commands = {"named": self.named, "played": played, "whatif": list(self._whatif(episode))}
        record = {**self.index.record(episode), **commands}
        for path in sorted((self.path / "tokens").glob(f"iteration-{record['iteration']:06d}*.jsonl.*")):
            if self._inside(path) is not None:
                with suppress(OSError):  # removed meanwhile
                    add_measures(record, (item[1] for item in LineFile(path).new_lines() if item is not None))
        # The numbers of JavaScript have 53 bits.
        record["seed"], record["task"] = str(record["seed"]), {**record["task"], "seed": str(record["task"]["seed"])}
        for rows in record["trajectories"].values():
            for row in rows:
                row["per_token"] = token_values(row)
                row["tokens"] = self._token_texts(str(row["policy"]), row["token_ids"])
        return record

    def logged(self) -> dict[str, list[float | None]]:
        """Return all logged numbers: columns by name, with None where a row lacks one."""
        return self._numbers.columns() if self._inside(self._numbers.path) else {}

    def _last(self, name: str) -> float | None:
        return self._numbers.last(name) if self._inside(self._numbers.path) else None

    def curves(self, *, from_start: bool = False) -> dict[str, list[float | None]]:
        """Return all logged numbers, and ``reward`` and ``accuracy`` of held-out evaluations.

        Those before and after the training are ``held_out/ENVIRONMENT/...``, those of the curve ``curve/...``. An
        evaluation is in the row of the update before it; the evaluation before training is in the first row.

        Args:
            from_start: whether to begin with a row of no cost, before the first update.
        """
        columns = self.logged()
        if from_start:
            first = {name: 0.0 if name.startswith("progress/") else None for name in columns} | {"step": -1.0}
            columns = {name: [first[name], *values] for name, values in columns.items()}
        steps = [-1 if step is None else int(step) for step in columns.get("step", ())]
        for kind, step, reports in self._held_out() if steps else ():
            row = next((row for row, logged_step in enumerate(steps) if logged_step + 1 >= step), len(steps) - 1)
            for environment, report in reports.items():
                for key, name in (("mean_reward", "reward"), ("accuracy", "accuracy")):
                    if isinstance(value := report.get(key), (int, float)):
                        column = f"{kind}/{environment}/{name}"
                        columns.setdefault(column, [None] * len(steps))[row] = float(value)
        return columns

    def _held_out(self) -> Iterator[tuple[str, float, Mapping[str, Any]]]:
        """Yield the evaluations before, during and after the training: kind, updates before it, and reports."""
        for moment, step in (("before", 0.0), ("curve", 0.0), ("after", math.inf)):
            with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):
                content = self._content(self.path / f"evaluation_{moment}.json")
                if moment == "curve":
                    points = msgspec.json.decode(content, type=_Curve)["points"]
                    yield from (("curve", point["step"], point["environments"]) for point in points)
                    continue
                reports = msgspec.json.decode(content, type=_Reports)
                if moment == "before" or self.state()[0] in ("finished", "unknown"):  # else of an end it went beyond
                    yield "held_out", step, reports

    def _collected(self) -> int | None:
        """Return the iterations that the metrics count, 0 without any; None for a file of episodes."""
        return int(self._last("progress/iteration") or 0) if self.path.is_dir() else None

    def _episode_files(self) -> list[Path]:
        if not self.path.is_dir():
            return [self.path]
        folder = self.path / "episodes"
        names: list[str] = []
        with suppress(OSError), os.scandir(folder) as entries:  # there is none, or it cannot be read
            inside = folder.resolve().is_relative_to(self._root)  # once: a long run has many files
            names = sorted(
                entry.name
                for entry in entries
                if ".jsonl" in entry.name
                and entry.name.endswith(_EPISODES)
                and ((inside and entry.is_file(follow_symlinks=False)) or self._inside(Path(entry)) is not None)
            )
        return [folder / name for name in names]

    def reports(self) -> dict[str, Mapping[str, Any]]:
        """Return the last evaluation of each environment."""
        return {str(report["environment"]): report for _, report in self._reports() if "environment" in report}

    def _reports(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the evaluations with the names of their files, those of the end of training last."""
        files = (
            [self.path] if self.path.suffix == ".json" else sorted(self.path.glob("evaluation_*.json"), reverse=True)
        )
        for path in filter(None, map(self._inside, files)):
            try:
                report = msgspec.json.decode(_text(path))
                reports = [report] if "mean_reward" in report else report.values()
                yield from ((path.name, entry) for entry in reports if isinstance(entry, dict))
            except (ValueError, TypeError, AttributeError, RecursionError):
                yield path.name, {}

    def _whatif(self, episode: str) -> Iterator[Mapping[str, Any]]:
        """Yield the reports of ``mrlm whatif`` on an episode, from ``RUN/whatif``."""
        for path in filter(None, map(self._inside, sorted((self.path / "whatif").glob("*.json"))[:MOST_REPORTS])):
            with suppress(ValueError, RecursionError):
                report = _WHATIF.decode(_text(path))
                if report["episode"] == episode:
                    yield report

    def _resumed(self) -> list[int]:
        """Return the iterations at which the run was resumed, by the times of its files."""
        if not self.path.is_dir():
            return []
        configs, times = [*self.path.glob("config-*.yaml")], []
        for path in self._episode_files() if configs else ():
            with suppress(FileNotFoundError):  # removed meanwhile
                times.append((path.stat().st_mtime, iteration_of(path)))
        later = [[number for modified, number in times if modified > config.stat().st_mtime] for config in configs]
        return sorted({min(numbers) for numbers in later if numbers} - {-1})

    def _changed(self) -> float:
        """Return the time of the last change; 0 for a run that was deleted."""
        paths = [self.path, *(self.path / name for name in ("metrics.csv", "episodes", "checkpoints", "config.yaml"))]
        return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)

    def _inside(self, path: Path | None) -> Path | None:
        """Return a regular file that lies in the given folder; None for any other, such as a link that leads out."""
        return path if path and path.is_file() and path.resolve().is_relative_to(self._root) else None

    def _content(self, path: Path | None) -> str:
        """Return the text of a file in the given folder; empty for any other."""
        return "" if (file := self._inside(path)) is None else _text(file)

    def _configuration(self) -> str:
        path = latest_configuration(self.path) if self.path.is_dir() else None
        return text_without_secrets(self._content(path))  # an exported page is made to be shown to others

    def _token_texts(self, policy: str, ids: Sequence[int]) -> list[str] | None:
        """Return the text of each token; None without a tokenizer, which a run that still trains may write later.

        The last of the tokens of one character has it; those before are replacement characters.
        """
        tokenizer = self._tokenizers.get(policy) or self._tokenizer(policy)
        if tokenizer is None:
            return None
        self._tokenizers[policy] = tokenizer
        texts = []
        for stop in range(1, len(ids) + 1):  # among those before it: a character has at most four tokens
            start = max(stop - 5, 0)
            before, text = (tokenizer.decode(ids[start:end], skip_special_tokens=False) for end in (stop - 1, stop))
            own = text[len(before.rstrip("\ufffd")) :]
            texts.append(own.lstrip("\ufffd") or own[-1:] or f"<{ids[stop - 1]}>")
        return texts

    def _tokenizer(self, policy: str) -> Tokenizer | None:
        """Return a policy's tokenizer: exported by the run, else of the built-in model, else from the hub's cache."""
        if Path(policy).name == policy and (path := self._inside(self.path / "policies" / policy / "tokenizer.json")):
            return _load_tokenizer(path)
        model = self.settings().get(f"model.policies.{policy}.model")
        if model == "builtin:tiny":
            return Tokenizer.from_str((resources.files("mrlm_pl") / "policy/tiny_model/tokenizer.json").read_text())
        if isinstance(model, str) and re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", model):
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(model, "tokenizer.json")
            return _load_tokenizer(Path(cached)) if isinstance(cached, str) else None
        return None


def demonstration() -> dict[str, Run]:
    """Return the recorded runs of this package; ``examples/record_viewer_demo.py`` records them."""
    folder = Path(__file__).parent / "demo"
    return {path.name: Run(path, path.name, folder, None) for path in sorted(folder.iterdir())}


def find_runs(names: Sequence[str]) -> dict[str, Run]:
    """Return the runs in the given run folders, folders of runs and files of episodes, by their names.

    Raises:
        ConfigurationError: a path does not exist or holds no run.
    """
    runs: dict[str, Run] = {}
    for name in names:
        path = Path(name).expanduser()
        if not path.exists():
            near = nearest_path(path, folders=True) or nearest_path(path)
            raise ConfigurationError(f"there is no run {name!r}; {meant(near)}")
        found_runs = runs_below(name)
        if not found_runs and path.is_dir() and any(file.name.endswith(_EPISODES) for file in path.iterdir()):
            raise ConfigurationError(
                f"{name!r} is a folder of episodes; name its run, {str(path.parent)!r}, or files in it"
            )
        if not found_runs:
            raise ConfigurationError(
                f"{name!r} holds no run: no config.yaml, metrics.csv or episodes; name a run folder, a folder of runs, "
                "a file of episodes (.jsonl, .jsonl.zst, .jsonl.gz) or a report of `mrlm eval --output`"
            )
        runs |= {key: run for key, run in found_runs.items() if key not in runs}
    return runs


def runs_below(name: str) -> dict[str, Run]:
    """Return the runs at and below a path, by their names; empty without any."""
    path = Path(name).expanduser()
    runs = {}
    for run_path in _runs_below(path, DEPTH):
        key = name.rstrip("/") if run_path == path else os.path.join(name, run_path.relative_to(path))
        runs[key] = Run(run_path, key, path if path.is_dir() else path.parent, key)
    return runs


def _runs_below(path: Path, depth: int) -> Iterator[Path]:
    if path.is_file():
        if path.name.endswith(_EPISODES):
            yield path
        return
    if any((path / name).exists() for name in ("config.yaml", "metrics.csv", "episodes")):
        yield path
    elif depth:
        for folder in sorted(path.iterdir()):
            with suppress(OSError):  # it cannot be read, or was removed meanwhile
                if folder.is_dir() and not folder.is_symlink():
                    yield from _runs_below(folder, depth - 1)


@functools.lru_cache(1000)
def _settings_in(text: str) -> Mapping[str, Any]:
    """Return the values of a configuration by name; the parser is slow, and the table of runs asks for all of them."""
    with suppress(ConfigurationError, yaml.YAMLError, RecursionError, ValueError):
        value = read_yaml(text)
        return dict(itertools.islice(_leaves(value) if value else (), SETTINGS))
    return {}


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the plain values in a configuration by name, without the words that only name a class's arguments."""
    nested = isinstance(value, list) and any(isinstance(item, (Mapping, list)) for item in value)
    if not value or not (nested or isinstance(value, Mapping)):
        if not isinstance(value, list) or len(value) <= SETTINGS:
            yield name, None if value in ({}, []) else value
        return
    for key, item in enumerate(value) if nested else value.items():
        yield from _leaves(item, name if key == "init_args" else f"{name}.{key}".lstrip("."))


def _text(path: Path) -> str:
    """Return the beginning of a file, up to :data:`LARGEST_TEXT` bytes."""
    with path.open("rb") as file:
        return file.read(LARGEST_TEXT).decode(errors="replace")


def _load_tokenizer(path: Path) -> Tokenizer | None:
    """Return the tokenizer of a file; None for a broken or half-written one."""
    with suppress(Exception):  # the library raises no narrower class
        return Tokenizer.from_file(str(path))
    return None
