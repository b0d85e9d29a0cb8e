from __future__ import annotations

import itertools
from typing import Any

import pytest
from mrlm_environments import CollaborativeReasoningEnvironment, MathEnvironment
from mrlm_environments.answers import agree, is_right, read_answer, vote
from mrlm_environments.collaborative_reasoning.masks import AnswerMasks, most_repeats
from mrlm_environments.collaborative_reasoning.record import in_words
from mrlm_environments.collaborative_reasoning.tasks import generate_inference

from mrlm_pl.environment.trial import play_copy
from mrlm_pl.episode import Message, Task
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.seeding import keyed_random


@pytest.mark.parametrize(
    ("reply", "label"),
    [
        ("entailment", "entailment"),
        ("The premise entails the hypothesis.", "entailment"),
        ("**Contradiction**", "contradiction"),
        ("That rules out entailment, so contradiction", "contradiction"),
        ("That rules out entailment so it is contradiction", "contradiction"),
        ("It is not entailment but neutral", "neutral"),
        ("Neutral, not entailment.", "neutral"),
        ("It is neutral rather than a contradiction", "neutral"),
        ("I first thought of entailment. The answer is contradiction.", "contradiction"),
        ("It doesn't contradict the premise; it is neutral", "neutral"),
        ("neutral: entailment can be ruled out", "neutral"),
        ("contradiction. Entailment is not possible", "contradiction"),
        ("neither entailed nor contradicted: neutral", "neutral"),
        ("Not only neutral but entailed", "entailment"),
        ("It isn\u2019t neutral. Entailment!", "entailment"),
        ("No. Contradiction.", "contradiction"),
        ("it is not a contradiction", None),
        ("neutrality is a virtue", None),
        ("", None),
        ("Entailment.", "entailment"),
        ("ENTAILMENT", "entailment"),
        ("not entailment", None),
        ("Not entailment.", None),
        ("It is not entailment.", None),
        ("This isn't entailment", None),
        ("non-entailment", None),
        ("no entailment", None),
        ("not_entailment", None),
        ("not neutral", None),
        ("not a contradiction, but entailment", "entailment"),
        ("entailment or neutral", None),
        ("Either entailment or neutral", None),
        ("neutral/contradiction", None),
        ("entailment, neutral", None),
        ("entailment and contradiction", None),
        ("entailment, neutral or contradiction?", None),
        ("It could be entailment or neutral; I choose neutral.", "neutral"),
        ("The options are entailment, neutral and contradiction. The answer is neutral.", "neutral"),
        ("Is this entailment, neutral or contradiction? It is entailment.", "entailment"),
        ("I am torn between neutral and contradiction, so contradiction.", "contradiction"),
        ("Between neutral and contradiction", None),
        ("\\boxed{neutral}", "neutral"),
        ("\\boxed{\\text{neutral}}", "neutral"),
        ("\\boxed{neutral}. Entailment would need more.", "neutral"),
        ("<answer>neutral</answer> although entailment is close", "neutral"),
        ("<answer>entailment</answer>, since the hypothesis does not contradict the premise", "entailment"),
        ("Answer: neutral\nThe hypothesis neither entails nor contradicts", "neutral"),
        ("Answer: neutral. An entailment would say more.", "neutral"),
        ("The answer is neutral because entailment needs proof and contradiction needs conflict.", "neutral"),
        ("#### neutral", "neutral"),
        ("label: contradiction", "contradiction"),
        ("**Answer: Neutral**", "neutral"),
        ("The premise does not entail the hypothesis.", None),
        ("The premise doesn't entail the hypothesis, nor does it contradict it. Neutral.", "neutral"),
        ("The hypothesis contradicts the premise", "contradiction"),
        ("The hypothesis is contradictory to the premise", "contradiction"),
        ("The hypothesis is not contradicted", None),
        ("The hypothesis is entailed by the premise", "entailment"),
        ("It's undetermined: neutral", "neutral"),
        ("neutral, as it is not entailed", "neutral"),
        ("contradiction (not neutral)", "contradiction"),
        ("entailment rather than neutral", "entailment"),
        ("rather than neutral, entailment", "entailment"),
        ("I would say contradiction instead of neutral", "contradiction"),
        ("It is far from neutral: contradiction", "contradiction"),
        ("Entailment is wrong; contradiction is right", "contradiction"),
        ("contradiction is right and entailment is wrong", "contradiction"),
        ("It would be entailment if all were blue, but neutral", "neutral"),
        ("neutral. It would be entailment if all were blue.", "neutral"),
        ("It cannot be neutral", None),
        ("It can't be anything but entailment", "entailment"),
        ("no doubt: entailment", "entailment"),
        ("No, it is neutral.", "neutral"),
        ("Without doubt entailment", "entailment"),
        ("There is no contradiction here, therefore entailment", "entailment"),
        ("There is no contradiction here", None),
        ("neither entailment nor contradiction", None),
        ("Neither. Neutral", "neutral"),
        ("<think>entailment</think> neutral", "neutral"),
        ("Not sure, but neutral", "neutral"),
        ("not only entailment", "entailment"),
        ("1", None),
        ("yes", None),
        ("neutrally", None),
        ("The answer is not neutral.", None),
        ("The answer is not entailment but neutral.", "neutral"),
        ("Neutral\nNeutral\nNeutral", "neutral"),
        ("entailment -> neutral", "neutral"),
        ("First entailment. No: neutral.", "neutral"),
        ("the correct label is contradiction, not entailment or neutral", "contradiction"),
    ],
)
def test_the_last_label_that_is_stated_and_not_denied(reply: str, label: str | None) -> None:
    assert read_answer(reply, "nli") == label


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        (r"\boxed{5}", "5"),
        ("#### 1,234", "1,234"),
        ("no", None),
        ("9" * 400, None),
        ("<answer>**5**</answer>", "5"),
        ("<answer>x = *5* apples</answer>", "5"),
        (r"\boxed{2 *3* 4}", "24"),
        (r"\boxed{2*3*4}", "24"),
        (r"\boxed{\text{Total cost: } \$5}", "$5"),
        (r"\boxed{3:5}", None),
        ("x equals minus 5.", "-5"),
        ("So it is negative 5", "-5"),
        ("8 minus 5", "5"),
        ("8 apples minus 5", "5"),
        ("The temperature falls to minus 5.", "-5"),
        ("it's minus 5", "-5"),
        ("(8) minus 5", "5"),
        ("**8** minus 5", "5"),
        ("so **minus 5**", "-5"),
        ("x = - 5", "-5"),
        ("8 - 5", "5"),
        ("The answer isn't 5", None),
        ("The answer is 5, maybe 6", None),
        ("The answer is 5 (perhaps 6)", None),
        ("The answer is 5 possibly 6", None),
        ("The answer is 5, maybe 5.0", "5"),
        ("The answer is 5, maybe 6 is too many", "5"),
    ],
)
def test_numbers_are_read_as_in_the_math_environment(reply: str, answer: str | None) -> None:
    assert read_answer(reply, "math") == answer


def test_right_answers() -> None:
    assert is_right("5.0", "5", "math")
    assert is_right("neutral", "neutral", "nli")
    assert not is_right("neutral", "entailment", "nli")
    assert not is_right(None, "5", "math")


@pytest.mark.parametrize("marked", ["{}", "The answer is {}.", r"\boxed{{{}}}", "<answer>{}</answer>", "#### {}"])
@pytest.mark.parametrize("kinds", [["arithmetic"], ["multistep", "word", "algebra"]])
def test_the_question_in_place_of_its_answer_earns_nothing(kinds: list[Any], marked: str) -> None:
    environment = MathEnvironment(difficulty=(1, 5), kinds=kinds)
    tasks = list(itertools.islice(environment.tasks("train"), 200))
    right = []
    for task in tasks:
        (asked,) = [message for message in environment.begin(task) if message.role == "user"]
        copy = asked.content.removeprefix("What is ").removesuffix("?")
        right.append(environment.reply(Message("assistant", marked.format(copy))).success)
    assert sum(map(bool, right)) <= 8, "but for chance: it may end in the answer"


@pytest.mark.parametrize(
    ("question", "reply", "answer"),
    [
        ("What is 14 - 2?", "14-2=12", "12"),
        ("What is 14 - 2?", "The answer is 14 - 2 = 12. Check: 12 + 2 = 14", "12"),
        ("What is 14 - 2?", r"\boxed{114 - 2}", "112"),
        ("What is 14 - 2?", r"\boxed{14 - 2.5}", "23/2"),
        ("What is -5 + 3?", "The answer is -5+3 = -2. Check: -2 - 3 = -5", "-2"),
        ("What is 1,850 / 5?", "1,850/5", None),
        ("What is 185/5?", "185/5", None),
        ("What is 14-2?", r"\boxed{14 - 2}", None),
        ("He eats 11/24, then 5/24. How much?", "1/2", "1/2"),
        ("He adds 3 1/2 cups and takes 3. How much is left?", "1/2", "1/2"),
        ("A coin shows heads with probability 1/2. How probable is tails?", r"\boxed{1/2}", "1/2"),
        ("What is 14 - 2?", "7 + 5", "5"),
        ("What is 14 - 2?", r"\boxed{7 + 5}", "12"),
    ],
)
def test_copies_of_the_question_alone_are_not_read(question: str, reply: str, answer: str | None) -> None:
    assert read_answer(reply, "math", question) == answer


def test_copies_of_the_question_have_no_vote() -> None:
    task = Task("math", "train", 0, 0, {"question": "What is 185 / 5?", "answer": "37", "format": "math"})
    for environment in (MathEnvironment(), CollaborativeReasoningEnvironment()):
        assert environment.majority(task, ["185/5", "185/5", "185/5", "37"])
        assert not environment.majority(task, ["185/5"])


def test_an_operation_of_the_instruction_is_no_copy_of_the_question() -> None:
    task = Task("collaborative_reasoning", "train", 0, 0, {"question": "6 * 3?", "answer": "18", "format": "math"})
    environment = CollaborativeReasoningEnvironment(instruction="Divide, as in 36 / 2.")
    played = play_copy(environment, task, "36 / 2", max_turns=8, must_end=False)
    assert environment.majority(task, ["36 / 2"])
    assert played.steps[-1].success


@pytest.mark.parametrize(
    ("answers", "winner"),
    [
        ((None, None, "5"), "5"),
        (("4", "5", "5.0"), "5"),
        (("4", "5"), "4"),
        (("5", "4"), "5"),
        (("3", "4", "4", "3"), "3"),
        ((), None),
        ((None,), None),
    ],
)
def test_votes(answers: tuple[str | None, ...], winner: str | None) -> None:
    assert vote(answers, "math") == winner


def test_agreement_is_by_value() -> None:
    assert agree(["0.5", "1/2"], "math")
    assert not agree(["5", "4"], "math")
    assert not agree(["neutral", None], "nli")


@pytest.mark.parametrize(
    ("score", "word"),
    [(0.29, "poor"), (0.3, "doubtful"), (0.59, "doubtful"), (0.6, "good"), (0.79, "good"), (0.8, "excellent")],
)
def test_words_for_scores(score: float, word: str) -> None:
    assert in_words(score) == word


def test_a_run_of_words_may_occur_three_times() -> None:
    assert most_repeats("a b " * 3, 2) == 3
    masks = AnswerMasks(loop_ngram=2)
    assert masks.faults("a b c " * 3, answered=True) == frozenset()
    assert masks.faults("a b c " * 4, answered=True) == {"looping"}
    assert AnswerMasks(loop_ngram=0).faults("a b c " * 9, answered=True) == frozenset()


@pytest.mark.parametrize(
    "options", [{"penalty": -0.1}, {"penalty": float("nan")}, {"min_characters": -1}, {"loop_ngram": -1}]
)
def test_masks_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        AnswerMasks(**options)  # type: ignore[arg-type]


def test_generated_inferences_have_their_labels_equally_often() -> None:
    made = [generate_inference(keyed_random("test", index)) for index in range(600)]
    for label in ("entailment", "neutral", "contradiction"):
        assert 160 < sum(data["answer"] == label for data in made) < 240
    assert len({data["question"] for data in made}) > 500
    for data in made:
        assert read_answer(data["solution"], "nli") == data["answer"]
        if " has exactly " not in data["question"]:
            continue
        name, _, _, count, thing = data["question"].split("\n")[0].removeprefix("Premise: ").rstrip(".").split(" ")
        words = data["question"].split("\n")[1].removeprefix("Hypothesis: ").rstrip(".").split(" ")
        assert words[0] == name
        if words[1:3] in (["has", "more"], ["has", "fewer"]):
            holds = int(count) > int(words[4]) if words[2] == "more" else int(count) < int(words[4])
            assert data["answer"] == ("entailment" if holds else "contradiction")
            assert words[5] == thing
