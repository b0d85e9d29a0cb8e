"""Phrases to avoid in the project's text, and the numbers of their places.

python -m tests.support.language          lower the allowances to the counts
python -m tests.support.language --accept set the allowances to the counts, also higher: after a merge of branches
python -m tests.support.language WORDS    list the places of the phrases whose names contain WORDS
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOWANCES = ROOT / "tests" / "shown" / "language_allowances.json"

_FORMS = r"(?:is|are|was|were|be|been|being|gets?|got)"
PHRASES = {
    "told of (is logged, warns, raises)": rf"\b{_FORMS} told\b",
    "Nothing when (Validate ...)": r"\bNothing,? (?:when|if|unless)\b",
    "so many (name the number)": r"\bso (?:many|much|few|long|often|far)\b(?! as\b| that\b)",
    "cut short (truncated)": r"\bcut short\b",
    "whoever (name the actor)": r"\b[Ww]hoever\b",
    "learnt (learned, trained on)": r"\blearnt\b",
    "paid (rewarded)": rf"\b{_FORMS} paid\b|\b[Pp]ays\b",
    "goes on with (continues, bootstraps)": r"\b(?:go|goes|went|going|gone) on\b",
    "in vain (fails, without an answer)": r"\bin vain\b",
    "afresh, anew (again)": r"\b(?:afresh|anew)\b",
    "spelt (spelled, written)": r"\bspelt\b",
    "rests (is not updated, is idle)": r"\brests\b",
    "what a ... has not (use the noun)": r"\b(?:[Ww]hat (?:a|an|the|it|they|was|has|are|no)|what is) ",
    "nobody (name the actor)": r"\b[Nn]obody\b",
    "each with each (all pairs)": r"\beach with each\b",
    "that which ... (use the noun)": r"\b[Tt]hat which\b|\bthe like\b",
    "What ... as a first line (Return ...)": r'"""(?:What|How|Where|Who|When|Whether|Nothing)\b',
    "an argument: of ... (write a noun phrase)": r"(?m)^ +[a-z_, ]+: of ",
    "for ever (forever)": r"\bfor ever\b",
    "outside of (outside)": r"\b(?:outside|inside) of\b",
    "white space (whitespace)": r"\b[Ww]hite space\b",
    "truth value (boolean)": r"\btruth values?\b",
    "in place of (instead of)": r"\bin place of\b",
    ", also in ... (even in ...)": r", also (?:after|as|at|by|for|from|if|in|of|on|to|under|when|where|while|with)\b",
    "a ... of its own (its own ...)": r"\ban? \w+ of (?:its|one's|their|your) own\b(?! \w+s\b)",
    "of the hub (on the hub)": r"\bof (?:the|a) (?:Hugging Face )?[Hh]ub\b(?! data)",
    "by GRPO (with GRPO)": r"\b[Tt]rain\w*(?: \S+){0,6} by (?:DPO|GRPO|MAGRPO|PPO|RLOO|SFT)\b",
    "is no ... (is not a ...)": r"(?<!here )\b(?:are|is) no (?:agent|checkpoint|environment|file|folder|function"
    r"|mapping|multiple|number|object|path|policy|report|row|text)\b",
    "in order (cleanly)": r"\borderly\b|\b(?:end|ended|ends)(?: \w+){0,2} in order\b",
    "side by side (in parallel)": r"\b(?:play|played|step|train|wait|work)(?: \w+){0,6} side by side\b",
    "stands in (is in)": r"\b[Ss]tands? (?:after|alone|at|before|between|first|in (?!for)|once|together|twice)",
    ".5 (0.5)": r"(?<=[\s(\[])\.\d",
    "British spelling": r"(?:normalis|centralis|optimis|initialis|synchronis|recognis|generalis|randomis|serialis)"
    r"(?:e|ing|ation)|behaviour|colour|favour|neighbour|honour|licence",
}
"""Regular expressions of phrases, by a name with a better wording."""

EXPRESSIONS = {name: re.compile(expression) for name, expression in PHRASES.items()}
OWN = (Path(__file__).name, "test_language.py")
_FOLDERS = ("mrlm_pl", "environments", "callbacks", "tests", "examples", "benchmarks", "configs", "docs")
_FILES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "pyproject.toml", "Makefile")


def files() -> Iterator[Path]:
    """Yield the counted files."""
    for folder in _FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".yaml") and "_pb2" not in path.name and path.name not in OWN:
                yield path
    yield from (ROOT / name for name in _FILES)


@cache
def _texts() -> tuple[tuple[Path, str], ...]:
    return tuple((path, path.read_text(encoding="utf-8")) for path in files())


def places(phrase: str) -> Iterator[tuple[str, str]]:
    """Yield the places of a phrase as ``FILE:LINE``, each with its line."""
    for path, text in _texts():
        for match in EXPRESSIONS[phrase].finditer(text):
            begin = text.rfind("\n", 0, match.start()) + 1
            line = text[begin:].partition("\n")[0].strip()
            yield f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}", line


def area_of(place: str) -> str:
    """Return the part of the project that contains a place.

    >>> area_of("mrlm_pl/engines/base.py:3"), area_of("docs/data/files.md:1")
    ('mrlm_pl/engines', 'docs')
    """
    first, *rest = place.partition(":")[0].split("/")
    return f"{first}/{rest[0]}" if first == "mrlm_pl" and rest else first


def counts() -> dict[str, dict[str, int]]:
    """Return the number of places of each phrase, by part of the project."""
    found = {phrase: Counter(area_of(place) for place, _ in places(phrase)) for phrase in PHRASES}
    areas = sorted({area for counter in found.values() for area in counter})
    return {area: {phrase: found[phrase][area] for phrase in PHRASES if found[phrase][area]} for area in areas}


def allowances() -> dict[str, dict[str, int]]:
    """Return the allowed number of places of each phrase, by part of the project."""
    return json.loads(ALLOWANCES.read_text(encoding="utf-8"))


def main(words: str) -> int:
    """Lower the allowances and return 0, or 1 if a count is above its allowance."""
    if words and words != "--accept":
        for phrase in PHRASES:
            if words.lower() in phrase.lower():
                print(f"\n{phrase}")
                print("\n".join(f"  {place}  {line}" for place, line in places(phrase)))
        return 0
    found = counts()
    allowed = found if words == "--accept" else allowances()
    lowered = {
        area: {phrase: min(number, allowed.get(area, {}).get(phrase, 0)) for phrase, number in row.items()}
        for area, row in found.items()
    }
    ALLOWANCES.write_text(json.dumps(lowered, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    over = [f"{area}: {phrase}" for area, row in found.items() for phrase in row if row[phrase] > lowered[area][phrase]]
    print(f"{sum(sum(row.values()) for row in lowered.values())} places are allowed", *over, sep="\n")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main(" ".join(sys.argv[1:])))
