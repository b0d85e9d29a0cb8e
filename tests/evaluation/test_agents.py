"""Expected numbers are arithmetic on two small episodes of two agents."""

from __future__ import annotations

import math

import pytest

from mrlm_pl.data.rollout.metrics import CollectionSums
from mrlm_pl.evaluation.report import played_episodes
from mrlm_pl.evaluation.summary import summarize
from tests.support.environments.counted_turns import episode, trajectory

FIRST = episode(
    0,
    "judged",
    False,
    trajectory("con", "main", (0, 3, {"style": 0.5}, "stop"), (2, 5, {"won": 1.0}, "length")),
    trajectory("pro", "main", (1, 4, {"won": -1.0}, "stop")),
)
SECOND = episode(1, "max_turns", True, trajectory("con", "main", (0, 4, {"style": 0.5}, "stop")))


def test_agents_and_policies_of_two_episodes() -> None:
    report = summarize([FIRST, SECOND], environment="duel", model="m", split="test", seed=0, requested=3)
    assert report.stop_reasons == {"judged": 1, "max_turns": 1}
    assert report.truncated == 0.5
    assert report.seats == {"con": "main", "pro": "main"}
    assert list(report.agents) == ["con", "pro"], "in the order in which they act"
    con, pro = report.agents["con"], report.agents["pro"]
    assert (con.reward, pro.reward) == ((1.5 + 0.5) / 2, (-1.0 + 0) / 2)
    assert con.components == {"style": 0.5, "won": 0.5}
    assert (con.turns, pro.turns) == (3 / 2, 1 / 2)
    assert (con.first_turn, pro.first_turn) == (0.0, 1.0)
    assert (con.opens, pro.opens) == (1.0, 0.0)
    assert con.response_tokens == (3 + 5 + 4) / 3
    assert con.finish_reasons == {"stop": 2, "length": 1}
    assert con.truncated_turns == pytest.approx(1 / 3)
    assert (con.stop_reasons, pro.stop_reasons) == ({"judged": 1, "max_turns": 1}, {"judged": 1})
    # Student's t of one degree, s^2 of 1.5 and 0.5 is 0.5
    half = 12.7062 * math.sqrt(0.5 / 2)
    assert con.ci95 == pytest.approx((1 - half, 1 + half), abs=1e-3)
    main = report.policies["main"]
    assert main.reward == pytest.approx((1.5 - 1.0 + 0.5) / 3), "of the agents that it played"
    assert main.response_tokens == 16 / 4
    assert (report.requested, report.episodes) == (3, 2)
    assert played_episodes(report) == "2 of up to 3 (no more tasks)"


def test_an_agent_that_never_acts_has_a_part() -> None:
    silent = summarize([SECOND], environment="duel", model="m", split="test", seed=0)
    pro = silent.agents["pro"]
    assert (pro.reward, pro.turns, pro.finish_reasons) == (0.0, 0.0, {})
    assert math.isnan(pro.first_turn)
    assert silent.to_dict()["agents"]["pro"]["first_turn"] is None


def test_components_are_those_that_training_logs() -> None:
    """`reward` is the whole if only some turns have named components."""
    mixed = episode(
        2, "end", False, trajectory("con", "main", (0, 3, {"style": 0.5}, "stop"), (1, 2, {"reward": 2.0}, "stop"))
    )
    report = summarize([mixed, SECOND], environment="duel", model="m", split="test", seed=0)
    assert report.components == {"reward": (0.5 + 2.0 + 0.5) / 2 / 2, "style": (0.5 + 0.5) / 2 / 2}
    assert report.agents["con"].components == {"reward": (0.5 + 2.0 + 0.5) / 2, "style": (0.5 + 0.5) / 2}
    logged = CollectionSums.of([mixed, SECOND], 1.0).metrics()
    assert {name: logged[f"rollout/duel/{name}"] for name in report.components} == report.components
