"""The built-in tiny model: tokenizer, template, folder and manners."""

from __future__ import annotations

import itertools
import json
import string

import pytest
import torch
from mrlm_environments.games.coordination import CoordinationGame
from mrlm_environments.math.environment import MathEnvironment
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from mrlm_pl.policy.tiny import build_config, build_tokenizer, tiny_model_path

SPECIAL = ["<pad>", "<unk>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CONVERSATION = [
    {"role": "system", "content": "Be exact."},
    {"role": "user", "content": "What is 2 + 2?\n"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}],
    },
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": " 2+2=4"},
    {"role": "user", "content": "Sure?"},
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return build_tokenizer()


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model_path()).eval()


def test_every_known_character_is_one_token_and_comes_back(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "".join(character for character in string.printable if character not in "\r\x0b\x0c") + "  two  spaces\n\n"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_unknown_characters_are_one_unknown_token_each(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("aé漢b")) == ["a", "<unk>", "<unk>", "b"]


def test_special_tokens_are_single_and_distinct(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = [tokenizer.encode(name) for name in SPECIAL]
    assert ids == [[0], [1], [2], [3], [4], [5], [6]]
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.decode([81, 82, 2], skip_special_tokens=True) == "hi"


def test_template_renders_roles_calls_and_results(tokenizer: PreTrainedTokenizerBase) -> None:
    assert tokenizer.apply_chat_template(CONVERSATION[:5], tokenize=False) == (
        "<|system|>Be exact.<|end|><|user|>What is 2 + 2?\n<|end|>"
        '<|assistant|><tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call><|end|>'
        "<|tool|>4<|end|><|assistant|> 2+2=4<|end|>"
    )


def test_template_lists_tools_in_a_system_message(tokenizer: PreTrainedTokenizerBase) -> None:
    function = {"name": "add", "description": "sum", "parameters": {"type": "object", "properties": {}}}
    text = tokenizer.apply_chat_template(
        CONVERSATION[1:2], tools=[{"type": "function", "function": function}], tokenize=False
    )
    head, rest = text.split("<|end|>", 1)
    assert head.startswith("<|system|>")
    assert json.loads(head.removeprefix("<|system|>")) == function
    assert rest == "<|user|>What is 2 + 2?\n<|end|>"


def test_a_longer_conversation_begins_with_the_shorter_one(tokenizer: PreTrainedTokenizerBase) -> None:
    rendered = [
        tokenizer.apply_chat_template(CONVERSATION[:count], tokenize=False) for count in range(1, len(CONVERSATION) + 1)
    ]
    for shorter, longer in itertools.pairwise(rendered):
        assert longer.startswith(shorter)
        assert len(longer) > len(shorter)
    prompt = tokenizer.apply_chat_template(CONVERSATION[:4], tokenize=False, add_generation_prompt=True)
    assert rendered[4].startswith(prompt)
    assert prompt == rendered[3] + "<|assistant|>"


def test_shipped_folder_is_small_and_what_the_recipe_begins_with() -> None:
    folder = tiny_model_path()
    assert sum(file.stat().st_size for file in folder.iterdir()) < 2_000_000
    shipped, built = AutoConfig.from_pretrained(folder).to_dict(), build_config().to_dict()
    made_on_saving = {"architectures", "dtype", "transformers_version", "_name_or_path"}
    assert {key: value for key, value in shipped.items() if key not in made_on_saving} == {
        key: value for key, value in built.items() if key not in made_on_saving
    }
    characters = ["\n", "\t", *map(chr, range(ord(" "), ord("~") + 1))]
    assert list(build_tokenizer().convert_ids_to_tokens(range(built["vocab_size"]))) == [*SPECIAL, *characters]


def test_the_size_of_a_head_follows_from_a_changed_width() -> None:
    assert build_config(hidden_size=32).head_dim == 8  # of four heads
    assert build_config(hidden_size=32, head_dim=4).head_dim == 4


def _replies(model: torch.nn.Module, questions: list[str], sampled: bool) -> list[str]:
    """Return the model's replies as text, special tokens included, padding removed."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path(), padding_side="left")
    chats = [[{"role": "user", "content": question}] for question in questions]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    tokens = model.generate(**inputs, do_sample=sampled, top_k=0, max_new_tokens=32)  # type: ignore[operator]
    return [text.replace("<pad>", "") for text in tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :])]


def test_weights_hold_in_fp32_and_embeddings_are_tied(model: torch.nn.Module) -> None:
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight  # type: ignore[union-attr]


def test_replies_end_their_turn_and_equations_are_mostly_solved(model: torch.nn.Module) -> None:
    """Of 64 held-out equations, which the demonstrations mostly solve, greedy decoding solves more than half."""
    environment = MathEnvironment(difficulty=(1, 1), kinds=["algebra"])
    tasks = [environment.tasks("test")[index] for index in range(64)]
    replies = _replies(model, [task.data["question"] for task in tasks], sampled=False)
    assert all(reply.endswith("<|end|>") and reply.count("<|end|>") == 1 for reply in replies)
    solved = [reply == f"{task.data['solution']}<|end|>" for task, reply in zip(tasks, replies, strict=True)]
    assert sum(solved) > 32


def test_sampled_choices_in_the_coordination_game_are_both_letters(model: torch.nn.Module) -> None:
    tasks = CoordinationGame().tasks("test")
    replies = _replies(model, [tasks[index].data["question"] for index in range(100)], sampled=True)
    counts = {letter: replies.count(f"{letter}<|end|>") for letter in "CA"}
    assert min(counts.values()) >= 25
    assert sum(counts.values()) >= 95


def test_the_rotation_is_the_one_asked_for() -> None:
    assert build_config(rope_theta=5.0).rope_parameters["rope_theta"] == 5.0
    assert build_config().rope_parameters == AutoConfig.from_pretrained(tiny_model_path()).rope_parameters
