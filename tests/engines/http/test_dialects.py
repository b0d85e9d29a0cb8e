"""Replies of foreign servers with any value in any field: their samples are right, or an error names the fault."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import pytest

from mrlm_pl.engines import SampleRequest, Sampling
from mrlm_pl.engines.http.dialects import Dialect, SglangDialect, VllmDialect, ended_by_stop, read_reply
from mrlm_pl.engines.http.replicas import PassingError
from mrlm_pl.errors import MRLMError, RemoteError

REQUEST = SampleRequest((1, 2, 3), "p", 0, Sampling(max_tokens=4), stop_ids=(2,))
CHOICE = {"finish_reason": "stop", "logprobs": {"token_logprobs": [-0.5, -0.25]}, "token_ids": [5, 2]}
VLLM = {"choices": [{**CHOICE, "prompt_token_ids": [1, 2, 3]}]}
FACTS = {"finish_reason": {"type": "stop"}, "prompt_tokens": 3, "output_token_logprobs": [[-0.5, 5], [-0.25, 2]]}
SGLANG = {"output_ids": [5, 2], "meta_info": FACTS}
DEEP: Any = []
for _ in range(2_000):
    DEEP = [DEEP]
VALUES: list[Any] = [
    None,
    -1,
    0,
    1,
    3.7,
    1e308,
    10**400,
    -(10**400),
    math.nan,
    math.inf,
    "",
    "3",
    "-0.5",
    [],
    {},
    True,
    [-1, 2],
    [5.5, 2],
]
VALUES += [["5", "2"], [0.5, -0.25], [True, 2], [-0.5, 10**30], {"type": "abort"}, DEEP]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for name in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[name], (*path, name))


def changed(reply: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    whole = held = copy.deepcopy(reply)
    for name in path[:-1]:
        held = held[name]
    held[path[-1]] = value
    return whole


@pytest.mark.parametrize(("dialect", "reply"), [(VllmDialect(), VLLM), (SglangDialect(), SGLANG)])
def test_a_reply_is_a_possible_sample_or_an_error(dialect: Dialect, reply: Any) -> None:
    for path in places(reply):
        for value in VALUES:
            try:
                drawn = read_reply(dialect, changed(reply, path, value), REQUEST)
                ended_by_stop(drawn, REQUEST)
            except (MRLMError, PassingError):
                continue
            assert all(type(token) is int and 0 <= token < 2**31 for token in drawn.token_ids), (path, value)
            assert all(type(logp) is float and logp <= 0 for logp in drawn.logprobs), (path, value)
            assert len(drawn.token_ids) == len(drawn.logprobs)


def test_rounding_above_zero_is_no_fault_and_a_negative_log_likelihood_is_one() -> None:
    place = ("choices", 0, "logprobs", "token_logprobs")
    assert read_reply(VllmDialect(), changed(VLLM, place, [1e-6, -0.25]), REQUEST).logprobs == (1e-6, -0.25)
    with pytest.raises(RemoteError, match=r"\[0.5, 0.25\]\.\.\.; .* of at most 0; check the server's .*-mode`"):
        read_reply(VllmDialect(), changed(VLLM, place, [0.5, 0.25]), REQUEST)


def test_log_probabilities_of_other_tokens_are_an_error() -> None:
    assert VllmDialect().body(REQUEST, "m", 4, 0)["return_tokens_as_token_ids"] is True
    place = ("choices", 0, "logprobs", "tokens")
    for same in (["token_id:5", "token_id:2"], ["hello", "</s>"]):  # a server that names texts names no tokens
        assert read_reply(VllmDialect(), changed(VLLM, place, same), REQUEST).token_ids == (5, 2)
    for other in (["token_id:5", "token_id:3"], ["token_id:5"]):
        with pytest.raises(RemoteError, match=r"are of \['token_id:5'.*, and its token_ids are \[5, 2\]\.\.\.; update"):
            read_reply(VllmDialect(), changed(VLLM, place, other), REQUEST)
    place = ("meta_info", "output_token_logprobs")
    with pytest.raises(RemoteError, match="output_ids are not the tokens of its output_token_logprobs; update SGLang"):
        read_reply(SglangDialect(), changed(SGLANG, place, [[-0.5, 5], [-0.25, 3]]), REQUEST)


@pytest.mark.parametrize("dialect", [VllmDialect(), SglangDialect()])
def test_an_update_that_a_proxy_answers_with_an_error_has_failed(dialect: Dialect) -> None:
    with pytest.raises(RemoteError, match=r"did not load the weights: .*no such host"):
        dialect.updated({"error": {"message": "no such host"}})
