"""Measure the cost of recorded episodes: bytes and seconds by compression, and an iteration with and without writing.

    python benchmarks/speed/records.py [--rounds 3] [--iterations 6] [--before FOLDER] [--json FILE]

The debate of ``configs/tasks/teams/debate.yaml`` is trained without ``data.save_episodes``, with it, and with the
measures of tokens, in turns; with ``--before`` also by the code in another checkout of this repository, in a process
beside the first. Seconds are those of the CPU, of the whole process, so that other programs on the machine hardly
count: printed are their medians over iterations, and the bytes on disk for 1,000 episodes. The episodes of the first
run are then encoded and compressed file by file, as the writer does.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import zstandard

ROOT = Path(__file__).parents[2]
TERMS = ("--model.kl.coefficient", "0.01", "--model.entropy.coefficient", "0.001")
VARIANTS = {
    "not saved": ("--data.save_episodes", "false"),
    "saved": ("--data.save_episodes", "true"),
    "saved with ratios": ("--data.save_episodes", "{tokens: 1}"),
    "saved with ratios, entropies and KL": ("--data.save_episodes", "{tokens: 1}", *TERMS),
}
BEFORE = ["not saved", "saved"]
"""Variants of the code in another checkout."""

CONFIGS = ("configs/tasks/teams/debate.yaml", "configs/debate.yaml")
"""Places of the debate's configuration, now and before."""

RUNS = "import json, sys; from mrlm_pl.cli.main import main; [main(words) for words in json.loads(sys.argv[1])]"

EPISODES = 32
"""Of an iteration."""


class CpuClock(lightning.Callback):
    """Append the CPU seconds of the process at the end of each update to a file.

    Args:
        path: path of the file.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, *arguments: Any) -> None:
        """Write a line."""
        with open(self.path, "a") as file:
            file.write(f"{time.process_time()}\n")


def started(code: Path, folder: Path, iterations: int, rounds: Sequence[Sequence[str]]) -> subprocess.Popen[bytes]:
    """Start a process that trains with the code of a checkout, in ``FOLDER/ROUND-VARIANT``.

    Args:
        code: folder of the checkout.
        folder: folder for the runs.
        iterations: number of iterations of a run, of :data:`EPISODES` episodes each.
        rounds: variants of each round, in their order.
    """
    config = next(code / name for name in CONFIGS if (code / name).exists())
    common = ["train", "--config", str(config), "--data.iterations", str(iterations), "--data.group_size", "8"]
    common += ["--trainer.limit_val_batches", "0", "--trainer.enable_progress_bar", "false"]
    commands = []
    for number, variants in enumerate(rounds):
        for variant in variants:
            place = folder / f"{number}-{variant}"
            clock = ["--trainer.callbacks+", "records.CpuClock", "--trainer.callbacks.path", f"{place}.clock"]
            commands.append([*common, *VARIANTS[variant], *clock, "--output", str(place)])
    folder.mkdir()
    sources = [code, code / "environments", code / "callbacks", Path(__file__).parent]
    return subprocess.Popen(
        [sys.executable, "-c", RUNS, json.dumps(commands)],
        cwd=code,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))},
        stdout=subprocess.DEVNULL,
    )


def seconds_and_bytes(folder: Path, variant: str, iterations: int) -> tuple[float, float]:
    """Return the median CPU seconds of an iteration over all rounds, and the bytes on disk for 1,000 episodes."""
    seconds: list[float] = []
    for clock in folder.glob(f"*-{variant}.clock"):
        ends = [float(line) for line in clock.read_text().split()]
        seconds += [later - earlier for earlier, later in itertools.pairwise(ends)]  # without the first iteration
    files = [file for kind in ("episodes", "tokens") for file in folder.glob(f"0-{variant}/{kind}/*.jsonl.*")]
    return statistics.median(seconds), sum(file.stat().st_size for file in files) * 1000 / (EPISODES * iterations)


def formats() -> dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]]:
    """Return the compressions to compare, each with its decompression."""
    found: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], bytes]]] = {
        f"gzip {level}": (partial(gzip.compress, compresslevel=level, mtime=0), gzip.decompress) for level in (1, 6, 9)
    }
    for level in (3, 6, 9):
        compressor = zstandard.ZstdCompressor(level=level)
        found[f"zstd {level}"] = (compressor.compress, zstandard.ZstdDecompressor().decompress)
    return found


def seconds_of(work: Callable[..., Any], rounds: int) -> float:
    """Return the least CPU seconds of several rounds."""
    return min(-time.process_time() + (work(), time.process_time())[1] for _ in range(rounds))


def costs(folder: Path, rounds: int) -> dict[str, Any]:
    """Return bytes and seconds for 1,000 episodes of a folder by step and compression."""
    from mrlm_pl.compressed_files import unpacked
    from mrlm_pl.episode_files import episode_files, read_episodes

    episodes = list(read_episodes(folder))
    texts = [b"".join(unpacked(path)) for path in episode_files(folder)]
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
    parser.add_argument("--rounds", type=int, default=3, help="Runs of each kind, and repetitions of each compression.")
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--before", type=Path, help="Checkout of another revision.")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    codes = {"now": (ROOT, [*VARIANTS])} | ({"before": (options.before.resolve(), BEFORE)} if options.before else {})
    with tempfile.TemporaryDirectory() as work:
        processes = []
        for name, (code, variants) in codes.items():
            rounds = [variants[number:] + variants[:number] for number in range(options.rounds)]
            processes.append(started(code, Path(work) / name, options.iterations, rounds))
        statuses = [process.wait() for process in processes]
        if any(statuses):
            sys.exit("a run has failed")
        found = {
            name: {variant: seconds_and_bytes(Path(work) / name, variant, options.iterations) for variant in variants}
            for name, (_, variants) in codes.items()
        }
        report = {
            **provenance(),
            "cpu_s_per_iteration": {name: {key: pair[0] for key, pair in of.items()} for name, of in found.items()},
            "bytes_per_1000_episodes": {name: {key: pair[1] for key, pair in of.items()} for name, of in found.items()},
            "per_1000_episodes": costs(Path(work) / "now" / "0-saved" / "episodes", options.rounds),
        }
    text = json.dumps(report, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from provenance import provenance

    main()
