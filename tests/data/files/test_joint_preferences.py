"""Pairs of joint actions from files and from episodes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.algorithms import DPO, MADPO
from mrlm_pl.data import JointPreferenceDataModule, joint_pairs
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.policy import ChatFormat, Policy
from mrlm_pl.policy.chat import Conversation
from mrlm_pl.policy.tiny import build_tokenizer

TOKENIZER = build_tokenizer()
GOOD = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}


def module(folder: Path, rows: list[Any], **options: Any) -> JointPreferenceDataModule:
    path = folder / "joint.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JointPreferenceDataModule(str(path), **options)


def set_up(data: JointPreferenceDataModule, trainer: Any, *folders: Path, **options: Any) -> Any:
    """The pairs of rows, as the two policies ``one`` and ``two`` are shown them."""
    one, two = folders if len(folders) == 2 else (folders[0], folders[0])
    algorithm = MADPO({"one": Policy(str(one)), "two": Policy(str(two), **options)}, {"a": "one", "b": "two"})
    trainer.strategy.connect(algorithm)
    data.trainer = trainer
    data.setup("fit")
    return data.examples["train"]


def said(rows: Any) -> list[tuple[str, str, str]]:
    acts = [[t for t, act in zip(row.token_ids, row.action_mask, strict=True) if act] for row in rows]
    return [(row.agent, row.policy, TOKENIZER.decode(ids)) for row, ids in zip(rows, acts, strict=True)]


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        (GOOD, r"row 2: it lacks the field 'agents'.*\['chosen', 'prompt', 'rejected'\]"),
        ({"agents": {"a": None}}, "row 2: its field 'agents' names no agent"),
        ({"agents": {"a": GOOD, "b": "4"}}, "row 2: agent 'b': '4' is not an object"),
        ({"agents": {"a": {"prompt": "2+2=", "chosen": "4"}}}, "row 2: agent 'a': it lacks the field 'rejected'"),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], fault: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=fault):
        module(tmp_path, [{"agents": {"a": GOOD, "b": None}}, row])


def test_every_agent_is_shown_its_part_in_the_form_of_its_own_model(
    tmp_path: Path, model_folder: Path, quiet_trainer: Any
) -> None:
    shutil.copytree(model_folder, tmp_path / "other")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("<|{{ message.role }}|>", "<|{{ message.role }}|> ")
    tokenizer.save_pretrained(tmp_path / "other")
    user = [{"role": "user", "content": "2+2?"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("4", "5")]
    chat = {"prompt": user, "chosen": answers[0], "rejected": answers[1]}
    both = {"chosen": [*user, *answers[0]], "rejected": [*user, *answers[1]]}
    rows = [{"agents": {"a": chat, "b": both}}, {"agents": {"b": GOOD}}]
    first, second = set_up(module(tmp_path, rows), quiet_trainer(), model_folder, tmp_path / "other")
    assert said(first.chosen) == [("a", "one", "4<|end|>"), ("b", "two", "4<|end|>")]
    assert said(first.rejected) == [("a", "one", "5<|end|>"), ("b", "two", "5<|end|>")]
    texts = [TOKENIZER.decode(row.token_ids) for row in first.chosen]
    assert texts == ["<|user|>2+2?<|end|><|assistant|>4<|end|>", "<|user|> 2+2?<|end|><|assistant|>4<|end|>"]
    assert said(second.chosen) == [("b", "two", "4<|end|>")]


def episode(number: int, group: str, plays: dict[str, tuple[float, list[str]]], error: str | None = None) -> Episode:
    """Every agent answers with these texts, and is rewarded at the end."""
    trajectories = {}
    for agent, (reward, texts) in plays.items():
        conversation, turns = Conversation(ChatFormat(TOKENIZER)), []
        for index, text in enumerate(texts):
            conversation.observe([Message("user", f"Task {group}" if not index else f"after {number}")])
            start, ids = len(conversation.row.token_ids), TOKENIZER.encode(text + "<|end|>")
            conversation.act(ids, [-1.0] * len(ids))
            paid = reward if index == len(texts) - 1 else 0.0
            turns.append(Turn(agent, index, start, start + len(ids), paid, {}, "stop", "m", 0, "e"))
        row = conversation.row
        trajectories[agent] = (
            Trajectory(
                agent,
                "m",
                tuple(row.token_ids),
                tuple(row.action_mask),
                tuple(row.logprobs),
                tuple(turns),
                tuple(row.messages),
            ),
        )
    return Episode(str(number), Task("t", "train", 0), group, 0, 0, trajectories, "end", error=error)


def test_the_best_and_the_worst_episode_of_a_group_are_a_pair() -> None:
    table = [("g", 1.0, 0.0), ("g", 0.0, 0.9), ("g", 0.6, 0.6), ("h", 1.0, 1.0), ("h", 1.0, 1.0), ("k", 0.3, 0.3)]
    episodes = [
        episode(n, group, {"a": (first, ["x"]), "b": (second, ["y"])}) for n, (group, first, second) in enumerate(table)
    ]
    episodes += [episode(6, "k", {"a": (0.1, ["x"])}), episode(7, "g", {"a": (9.0, ["x"])}, error="away")]
    # Means 0.5, 0.45, 0.6 in g; 0.3 and 0.1 in k.
    assert [(pair.chosen.id, pair.rejected.id) for pair in joint_pairs(episodes)] == [("2", "1"), ("5", "6")]
    assert [pair.chosen.id for pair in joint_pairs(episodes, reward_gap=0.18)] == ["5"]


def test_all_that_the_agents_said_counts_and_what_is_alike_does_not(
    tmp_path: Path, model_folder: Path, quiet_trainer: Any
) -> None:
    episodes = [
        episode(0, "g", {"a": (1.0, ["yes", "so"]), "b": (1.0, ["same"])}),
        episode(1, "g", {"a": (0.0, ["no", "so"]), "b": (0.0, ["same"])}),
        episode(2, "h", {"a": (1.0, ["one"]), "b": (1.0, ["two"])}),  # b did not come to act in the other
        episode(3, "h", {"a": (0.0, ["two"])}),
        episode(4, "k", {"a": (1.0, ["luck"])}),
        episode(5, "k", {"a": (0.0, ["luck"])}),
    ]
    data = module(tmp_path, [item.to_dict() for item in episodes])
    first, second = set_up(data, quiet_trainer(), model_folder)
    assert said(first.chosen) == [("a", "one", "yes<|end|>so<|end|>")]
    assert said(first.rejected) == [("a", "one", "no<|end|>so<|end|>")]
    assert said(second.chosen) == [("a", "one", "one<|end|>"), ("b", "two", "two<|end|>")]
    assert said(second.rejected) == [("a", "one", "two<|end|>")]
    tables = data.collate("train", [1, 0])
    assert tables["one"].joint_actions.tolist() == [0, 1, 2, 3]
    assert tables["two"].joint_actions.tolist() == [0]
    assert tables["one"].groups.tolist() == [0, 0, 1, 1], "the joint actions of a pair compute a prompt once"
    sizes = data.totals("train", [0, 1])
    assert {name: size.sequences for name, size in sizes.items()} == {"one": 4, "two": 1}
    parts = {"one": 1 + 2 / 3, "two": 1 / 3}
    assert {name: size.episodes for name, size in sizes.items()} == pytest.approx(parts), "of two pairs, by tokens"
    quiet_trainer().fit(data.algorithm(), JointPreferenceDataModule(data.sources["train"], batch_size=1))


def test_episodes_without_a_difference_are_refused(tmp_path: Path, model_folder: Path, quiet_trainer: Any) -> None:
    rows = [episode(n, "g", {"a": (1.0 - n, ["same"]), "b": (0.0, [f"word {n}"])}).to_dict() for n in (0, 1)]
    with pytest.raises(DataError, match=r"differ by more than 0\.5 in the agents' mean return"):
        module(tmp_path, rows, reward_gap=0.5)
    with pytest.raises(DataError, match="no pair in which an agent whose policy is trained acts differently"):
        set_up(module(tmp_path, rows), quiet_trainer(), model_folder, trained=False)


def test_long_pairs_are_left_out_together(tmp_path: Path, model_folder: Path, quiet_trainer: Any) -> None:
    rows = [{"agents": {"a": GOOD, "b": GOOD}}, {"agents": {"a": GOOD, "b": {**GOOD, "rejected": "5" * 50}}}]
    assert len(set_up(module(tmp_path, rows, max_tokens=20), quiet_trainer(), model_folder)) == 1
    with pytest.raises(DataError, match="fits into 3 tokens"):
        set_up(module(tmp_path, rows, max_tokens=3), quiet_trainer(), model_folder)


def test_dpo_does_not_learn_from_joint_pairs_and_agents_need_a_seat(
    tmp_path: Path, model_folder: Path, quiet_trainer: Any
) -> None:
    with pytest.raises(ConfigurationError, match="is for MADPO and PairwiseRewardModel, not for DPO"):
        quiet_trainer().fit(DPO({"main": Policy(str(model_folder))}), module(tmp_path, [{"agents": {"a": GOOD}}]))
    with pytest.raises(ConfigurationError, match="agent 'judge' has no seat"):
        set_up(module(tmp_path, [{"agents": {"judge": GOOD}}]), quiet_trainer(), model_folder)
