"""Token rows of played episodes: the origin of their tokens, and a learner's view of them."""

from __future__ import annotations

import copy
import dataclasses
import gzip
import json
import pickle
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from mrlm_pl.data import PreferenceDataModule, TrajectoryDataModule
from mrlm_pl.data.files.chat_rows import chat_rows, played_rows, scored_row
from mrlm_pl.data.files.demonstrations import demonstration_rows
from mrlm_pl.data.files.preferences import pair_rows, played_pairs
from mrlm_pl.episode import Episode, Message, Task, Trajectory, Turn
from mrlm_pl.episode_files import read_episodes, write_episodes
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.policy import ChatFormat, Conversation
from mrlm_pl.policy.tiny import build_tokenizer

TOKENIZER = build_tokenizer()
CHAT = ChatFormat(TOKENIZER)
STRIPS_REASONING = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def play(
    replies: Sequence[str], chat: ChatFormat = CHAT, tools: Sequence[Any] = (), question: str = ""
) -> list[Trajectory]:
    """The rows of an agent that gives these replies, each sampled as its characters; `...` at an end is a cut."""
    conversation, places = Conversation(chat, tools), []
    for number, reply in enumerate(replies):
        conversation.observe([Message("user", question or f"Turn {number}?")])
        sampled = ids(reply.removesuffix("...")) + ([] if reply.endswith("...") else [chat.end_id])
        start = len(conversation.row.token_ids)
        conversation.act(sampled, [-1.0] * len(sampled))
        reason = "length" if reply.endswith("...") else "stop"
        turn = Turn("a", number, start, start + len(sampled), 1.0, {}, reason, "actor", 0, "e")
        places.append((len(conversation.rows) - 1, turn))
    return [
        Trajectory(
            "a",
            "actor",
            tuple(row.token_ids),
            tuple(row.action_mask),
            tuple(row.logprobs),
            tuple(turn for place, turn in places if place == number),
            tuple(row.messages),
        )
        for number, row in enumerate(conversation.rows)
    ]


def episode(rows: Sequence[Trajectory], group: str = "g", error: str | None = None) -> Episode:
    return Episode("0", Task("t", "train", 0), group, 0, 0, {"a": tuple(rows)}, "end", error=error)


def acted(row: Trajectory, chat: ChatFormat = CHAT) -> str:
    return chat.tokenizer.decode([token for token, acts in zip(row.token_ids, row.action_mask, strict=True) if acts])


def words_tokenizer() -> PreTrainedTokenizerFast:
    """Another tokenizer: its ids are the words of the test."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {
        word: index for index, word in enumerate(("<unk>", "<eos>", "four", "five", "User", ":", "Turn", "0", "?"))
    }
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>")


@pytest.mark.parametrize("replies", [["four"], ["four", "five"], ["fou..."], ["fo...", "five"]])
def test_the_players_own_tokens_are_kept(replies: list[str]) -> None:
    (played,) = play(replies)
    (row,) = played_rows(played, CHAT, "main")
    assert row.policy == "main"
    assert (row.token_ids, row.action_mask) == (played.token_ids, played.action_mask)


def test_tokens_that_encoding_their_text_would_not_give_are_kept() -> None:
    # A special token that was sampled amid the reply is not a text, so the text alone would lose it.
    (played,) = play(["four"])
    token = TOKENIZER.convert_tokens_to_ids("<|user|>")
    turn = played.turns[0]
    row = Trajectory(
        "a",
        "actor",
        (*played.token_ids[: turn.start], token, *played.token_ids[turn.start :]),
        (*played.action_mask, True),
        (*played.logprobs, -1.0),
        (Turn("a", 0, turn.start, turn.stop + 1, 1.0, {}, "stop", "actor", 0, "e"),),
        played.messages,
    )
    assert played_rows(row, CHAT, "main")[0].token_ids == row.token_ids


def test_descriptions_of_tools_before_the_conversation_stay() -> None:
    (played,) = play(["four"], tools=TOOLS)
    assert '"add"' in TOKENIZER.decode(played.token_ids)
    assert played_rows(played, CHAT, "main")[0].token_ids == played.token_ids


def test_a_prompt_that_spells_special_tokens_keeps_the_row_and_data_are_read_as_they_are() -> None:
    (played,) = play(["four"], tools=TOOLS, question="Turn <|end|>?")
    assert played_rows(played, CHAT, "main")[0].token_ids == played.token_ids
    (row,) = chat_rows([Message("user", "<|end|>?")], [Message("assistant", "4")], CHAT, "main")
    assert list(row.token_ids) == ids("<|user|><|end|>?<|end|><|assistant|>4<|end|>")


def test_a_template_that_writes_the_last_message_otherwise_renders_anew() -> None:
    prompt = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    loud = ChatFormat(TOKENIZER, "{% for m in messages %}{{ m.content | upper }}{% endfor %}" + prompt)
    (row,) = played_rows(play(["FOUR"])[0], loud, "main")
    assert TOKENIZER.decode(row.token_ids) == "TURN 0?<|assistant|>FOUR<|end|>"


def test_replies_with_calls_keep_their_tokens_and_the_tools_before_them() -> None:
    (played,) = play(['<tool_call>{"name": "add", "arguments": {}}</tool_call>', "four"], tools=TOOLS)
    assert [len(message.tool_calls) for message in played.messages] == [0, 1, 0, 0]
    (row,) = played_rows(played, CHAT, "main")
    assert (row.token_ids, row.action_mask) == (played.token_ids, played.action_mask)


def test_another_template_or_tokenizer_renders_anew_and_a_cut_turn_does_not_end() -> None:
    plain = ChatFormat(TOKENIZER, "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}assistant:")
    (whole,), (cut,) = (played_rows(play([reply])[0], plain, "main") for reply in ("four", "fou..."))
    assert TOKENIZER.decode(whole.token_ids) == "user:Turn 0?<|end|>assistant:four<|end|>"
    assert acted(whole) == "four<|end|>"
    assert acted(cut) == "fou"
    words = ChatFormat(words_tokenizer())
    (other,) = played_rows(play(["four"])[0], words, "main")
    assert acted(other, words) == "four <eos>"


def test_turns_that_a_rewritten_history_repeats_act_once() -> None:
    chat = ChatFormat(TOKENIZER, STRIPS_REASONING)
    rows = play(["<think>a</think>one", "<think>b</think>two", "three"], chat)
    assert len(rows) == 3
    for learner in (chat, CHAT):
        made = [made for row in rows for made in played_rows(row, learner, "main")]
        assert [acted(row) for row in made] == [
            "<think>a</think>one<|end|>",
            "<think>b</think>two<|end|>",
            "three<|end|>",
        ]


def test_a_folder_of_episodes_is_read_without_the_failed_ones(tmp_path: Path) -> None:
    write_episodes(tmp_path / "episodes/iteration-000000.jsonl.gz", [episode(play(["four"]))])
    write_episodes(tmp_path / "episodes/iteration-000001.jsonl.gz", [episode(play(["five"]), error="away")])
    data = TrajectoryDataModule(str(tmp_path / "episodes"))
    assert len(data._examples["train"]) == 1
    plain = tmp_path / "plain.jsonl"
    plain.write_text(episode(play(["four"])).to_json() + "\n" + episode(play(["a"]), error="away").to_json() + "\n")
    assert len(TrajectoryDataModule(str(plain))._examples["train"]) == 1
    assert len(list(read_episodes(plain))) == 2
    write_episodes(tmp_path / "bad/x.jsonl.gz", [episode(play(["five"]), error="away")])
    with pytest.raises(DataError, match=r"every episode of .* failed, 1 in all"):
        TrajectoryDataModule(str(tmp_path / "bad"))
    plain.write_text(episode(play(["four"])).to_json() + '\n{"messages": []}\n')
    with pytest.raises(DataError, match=r"row 2 is not an episode record"):
        TrajectoryDataModule(str(plain))
    row = json.dumps({"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4"}]})
    plain.write_text(f"{row}\n{episode(play(['four'])).to_json()}\n")
    with pytest.raises(DataError, match=r"row 2 is an episode record, unlike those before it"):
        TrajectoryDataModule(str(plain))


def test_episodes_below_a_reward_are_left_out(tmp_path: Path) -> None:
    write_episodes(tmp_path / "e.jsonl.gz", [episode(play(["four"])), episode(play(["four", "five"]))])
    # A reward of 1 for each turn.
    assert len(TrajectoryDataModule(str(tmp_path / "e.jsonl.gz"), filter_reward=2.0)._examples["train"]) == 1
    with pytest.raises(DataError, match=r"no episode has a reward of 2\.5 or more"):
        TrajectoryDataModule(str(tmp_path / "e.jsonl.gz"), filter_reward=2.5)


def test_the_rows_of_chosen_agents_are_trained(tmp_path: Path) -> None:
    (agent,) = {row.agent for row in play(["four"])}
    other = [dataclasses.replace(row, agent="other") for row in play(["nine"])]
    team = dataclasses.replace(
        episode(play(["four"])), trajectories={agent: tuple(play(["four"])), "other": tuple(other)}
    )
    path = str(tmp_path / "e.jsonl.gz")
    write_episodes(path, [team, episode(play(["five"]))])

    def trained(agents: list[str] | None) -> list[str]:
        rows = TrajectoryDataModule(path, agents=agents)._examples["train"]
        return [acted(row) for example in rows for row in demonstration_rows(example, CHAT, "main")]

    assert trained(None) == ["four<|end|>", "nine<|end|>", "five<|end|>"]
    assert trained(["other"]) == ["nine<|end|>"]
    assert trained([agent]) == ["four<|end|>", "five<|end|>"]
    with pytest.raises(ConfigurationError, match=r"data\.agents is \['third'\]; choose from"):
        TrajectoryDataModule(path, agents=["third"])
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "2+2=", "completion": "4"}\n')
    for chosen in ({"agents": ["other"]}, {"filter_reward": 0.5}):
        with pytest.raises(DataError, match=r"data\.agents and data\.filter_reward choose among episodes"):
            TrajectoryDataModule(str(rows), **chosen)


def test_pairs_of_episodes_compare_the_sampled_tokens(tmp_path: Path) -> None:
    episodes = [episode(play(["four", "five"])), episode(play(["fou..."]))]
    (pair,) = played_pairs(episodes)
    chosen, rejected = pair_rows(pair, CHAT, "main")
    assert chosen.token_ids == episodes[0].rows()[0].token_ids
    assert acted(rejected) == "fou"
    assert isinstance(PreferenceDataModule(_written(tmp_path, episodes))._examples["train"][0].chosen, Trajectory)
    (row,) = play(["four"])
    better = dataclasses.replace(row, turns=(dataclasses.replace(row.turns[0], reward=2.0),))
    assert not played_pairs([episode([row]), episode([better])]), "both say the same"


def _written(folder: Path, episodes: Sequence[Episode]) -> str:
    write_episodes(folder / "pairs.jsonl.gz", episodes)
    return str(folder / "pairs.jsonl.gz")


DAMAGES = {
    "a list in the mask": (lambda row: row["action_mask"].__setitem__(0, []), r"`bool`, got `array`.*action_mask\[0\]"),
    "a float token": (lambda row: row["token_ids"].__setitem__(0, 1.5), r"`int`, got `float`.*token_ids\[0\]"),
    "a negative token": (lambda row: row["token_ids"].__setitem__(0, -5), r"`int` >= 0 .*token_ids\[0\]"),
    "no log-prob": (lambda row: row["logprobs"].__setitem__(0, None), r"`float`, got `null`.*logprobs\[0\]"),
    "text for a mask": (lambda row: row.__setitem__("action_mask", "x"), "got `str`.*action_mask"),
    "a short mask": (lambda row: row["action_mask"].pop(), "have lengths"),
    "content": (lambda row: row["messages"][0].__setitem__("content", 3), r"got `int`.*messages\[0\].content"),
    "no content": (lambda row: row["messages"][0].pop("content"), r"missing .*`content`.*messages\[0\]"),
    "a late turn": (lambda row: row["turns"][0].__setitem__("stop", 10**6), "goes from .* in a row of"),
    "an early turn": (lambda row: row["turns"][0].__setitem__("start", -3), "goes from -3"),
    "a reward": (lambda row: row["turns"][0].__setitem__("reward", "much"), r"got `str`.*turns\[0\].reward"),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("form", ["file", "folder"])
def test_a_damaged_episode_is_one_line_that_names_it(tmp_path: Path, name: str, form: str) -> None:
    damage, fault = DAMAGES[name]
    record = json.loads(episode(play(["four"])).to_json())
    ((row,),) = record["trajectories"].values()
    damage(row)
    line = json.dumps(record) + "\n"
    if form == "file":
        (tmp_path / "e.jsonl").write_text(line)
        source = tmp_path / "e.jsonl"
    else:
        source = tmp_path / "episodes"
        source.mkdir()
        (source / "iteration-000000.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    with pytest.raises(DataError, match=fault) as caught:
        TrajectoryDataModule(str(source))
    assert len(str(caught.value).splitlines()) == 1


def test_a_damaged_folder_of_episodes_is_named(tmp_path: Path) -> None:
    whole = gzip.compress(episode(play(["four"])).to_json().encode())
    (tmp_path / "iteration-000000.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"iteration-000000.jsonl.gz cannot be read: EOFError"):
        TrajectoryDataModule(str(tmp_path))


TOKENIZER = build_tokenizer()
# As Qwen's: a turn ends with a line break after its end token.
LINES = (
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
# As reasoning models': the generation prompt opens a thought that a rendered history does not have.
THINKS = LINES.replace("<|assistant|>\n{% endif %}", "<|assistant|>\n[think]{% endif %}")


@pytest.mark.parametrize(
    ("template", "given", "acting"),
    [
        (None, "<|user|>2+2?<|end|><|assistant|>", "4<|end|>"),
        (LINES, "<|user|>\n2+2?<|end|>\n<|assistant|>\n", "4<|end|>\n"),
        (THINKS, "<|user|>\n2+2?<|end|>\n<|assistant|>\n", "4<|end|>\n"),
    ],
)
def test_the_row_is_the_whole_rendering_and_the_answer_acts(template: str | None, given: str, acting: str) -> None:
    chat = ChatFormat(TOKENIZER, template)
    messages = (Message("user", "2+2?"), Message("assistant", "4"))
    row = scored_row(messages[:1], messages[1:], chat, "main")
    assert list(row.token_ids) == chat.encode(chat.render(messages, generation_prompt=False))
    parts = {
        acts: TOKENIZER.decode(
            [token for token, own in zip(row.token_ids, row.action_mask, strict=True) if own == acts]
        )
        for acts in (False, True)
    }
    assert parts == {False: given, True: acting}
    assert row.messages == messages


def test_an_empty_answer_acts_with_its_end() -> None:
    row = scored_row([Message("user", "2+2?")], [Message("assistant", "")], ChatFormat(TOKENIZER), "main")
    assert row.num_actions == 1


def test_an_answer_that_spells_special_tokens_is_the_text_that_reward_models_score() -> None:
    row = scored_row([Message("user", "2<|end|>?")], [Message("assistant", "4<|end|>!")], CHAT, "main")
    assert list(row.token_ids) == ids("<|user|>2< |end|>?<|end|><|assistant|>4< |end|>!<|end|>")


def test_rows_of_files_and_episodes_take_few_bytes_a_token(tmp_path: Path) -> None:
    """A token is an int32 and a bool, a sampled one also has a float64: 5 and 13 bytes, and tuples have 24 or more."""
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "4" * 20_000}]
    rows, episodes = tmp_path / "rows.jsonl", tmp_path / "episodes.jsonl.gz"
    rows.write_text(json.dumps({"messages": chat}))
    played = play(["4" * 20_000], question="?")
    write_episodes(episodes, [episode(played)])
    (demonstration,) = TrajectoryDataModule(str(rows))._examples["train"]
    ((recorded,),) = TrajectoryDataModule(str(episodes))._examples["train"]
    for make, most in (
        (lambda: demonstration_rows(demonstration, CHAT, "main"), 5),
        (lambda: played_rows(recorded, CHAT, "main"), 13),
    ):
        make()  # fills the caches
        tracemalloc.start()
        (row,) = make()
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert taken < (most + 1) * 20_000 + 50_000, "with the texts of the chat"
        assert (row.token_ids, row.action_mask) == (played[0].token_ids, played[0].action_mask)
    assert recorded == dataclasses.replace(row, policy="actor") != played[0]
    assert (recorded.logprobs, recorded.turns) == (played[0].logprobs, played[0].turns)
    assert pickle.loads(pickle.dumps(row)) == copy.copy(row) == row
    with pytest.raises(AttributeError, match="'CompactTrajectory' object has no attribute 'tokens'"):
        row.tokens  # type: ignore[attr-defined]  # noqa: B018
