"""The text that stands for token ids with ``transformers serve``, and what its replies are worth."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mrlm_pl.engines import SampleRequest, Sampling
from mrlm_pl.engines.http.dialects import read_reply
from mrlm_pl.engines.http.replicas import PassingError
from mrlm_pl.engines.http.text_dialect import TransformersDialect
from mrlm_pl.episode import Message
from mrlm_pl.errors import EngineError, PolicyError, RemoteError
from mrlm_pl.policy import Policy
from mrlm_pl.policy.chat import Conversation


@pytest.fixture(scope="module")
def dialect() -> TransformersDialect:
    return TransformersDialect("builtin:tiny")


@pytest.fixture(scope="module")
def asked() -> SampleRequest:
    chat = Policy("builtin:tiny", trained=False).chat
    conversation = Conversation(chat)
    conversation.observe([Message("user", "2+3?")])
    return SampleRequest(tuple(conversation.row.token_ids), "p", 5, Sampling(max_tokens=4), chat.stop_ids)


def reply(asked: SampleRequest, text: str, tokens: int, ended: str, prompt: int | None = None) -> dict[str, Any]:
    usage = {"prompt_tokens": len(asked.token_ids) if prompt is None else prompt, "completion_tokens": tokens}
    return {"choices": [{"text": text, "finish_reason": ended, "index": 0}], "usage": usage}


def test_the_text_is_read_as_the_same_ids(dialect: TransformersDialect, asked: SampleRequest) -> None:
    assert dialect.tokenizer(dialect.text_of(asked.token_ids))["input_ids"] == list(asked.token_ids)
    assert dialect.window == 2048
    assert dialect.tokenizer.decode(dialect.ids_of("12 + 3")) == "12 + 3"


def test_ids_that_text_does_not_keep_are_refused() -> None:
    dialect = TransformersDialect("builtin:tiny")
    whole = dialect.tokenizer

    class Merging:
        """A tokenizer that would read two characters as one token."""

        def decode(self, token_ids: list[int], **options: Any) -> str:
            return whole.decode(token_ids, **options)

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": whole(text)["input_ids"][:-1]}

    dialect.tokenizer = Merging()  # type: ignore[assignment]
    with pytest.raises(EngineError, match="3 tokens would be read as 2 others"):
        dialect.text_of(whole("abc")["input_ids"])


def test_a_first_token_that_the_server_adds_is_not_sent_twice() -> None:
    dialect = TransformersDialect("builtin:tiny")
    whole = dialect.tokenizer
    first = whole.all_special_ids[0]

    class Beginning:
        """A tokenizer that puts a special token in front, as those with BOS do."""

        def decode(self, token_ids: list[int], **options: Any) -> str:
            return whole.decode(token_ids, **options)

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [first, *whole(text)["input_ids"]]}

    dialect.tokenizer = Beginning()  # type: ignore[assignment]
    ids = [first, *whole("abc")["input_ids"]]
    assert dialect.text_of(ids) == "abc"


def test_a_missing_tokenizer_is_told() -> None:
    with pytest.raises(PolicyError, match="tokenizer of '/nowhere/at/all'"):
        TransformersDialect("/nowhere/at/all")


def test_what_the_server_is_asked(dialect: TransformersDialect, asked: SampleRequest) -> None:
    body = dialect.body(asked, "folder", 4, 11)
    config = json.loads(body["generation_config"])
    assert (body["model"], body["seed"]) == ("folder", 11)
    assert config["do_sample"] is True
    assert (config["temperature"], config["top_p"], config["top_k"], config["max_new_tokens"]) == (1.0, 1.0, 0, 4)
    assert config["eos_token_id"] == list(asked.stop_ids)
    greedy = SampleRequest(asked.token_ids, "p", 0, Sampling(temperature=0.0), asked.stop_ids)
    config = json.loads(dialect.body(greedy, "folder", 4, 11)["generation_config"])
    assert config["do_sample"] is False
    assert "temperature" not in config


@pytest.mark.parametrize(
    ("text", "tokens", "ended", "stopped"),
    [
        ("12", 3, "stop", True),  # two characters and the stop token, which is not part of the text
        ("", 1, "stop", True),
        ("1234", 4, "length", False),
        ("123", 4, "length", True),  # a special token somewhere: at the end, most likely
        ("12", 4, "stop", True),  # one more token than its text has
    ],
)
def test_the_tokens_of_a_reply(
    dialect: TransformersDialect, asked: SampleRequest, text: str, tokens: int, ended: str, stopped: bool
) -> None:
    drawn = dialect.read(reply(asked, text, tokens, ended), asked)
    characters = tuple(dialect.tokenizer.convert_tokens_to_ids(character) for character in text)
    assert drawn.token_ids == (*characters, *([asked.stop_ids[0]] if stopped else []))
    assert drawn.stopped == stopped
    assert drawn.logprobs == (0.0,) * len(drawn.token_ids)


def test_replies_that_are_refused(dialect: TransformersDialect, asked: SampleRequest) -> None:
    with pytest.raises(EngineError, match="read the context as 99 tokens"):
        dialect.read(reply(asked, "1", 2, "stop", prompt=99), asked)
    with pytest.raises(EngineError, match="when it is encoded and decoded"):
        dialect.read(reply(asked, "a\u2603b<|end|>", 4, "length"), asked)
    with pytest.raises(PassingError, match="abort"):
        dialect.read(reply(asked, "1", 2, "abort"), asked)
    with pytest.raises(RemoteError, match="not a reply"):
        read_reply(dialect, {"detail": "x"}, asked)
