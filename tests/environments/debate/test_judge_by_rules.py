from __future__ import annotations

import time

import pytest
from mrlm_environments.debate.judge import SIDES, Argument, Debate, Side, Verdict
from mrlm_environments.debate.judge_by_rules import RuleJudge

from mrlm_pl.environment.check import HOSTILE_REPLIES
from mrlm_pl.errors import ConfigurationError

TOPIC = "Cities should ban private cars from their centres."
FOR = (
    "Cities should keep private cars out of the centre because the streets become safer. A study of Oslo found that "
    "accidents fell by 40% after the change. However, shops did not lose customers, since people on foot buy more "
    "often. For example, Ghent gained 17% more cyclists in one year. So the measure helps both health and trade."
)
ANSWER = (
    "My opponent fears for the old and the disabled. If permits are given to them, nobody is left out, whereas today "
    "everyone sits in the same queue. According to a survey in Madrid, noise dropped by half, and residents slept "
    "better. Therefore the ban serves those who live in the centre of our cities."
)
AGAINST = (
    "A ban hurts people who cannot walk far, such as the old and the disabled. Buses do not reach every home, so "
    "families would lose an hour each day. In Turin, a trial was stopped after 8 months because shops closed. When you "
    "forbid cars, you punish those with the least choice."
)
NARRATIVE = (
    "The canal museum in my town has a clock that was built by a baker. He worked on it for nine winters and told no "
    "one of it. Visitors come from far away to see how it moves. It still rings at noon."
)
SOUPS = (
    "because therefore evidence study data 50% however if first second finally research example private cars cities "
    "centre ban statistics report although unless thus hence",
    "Because cities. Therefore evidence study. However the data of 50%. If private cars ban then centre. According to "
    "research for example the statistics. Since report, thus findings.",
    "cities ban private cars centres " * 12,
    "The because of the study if the data however the cars so the evidence of the ban therefore the research in the "
    "centres unless the statistics 50% for example the cities although the report hence the cars thus the survey.",
    "first because second therefore third however finally evidence " * 8,
)


def score(text: str, other: str = AGAINST) -> float:
    """Return PRO's score in a debate of one turn each."""
    return verdict(("PRO", text), ("CON", other)).score("PRO")


def verdict(*turns: tuple[Side, str], words: int = 60) -> Verdict:
    return RuleJudge(words).judge(Debate(TOPIC, tuple(Argument(side, text) for side, text in turns)))


@pytest.mark.parametrize("soup", SOUPS)
def test_keyword_soup_scores_below_real_arguments(soup: str) -> None:
    for real in (FOR, ANSWER, AGAINST):
        assert score(soup, NARRATIVE) < 0.6 * score(real, NARRATIVE)
        found = verdict(("PRO", real), ("CON", soup), ("PRO", ANSWER + " Indeed."), ("CON", soup))
        assert found.winner(0.05) == "PRO"


def test_repetition_scores_below_a_new_argument() -> None:
    fresh = verdict(("PRO", FOR), ("CON", AGAINST), ("PRO", ANSWER), ("CON", AGAINST))
    again = verdict(("PRO", FOR), ("CON", AGAINST), ("PRO", FOR), ("CON", AGAINST))
    assert again.score("PRO") < 0.6 * fresh.score("PRO")
    assert fresh.winner(0.2) == "PRO", "CON said the same twice"
    copied = verdict(("PRO", FOR), ("CON", FOR))
    assert copied.score("CON") == 0.0, "and so is the other side's speech"
    assert score(TOPIC) < 0.05, "and the topic"
    assert score(FOR[:170] * 3) < 0.7 * score(FOR)


def test_an_argument_beside_the_point_scores_below_one_that_is_not() -> None:
    assert verdict(("PRO", NARRATIVE), ("CON", AGAINST)).parts["PRO"]["relevance"] == 0.0
    assert score(NARRATIVE) < 0.7 * score(FOR)


def test_numbers_of_a_short_debate() -> None:
    """Worked by hand. 8 words are a full argument.

    PRO: 8 words, all different, all runs new; 4 function words (the, are, if, are) of 8; 1 marker (if) of 8, which is
    below a fifth: so sound. One sentence of 8 words with one connective of one family; no evidence; `cars` and `ban` of
    the topic's words. CON: nothing that is a word.
    """
    found = RuleJudge(words=8).judge(
        Debate("Ban cars.", (Argument("PRO", "The streets are quiet if cars are banned"), Argument("CON", "7 ...")))
    )
    pro = found.parts["PRO"]
    assert pro["length"] == pytest.approx(0.6 * 0.2)
    assert pro["evidence"] == 0.0
    assert pro["reasoning"] == pytest.approx(0.6 * 0.25 * (0.5 * 1 / 2 + 0.5 * 1 / 2))
    assert pro["structure"] == pytest.approx(0.6 * 0.15 * 1 / 3)
    assert pro["relevance"] == pytest.approx(0.6 * 0.15 * 1.0), (
        "one of two content words is half of them, which is full"
    )
    assert pro["consistency"] == pytest.approx(0.2)
    assert pro["coverage"] == pytest.approx(0.2 * 1.0), "it heard nothing: its relevance"
    assert found.score("CON") == 0.0


def test_coverage_is_the_share_of_the_opponents_arguments_that_are_taken_up() -> None:
    both = verdict(("CON", AGAINST), ("PRO", ANSWER), ("CON", NARRATIVE), ("PRO", FOR))
    assert both.parts["PRO"]["coverage"] < 0.2 * 0.55, "the story of the clock is not taken up"
    answered = verdict(("CON", AGAINST), ("PRO", ANSWER))
    assert answered.parts["PRO"]["coverage"] > 0.2 * 0.8
    assert verdict(("CON", NARRATIVE), ("PRO", FOR)).parts["PRO"]["coverage"] == 0.0


def test_labels_do_not_matter() -> None:
    other: dict[Side, Side] = {"PRO": "CON", "CON": "PRO"}
    turns: list[tuple[Side, str]] = [("PRO", FOR), ("CON", AGAINST), ("PRO", ANSWER), ("CON", SOUPS[0])]
    one, two = verdict(*turns), verdict(*((other[side], text) for side, text in turns))
    assert one.parts["PRO"] == two.parts["CON"]
    assert one.parts["CON"] == two.parts["PRO"]


@pytest.mark.parametrize("text", [FOR, AGAINST, NARRATIVE, *SOUPS, *HOSTILE_REPLIES])
def test_every_part_is_in_its_range(text: str) -> None:
    most = {"length": 0.12, "evidence": 0.15, "reasoning": 0.15, "structure": 0.09, "relevance": 0.09}
    found = verdict(("PRO", text), ("CON", text), ("PRO", text + " more"), ("CON", "so " + text))
    for parts in found.parts.values():
        assert list(parts) == [*most, "consistency", "coverage"]
        assert all(0 <= value <= most.get(name, 0.2) + 1e-12 for name, value in parts.items())


@pytest.mark.parametrize(
    "text",
    [*HOSTILE_REPLIES, "." * 10**6, ".!?;" * 10**5, "a'" * 10**5, "é’" * 10**5, "because " * 10**5, "\n" * 10**6],
    ids=lambda text: repr(text[:8]),
)
def test_hostile_texts_are_judged_in_bounded_time(text: str) -> None:
    started = time.process_time()
    verdict(("PRO", text), ("CON", text), ("PRO", text), ("CON", text))
    assert time.process_time() - started < 1.0


def test_the_length_of_a_full_argument_must_be_positive() -> None:
    with pytest.raises(ConfigurationError, match="words is 0"):
        RuleJudge(words=0)


def test_a_side_that_says_nothing_scores_0() -> None:
    one_sided = verdict(("PRO", FOR))
    assert one_sided.score("CON") == 0.0 < one_sided.score("PRO")
    assert one_sided.parts["CON"].keys() == one_sided.parts["PRO"].keys()
    assert not any(verdict().score(side) for side in SIDES)
