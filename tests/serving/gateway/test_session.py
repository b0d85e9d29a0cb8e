"""The conversations of an episode."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from mrlm_pl.environment.prompts import Prompt, Reply
from mrlm_pl.episode import Message
from mrlm_pl.serving.gateway.protocol import Call
from mrlm_pl.serving.gateway.session import Limits, Session


def test_a_call_compares_each_message_a_bounded_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that calls once a turn would otherwise spend most of its time here."""
    compared, equal = [0], Message.__eq__

    def counted(message: Message, other: object) -> bool:
        compared[0] += 1
        return equal(message, other)

    monkeypatch.setattr(Message, "__eq__", counted)

    async def play(turns: int) -> int:
        session = Session(("agent",), Limits(calls=turns), {}, ())
        messages: tuple[Message, ...] = ()
        for turn in range(turns):
            messages += (Message("user", f"{turn}?"),)
            prompt, compared[0] = Prompt(tuple(replace(message) for message in messages)), 0  # as a request is read
            asked = asyncio.ensure_future(session.ask("agent", Call("agent", prompt)))
            await asyncio.sleep(0)
            session.answer({"agent": Reply("assistant", f"{turn}!")})
            ((_, text, _, _),) = await asked
            messages += (Message("assistant", text),)
        assert +session.counts == {"calls": turns}
        return compared[0]

    few, many = (asyncio.run(play(turns)) for turns in (20, 40))
    assert few < many <= 2.2 * few
