"""Pairs from files and from episodes."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.algorithms import DPO, SFT, PairwiseRewardModel
from mrlm_pl.data import JointPreferenceDataModule, PreferenceDataModule
from mrlm_pl.data.files.preferences import AnswerPair, pair_of, pair_rows, played_pairs
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.policy import ChatFormat, Policy
from mrlm_pl.policy.forward.packing import RowPlan
from mrlm_pl.policy.tiny import build_tokenizer

TOKENIZER = build_tokenizer()
CHAT = ChatFormat(TOKENIZER)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def texts(pair: Any) -> list[str]:
    return [TOKENIZER.decode(row.token_ids) for row in pair]


def actions(pair: Any) -> list[str]:
    chosen = [[t for t, acts in zip(row.token_ids, row.action_mask, strict=True) if acts] for row in pair]
    return [TOKENIZER.decode(ids) for ids in chosen]


def test_plain_text_is_compared_without_a_template() -> None:
    pair = pair_rows(pair_of({"prompt": "2+2=", "chosen": "4", "rejected": "5"}), CHAT, "main")
    assert texts(pair) == ["2+2=4<|end|>", "2+2=5<|end|>"]
    assert actions(pair) == ["4<|end|>", "5<|end|>"]


def test_messages_are_rendered_and_only_the_answers_count() -> None:
    row = {
        "prompt": [message("user", "2+2?")],
        "chosen": [message("assistant", "4")],
        "rejected": [message("assistant", "5")],
    }
    pair = pair_rows(pair_of(row), CHAT, "main")
    assert texts(pair)[0] == "<|user|>2+2?<|end|><|assistant|>4<|end|>"
    assert actions(pair) == ["4<|end|>", "5<|end|>"]


def test_the_tools_of_a_pair_are_in_its_prompt() -> None:
    function = {"name": "add", "description": "Sum.", "parameters": {"type": "object"}}
    row = {
        "prompt": [message("user", "2+2?")],
        "chosen": [message("assistant", "4")],
        "rejected": [message("assistant", "5")],
        "tools": [{"type": "function", "function": function}],
    }
    pair = pair_rows(pair_of(row), CHAT, "main")
    told = '<|system|>{"name": "add", "description": "Sum.", "parameters": {"type": "object"}}\n<|end|>'
    assert texts(pair)[0] == f"{told}<|user|>2+2?<|end|><|assistant|>4<|end|>"
    assert actions(pair) == ["4<|end|>", "5<|end|>"]


@pytest.mark.parametrize("family", ["qwen3", "glm4.5", "gpt_oss"])
def test_answers_with_a_call_and_its_result_are_compared(family: str) -> None:
    call = {"id": "call00000", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    called = [{"role": "assistant", "content": "", "tool_calls": [call]}, {**message("tool", "4"), "name": "add"}]
    row = {
        "prompt": [message("user", "2+2?")],
        "chosen": [*called, message("assistant", "It is 4.")],
        "rejected": [*called, message("assistant", "It is 5.")],
    }
    template = (Path(__file__).parents[1] / "templates" / f"{family}.jinja").read_text()
    said = actions(pair_rows(pair_of(row), ChatFormat(TOKENIZER, template), "main"))
    assert [("add" in text, text[-6:]) for text in said] == [(True, "<|end|>"[-6:])] * 2
    assert said[0].replace("It is 4.", "It is 5.") == said[1] != said[0]


def module(path: Path, rows: list[Any], **options: Any) -> PreferenceDataModule:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return PreferenceDataModule(str(path), **options)


def test_an_answer_of_several_turns_under_a_template_that_rewrites_history_is_refused() -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}<|end|>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    answers = [[message("assistant", "4"), message("user", "Sure?"), message("assistant", text)] for text in "45"]
    row = {"prompt": [message("user", "2+2?")], "chosen": answers[0], "rejected": answers[1]}
    with pytest.raises(ValueError, match=r"the 'chosen' answer makes 2 rows of policy 'main', as .*; give answers of"):
        pair_rows(pair_of(row), ChatFormat(TOKENIZER, template), "main")


@pytest.mark.parametrize("stated", ["2+2?", [message("user", "2+2?")], [], None])
def test_a_prompt_that_the_answers_repeat_is_read_once(stated: Any) -> None:
    """Data sets such as HuggingFaceH4/ultrafeedback_binarized state the prompt, and repeat it in both answers."""
    both = [message("user", "2+2?")]
    pair = {"chosen": [*both, message("assistant", "4")], "rejected": [*both, message("assistant", "5")]}
    assert pair_rows(pair_of({"prompt": stated, **pair}), CHAT, "main") == pair_rows(pair_of(pair), CHAT, "main")


def test_without_a_prompt_it_is_what_both_begin_with(tmp_path: Path) -> None:
    both = [message("user", "2+2?")]
    rows = [{"chosen": [*both, message("assistant", "4")], "rejected": [*both, message("assistant", "5")]}]
    (example,) = module(tmp_path / "pairs.jsonl.gz", rows)._examples["train"]
    given = {"prompt": both, "chosen": [message("assistant", "4")], "rejected": [message("assistant", "5")]}
    assert pair_rows(example, CHAT, "main") == pair_rows(pair_of(given), CHAT, "main")


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"prompt": "a", "chosen": "b"}, "lacks the field 'rejected'"),
        ({"chosen": "b", "rejected": "c"}, "need a field 'prompt'"),
        ({"prompt": "a", "chosen": "b", "rejected": [message("assistant", "c")]}, "must all be text"),
        ({"prompt": [message("user", "a")], "chosen": [message("user", "b")], "rejected": []}, "no assistant message"),
        ({"chosen": [message("user", "a")], "rejected": [message("user", "b")]}, "begin differently"),
        (
            {
                "chosen": [message("user", "a"), message("assistant", "b")],
                "rejected": [message("user", "a"), message("assistant", "c") | {"weight": 0}],
            },
            "'rejected' answer has a message of weight 0; leave it out",
        ),
        ({"prompt": [{"role": "judge"}], "chosen": [], "rejected": []}, "is not a message"),
        ({"prompt": [message("user", "a")], "chosen": [], "rejected": [], "tools": ["add"]}, "is not a tool"),
    ],
)
def test_a_bad_row_is_named(row: dict[str, Any], fault: str, tmp_path: Path) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError, match=rf"pairs.jsonl, row 2: .*{fault}"):
        module(tmp_path / "pairs.jsonl", [good, row])


def episode(number: int, group: str, reward: float, answer: str, error: str | None = None) -> Episode:
    turn = Turn("a", 0, 1, 2, reward, {"r": reward}, "stop", "main", 0, "e")
    messages = (Message("user", f"Task {group}"), Message("assistant", answer))
    row = Trajectory("a", "main", (8, 9), (False, True), (0.0, -1.0), (turn,), messages)
    return Episode(str(number), Task("t", "train", 0), group, 0, 0, {"a": (row,)}, "end", error=error)


def conversations(pairs: Sequence[AnswerPair]) -> list[list[str]]:
    """Return the first message of each pair's prompt, chosen and rejected answer."""
    return [[messages[0].content for messages in pair.parts()] for pair in pairs]


def test_the_best_and_the_worst_of_a_group_are_a_pair() -> None:
    episodes = [
        episode(0, "g", 0.5, "middle"),
        episode(1, "g", 1.0, "best"),
        episode(2, "g", 0.0, "worst"),
        episode(3, "g", 9.0, "failed", error="away"),
        episode(4, "h", 1.0, "same"),
        episode(5, "h", 1.0, "same too"),
        episode(6, "k", 0.3, "near"),
        episode(7, "k", 0.1, "far"),
    ]
    assert conversations(played_pairs(episodes, reward_gap=0.25)) == [["Task g", "best", "worst"]]
    assert len(played_pairs(episodes)) == 2


def test_agents_that_share_a_policy_make_a_pair_each_by_their_own_returns(tmp_path: Path) -> None:
    def team(number: int, rewards: dict[str, float]) -> Episode:
        rows = {agent: episode(number, agent, reward, str(number)).rows()[0] for agent, reward in rewards.items()}
        rows = {
            agent: replace(row, agent=agent, turns=(replace(row.turns[0], agent=agent),)) for agent, row in rows.items()
        }
        return replace(episode(number, "g", 0.0, ""), trajectories={agent: (row,) for agent, row in rows.items()})

    episodes = [team(0, {"a": 1.0, "b": 0.0}), team(1, {"a": 0.0, "b": 0.0}), team(2, {"a": 0.5, "b": 3.0})]
    assert conversations(played_pairs(episodes)) == [["Task a", "0", "1"], ["Task b", "2", "0"]]
    file = tmp_path / "same.jsonl"
    file.write_text("".join(json.dumps(item.to_dict()) + "\n" for item in episodes[:2]))
    with pytest.raises(DataError, match=r"differ by more than 2 in an agent's return; collect"):
        PreferenceDataModule(str(file), reward_gap=2)


def test_episode_files_are_read_and_without_a_difference_refused(tmp_path: Path) -> None:
    rows = [episode(n, "g", reward, f"answer {n}").to_dict() for n, reward in enumerate((1.0, 0.0))]
    assert len(module(tmp_path / "a.jsonl", rows)._examples["train"]) == 1
    with pytest.raises(DataError, match=r"differ by more than 1\.5"):
        module(tmp_path / "b.jsonl", rows, reward_gap=1.5)


@pytest.mark.parametrize("algorithm_class", [DPO, PairwiseRewardModel])
def test_the_answers_of_a_pair_compute_their_prompt_once(
    algorithm_class: Any, tmp_path: Path, model_folder: Path, quiet_trainer: Any
) -> None:
    rows = [{"prompt": number * 200, "chosen": "a" * 50, "rejected": "b" * 50} for number in "12"]
    data, trainer = module(tmp_path / "pairs.jsonl", rows), quiet_trainer()
    trainer.strategy.connect(algorithm_class({"main": Policy(str(model_folder))}))
    data.trainer = trainer
    data.setup("fit")
    fed = 0
    for pair in data.examples["train"]:
        (chosen,), (rejected,) = pair[:2]
        first, second = chosen.token_ids[:-1], rejected.token_ids[:-1]  # the last token predicts nothing
        shared = next(place for place, (a, b) in enumerate(zip(first, second, strict=True)) if a != b)
        assert shared >= 200
        fed += shared + (len(first) - shared) + (len(second) - shared)
    inputs = data.collate("train", [0, 1])["main"].inputs()
    plan = RowPlan(inputs.token_ids, inputs.action_mask, inputs.prefix_groups)
    (packed,) = plan.packed(None)
    assert packed.input_ids.numel() == fed


@pytest.mark.parametrize(
    ("algorithm_class", "data_module"),
    [
        (DPO, PreferenceDataModule),
        (PairwiseRewardModel, PreferenceDataModule),
        (PairwiseRewardModel, JointPreferenceDataModule),
    ],
)
def test_calls_of_answers_are_written_for_policies_and_reward_models(
    algorithm_class: Any, data_module: Any, tmp_path: Path, model_folder: Path, quiet_trainer: Any
) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    pair = {
        "prompt": [message("user", "2+2?")],
        "chosen": [{"role": "assistant", "content": None, "tool_calls": [call]}],
        "rejected": [message("assistant", "5")],
    }
    file, trainer = tmp_path / "pairs.jsonl", quiet_trainer()
    file.write_text(json.dumps({"agents": {"main": pair}} if data_module is JointPreferenceDataModule else pair) + "\n")
    trainer.strategy.connect(algorithm_class({"main": Policy(str(model_folder))}))
    data = data_module(str(file))
    data.trainer = trainer
    data.setup("fit")
    ((chosen,), (rejected,)) = data.examples["train"][0][:2]
    written = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    called = [written in "".join(TOKENIZER.decode(row.token_ids).split("\n")) for row in (chosen, rejected)]
    assert called == [True, False]


def test_long_pairs_are_left_out_together(tmp_path: Path, model_folder: Path, quiet_trainer: Any) -> None:
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b", "rejected": "c" * 50},
    ]
    data = module(tmp_path / "pairs.jsonl", rows, max_tokens=20)
    quiet_trainer().fit(DPO({"main": Policy(str(model_folder))}), data)
    assert data.count("train") == 1


def test_other_algorithms_do_not_learn_from_pairs(tmp_path: Path, model_folder: Path, quiet_trainer: Any) -> None:
    data = module(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    with pytest.raises(ConfigurationError, match="is for DPO and SimPO and ORPO and PairwiseRewardModel, not for SFT"):
        quiet_trainer().fit(SFT({"main": Policy(str(model_folder))}), data)
