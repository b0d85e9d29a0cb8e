"""The counts of phrases to avoid never rise."""

from __future__ import annotations

from tests.support.language import EXPRESSIONS, PHRASES, allowances, area_of, counts, places

LOWER = "python -m tests.support.language"


def test_no_phrase_spreads_and_the_allowances_follow_the_text() -> None:
    allowed, found = allowances(), counts()
    for area, row in found.items():
        for phrase, number in row.items():
            if number > allowed.get(area, {}).get(phrase, 0):
                shown = [f"{place}  {line}" for place, line in places(phrase) if area_of(place) == area]
                raise AssertionError(
                    f"{area} says {phrase!r} in more places than before; all of them:\n" + "\n".join(shown)
                )
    over = {
        f"{area}: {phrase}": f"{number} allowed, {found.get(area, {}).get(phrase, 0)} left"
        for area, row in allowed.items()
        for phrase, number in row.items()
        if number > found.get(area, {}).get(phrase, 0)
    }
    assert not over, f"lower them with `{LOWER}`"


def test_the_phrases_are_found() -> None:
    bad = [
        "an error is told of", "Nothing when all is well", "for so many seconds", "an episode cut short",
        "whoever asks", "learnt from", "is paid for digits", "it goes on with V", "waits in vain", "started afresh",
        "is spelt so", "the group rests", "what a model has not", "nobody asks", "each with each", "and the like",
        '"""What is shown', "        folder: of the run.", "waits for ever", "outside of it",
        "white space", "a truth value", "a text in place of it", "it works, also in YAML", "a name of its own",
        "a model of the hub", "trains a policy by GRPO", "it is no number", "an orderly end", "played side by side",
        "a key stands twice", "a score of .5", "normalised",
    ]  # fmt: skip
    assert len(bad) == len(PHRASES)
    for (phrase, expression), text in zip(EXPRESSIONS.items(), bad, strict=True):
        assert expression.search(text), phrase
    good = "so far as we know, as many; what follows is read; 95 % of tokens"
    assert not any(expression.search(good) for expression in EXPRESSIONS.values())
