"""Programs that speak Anthropic's protocol, through Anthropic's own client."""

from __future__ import annotations

from typing import Any

from anthropic import AsyncAnthropic, AuthenticationError, BadRequestError, beta_async_tool

from mrlm_pl.episode import Message, ToolCall
from tests.support.servers.harness_programs import TOKENIZER, harness, played

CALL = 'Hm. <tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
ADD: Any = {"name": "add", "description": "Add.", "input_schema": {"type": "object", "properties": {"a": {}, "b": {}}}}


def client(endpoint: Any) -> AsyncAnthropic:
    """Return a client as a program makes it from its environment variables."""
    variables = endpoint.variables()
    base_url, key = variables["ANTHROPIC_BASE_URL"], variables["ANTHROPIC_API_KEY"]
    return AsyncAnthropic(base_url=base_url, api_key=key, max_retries=0)


def test_tools_and_streams_continue_one_conversation() -> None:
    found: dict[str, Any] = {}

    async def program(row: Any, endpoint: Any) -> float:
        async with client(endpoint) as anthropic:
            messages: Any = [{"role": "user", "content": [{"type": "text", "text": "1+2?"}]}]
            more: Any = {"model": "agent", "max_tokens": 99, "system": "Add.", "tools": [ADD]}
            first = await anthropic.messages.create(messages=messages, **more)
            found["first"] = first
            (_, use) = first.content
            result = {"type": "tool_result", "tool_use_id": use.id, "content": "3"}
            again = [block.model_dump() for block in first.content]
            messages += [{"role": "assistant", "content": again}, {"role": "user", "content": [result]}]
            async with anthropic.messages.stream(messages=messages, **more) as stream:
                found["text"] = "".join([text async for text in stream.text_stream])
                found["last"] = await stream.get_final_message()
            messages += [{"role": "assistant", "content": found["text"]}, {"role": "user", "content": "2+2?"}]
            async with anthropic.messages.stream(messages=messages, **more) as stream:
                found["called"] = await stream.get_final_message()
        return 1.0

    (episode,) = played(harness(program), [{"agent": [CALL, "three", CALL]}])
    assert (episode.error, episode.reward) == (None, 1.0)
    text, use = found["first"].content
    assert (text.text, use.name, use.input) == ("Hm.", "add", {"a": 1, "b": 2})
    assert (found["first"].stop_reason, found["text"], found["last"].stop_reason) == ("tool_use", "three", "end_turn")
    assert [block.type for block in found["called"].content] == ["text", "tool_use"]
    assert found["called"].content[1].input == {"a": 1, "b": 2}
    (row,) = episode.trajectories["agent"]
    assert row.messages[0].content.endswith("Add.")
    assert row.messages[2].tool_calls == (ToolCall("call00000", "add", {"a": 1, "b": 2}),)
    assert row.messages[3] == Message("tool", "3", (), "call00000", "add")
    sampled = len(TOKENIZER.encode("three", add_special_tokens=False)) + 1
    assert found["last"].usage.output_tokens == sampled == row.turns[1].stop - row.turns[1].start
    assert found["last"].usage.input_tokens == row.turns[1].start


def test_stop_texts_and_refusals_have_its_form() -> None:
    replies: list[Any] = []
    errors: list[Any] = []

    async def program(row: Any, endpoint: Any) -> float:
        messages: Any = [{"role": "user", "content": "Q"}]
        async with client(endpoint) as anthropic:
            ask: Any = anthropic.messages.create
            auto = {"type": "auto", "disable_parallel_tool_use": False}
            for stops in (["!"], ["?"], ["l", "He"]):
                more = {"stop_sequences": stops, "tool_choice": auto}
                replies.append(await ask(model="agent", max_tokens=9, messages=messages, **more))
            image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/a.png"}}
            for bad in (
                {"temperature": 0.2},
                {"top_k": 5},
                {"stop": ["!"]},
                {"messages": [{"role": "user", "content": [image]}]},
            ):
                try:
                    await ask(model="agent", max_tokens=9, messages=messages, extra_body=bad)
                except BadRequestError as error:
                    errors.append(error.body["error"])  # type: ignore[index]
            try:
                await ask(model="agent", max_tokens=9, messages=messages, extra_headers={"x-api-key": "wrong"})
            except AuthenticationError as error:
                errors.append(error.body["error"])  # type: ignore[index]
        return 1.0

    (episode,) = played(harness(program), [{"agent": ["Yes! No", "No", "Hello"]}])
    assert episode.error is None
    cut, whole, first = replies
    assert (cut.content[0].text, cut.stop_reason, cut.stop_sequence) == ("Yes", "stop_sequence", "!")
    assert (whole.content[0].text, whole.stop_reason, whole.stop_sequence) == ("No", "end_turn", None)
    assert (first.content, first.stop_sequence) == ([], "He"), "the first text that ends it, not the first of the list"
    assert [error["type"] for error in errors] == ["invalid_request_error"] * 4 + ["authentication_error"]
    named = ("'temperature'", "'top_k'", "'stop'", "only text can be served", "OPENAI_API_KEY")
    assert all(name in error["message"] for name, error in zip(named, errors, strict=True))
    assert episode.metrics["refused"] == 4


def test_a_tool_runner_continues_without_a_thread_of_the_server() -> None:
    @beta_async_tool
    async def add(a: int, b: int) -> str:
        """Add."""
        return str(a + b)

    said: list[Any] = []

    async def program(row: Any, endpoint: Any) -> float:
        async with client(endpoint) as anthropic:
            runner = anthropic.beta.messages.tool_runner(
                model="agent", max_tokens=99, tools=[add], messages=[{"role": "user", "content": "1+2?"}]
            )
            said.extend([message.content[0].text async for message in runner])  # type: ignore[union-attr]
        return 1.0

    (episode,) = played(harness(program), [{"agent": [CALL, "three"]}])
    assert (episode.error, said) == (None, ["Hm.", "three"])
    (row,) = episode.trajectories["agent"]
    assert [message.content for message in row.messages[1:]] == [CALL, "3", "three"]
    assert (episode.metrics["calls"], episode.metrics["refused"]) == (2, 1)
