"""Measure the cost of recorded episodes: bytes and seconds by compression, and an iteration with and without writing.

    python benchmarks/speed/records.py [--rounds 3] [--iterations 6] [--json benchmarks/results/records.json]

The debate of ``configs/tasks/teams/debate.yaml`` is trained with and without ``data.save_episodes``, in turns, each run
in its own process. Printed are the median seconds of an iteration and the median of the rounds' ratios. The episodes of
the first run are then encoded and compressed file by file, as the writer does: bytes and seconds for 1,000 episodes.
zstandard is measured where it is installed.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from provenance import provenance

from mrlm_pl.episode_files import read_episodes

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "mrlm_pl.cli.main", "train", "--config", str(ROOT / "configs/tasks/teams/debate.yaml")]
WARMUP = 1
"""Iterations at the beginning of a run that are not counted."""


def iteration_seconds(folder: Path, iterations: int, save: bool) -> list[float]:
    """Return the seconds of each iteration of a run."""
    options = ["--data.iterations", str(iterations), "--data.save_episodes", str(save).lower()]
    options += ["--trainer.limit_val_batches", "0", "--trainer.enable_progress_bar", "false"]
    subprocess.run([*COMMAND, *options, "--output", str(folder)], check=True, stdout=subprocess.DEVNULL)
    with (folder / "metrics.csv").open(newline="") as file:
        ends = [float(row["progress/seconds"]) for row in csv.DictReader(file) if row.get("progress/seconds")]
    return [later - earlier for earlier, later in itertools.pairwise(ends)][WARMUP:]


def formats() -> dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]]:
    """Return the compressions to compare, each with its decompression."""
    found: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
        f"gzip {level}": (lambda text, level=level: gzip.compress(text, level, mtime=0), gzip.decompress)
        for level in (1, 6, 9)
    }
    if importlib.util.find_spec("zstandard"):
        import zstandard

        for level in (3, 6, 9):
            compressor = zstandard.ZstdCompressor(level=level)
            found[f"zstd {level}"] = (compressor.compress, zstandard.ZstdDecompressor().decompress)
    return found


def seconds_of(work: Callable[[], Any], rounds: int) -> float:
    """Return the least seconds of several rounds."""
    return min(-time.perf_counter() + (work(), time.perf_counter())[1] for _ in range(rounds))


def costs(folder: Path, rounds: int) -> dict[str, Any]:
    """Return bytes and seconds for 1,000 episodes of a folder by step and compression."""
    episodes = list(read_episodes(folder))
    texts = [gzip.decompress(path.read_bytes()) for path in sorted(folder.glob("*.gz"))]
    per = 1000 / len(episodes)
    tokens = sum(len(row.token_ids) for episode in episodes for row in episode.rows())
    found: dict[str, Any] = {
        "episodes": len(episodes),
        "tokens": tokens * per,
        "text_bytes": sum(map(len, texts)) * per,
        "encode_s": per * seconds_of(lambda: [episode.to_json() for episode in episodes], rounds),
        "encode_with_json_s": per * seconds_of(lambda: [json.dumps(episode.to_dict()) for episode in episodes], rounds),
        "read_s": per * seconds_of(lambda: list(read_episodes(folder)), rounds),
    }
    for name, (compress, decompress) in formats().items():
        files = [compress(text) for text in texts]
        assert [decompress(file) for file in files] == texts
        found[name] = {
            "bytes": sum(map(len, files)) * per,
            "compress_s": per * seconds_of(lambda compress=compress: [compress(text) for text in texts], rounds),
            "decompress_s": per * seconds_of(lambda files=files, of=decompress: [of(file) for file in files], rounds),
        }
    return found


def main() -> None:
    """Measure and print; ``--json`` writes a file too."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="Pairs of runs, and repetitions of each compression.")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seconds: dict[bool, list[list[float]]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as work:
        for number, save in itertools.product(range(options.rounds), (True, False)):
            seconds[save].append(iteration_seconds(Path(work) / f"{number}-{save}", options.iterations, save))
        rounds = {save: [statistics.median(values) for values in runs] for save, runs in seconds.items()}
        medians = {save: statistics.median(itertools.chain(*runs)) for save, runs in seconds.items()}
        ratios = [saved / plain for saved, plain in zip(rounds[True], rounds[False], strict=True)]
        report = {
            **provenance(),
            "iteration_s": {"with": medians[True], "without": medians[False]},
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "per_1000_episodes": costs(Path(work) / "0-True" / "episodes", options.rounds),
        }
    text = json.dumps(report, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
