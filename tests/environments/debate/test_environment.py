from __future__ import annotations

import copy
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from mrlm_environments.debate.environment import PROPOSALS, DebateEnvironment, opening_side
from mrlm_environments.debate.judge import Debate, Judge, Side, Verdict
from mrlm_environments.debate.judge_by_model import LanguageModelJudge
from mrlm_environments.debate.judge_by_reward_model import RewardModelJudge

from mrlm_pl.environment import Message, Step, Task
from mrlm_pl.environment.check import check_environment
from mrlm_pl.environment.tasks import split_of
from mrlm_pl.errors import ConfigurationError, DataError, EnvironmentContractError

TOPIC = "Cities should ban private cars."
SEEDS: dict[Side, int] = {side: next(n for n in range(50) if opening_side(n) == side) for side in ("PRO", "CON")}


class Fixed(Judge):
    """Gives PRO and CON the same two parts every time, and keeps the debates."""

    def __init__(self, pro: tuple[float, float] = (0.5, 0.25), con: tuple[float, float] = (0.25, 0.125)) -> None:
        self.pro, self.con = pro, con
        self.asked: list[Debate] = []

    def judge(self, debate: Debate) -> Verdict:
        self.asked.append(debate)
        named = {"PRO": self.pro, "CON": self.con}
        return Verdict({side: {"style": a, "facts": b} for side, (a, b) in named.items()}, {"sure": 1.0})


def play(environment: DebateEnvironment, texts: list[str], opener: Side = "PRO") -> tuple[list[Any], Step]:
    """Return each speaker's observation in turn, and the last step."""
    observations = environment.reset(Task("debate", "train", 0, SEEDS[opener], {"topic": TOPIC}))
    shown = []
    for text in texts:
        ((agent, messages),) = observations.items()
        shown.append((agent, messages[-1].content))
        step = environment.step({agent: Message("assistant", text)})
        observations = step.observations
    return shown, step


@pytest.mark.parametrize(("opener", "order"), [("PRO", ["pro", "con"] * 2), ("CON", ["con", "pro"] * 2)])
def test_turns_alternate_and_everyone_sees_the_topic_and_all_that_was_said(opener: Side, order: list[str]) -> None:
    shown, step = play(DebateEnvironment(), ["one", "two", "three", "four"], opener)
    assert [agent for agent, _ in shown] == order
    assert step.done
    seen: dict[str, str] = {"pro": "", "con": ""}
    for agent, text in shown:
        seen[agent] += text
    assert TOPIC in seen["pro"]
    assert TOPIC in seen["con"]
    assert "You argue for this" in seen["pro"]
    assert "You argue against this" in seen["con"]
    first, second = order[:2]
    assert "two" in seen[first]
    assert "four" not in seen[first]
    assert "one" in seen[second]
    assert "three" in seen[second]


@pytest.mark.parametrize("turns", [1, 3])
def test_each_side_speaks_exactly_max_turns_times(turns: int) -> None:
    judge = Fixed()
    shown, step = play(DebateEnvironment(judge, max_turns=turns), [str(n) for n in range(2 * turns)])
    assert step.done
    assert f"this, in {turns} turn{'' if turns == 1 else 's'}.\n" in shown[0][1]
    assert [agent for agent, _ in shown].count("pro") == turns
    assert [len(judge.asked[0].texts(side)) for side in ("PRO", "CON")] == [turns, turns]
    assert [argument.text for argument in judge.asked[0].arguments] == [str(n) for n in range(2 * turns)]


@pytest.mark.parametrize(
    ("reward", "pro", "con"),
    [
        ("score", {"style": 0.5, "facts": 0.25}, {"style": 0.25, "facts": 0.125}),
        ("margin", {"style": 0.25, "facts": 0.125}, {"style": -0.25, "facts": -0.125}),
        ("win", {"win": 1.0}, {"win": -1.0}),
    ],
)
def test_rewards_are_the_sums_of_their_parts(reward: Any, pro: dict[str, float], con: dict[str, float]) -> None:
    _, step = play(DebateEnvironment(Fixed(), reward=reward), list("abcd"))
    assert step.components == {"pro": pro, "con": con}
    assert step.rewards == {"pro": sum(pro.values()), "con": sum(con.values())}
    assert step.success is None
    assert step.stop_reason == "judged"


@pytest.mark.parametrize(
    ("con", "margin", "expected"),
    [
        ((0.25, 0.0), 0.01, "pro_wins"),
        ((1.0, 0.0), 0.01, "con_wins"),
        ((0.5, 0.25), 0.0, "tie"),
        ((0.5, 0.0), 0.25, "tie"),
    ],
)
def test_the_winner_is_told_by_the_metrics(con: tuple[float, float], margin: float, expected: str) -> None:
    _, step = play(DebateEnvironment(Fixed(con=con), tie_margin=margin, reward="win"), list("abcd"))
    assert {name for name in ("pro_wins", "con_wins", "tie") if step.metrics[name]} == {expected}
    assert step.metrics["pro_score"] == 0.75
    assert step.metrics["con_score"] == sum(con)
    assert step.metrics["sure"] == 1.0
    if expected == "tie":
        assert step.rewards == {"pro": 0.0, "con": 0.0}


def test_nobody_is_paid_before_the_end() -> None:
    environment = DebateEnvironment(Fixed())
    observations = environment.reset(Task("debate", "train", 0, SEEDS["PRO"], {"topic": TOPIC}))
    for _ in range(3):
        ((agent, _),) = observations.items()
        step = environment.step({agent: Message("assistant", "x")})
        assert not step.rewards
        observations = step.observations


def test_swapping_sides_swaps_the_result() -> None:
    good = "Streets are safer without cars, because a study of 2019 found fewer accidents. However, trade did not fall."
    texts = [good, "no", "So children can walk to school, and the air is cleaner if engines stop.", "no no"]
    for reward in ("score", "margin", "win"):
        _, one = play(DebateEnvironment(reward=reward), texts, "PRO")  # type: ignore[arg-type]
        _, other = play(DebateEnvironment(reward=reward), texts, "CON")  # type: ignore[arg-type]
        assert one.rewards["pro"] == other.rewards["con"]
        assert one.rewards["con"] == other.rewards["pro"]
        assert (one.metrics["pro_wins"], other.metrics["con_wins"]) == (1.0, 1.0)


def test_the_seed_tells_who_opens() -> None:
    openings = [opening_side(seed) for seed in range(400)]
    assert 160 < openings.count("PRO") < 240
    environment = DebateEnvironment()
    agents = {index: next(iter(environment.reset(environment.tasks("train")[index]))) for index in range(30)}
    assert set(agents.values()) == {"pro", "con"}
    fixed = DebateEnvironment(swap_opening=False)
    assert {next(iter(fixed.reset(fixed.tasks("train")[index]))) for index in range(30)} == {"pro"}


def test_embedded_topics_are_split_by_the_proposal_and_worded_both_ways() -> None:
    assert len(set(PROPOSALS)) == len(PROPOSALS) > 100
    environment = DebateEnvironment()
    for split in ("train", "validation", "test"):
        tasks = [environment.tasks(split)[index] for index in range(60)]
        assert all(split_of(task.data["proposal"]) == split for task in tasks)
        assert 10 < sum(" should not " in task.data["topic"] for task in tasks) < 50
        assert len({task.data["proposal"] for task in tasks}) > 4


def test_topics_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "topics.jsonl"
    path.write_text("".join(json.dumps({"topic": f" Topic {n} "}) + "\n" for n in range(60)))
    environment = DebateEnvironment(data=str(path))
    found = {
        split: [task.data["topic"] for task in environment.tasks(split)] for split in ("train", "validation", "test")
    }
    assert sum(len(topics) for topics in found.values()) == 60
    assert all(split_of(topic) == split for split, topics in found.items() for topic in topics)
    check_environment(environment).raise_on_failure()
    path.write_text(json.dumps({"topic": ["no text"]}))
    with pytest.raises(DataError, match="row 1: topic is"):
        DebateEnvironment(data={"train": str(path), "validation": str(path)}).tasks("train")


def test_long_and_broken_texts_are_cut_for_both() -> None:
    judge = Fixed()
    shown, step = play(DebateEnvironment(judge, max_turns=1, max_characters=10), ["\ud83d" + "x" * 99, "short"])
    assert judge.asked[0].arguments[0].text == "?" + "x" * 9
    assert shown[1][1].count("x") == 9
    assert step.metrics["clipped_arguments"] == 1.0


@pytest.mark.parametrize("reward", ["score", "margin", "win"])
def test_the_contract_is_kept(reward: Any) -> None:
    environment = DebateEnvironment(reward=reward)
    check_environment(environment).raise_on_failure()
    assert environment.bounds(environment.tasks("train")[0]) == (None if reward == "score" else (0.0, 0.0))


def test_the_wrong_side_is_refused() -> None:
    environment = DebateEnvironment()
    environment.reset(Task("debate", "train", 0, SEEDS["PRO"], {"topic": TOPIC}))
    with pytest.raises(EnvironmentContractError, match="due are"):
        environment.step({"con": Message("assistant", "me first")})


def test_copies_share_the_judge_and_settings_are_pickled() -> None:
    environment = DebateEnvironment(Fixed(), reward="win")
    assert copy.deepcopy(environment).judge is environment.judge
    again = pickle.loads(pickle.dumps(DebateEnvironment(reward="win")))
    assert play(again, list("abcd"))[1] == play(DebateEnvironment(reward="win"), list("abcd"))[1]


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"max_turns": 0}, "max_turns"), ({"reward": "fame"}, "fame"), ({"tie_margin": 1.0}, "tie_margin")],
)
def test_wrong_settings_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        DebateEnvironment(**settings)


def test_judges_are_built_from_the_blocks_of_the_document() -> None:
    from mrlm_pl.cli.parsing.parser import CommandParser
    from mrlm_pl.environment import Environment
    from mrlm_pl.runs.plugins import import_environment

    document = (Path(__file__).parents[3] / "docs/environments/debate.md").read_text()
    generator, reward_model = re.findall(r"```yaml\n(.*?)```", document, re.DOTALL)
    import_environment("DebateEnvironment")
    built = []
    for judge in (
        yaml.safe_load(generator)["environment"]["init_args"]["judge"],
        yaml.safe_load(reward_model)["judge"],
    ):
        parser = CommandParser(prog="test", allow_abbrev=False)
        parser.add_subclass_arguments(Environment, "environment", required=True)
        given = json.dumps({"class_path": "DebateEnvironment", "init_args": {"judge": judge}})
        built.append(parser.instantiate(parser.parse_args(["--environment", given])).environment.judge)
    assert isinstance(built[0], LanguageModelJudge)
    assert built[0].generator.url == "http://localhost:8000/v1/chat/completions"  # type: ignore[attr-defined]
    assert isinstance(built[1], RewardModelJudge)
    assert built[1].model.model == "path/or/hub-id"  # type: ignore[attr-defined]
