from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from mrlm_environments.writing.environment import WritingEnvironment
from mrlm_environments.writing.words import STOP_WORDS, TRANSITIONS, transition_categories

from mrlm_pl.cli.main import main
from mrlm_pl.environment import Step, Task
from mrlm_pl.environment.check import check_environment
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, DataError


def words(start: int, count: int) -> str:
    """Return distinct words of four letters that mean nothing: ``5 * count - 1`` characters."""
    letters = "bcdfghjklmnpqrtv"
    return " ".join(
        "z" + letters[n // 256] + letters[n // 16 % 16] + letters[n % 16] for n in range(start, start + count)
    )


def scored(first: str, second: str, source: str = "A text.", **options: Any) -> Step:
    environment = WritingEnvironment(**options)
    environment.reset(Task("writing", "train", 0, 0, {"text": source}))
    return environment.step(actions(environment, first, second))


def actions(environment: WritingEnvironment, first: str, second: str) -> Mapping[str, Message]:
    return dict(zip(environment.agents, (Message("assistant", first), Message("assistant", second)), strict=True))


def components(step: Step, agent: str = "brief") -> list[float]:
    return list(step.components[agent].values())


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (20, 40, [0.5, 1.0, 0.5]),
        (10, 60, [0.5, 0.0, 0.0]),  # 299 / 49 is above 5
        (7, 20, [0.0, 0.0, 0.0]),
        (20, 7, [0.0, 0.0, 0.0]),
        (8, 16, [0.5, 1.0, 0.5]),  # 79 / 39
        (128, 256, [0.5, 1.0, 0.5]),
        (128, 257, [0.0, 0.0, 0.0]),
        (20, 28, [0.5, (139 / 99 - 1.1) / 0.5, 0.5 * (1.4 - 1.3) / 0.7]),  # 1.1795 in all
        (10, 40, [0.5, (5.0 - 199 / 49) / 1.8, 0.5]),  # 1.5215
        (20, 20, [0.5, 0.0, 0.0]),
        (20, 24, [0.5, (119 / 99 - 1.1) / 0.5, 0.0]),  # the vocabulary is 1.2 times as large
        (20, 26, [0.5, (129 / 99 - 1.1) / 0.5, 0.0]),  # 1.3 times: nothing, but the gate is open
    ],
)
def test_levels_of_summaries(first: int, second: int, expected: list[float]) -> None:
    step = scored(words(0, first), words(first, second))
    assert components(step) == pytest.approx([*expected, 0.0, 0.0])
    assert step.rewards == pytest.approx(dict.fromkeys(("brief", "detailed"), sum(expected)))
    assert step.components["brief"] == step.components["detailed"]
    assert (step.done, step.stop_reason) == (True, "answered")


def test_the_published_totals_of_summaries() -> None:
    totals = {(20, 40): 2.0, (10, 60): 0.5, (7, 20): 0.0, (20, 28): 1.1795, (10, 40): 1.5215}
    for (first, second), total in totals.items():
        assert scored(words(0, first), words(first, second)).rewards["brief"] == pytest.approx(total, abs=5e-5)


@pytest.mark.parametrize(
    ("first", "second", "fill", "expected"),
    [
        (128, 192, 0, [0.5, 1.0, 0.5 * (1 - (1.5 - 1.3) / 0.4)]),
        (130, 130, 0, [0.5, (1.0 - 0.8) / 0.5, 0.5]),
        (127, 150, 0, [0.0, 0.0, 0.0]),
        (150, 257, 0, [0.0, 0.0, 0.0]),
        (128, 256, 0, [0.5, 0.0, 0.0]),  # 1279 / 639 is above 2
        (160, 128, 0, [0.5, 0.0, 0.0]),  # 639 / 799 is below 0.8
        (128, 230, 0, [0.5, 1 - (1149 / 639 - 1.6) / 0.4, 0.0]),  # the vocabulary is 1.8 times as large
        (130, 52, 78, [0.5, 0.4, 0.0]),  # 0.4 times
        (130, 78, 52, [0.5, 0.4, 0.5 * (0.6 - 0.5) / 0.2]),
    ],
)
def test_levels_of_introductions(first: int, second: int, fill: int, expected: list[float]) -> None:
    """``fill`` words of the second part are a stop word of four letters."""
    step = scored(words(0, first), words(first, second) + " from" * fill, family="arxiv")
    assert components(step, "background") == pytest.approx([*expected, 0.0, 0.0])
    assert step.rewards == pytest.approx(dict.fromkeys(("background", "method"), sum(expected)))


@pytest.mark.parametrize(("common", "overlap"), [(0, 0.0), (1, 0.6 * (1 / 59) / 0.03), (2, 0.6), (20, 0.6)])
def test_common_words_of_summaries_pay_up_to_three_in_a_hundred(common: int, overlap: float) -> None:
    assert components(scored(words(0, 20), words(20 - common, 40)))[4] == pytest.approx(overlap)


@pytest.mark.parametrize(("common", "overlap"), [(13, 0.6 * (13 / 247) / 0.23), (49, 0.6)])
def test_common_words_of_introductions_pay_up_to_23_in_a_hundred(common: int, overlap: float) -> None:
    step = scored(words(0, 130), words(130 - common, 130), family="arxiv")
    assert components(step, "background")[4] == pytest.approx(overlap)


@pytest.mark.parametrize(
    ("said", "earned"),
    [
        ("however", 0.4 * 0.4),
        ("However, moreover: THEREFORE", 0.4 * 0.5),
        ("however whereas conversely", 0.4 * 0.4),
        ("in \n addition", 0.4 * 0.4),
        ("for example, as a result", 0.4 * 0.45),
        ("in, addition second-hand howevers thusly", 0.0),
        (" ".join(phrases[0] for phrases in TRANSITIONS.values()), 0.4 * 0.95),
    ],
)
def test_kinds_of_transition_words(said: str, earned: float) -> None:
    detailed = f"{words(20, 40)} {said}"
    assert components(scored(words(0, 20), detailed))[3] == pytest.approx(earned)
    assert components(scored(f"{words(0, 20)} {said}", words(50, 90)))[3] == 0.0, "in the brief part"
    assert components(scored(words(0, 20), f"{words(20, 6)} {said}"))[3] == 0.0, "behind a closed gate"
    first_part = scored(f"{words(0, 130)} {said}", words(130, 180), family="arxiv")
    assert components(first_part, "background")[3] == pytest.approx(earned), "in either part of an introduction"


def test_phrases_do_not_run_from_one_part_into_the_other() -> None:
    step = scored(f"{words(0, 130)} in", f"short {words(130, 180)}", family="arxiv")
    assert step.metrics["transition_kinds"] == 0.0


def test_twelve_categories_without_a_common_phrase() -> None:
    phrases = [phrase for group in TRANSITIONS.values() for phrase in group]
    assert len(TRANSITIONS) == 12
    assert len(phrases) == len(set(phrases))
    for category, group in TRANSITIONS.items():
        for phrase in group:
            assert category in transition_categories(f"So, {phrase}, we"), phrase
    assert not [(one, other) for one in phrases for other in phrases if other.startswith((f"{one} ", f"{one}-"))]
    # Words in nearly every text would be rewarded for nothing.
    assert not STOP_WORDS & (set(phrases) - {"if"})


def test_a_part_of_stop_words_alone_ends_the_score() -> None:
    step = scored("the and of to in it is was", words(0, 9))
    assert components(step)[0] == 0.5
    assert components(step)[2:] == [0.0, 0.0, 0.0]
    assert step.metrics["gates"] == 2.0


def test_the_ends_of_a_band_pay_nothing_but_open_the_gate() -> None:
    step = scored(words(0, 20), words(18, 26))  # 1.3 times the content words, and two in common
    assert components(step)[2:] == pytest.approx([0.0, 0.0, 0.6])
    assert step.metrics["gates"] == 3.0


def test_faithfulness_is_the_common_share_with_the_source() -> None:
    source = f"The {words(0, 10)} and the rest"
    step = scored(words(0, 20), words(20, 40), source, faithfulness=0.5)
    assert step.components["brief"]["faithfulness"] == pytest.approx(0.5 * 10 / 61)
    assert step.rewards["detailed"] == pytest.approx(2.0 + 0.5 * 10 / 61)
    closed = scored(words(0, 20), words(20, 24), source, faithfulness=0.5)
    assert closed.components["brief"]["faithfulness"] == 0.0
    assert "faithfulness" not in scored(words(0, 20), words(20, 40), source).components["brief"]


def test_success_and_metrics_tell_which_gate_was_closed() -> None:
    found = [scored(words(0, first), words(first, second)) for first, second in ((7, 9), (9, 9), (20, 24), (20, 40))]
    assert [step.metrics["gates"] for step in found] == [0.0, 1.0, 2.0, 3.0]
    assert [step.success for step in found] == [False, False, False, True]
    assert found[3].metrics["length_ratio"] == pytest.approx(199 / 99)
    assert found[3].metrics["vocabulary_ratio"] == 2.0


def test_the_last_pair_alone_is_paid_and_partners_see_each_other() -> None:
    environment = WritingEnvironment(turns=3)
    task = environment.tasks("train")[0]
    environment.reset(task)
    first, second = words(0, 20), words(20, 20)
    step = environment.step(actions(environment, first, second))
    assert (dict(step.rewards), step.done) == ({}, False)
    told = {agent: messages[0].content for agent, messages in step.observations.items()}
    assert second in told["brief"]
    assert first not in told["brief"]
    assert first in told["detailed"]
    assert "The detailed part should be longer beside the brief one." in told["brief"]
    assert "Your part has 20 words and your partner's 20 words." in told["detailed"]
    step = environment.step(actions(environment, "x" * 1_000_000, second))
    assert "Your part has more than 3000 characters" in step.observations["brief"][0].content
    assert len(step.observations["detailed"][0].content) < 3_500
    step = environment.step(actions(environment, words(0, 20), words(20, 40)))
    assert (step.rewards["brief"], step.done) == (2.0, True)


@pytest.mark.parametrize(
    ("first", "second", "advice"),
    [
        (words(0, 7), words(7, 20), "A part is too short or too long."),
        (words(0, 10), words(10, 40), "The detailed part should be shorter beside the brief one."),
        (words(0, 20), words(20, 20) + " from" * 20, "should have more different words beside the brief one."),
        (words(0, 20), words(20, 40), "The parts should have more words in common."),
        (words(0, 20), words(10, 40), "Use more kinds of transition words."),
    ],
)
def test_advice_names_the_first_shortcoming_without_numbers(first: str, second: str, advice: str) -> None:
    step = scored(first, second, turns=2)
    for messages in step.observations.values():
        assert advice in messages[0].content


@pytest.mark.parametrize("family", ["tldr", "arxiv"])
def test_made_texts_have_a_demonstration_that_earns_the_most(family: Any) -> None:
    environment = WritingEnvironment(family)
    for index in range(100):
        task = environment.tasks("train")[index]
        replies = environment.gold(task)
        assert replies is not None
        environment.reset(task)
        step = environment.step(actions(environment, *(replies[agent][0] for agent in environment.agents)))
        assert step.rewards == pytest.approx(dict.fromkeys(environment.agents, 0.5 + 1.0 + 0.5 + 0.4 * 0.95 + 0.6))
        assert task.data["text"] in environment.reset(task)[environment.agents[1]][0].content


def test_no_best_replies_are_known_where_faithfulness_is_paid() -> None:
    environment = WritingEnvironment(faithfulness=1.0)
    assert environment.gold(environment.tasks("train")[0]) is None


@pytest.mark.parametrize(
    "options", [{}, {"family": "arxiv"}, {"turns": 3}, {"faithfulness": 1.0}, {"family": "arxiv", "turns": 2}]
)
def test_the_contract_is_kept(options: dict[str, Any]) -> None:
    check_environment(WritingEnvironment(**options)).raise_on_failure()


def test_check_env_finds_it_by_name() -> None:
    assert main(["check-env", "writing"]) == 0


@pytest.mark.parametrize(("family", "field"), [("tldr", "prompt"), ("arxiv", "abstract_text"), ("arxiv", "abstract")])
def test_rows_of_a_file(family: Any, field: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({field: f"Text {n}.", "other": 1}) + "\n" for n in range(60)))
    environment = WritingEnvironment(family, data=str(path))
    split = {name: environment.tasks(name) for name in ("train", "validation", "test")}
    texts = [task.data["text"] for source in split.values() for task in source]
    assert sorted(texts) == sorted(f"Text {n}." for n in range(60))
    assert environment.reset(split["train"][0])[environment.agents[0]][0].content.endswith(
        split["train"][0].data["text"]
    )
    assert environment.gold(split["train"][0]) is None
    assert environment.copy().tasks("train") is split["train"], "copies share the rows"


def test_the_sentences_of_an_abstract_are_joined(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"abstract_text": ["<S> we study it . </S>", "<S> it works . </S>"]}) + "\n")
    environment = WritingEnvironment("arxiv", data={"test": str(path)})
    assert environment.tasks("test")[0].data["text"] == "we study it . it works ."


@pytest.mark.parametrize("row", [{"prompt": ["a", "b"]}, {"prompt": " "}, {"text": "a"}])
def test_a_row_without_a_text_is_refused(row: Mapping[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=r"row 1.*'tldr' has it in prompt"):
        WritingEnvironment(data={"train": str(path), "validation": str(path)}).tasks("train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "novel"}, "choose from tldr, arxiv"),
        ({"turns": 0}, "1 or above"),
        ({"faithfulness": -1.0}, "0 or above"),
        ({"faithfulness": float("inf")}, "0 or above"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        WritingEnvironment(**options)


class Unread(str):
    """A text of which only the length and a beginning may be asked for."""

    def split(self, *_: Any) -> list[str]:
        raise AssertionError("the whole text is read")

    lower = strip = splitlines = __iter__ = split


def test_a_text_beyond_the_limit_is_not_read() -> None:
    for text in ("a.b. " * 50 + "a." * 500_000, "word " * 300_000, "however " * 8 + " " * 1_000_000):
        step = scored(Unread(text), Unread(text))
        assert components(step) == [0.0] * 5
