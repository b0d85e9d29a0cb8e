"""Small texts to write about, made by seed: posts of people who ask for advice, and abstracts of papers.

Each comes with two parts that earn the highest score, as a demonstration. The sentences are made for this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import yaml

_FAMILIES = yaml.safe_load(Path(__file__).with_name("texts.yaml").read_text(encoding="utf-8"))


def make_text(family: str, rng: Random) -> dict[str, Any]:
    """Return a text of a family, under ``text``, and the choices that it was made of, under ``choices``.

    >>> made = make_text("arxiv", Random(1))
    >>> made["text"].startswith(f"We study {made['choices']['task']}.")
    True
    """
    made = _FAMILIES[family]
    choices = {name: rng.choice(options) for name, options in made["slots"].items()}
    return {"text": made["text"].format_map(choices), "choices": choices}


def demonstrate(family: str, choices: Mapping[str, str]) -> tuple[str, str]:
    """Return the two parts that earn the highest score on the text made of these choices."""
    first, second = _FAMILIES[family]["parts"]
    return first.format_map(choices), second.format_map(choices)
