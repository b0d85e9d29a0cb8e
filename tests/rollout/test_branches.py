"""Further episodes that branch from finished ones."""

from __future__ import annotations

import dataclasses

import pytest

from mrlm_pl.data.rollout.metrics import token_count
from mrlm_pl.episode import Episode, Origin, turns_by_step
from mrlm_pl.errors import ConfigurationError, EnvironmentContractError
from mrlm_pl.rollout.branches import Alternatives, Expansions, check_origin, roots_of
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.rollout.replay import continued, differences, replayed
from tests.rollout.test_replay import ReplayedSums, play, words

TOKENS = 2
"""Of a decision: a digit and the end of the turn."""


@pytest.fixture(scope="module")
def group() -> list[Episode]:
    task = ReplayedSums().tasks("train")[0]
    return play([EpisodeSpec(f"e{number}", task, "g", seed=number, iteration=2) for number in range(2)])[0]


def test_a_branch_records_its_origin_and_counts_its_own_tokens_alone(group: list[Episode]) -> None:
    specs = Alternatives(3, None, "play", ("main",)).due(group, 0)
    assert len(specs) == 2 * 3 * 3, "episodes, messages, alternatives"
    made, engine = play(specs)
    assert engine.sampled == 2 * 3 * (2 + 2 + 1), "c decides again after a or b, and alone in its own place"
    assert token_count(made) == TOKENS * engine.sampled
    for branch in made:
        assert branch.origin is not None
        (agent,), step = branch.origin.agents, branch.origin.step
        assert branch.id.startswith(f"{branch.origin.episode}/{agent}/{step}/")
        fresh = {turn.agent for row in branch.rows() for turn in row.turns if not turn.scripted}
        assert fresh == {agent, "c"}
        check_origin(group[int(branch.origin.episode[1])], branch)
        assert Episode.from_json(branch.to_json()) == branch
        (again,), silent = play([replayed(branch)])
        assert silent.sampled == 0
        assert differences(branch, again) == []
    assert len({words(branch)[2] for branch in made}) > 3, "alternatives have their own seeds"


def test_what_is_replayed_after_the_message_generates_nothing(group: list[Episode]) -> None:
    made, engine = play(Alternatives(2, None, "replay", ("main",)).due(group, 0))
    assert engine.sampled == len(made) == 2 * 3 * 2


def test_messages_are_drawn_alike_each_time(group: list[Episode]) -> None:
    found = [[spec.id for spec in Alternatives(1, 1, "play", ("main",)).due(group, 0)] for _ in range(2)]
    assert found[0] == found[1]
    assert [name.split("/")[0] for name in found[0]] == ["e0", "e1"]


def test_failed_episodes_and_frozen_policies_are_not_branched(group: list[Episode]) -> None:
    failed = dataclasses.replace(group[0], error="away")
    assert {spec.origin.episode for spec in Alternatives(1, None, "play", ("main",)).due([failed, group[1]], 0)} == {
        "e1"
    }
    assert not Alternatives(1, None, "play", ("other",)).due(group, 0)
    assert not Expansions(1, 1).due([failed], 0)


def test_trees_grow_by_rounds_and_do_not_pay_for_prefixes(group: list[Episode]) -> None:
    grown, expansions = [*group], Expansions(rounds=2, nodes=3)
    for number in range(3):
        specs = expansions.due(grown, number)
        assert specs == expansions.due(grown, number)
        made, engine = play(specs)
        assert engine.sampled == sum(3 - 2 * (spec.origin.step) for spec in specs), "three decisions, or c's alone"
        grown += made
    assert len(grown) == 2 + 2 * 2 * 3
    assert len({leaf.id for leaf in grown}) == len(grown)
    trees = roots_of(grown)
    assert sorted(trees.values()) == ["e0"] * 7 + ["e1"] * 7
    # States of second steps in expansions of the first round are expanded too.
    assert any(leaf.id.count("/") == 4 for leaf in grown)
    for leaf in grown:
        if leaf.origin is not None and leaf.origin.step:
            before = next(other for other in grown if other.id == leaf.origin.episode)
            assert turns_by_step(before)[0]["a"][1].token_ids == turns_by_step(leaf)[0]["a"][1].token_ids


def test_records_without_origins_are_still_read(group: list[Episode]) -> None:
    data = group[0].to_dict()
    del data["origin"]
    for rows in data["trajectories"].values():
        for row in rows:
            for turn in row["turns"]:
                del turn["scripted"]
    assert Episode.from_dict(data) == group[0]


def test_other_observations_after_the_same_actions_are_an_error(group: list[Episode]) -> None:
    (branch,), _ = play([continued(group[0], 1, 0)])
    row = branch.trajectories["c"][0]
    other = dataclasses.replace(row, token_ids=(1, *row.token_ids[1:]))
    changed = dataclasses.replace(branch, trajectories={**branch.trajectories, "c": (other,)})
    assert branch.origin == Origin("e0", ("c",), 1)
    check_origin(group[0], branch)
    with pytest.raises(EnvironmentContractError, match=r"'sums'.* at step 1 .*deterministic in the task"):
        check_origin(group[0], changed)


def test_values_out_of_range_are_errors(group: list[Episode]) -> None:
    for messages, count, rest in ((0, 1, "play"), (None, 0, "play"), (None, 1, "replay"), (None, 1, "skip")):
        with pytest.raises(ConfigurationError):
            Alternatives(count, messages, rest, ("main",))  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError):
        Expansions(0, 1)
    with pytest.raises(ConfigurationError, match="no agent decided at step 2"):
        continued(group[0], 2, 0)
