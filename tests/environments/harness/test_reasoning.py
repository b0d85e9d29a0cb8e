"""Reasoning of a model: served apart from the text, and kept in the trajectory whether or not it is sent back."""

from __future__ import annotations

from typing import Any

import aiohttp
import lazy_loader
import pytest

from tests.support.servers.harness_programs import TOKENIZER, asked, harness, played

openai = lazy_loader.load("openai")  # importing its types takes a second of each worker

ADD: Any = {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}
CALLS = "\n".join(f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": 2}}}}</tool_call>' for a in (1, 3))
USER = {"role": "user", "content": "1+2?"}
AGAIN = {"role": "user", "content": "Again."}


def said(message: Any, form: str) -> list[Any]:
    """Return a served message as programs send it back, and the next question."""
    if form == "content":
        message = {"role": "assistant", "content": message["content"]}
    elif form == "reasoning":
        message = {"role": "assistant", "content": message["content"], "reasoning": message["reasoning_content"]}
    return [message, AGAIN]


@pytest.mark.parametrize("form", ["content", "reasoning", "reasoning_content"])
def test_equal_texts_with_other_reasoning_continue_their_own_trajectory(form: str) -> None:
    replies = [
        "<think>\nOne.\n</think>\n\n3",
        "<think>\nTwo.\n</think>\n\n3",
        "<think>\nThree.\n</think>\n\n3",
        "<think>4",
    ]
    seen: list[Any] = []

    async def program(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            messages: list[Any] = [USER]
            for _ in replies:
                seen.append(await asked(http, endpoint, "agent", messages))
                messages += said(seen[-1], form)
        return 1.0

    (episode,) = played(harness(program), [{"agent": replies}])
    assert episode.error is None
    assert [(reply["reasoning_content"], reply["content"]) for reply in seen] == [
        *(("One.", "3"), ("Two.", "3"), ("Three.", "3"), ("4", "")),
    ]
    (row,) = episode.trajectories["agent"]
    assert [message.content for message in row.messages if message.role == "assistant"] == replies
    sampled = [row.token_ids[turn.start : turn.stop - 1] for turn in row.turns]
    assert [TOKENIZER.decode(tokens) for tokens in sampled] == replies
    assert episode.metrics["edited_histories"] == 0


@pytest.mark.parametrize("example", ["3", "4"])
def test_an_example_in_the_prompt_stays_as_it_is_after_the_agent_has_said_the_same(example: str) -> None:
    replies = ["<think>\nOne.\n</think>\n\n3", "<think>\nTwo.\n</think>\n\n4", "<think>\nThree.\n</think>\n\n3"]
    prompt: list[Any] = [USER, {"role": "assistant", "content": example}, USER]

    async def program(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            messages = [*prompt]
            for _ in replies:
                messages += said(await asked(http, endpoint, "agent", messages), "content")
        return 1.0

    (episode,) = played(harness(program), [{"agent": replies}])
    assert episode.error is None
    (row,) = episode.trajectories["agent"]
    assert [message.content for message in row.messages if message.role == "assistant"] == [example, *replies]
    assert episode.metrics["edited_histories"] == 0


def test_changed_reasoning_and_that_of_another_agent_are_as_they_are_sent() -> None:
    async def program(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            first = await asked(http, endpoint, "a", [USER])
            await asked(http, endpoint, "a", [USER, *said(first | {"reasoning_content": "Else."}, "")])
            await asked(http, endpoint, "b", [USER, *said(first, "content")])
            await asked(http, endpoint, "b", [USER, *said(first, "")])
        return 1.0

    plan = {"a": ["<think>\nOne.\n</think>\n\n3", "x"], "b": ["y", "z"]}
    (episode,) = played(harness(program, agents=["a", "b"]), [plan])
    assert episode.error is None
    assert [row.messages[1].content for row in (*episode.trajectories["a"], *episode.trajectories["b"])] == [
        *(plan["a"][0], "<think>\nElse.\n</think>\n\n3", "3", plan["a"][0]),
    ]
    assert episode.metrics["edited_histories"] == 2, "the second call of each"


def test_a_stream_has_reasoning_text_and_each_call_alone() -> None:
    chunks: list[Any] = []

    async def program(row: Any, endpoint: Any) -> float:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0) as client:
            tools: Any = [{"type": "function", "function": ADD}]
            stream = await client.chat.completions.create(model="x", messages=[USER], tools=tools, stream=True)
            chunks.extend([chunk.choices[0].delta.model_dump(exclude_none=True) async for chunk in stream])
        return 1.0

    (episode,) = played(harness(program), [{"agent": [f"<think>\nBoth.\n</think>\n\nFirst. {CALLS}"]}])
    assert episode.error is None
    assert chunks[:2] == [{"role": "assistant", "reasoning_content": "Both."}, {"content": "First."}]
    assert [[call["index"] for call in chunk["tool_calls"]] for chunk in chunks[2:4]] == [[0], [1]]
    assert chunks[4:] == [{}]


def test_responses_have_it_as_an_item_of_its_own_that_is_sent_back() -> None:
    found: dict[str, Any] = {}

    async def program(row: Any, endpoint: Any) -> float:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0) as client:
            more: Any = {"model": "x", "tools": [{"type": "function", "strict": False, **ADD}]}
            items: list[Any] = [{"role": "user", "content": "1+2?"}]
            first = await client.responses.create(input=items, **more)
            found["first"] = [item.type for item in first.output]
            items += [item.model_dump() for item in first.output]
            calls = [item.call_id for item in first.output if item.type == "function_call"]
            items += [{"type": "function_call_output", "call_id": call, "output": "3"} for call in calls]
            events = [event async for event in await client.responses.create(input=items, stream=True, **more)]
            found["events"] = [event.type.removeprefix("response.") for event in events]
            found["text"] = events[-1].response.output_text
            await client.responses.create(input=[*items, *events[-1].response.model_dump()["output"], AGAIN], **more)
        return 1.0

    replies = [f"<think>\nBoth.\n</think>\n\n{CALLS}", "<think>\nSum.\n</think>\n\n3", "4"]
    (episode,) = played(harness(program), [{"agent": replies}])
    assert episode.error is None
    assert (found["first"], found["text"]) == (["reasoning", "function_call", "function_call"], "3")
    assert found["events"] == [
        *("created", "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done"),
        *("content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    (row,) = episode.trajectories["agent"]
    assert [message.content for message in row.messages if message.role == "assistant"] == replies
