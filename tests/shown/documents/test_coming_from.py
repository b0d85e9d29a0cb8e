"""The pages for users of other frameworks: our options and classes exist, and so do theirs where they are installed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import mrlm_environments
import pytest
import yaml

import mrlm_pl
from mrlm_pl import algorithms, data
from mrlm_pl.cli.parsing.early_check import training_options
from mrlm_pl.data.files.preferences import PreferenceDataModule
from mrlm_pl.data.rollout.collectors.asynchronous import AsyncOptions
from mrlm_pl.learner.policies.reference import KL, ReferenceSync
from mrlm_pl.losses import Entropy
from mrlm_pl.rollout.cross_policy import CrossPolicy
from tests.support.documents import ROOT

PAGES = sorted((ROOT / "docs" / "coming_from").glob("*.md"))
NESTED = {
    "model.entropy": Entropy,
    "model.reference_sync": ReferenceSync,
    "data": PreferenceDataModule,
    "data.validation_sampling": mrlm_pl.Sampling,
    "data.async_options": AsyncOptions,
    "data.cross_policy": CrossPolicy,
    "checkpoint": mrlm_pl.LastCheckpoint,
}
"""Settings whose names `training_options` leaves out."""

OWNERS = {
    "model": mrlm_pl.PPO,
    "model.policies.main": mrlm_pl.Policy,
    "model.kl": KL,
    "data": mrlm_pl.RolloutDataModule,
    "data.sampling": mrlm_pl.Sampling,
}
"""Classes whose defaults the pages state."""

STATED = re.compile(r"(?<!\w)([\d.]+(?:e-?\d+)?) by default")
OPTION = re.compile(r"(?:model|data|trainer|checkpoint)\.[\w.]+")
CLASS = re.compile(r"[A-Z]\w+")
OTHERS = {"Outcome", "Task", "Tool", "Environment.tasks", "Environment"}
"""Names in the column of ours that are neither algorithms, data modules nor environments."""


def rows(page: Path) -> Iterator[list[str]]:
    """Yield the cells of the tables, without their heads."""
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines):
        head = number + 1 < len(lines) and lines[number + 1].startswith("|---")
        if line.startswith("| ") and not head:
            yield [cell.strip() for cell in line.strip("|").split(" | ")]


def code(text: str) -> list[str]:
    """Return the inline code of a text."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_our_options_and_classes_exist(page: Path) -> None:
    options = {option.removeprefix("--") for option in training_options()}
    options |= {f"{place}.{name}" for place, cls in NESTED.items() for name in inspect.signature(cls).parameters}
    classes = {*algorithms.__all__, *data.__all__, *mrlm_environments.__all__, *mrlm_pl.__all__, *OTHERS}
    table = list(rows(page))
    assert len(table) > 15
    assert {len(row) for row in table} <= {2, 3}
    of_theirs = {text for row in table for text in code(row[0])}
    named = {text for text in code(page.read_text()) if OPTION.fullmatch(text)}
    assert named - of_theirs <= options
    for row in table:
        assert {text for text in code(row[1]) if CLASS.fullmatch(text)} <= classes, row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_defaults_that_a_page_states_are_ours(page: Path) -> None:
    for row in (row for row in rows(page) if STATED.search(row[-1])):
        place, _, name = code(row[1])[0].rpartition(".")
        owner = PreferenceDataModule if name == "batch_size" else OWNERS[place]
        default = inspect.signature(owner).parameters[name].default
        assert float(STATED.findall(row[-1])[0]) == default, row


def site_packages(environment: str, package: str) -> Path:
    """Return the folder of a peer's package."""
    found = next((ROOT / environment).glob(f"lib/*/site-packages/{package}"), None)
    if found is None:
        pytest.skip(f"{package} is not installed in {environment}")
    return found


def theirs(page: str) -> list[str]:
    """Return the peer's options of a page, without values and without the classes of verifiers' earlier releases."""
    named = [text for row in rows(ROOT / "docs" / "coming_from" / f"{page}.md") for text in code(row[0])]
    return [text.partition(":")[0] for text in named if re.fullmatch(r"(?!vf\.)[a-z][\w.]*(: .*)?", text)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "environment", "package", "files"),
    [
        ("trl", ".venv-peers", "trl", "trainer/*.py ../transformers/training_args.py"),
        ("comlrl", ".venv-peers-multi", "comlrl", "trainers/*/*.py"),
        ("verifiers", ".venv-verifiers", "verifiers", "v1/configs/*.py v1/configs/cli/*.py v1/types.py"),
    ],
)
def test_their_options_exist(page: str, environment: str, package: str, files: str) -> None:
    folder = site_packages(environment, package)
    text = "\n".join(file.read_text() for pattern in files.split() for file in sorted(folder.glob(pattern)))
    missing = [name for name in theirs(page) if not re.search(rf"\b{name.rpartition('.')[2]}\b", text)]
    assert not missing


@pytest.mark.slow
def test_their_keys_of_verl_exist() -> None:
    folder = site_packages(".venv-peers", "verl")
    config = yaml.safe_load((folder / "trainer/config/_generated_ppo_trainer.yaml").read_text())
    keys = [name for name in theirs("verl") if "." in name]
    assert len(keys) > 50
    for key in keys:
        value = config
        for part in key.split("."):
            assert part in value, key
            value = value[part]
