"""The commands of the README and of the page of commands run in order in an empty folder, at a small size."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from mrlm_pl.cli.main import main
from mrlm_pl.episode_files import read_episodes
from tests.support.documents import CONFIGS, ROOT, blocks, commands

PAGES = ("README.md", "docs/reference/commands.md")
MADE: Mapping[tuple[str, ...], list[str]] = {
    ("make", "quickstart"): ["mrlm", "fit", "--config", "configs/quickstart.yaml"]
}
"""Targets of make, with the command that they run."""
COMMANDS = [
    MADE.get((*words,), words)
    for page in PAGES
    for place, text in blocks("bash")
    if place.startswith(f"{page}:")
    for words in commands(text)
]
ELSEWHERE = {"init": "tests/cli/commands/test_init.py", "push": "tests/runs/test_publication.py"}
"""Commands that need a free package name or the hub, with their own tests."""
SHOWN = [words[1:] for words in COMMANDS if words[0] == "mrlm" and words[1] not in ELSEWHERE]

EVALUATION = ["--trainer.callbacks.init_args.episodes", "8"]
FIT = ["--data.iterations", "1", "--data.groups", "2", "--trainer.accelerator", "cpu"]
SMALL: Mapping[str, list[str]] = {
    "fit": [*FIT, *EVALUATION],
    "train": [*FIT, *EVALUATION],
    "sweep": [*FIT, *EVALUATION, "--seeds", "1"],
    "validate": ["--data.validation_episodes", "4", "--trainer.accelerator", "cpu", "--trainer.callbacks", "null"],
    "eval": ["--num-episodes", "4", "--device", "cpu"],
    "arena": ["--num-episodes", "2", "--device", "cpu"],
    "collect": ["--num-episodes", "4", "--device", "cpu"],
    "view": ["--text"],
}
"""Options that shorten a command."""


@pytest.fixture
def reader(outside_the_repository: None) -> None:
    """Change to a folder with the configurations, the examples and a data set of answers."""
    for folder in ("configs", "examples"):
        Path(folder).symlink_to(ROOT / folder)
    for name in ("a", "b"):
        Path(f"{name}.yaml").write_text((ROOT / "configs/quickstart.yaml").read_text())
    rows = [
        {"question": f"{n} + {n} = ?", "answer": f"{n + n + wrong}", "correct": not wrong}
        for n in range(8)
        for wrong in (0, 1)
    ]
    with gzip.open("answers.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def servers() -> Iterator[list[subprocess.Popen[str]]]:
    """Yield a list of servers that are stopped at the end of the test."""
    started: list[subprocess.Popen[str]] = []
    yield started
    for server in started:
        server.kill()
        server.communicate(timeout=60)


@pytest.mark.long
def test_the_commands_of_the_front_pages_in_order(
    reader: None, servers: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    address = ""
    for words in SHOWN:
        if words[0] == "serve":
            words = [*words, "--port", "0"]
            server = subprocess.Popen(
                [sys.executable, "-m", "mrlm_pl.cli.main", *words], stdout=subprocess.PIPE, text=True
            )
            servers.append(server)
            assert server.stdout is not None
            address = server.stdout.readline().removeprefix("serving on ").strip()
            assert re.fullmatch(r"127\.0\.0\.1:\d+", address)
            continue
        words = [word if word != "127.0.0.1:50051" else address for word in words]
        assert main([*words, *SMALL.get(words[0], [])]) == 0, f"{words}: {capsys.readouterr().err}"
    out = capsys.readouterr().out
    servers[0].send_signal(signal.SIGTERM)
    assert servers[0].wait(60) == 0

    assert {words[0] for words in SHOWN} >= {
        *SMALL,
        "replay",
        "rescore",
        "balance",
        "check-env",
        "report",
        "serve",
        "sessions",
        "info",
    }
    assert len(list(read_episodes(Path("runs/quickstart/episodes")))) == 2 * 8
    assert Path("runs/mine/checkpoints/last.ckpt").is_file()
    assert json.loads(Path("eval.json").read_text())["episodes"] == 4
    assert re.search(r"^paired gain in accuracy .* over runs/quickstart/evaluation_before.json", out, re.MULTILINE)
    assert len(list(read_episodes(Path("episodes.jsonl")))) == 4
    assert "16 of 16 episodes are equal to their record" in out
    assert len(Path("balanced.jsonl").read_text().splitlines()) > 8
    assert re.search(r"^math: (\d+) of \1 checks passed", out, re.MULTILINE)
    assert re.search(r"^(new minus old|old minus new) [+-]\d", out, re.MULTILINE)
    assert re.search(r"^\| runs/sweep/seed-0 \| 1 \|", out, re.MULTILINE)
    assert re.search(r"^\| runs .* last tenth of [\d,]+ tokens", out, re.MULTILINE)
    assert re.search(r"^0 sessions", out, re.MULTILINE)


TINY = ROOT / "mrlm_pl" / "policy" / "tiny_model"
HUB = "needs a model from the hub"
UNTRIED = {
    "gsm8k": HUB,
    "humaneval": HUB,
    "smollm2": HUB,
    "smollm2_team": HUB,
    "writing_tldr": HUB,
    "served_rollouts": "needs vLLM",
    "coordination_served": "needs a server of policies; tests/engines/http starts one",
    "remote_math": "needs a server of environments; tests/serving starts one",
    "openenv": "needs a server of OpenEnv; tests/serving/test_openenv.py starts one",
    "verifiers": "needs a server of environments; tests/environments/adapters/test_verifiers.py plays it",
    "debate_verified": "needs a verifier; tests/serving/verifiers starts one",
    "marlhf": "needs a reward model; tests/environments/test_scored.py trains one",
    "two_families": "needs the model of examples/other_family.py; tests/shown runs it",
    "team": "needs a co-trained team; benchmarks/learning/team_distillation.py runs it",
    "co_training": "needs the models of examples/specialists.py; tests/shown runs it",
}
FROM_FILES = ("recipes", "sft", "dpo", "simpo", "orpo", "kto", "madpo", "correctness_model")
FROM_FILES += ("pairwise_reward_model", "joint_reward_model")
"""Configurations that train on the files of other commands."""
PLAYING = [
    path
    for path in CONFIGS
    if path.parent.name not in ("servers", "logging")
    and path.stem not in UNTRIED
    and not {path.parent.name, path.stem} & {*FROM_FILES}
]


def test_every_exception_is_a_configuration() -> None:
    assert set(UNTRIED) <= {path.stem for path in CONFIGS}


@pytest.mark.slow
@pytest.mark.parametrize("path", PLAYING, ids=lambda path: path.stem)
def test_every_configuration_runs(path: Path, reader: None, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in re.findall(r"model: (runs/\S+)", path.read_text()):  # the result of a recipe
        Path(folder).parent.mkdir(parents=True)
        Path(folder).symlink_to(TINY)
    small = [*FIT, "--data.group_size", "2", "--trainer.limit_val_batches", "0", "--trainer.callbacks", "null"]
    status = main(["train", "--config", str(path), "--output", "run", *small])
    assert status == 0, capsys.readouterr().err
    assert list(Path("run/policies").glob("*/config.json"))
