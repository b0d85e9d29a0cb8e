"""Measure scores per second and latency of ``mrlm serve --verifier``, by clients and conversations per request.

The model is the built-in tiny one with a random value head, or ``--verifier``. Every score is compared with the text's
first score: ``wrong`` counts other scores, ``rounded`` scores that differ in rounding.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mrlm_pl.serving.verifiers import VerifierClient

TEXTS = 512
ROUNDED = 1e-4
TABLE: list[list[str]] = []  # questions and answers


def tiny_verifier(folder: Path) -> str:
    """Return the folder of the built-in tiny model with a random value head."""
    import torch

    from mrlm_pl.policy import Policy

    policy = Policy(trained=False)
    policy.load()
    policy.add_value_head()
    assert policy.value_head is not None
    torch.manual_seed(0)
    torch.nn.init.normal_(policy.value_head.linear.weight)
    policy.save_pretrained(folder)
    return str(folder)


def texts(characters: int) -> tuple[list[str], list[str]]:
    """Return questions, and answers of at most ``characters`` characters."""
    draw = random.Random(0)
    questions = [f"{draw.randrange(1000)} + {draw.randrange(1000)} = ?" for _ in range(TEXTS)]
    sizes = [draw.randrange(characters // 2, characters) for _ in range(TEXTS)]
    return questions, ["".join(draw.choices("0123456789 +-=", k=size)) for size in sizes]


def measured(target: str, clients: int, size: int, seconds: float, known: Sequence[float]) -> dict[str, Any]:
    """Return the figures of client threads that request ``size`` scores at a time.

    Args:
        target: address of the server.
        clients: number of threads.
        size: conversations per request.
        seconds: duration.
        known: the score of each text.
    """
    client = VerifierClient(target, batch_size=1024)
    questions, answers = TABLE
    started = time.perf_counter()

    def work(number: int) -> tuple[list[float], list[float]]:
        draw, latencies, faults = random.Random(number), list[float](), list[float]()
        while time.perf_counter() - started < seconds:
            chosen = [draw.randrange(TEXTS) for _ in range(size)]
            begun = time.perf_counter()
            found = client.score_texts([questions[n] for n in chosen], [answers[n] for n in chosen])
            latencies.append(time.perf_counter() - begun)
            faults += [abs(score - known[n]) for n, score in zip(chosen, found, strict=True) if score != known[n]]
        return latencies, faults

    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(work, range(clients)))
    elapsed = time.perf_counter() - started
    latencies = sorted(latency for part, _ in found for latency in part)
    faults = [fault for _, part in found for fault in part]
    return {
        "clients": clients,
        "conversations": size,
        "scores_per_second": round(len(latencies) * size / elapsed),
        "p50_ms": round(1000 * latencies[len(latencies) // 2], 1),
        "p99_ms": round(1000 * latencies[int(0.99 * len(latencies))], 1),
        "wrong": sum(fault > ROUNDED for fault in faults),
        "rounded": sum(fault <= ROUNDED for fault in faults),
    }


def run(options: Sequence[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the figures of one server."""
    command = [sys.executable, "-m", "mrlm_pl.cli.main", "serve", "--port", "0", *options]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        target = server.stdout.readline().split()[-1]
        known = VerifierClient(target).score_texts(*TABLE)
        rows = []
        for clients, size in itertools.product(arguments.clients, arguments.conversations):
            row = measured(target, clients, size, arguments.seconds, known)
            rows.append({"server": " ".join(options[2:]), **row})
            print(json.dumps(rows[-1]), flush=True)
        return rows
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def main() -> None:
    """Run the command line's measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verifier", help="run or folder; default: the built-in tiny model with a random head")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--conversations", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--precision", nargs="+", default=["64", "32"], help="precision of the server's weights")
    parser.add_argument("--batch", type=int, nargs="+", default=[64], help="texts per call of the model")
    parser.add_argument("--characters", type=int, default=100, help="maximum length of an answer in characters")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds per row")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    TABLE[:] = texts(arguments.characters)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.verifier or tiny_verifier(Path(folder))
        for precision in arguments.precision:
            for batch in arguments.batch:
                settings = ["--verifier_precision", precision, "--verifier_batch", str(batch)]
                rows += run(["--verifier", model, *settings, "--device", arguments.device], arguments)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=2))
    if any(row["wrong"] for row in rows):
        raise SystemExit("a score was wrong")


if __name__ == "__main__":
    main()
