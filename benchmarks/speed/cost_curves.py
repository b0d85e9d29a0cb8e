"""Measure how the cost of a training step grows with agents, turns, group, vocabulary, episode and context.

    python benchmarks/speed/cost_curves.py --trl-python .venv-peers/bin/python \\
        --comlrl-python .venv-peers-multi/bin/python [--axis group] [--side ours] [--quick] [--json curves.json]

Each point runs in its own process with one thread, forked from one that has only imported its side's libraries. It
makes a small step first, then the measured ones: rollout and update of a random Llama model with forced lengths, as in
``grpo_step.py`` and ``team_step.py``. Measured are processor and wall seconds of a step, and the peak of the resident
memory beyond that at the start of training, when the models are loaded. Group, vocabulary and episode are GRPO against
TRL; agents, turns (IPPO, an episode is a chain) and tree (MAGRPO, whose turns branch: x is the number of states) teams
against CoMLRL. The last two have no peer: ``learner`` is a forward and backward pass over two rows of T tokens, the
first half in common; ``engine`` a turn over a context of T tokens, the first half from the cache of an earlier turn.

A slope is that of the logarithms: 1 is linear growth. It is shown over all points and between the last two, where
constant costs matter least; attention's own arithmetic grows with the square of the tokens. A point beyond
``--seconds`` of the processor or ``--gigabytes`` is recorded with that reason. Points that the file holds are kept.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpo_step
import random_models
import team_step
from grpo_step import Clock, Shape
from memory import resident_mib
from random_models import make_model

sys.path.insert(0, str(Path(__file__).parents[1]))
from log_slopes import LEAST, slopes
from provenance import provenance

MEASURES = ("cpu_s", "wall_s", "memory_mib")
TEAM = team_step.Work(
    turns=1, steps=1, algorithm="magrpo", group=4, new_tokens=32, critic="", learning_rate=1e-5, seed=0
)
SMALLEST = Shape(1, 2, 8, 8)
LLAMA = "transformers.models.llama.modeling_llama"
IMPORTS = {
    "ours": [LLAMA, "quiet_trainer", "mrlm_pl.algorithms.grpo", "mrlm_pl.algorithms.magrpo", "mrlm_pl.algorithms.ippo"],
    "trl": [LLAMA, "datasets", "trl.trainer.grpo_trainer"],
    "comlrl": [LLAMA, "datasets", "comlrl.trainers.actor_critic", "comlrl.trainers.reinforce"],
}


@dataclass(frozen=True)
class Axis:
    """One quantity that grows.

    Args:
        unit: name of the quantity on the axis.
        points: values of the quantity.
        work: returns the work of a step at a value.
        size: size of the model.
        model: returns changes of the model at a value.
        algorithm: algorithm of both sides.
        peer: name of the peer; empty: none.
        steps: number of measured steps.
    """

    unit: str
    points: tuple[int, ...]
    work: Callable[[int], Shape | team_step.Work | int]
    algorithm: str
    peer: str = ""
    size: str = "s"
    model: Callable[[int], dict[str, Any]] = lambda _: {}
    steps: int = 1


AXES = {
    "agents": Axis("agents", (1, 2, 4, 6, 8), lambda n: replace(TEAM, agents=n), "MAGRPO", "comlrl", steps=2),
    "turns": Axis(
        "turns", (1, 2, 3, 4, 6), lambda n: replace(TEAM, turns=n, algorithm="ippo", new_tokens=16), "IPPO", "comlrl"
    ),
    "tree": Axis(
        "states of 1 to 6 turns",
        (1, 3, 7, 15, 31, 63),
        lambda n: replace(TEAM, turns=n.bit_length(), group=2, new_tokens=16),
        "MAGRPO",
        "comlrl",
        size="xs",
    ),
    "group": Axis("episodes of a prompt", (2, 4, 8, 16, 32, 64), lambda n: Shape(1, n), "GRPO", "trl", steps=2),
    "vocabulary": Axis(
        "tokens of the vocabulary",
        (512, 2048, 8192, 32768, 152064),
        lambda _: Shape(1, 8, 32, 64),
        "GRPO",
        "trl",
        size="xs",
        model=lambda n: {"vocab": n, "num_hidden_layers": 1},
    ),
    "episode": Axis(
        "tokens of an episode",
        (128, 512, 2048, 4096, 8192),
        lambda n: Shape(1, 4, 64, n - 64),
        "GRPO",
        "trl",
        size="xs",
        model=lambda n: {"max_position_embeddings": n},
    ),
    "learner": Axis(
        "tokens of a row",
        (512, 2048, 8192, 16384, 32768),
        int,
        "the learner's pass",
        size="xs",
        model=lambda n: {"max_position_embeddings": n, "num_attention_heads": 2},
    ),
    "engine": Axis(
        "tokens of the context",
        (512, 2048, 8192, 16384, 32768),
        int,
        "a later turn in the engine",
        size="xs",
        model=lambda n: {"max_position_embeddings": n + 16, "num_attention_heads": 2},
    ),
}


class Meter(Clock):
    """A clock that also measures the memory beyond that at the beginning."""

    def __init__(self) -> None:
        super().__init__(warmup=0)

    def begin(self) -> None:
        """Note the beginning of the first step."""
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins here
        self.base = resident_mib("VmRSS")
        super().begin()

    def point(self, report: dict[str, Any]) -> dict[str, float]:
        """Return the costs of a step from the report of a side."""
        return {
            "cpu_s": statistics.median(report["cpu"]),
            "wall_s": statistics.median(report["steps"]),
            "memory_mib": resident_mib("VmHWM") - self.base,
        }


def step_of(side: str, folder: str, work: Any, steps: int, critic: str, clock: Clock) -> dict[str, Any]:
    """Run steps of a side and return its report."""
    if isinstance(work, Shape):
        if side == "ours":
            return grpo_step.run_ours(folder, steps, "32-true", shape=work, clock=clock)
        return grpo_step.run_peer(folder, steps, shape=work, clock=clock)
    run = team_step.run_ours if side == "ours" else team_step.run_peer
    return run(folder, replace(work, steps=steps, critic=critic), clock)


def passed(folder: str, axis: str, tokens: int, clock: Clock) -> dict[str, Any]:
    """Return the report of one pass of the learner, or of one turn in the engine, over rows of this length."""
    import torch
    from transformers import AutoModelForCausalLM

    from mrlm_pl.engines import Sampling
    from mrlm_pl.engines.base import SampleRequest
    from mrlm_pl.engines.local.engine import InProcessEngine
    from mrlm_pl.policy.forward.logprobs import token_logprobs
    from mrlm_pl.policy.forward.packing import TokenRows

    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, random_models.vocabulary_of(folder), (2, tokens), generator=generator)
    half = tokens // 2
    if axis == "learner":
        ids[1, :half] = ids[0, :half]
        action = torch.zeros(2, tokens, dtype=torch.bool)
        action[:, half:] = True
        lengths, group = torch.full((2,), tokens), torch.zeros(2, dtype=torch.int64)
        clock.begin()
        token_logprobs(model, TokenRows(ids, lengths, action, prefix_groups=group)).mean().backward()
    else:
        import asyncio

        engine = InProcessEngine()
        engine.load("p", model, 0)
        first, whole = tuple(ids[0, :half].tolist()), tuple(ids[0].tolist())
        sampling = Sampling(max_tokens=8)
        asyncio.run(engine.sample([SampleRequest(first, "p", 1, sampling, session="s")]))
        clock.begin()
        asyncio.run(engine.sample([SampleRequest(whole, "p", 2, sampling, session="s")]))
    clock.tick()
    return clock.report()


def measured(axis: str, side: str, value: int) -> dict[str, float]:
    """Return the costs of a step of one side at one value."""
    found, meter, once = AXES[axis], Meter(), Clock(0)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as critic:
        make_model(Path(folder), found.size, **found.model(value))
        make_model(Path(critic), found.size, knows_eos=True)
        work = found.work(value)
        if isinstance(work, int):
            passed(folder, axis, 256, once)
            return meter.point(passed(folder, axis, work, meter))
        small = SMALLEST if isinstance(work, Shape) else replace(work, turns=1, new_tokens=8)
        step_of(side, folder, small, 1, critic, once)
        return meter.point(step_of(side, folder, work, found.steps, critic, meter))


def forked(axis: str, side: str, value: int, seconds: int, gigabytes: float) -> dict[str, Any]:
    """Return the costs of a point from its own process, or the reason why it has none."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as found:
        child = os.fork()
        if not child:
            status = 1
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
                resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 2**30),) * 2)
                result = measured(axis, side, value)
                found.write(json.dumps(result))
                status = 0
            except BaseException as error:  # the parent reports it
                found.write("".join(traceback.format_exception(error)))
            finally:
                found.flush()
                os._exit(status)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        found.seek(0)
        text = found.read()
    if code in (-signal.SIGKILL, -signal.SIGXCPU):
        return {"reason": f"more than {seconds} s of the processor"}
    if code and ("MemoryError" in text or "allocate" in text):
        return {"reason": f"more than {gigabytes:g} GB"}
    if code:
        raise SystemExit(f"{axis} {side} {value} failed with {code}:\n{text[-3000:]}")
    return json.loads(text)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the points and slopes as text."""
    lines = []
    for axis, found in AXES.items():
        for side in ("ours", found.peer):
            own = [row for row in rows if row["axis"] == axis and row["side"] == side]
            for row in sorted(own, key=lambda row: row["x"]):
                costs = row.get("reason") or "  ".join(f"{measure} {row[measure]:9.3f}" for measure in MEASURES)
                lines.append(f"{axis:10} {side:6} {row['x']:7}  {costs}")
            for measure in LEAST:
                if (slope := slopes(own, measure)) is not None:
                    lines.append(f"{axis:10} {side:6} slope of {measure}: {slope[0]:.2f}, last {slope[1]:.2f}")
    return "\n".join(lines)


def points_of(side: str, python: str, wanted: Sequence[tuple[str, int]], limits: Sequence[str]) -> Iterator[Any]:
    """Yield the rows of a side as they are measured, in a process with its libraries."""
    command = [python, __file__, *limits, "--points", side, json.dumps(wanted)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        yield from (json.loads(line) for line in process.stdout if line.startswith('{"axis"'))
    if process.returncode:
        raise SystemExit(f"{side} failed with {process.returncode}")


def main() -> None:
    """Measure the points that the file does not hold, print the slopes and write all points."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl-python", default="", help="a Python with TRL: .venv-peers/bin/python")
    parser.add_argument("--comlrl-python", default="", help="a Python with CoMLRL: .venv-peers-multi/bin/python")
    parser.add_argument("--axis", nargs="+", choices=list(AXES), default=list(AXES))
    parser.add_argument("--side", nargs="+", choices=["ours", "peer"], default=["ours", "peer"])
    parser.add_argument("--quick", action="store_true", help="the two smallest points of each axis")
    parser.add_argument("--seconds", type=int, default=120, help="most processor seconds of a point")
    parser.add_argument("--gigabytes", type=float, default=12.0, help="most memory of a point")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--points", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.points:
        side = options.points[0]
        for name in IMPORTS[side]:
            importlib.import_module(name)
        importlib.import_module("torch").set_num_threads(1)
        for axis, value in json.loads(options.points[1]):
            costs = forked(axis, side, value, options.seconds, options.gigabytes)
            print("\n" + json.dumps({"axis": axis, "side": side, "x": value, **costs}), flush=True)
        return
    kept = json.loads(options.json.read_text(encoding="utf-8")) if options.json and options.json.exists() else None
    pythons = {"ours": sys.executable, "trl": options.trl_python, "comlrl": options.comlrl_python}
    found = provenance(kept=kept)
    found["versions"] = (kept["versions"] if kept else {}) | found["versions"]
    for peer in list(pythons)[1:]:
        if pythons[peer]:
            found["versions"] |= provenance(peer, pythons[peer])["versions"]
    found["axes"] = {
        name: {"unit": axis.unit, "algorithm": axis.algorithm, "peer": axis.peer} for name, axis in AXES.items()
    }
    rows = found["rows"] = list(kept["rows"]) if kept else []
    known = {(row["axis"], row["side"], row["x"]) for row in rows}
    limits = ["--seconds", str(options.seconds), "--gigabytes", str(options.gigabytes)]
    for side, python in pythons.items():
        if not python or {"ours": "ours"}.get(side, "peer") not in options.side:
            continue
        wanted = [
            (axis, value)
            for axis in options.axis
            if side in ("ours", AXES[axis].peer)
            for value in AXES[axis].points[: 2 if options.quick else None]
            if (axis, side, value) not in known
        ]
        for row in points_of(side, python, wanted, limits) if wanted else ():
            rows.append(row)
            print(json.dumps(row), flush=True)
            if options.json:
                options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
