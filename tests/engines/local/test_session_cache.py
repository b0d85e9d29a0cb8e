"""The session cache: reused and dropped sessions, and the bound on its bytes."""

from __future__ import annotations

import torch

from mrlm_pl.engines.local.generation import SessionCache, States


def _part(length: int, first: int = 0) -> torch.Tensor:
    """Return 2 layers, keys and values, 1 head, size 1: 16 bytes for each token."""
    numbers = torch.arange(first, first + length, dtype=torch.float32)
    return numbers.expand(2, 2, 1, length).unsqueeze(-1).contiguous()


def _states(length: int) -> States:
    return States((_part(length),))


def test_the_common_beginning_is_returned_and_one_token_is_always_left() -> None:
    cache = SessionCache(1000)
    cache.put("p", "a", (1, 2, 3), _states(3))
    for context, length in (((1, 2, 3, 4), 3), ((1, 2, 3), 2), ((1, 2, 9, 9, 9), 2)):
        found = cache.get("p", "a", context)
        assert found is not None
        assert found.length == length
        assert torch.cat(found.parts, 3)[0, 0, 0, :, 0].tolist() == list(range(length))
    assert cache.get("q", "a", (1, 2, 3, 4)) is None
    assert cache.get("p", "b", (1, 2, 3, 4)) is None


def test_a_session_without_a_common_token_is_dropped() -> None:
    cache = SessionCache(1000)
    cache.put("p", "a", (1, 2), _states(2))
    assert cache.get("p", "a", (2, 2, 3)) is None
    assert (len(cache), cache.size) == (0, 0)


def test_the_least_recently_used_sessions_make_room() -> None:
    cache = SessionCache(100)
    for name in "abc":
        cache.put("p", name, (1, 2), _states(2))
    assert cache.size == 96
    cache.get("p", "a", (1, 2, 3))
    cache.put("p", "d", (1, 2, 3), _states(3))
    assert cache.size == 80
    assert [cache.get("p", name, (1, 2, 3)) is not None for name in "abcd"] == [True, False, False, True]


def test_what_is_larger_than_the_bound_is_not_kept_and_replaces_nothing_else() -> None:
    cache = SessionCache(40)
    cache.put("p", "a", (1, 2), _states(2))
    cache.put("p", "b", (1, 2, 3), _states(3))
    assert len(cache) == 1
    cache.put("p", "a", (1, 2, 3), _states(3))
    assert (len(cache), cache.size) == (0, 0)


def test_release_goes_by_prefix_and_drop_policy_by_policy() -> None:
    cache = SessionCache(1000)
    for policy, session in (("p", "e1/a"), ("q", "e1/b"), ("p", "e2/a"), ("q", "e2/a")):
        cache.put(policy, session, (1,), _states(1))
    cache.release("e1/")
    assert len(cache) == 2
    cache.drop_policy("p")
    assert cache.get("q", "e2/a", (1, 2)) is not None
    assert cache.size == 16


def test_rows_of_a_context_count_its_states_once() -> None:
    cache, context = SessionCache(112), _part(4)
    for name in "abc":
        cache.put("p", name, (1, 2, 3, 4, 5), States((context, _part(1, first=4))))
    assert cache.size == 16 * (4 + 3)
    found = cache.get("p", "b", (1, 2, 3, 4, 5, 6))
    assert found is not None
    assert torch.cat(found.parts, 3)[1, 1, 0, :, 0].tolist() == [0, 1, 2, 3, 4]
    beginning = cache.get("p", "b", (1, 2, 9))
    assert beginning is not None
    assert torch.cat(beginning.parts, 3)[1, 1, 0, :, 0].tolist() == [0, 1]
    cache.release("a")
    cache.release("b")
    assert cache.size == 16 * (4 + 1)
    cache.put("p", "d", (7, 8, 9), _states(3))
    assert (len(cache), cache.size) == (1, 48), "the context goes with its last session"
