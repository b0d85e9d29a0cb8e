"""Measure held-out reward of teams of tiny models before and after training, for several seeds.

    python benchmarks/learning/teams.py [--experiments families frozen emission halves ...] [--seeds 0 1 2 3 4]
        [--json out.json]

    families    two models of different families, with their own tokenizers, learn the coordination game together
    frozen      one learner with a frozen partner that collaborates at a rate of .3: it should act alone
    emission    two agents say the requested word, 8 tokens, 8 decisions each
    halves      two agents must say different halves: joint modes align and cross with the same number of decisions
    lengths     the length-ratio game, with one policy and with two
    three       three agents say the word
    debate      two policies debate before the rule-based judge

Intervals are 95 %: of an evaluation over its episodes, of a row ``all seeds`` over the seeds (Student's t).
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seeds import MRLM, ResultsFile, call, mean_and_half, parser_of

TINY = "{model: builtin:tiny, learning_rate: 1.0e-3}"
EPISODES = 512


def train(config: str, seed: int, folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run ``mrlm train`` and return both evaluations."""
    command = [MRLM, "train", "--config", f"configs/{config}.yaml", "--output", str(folder)]
    command += ["--seed_everything", str(seed), "--trainer.limit_val_batches", "0"]
    command += ["--trainer.callbacks+", "HeldOutEvaluation", "--trainer.callbacks.episodes", str(EPISODES)]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    call(*command)
    found = {}
    for moment in ("before", "after"):
        (report,) = json.loads((folder / f"evaluation_{moment}.json").read_text()).values()
        found[moment] = report
    return found


def partner(folder: Path, share: float, seed: int) -> str:
    """Return a model of another family that collaborates at this rate."""
    command = [sys.executable, "examples/other_family.py", "--output", str(folder)]
    call(*command, "--collaborates", str(share), "--seed", str(seed))
    return str(folder)


def said(report: Mapping[str, Any], agent: str, letter: str) -> float:
    """Return the fraction of episodes in which an agent's reply begins with a letter."""
    replies = [episode["messages"][agent][-1]["content"] for episode in report["transcripts"] if not episode["error"]]
    return sum(reply.strip().upper().startswith(letter) for reply in replies) / len(replies)


def summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """Return reward and success of both evaluations."""
    row: dict[str, Any] = {}
    for moment, report in found.items():
        row[moment] = {
            "reward": round(report["mean_reward"], 3),
            "ci95": [x if x is None else round(x, 3) for x in report["ci95"]],
        }
        if report["accuracy"] is not None:
            row[moment]["success"] = round(report["accuracy"], 3)
    return row


def families(seed: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Return rows by name."""
    other = partner(folder / "other", 0.5, seed)
    second = f"{{model: {other}, learning_rate: 1.0e-3}}"
    found = train(
        "models/two_families", seed, folder / "run", {"model.policies": f"{{first: {TINY}, second: {second}}}"}
    )
    shares = {agent: round(said(found["after"], agent, "C"), 3) for agent in ("row", "column")}
    return {"": summary(found) | {"collaborates": shares}}


def frozen(seed: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Return rows by name."""
    other = partner(folder / "other", 0.3, seed)
    second = f"{{model: {other}, trained: false}}"
    # Collaborating maximizes the team's reward; acting alone maximizes the learner's own.
    options = {"model.policies": f"{{first: {TINY}, second: {second}}}", "model.reward": "own"}
    found = train("models/two_families", seed, folder / "run", options)
    shares = {agent: round(said(found["after"], agent, "C"), 3) for agent in ("row", "column")}
    return {"": summary(found) | {"collaborates": shares}}


def emission(seed: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Return rows by name."""
    options = {"model": "MAGRPO", "model.policies": f"{{main: {TINY}}}", "data.group_size": 8, "data.iterations": 120}
    return {"": summary(train("tasks/games/word_emission", seed, folder, options))}


def three(seed: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Return rows by name."""
    options = {
        "model": "MAGRPO",
        "model.policies": f"{{main: {TINY}}}",
        "data.environment": "WordEmission",
        "data.environment.num_agents": 3,
        "data.group_size": 8,
    }
    return {"": summary(train("tasks/games/word_emission", seed, folder, options))}


def halves(seed: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Return rows by joint mode, with the same number of decisions."""
    rows = {}
    for mode in ("align", "cross"):
        options = {
            "model": "MAGRPO",
            "model.policies": f"{{first: {TINY}, second: {TINY}}}",
            "model.seats": "{left: first, right: second}",
            "model.joint_mode": mode,
            "data.group_size": 4,
            "data.iterations": 20,
        }
        rows[mode] = summary(train("tasks/games/halves", seed, folder / mode, options))
    return rows


def lengths(seed: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Return rows by number of policies."""
    return {
        name: summary(train(config, seed, folder / name, {}))
        for name, config in (("shared", "tasks/games/length_ratio_shared"), ("separate", "tasks/games/length_ratio"))
    }


def debate(seed: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Return rows by name."""
    return {"": summary(train("tasks/teams/debate", seed, folder, {}))}


EXPERIMENTS = {
    "families": families,
    "frozen": frozen,
    "emission": emission,
    "halves": halves,
    "lengths": lengths,
    "three": three,
    "debate": debate,
}


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Return the mean and the 95 % interval over seeds."""
    mean, half = mean_and_half(values)
    if len(values) < 2:
        return {"mean": round(mean, 3)}
    return {"mean": round(mean, 3), "ci95": [round(mean - half, 3), round(mean + half, 3)]}


def main() -> None:
    """Run every experiment with every seed and print a row each."""
    options = parser_of(__doc__, experiments=EXPERIMENTS).parse_args()
    file = ResultsFile(options.json)
    rows: list[dict[str, Any]] = []
    for experiment in options.experiments:
        rewards: dict[str, list[float]] = {}
        for seed in options.seeds:
            folder = Path(tempfile.mkdtemp())
            for name, row in EXPERIMENTS[experiment](seed, folder).items():
                rows.append({"experiment": f"{experiment} {name}".strip(), "seed": seed, **row})
                print(json.dumps(rows[-1]), flush=True)
                file.write(rows)
                rewards.setdefault(name, []).append(row["after"]["reward"])
        for name, values in rewards.items():
            rows.append({"experiment": f"{experiment} {name}".strip(), "all seeds": over_seeds(values)})
            print(json.dumps(rows[-1]), flush=True)
    file.write(rows)


if __name__ == "__main__":
    main()
