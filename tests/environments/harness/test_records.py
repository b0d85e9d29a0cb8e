"""Programs as environments: equal records to native play, rewards, tools, several replies, streams, other forms."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
from dataclasses import asdict, replace
from typing import Any

import aiohttp
import lazy_loader
import mrlm_environments
import pytest
from mrlm_environments import HarnessEnvironment, Reward

from mrlm_pl.cli.commands.serve import hosted_environments
from mrlm_pl.environment.check import check_environment
from mrlm_pl.environment.prompts import Prompt
from mrlm_pl.episode import Message, ToolCall
from mrlm_pl.errors import ConfigurationError, MRLMError, RemoteError
from mrlm_pl.policy.chat import Conversation
from mrlm_pl.rollout.play import EpisodeSpec
from mrlm_pl.rollout.replay import RecordPlayer, differences
from mrlm_pl.serving.gateway.protocol import read_call
from mrlm_pl.serving.transport.codec import to_json
from tests.support.servers.harness_programs import CHAT, TOKENIZER, asked, harness, native, played, player_of, script

openai = lazy_loader.load("openai")  # importing its types takes a second of each worker


@pytest.mark.parametrize("name", ["KuhnPoker", "Helpers", "MathEnvironment"])
def test_a_program_and_the_same_environment_give_equal_records(name: str) -> None:
    inner = getattr(mrlm_environments, name)()
    tasks, draw, count = inner.tasks("train"), random.Random(0), 6
    plans = [{agent: draw.choices(("P", "B", "C", "A", "7"), k=8) for agent in inner.agents} for _ in range(count)]
    rows = [{"environment": name, "task": asdict(tasks[n])} for n in range(count)]
    there = played(harness(native, rows, agents=inner.agents), plans)
    for one, other in zip(there, played(inner, plans), strict=True):
        assert one.error is None
        assert {agent: [plain(row) for row in found] for agent, found in one.trajectories.items()} == {
            agent: [plain(row) for row in found] for agent, found in other.trajectories.items()
        }
        assert (one.rewards(), one.row_restarts) == (other.rewards(), 0)


def plain(row: Any) -> Any:
    """Return a trajectory whose turns without a reward have no components: a game may name a component of 0."""
    return replace(row, turns=tuple(turn if turn.reward else replace(turn, components={}) for turn in row.turns))


def test_the_output_of_an_unchanged_script_is_scored() -> None:
    command = script("plan = ask('planner', row['q'])\nprint(plan + ask('solver', 'Plan: ' + plan))")
    rows = [{"q": "1+1?"}, {"q": "2+2?"}]
    environment = HarnessEnvironment(
        {"train": rows},
        command,
        rewards=[
            lambda output, row: {"length": len(output.strip()), "asked": row["q"] == "1+1?"},
            Reward(lambda output, row: output.strip() == "abc", weight=0.0, name="exact"),
        ],
        agents=["planner", "solver"],
        success_at=4,
    )
    first, second = played(environment, [{"planner": ["ab"], "solver": ["c"]}] * 2)
    assert (first.error, second.error) == (None, None)
    assert first.rewards() == {"planner": 4.0, "solver": 4.0}
    assert second.components() == {"length": 3.0, "asked": 0.0}
    assert second.metrics["exact"] == 1.0
    assert (first.success, second.success) == (True, False)
    (planner,), (solver,) = first.trajectories["planner"], first.trajectories["solver"]
    assert [message.content for message in planner.messages] == ["1+1?", "ab"]
    assert [message.content for message in solver.messages] == ["Plan: ab", "c"]
    assert (planner.policy, solver.policy) == ("planner", "solver")
    assert (planner.turns[0].index, solver.turns[0].index) == (0, 1)


def test_a_record_is_replayed_by_starting_the_program_again() -> None:
    async def twice(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            said = [{"role": "user", "content": f"row {row['n']}"}]
            said.append(await asked(http, endpoint, "agent", said))
            said.append({"role": "user", "content": "again"})
            return float(len((await asked(http, endpoint, "agent", said))["content"]))

    environment = harness(twice)
    (recorded,) = played(environment, [{"agent": ["abc", "de"]}])
    assert recorded.reward == 2.0
    player = player_of(environment, [], RecordPlayer)
    try:
        (again,) = player.play_again([recorded])  # type: ignore[attr-defined]
    finally:
        player.close()
    assert differences(recorded, again) == []


def test_async_functions_share_a_client_across_episodes_and_environments() -> None:
    client = openai.AsyncOpenAI(base_url="http://of.each.episode", api_key="key", max_retries=0)

    async def program(row: Any, endpoint: Any) -> float:
        own = client.with_options(base_url=endpoint.base_url, api_key=endpoint.key)
        for _ in range(2):
            reply = await own.chat.completions.create(model="agent", messages=[{"role": "user", "content": "Q"}])
        return float(reply.choices[0].message.content == "b")

    for _ in range(2):  # another gateway, at its own port
        episodes = played(harness(program, 3), [{"agent": ["a", "b"]}] * 3)
        assert [(episode.error, episode.reward) for episode in episodes] == [(None, 1.0)] * 3


CALL = 'Hm. <tool_call>{"name": "add", "arguments": {"b": 2, "a": 1}}</tool_call>'
ADD = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}


def test_tool_calls_are_objects_and_their_results_continue_the_conversation() -> None:
    seen: list[Any] = []

    async def program(row: Any, endpoint: Any) -> float:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0) as client:
            tools: Any = [{"type": "function", "function": ADD}]
            messages: Any = [{"role": "user", "content": "1+2?"}]
            reply = await client.chat.completions.create(model="agent", messages=messages, tools=tools)
            seen.append(reply.choices[0])
            (call,) = reply.choices[0].message.tool_calls
            # A client may write the arguments again in another order.
            again = json.dumps(json.loads(call.function.arguments), sort_keys=True, indent=1)
            made = {"id": call.id, "type": "function", "function": {"name": "add", "arguments": again}}
            messages.append({"role": "assistant", "content": reply.choices[0].message.content, "tool_calls": [made]})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
            reply = await client.chat.completions.create(model="agent", messages=messages, tools=tools)
            return float(reply.choices[0].message.content == "3")

    (episode,) = played(harness(program), [{"agent": [CALL, "3"]}])
    assert (episode.error, episode.reward) == (None, 1.0)
    assert (seen[0].finish_reason, seen[0].message.content) == ("tool_calls", "Hm.")
    (row,) = episode.trajectories["agent"]
    whole = Conversation(CHAT, [{"type": "function", "function": ADD}])
    for text, new in ((CALL, Message("user", "1+2?")), ("3", Message("tool", "3", (), "call00000", "add"))):
        whole.observe([new])
        sampled = [*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id]
        whole.act(sampled, [-0.25] * len(sampled))
    assert list(row.token_ids) == whole.row.token_ids
    assert list(row.messages) == whole.row.messages
    assert row.messages[1].tool_calls == (ToolCall("call00000", "add", {"a": 1, "b": 2}),)


def test_several_replies_are_siblings() -> None:
    async def program(row: Any, endpoint: Any) -> float:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0) as client:
            messages: Any = [{"role": "user", "content": "Q"}]
            reply = await client.chat.completions.create(model="agent", messages=messages, n=2)
            texts = [choice.message.content for choice in reply.choices]
            assert reply.usage.completion_tokens == len("ab") + len("c") + 2
            messages += [{"role": "assistant", "content": texts[0]}, {"role": "user", "content": "R"}]
            await client.chat.completions.create(model="agent", messages=messages)
            return float(texts == ["ab", "c"])

    (episode,) = played(harness(program), [{"agent": ["ab", "c", "d"]}])
    assert (episode.error, episode.reward) == (None, 1.0)
    assert [TOKENIZER.decode(row.token_ids) for row in episode.trajectories["agent"]] == [
        "<|user|>Q<|end|><|assistant|>ab<|end|><|user|>R<|end|><|assistant|>d<|end|>",
        "<|user|>Q<|end|><|assistant|>c<|end|>",
    ]
    turns = [[turn.index for turn in row.turns] for row in episode.trajectories["agent"]]
    assert turns == [[0, 2], [1]]
    assert episode.metrics["calls"] == 3


def test_streams_stops_and_the_form_of_responses() -> None:
    found: dict[str, Any] = {}

    async def program(row: Any, endpoint: Any) -> float:
        key = endpoint.agent_key("agent")
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0) as client:
            messages: Any = [{"role": "user", "content": "Q"}]
            stream = await client.chat.completions.create(
                model="x", messages=messages, stream=True, stop=["!"], stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            found["chunks"] = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            found["reason"] = chunks[-2].choices[0].finish_reason
            found["usage"] = chunks[-1].usage.completion_tokens
            tools: Any = [{"type": "function", "strict": False, **ADD}]
            response = await client.responses.create(model="x", input="1+2?", instructions="Add.", tools=tools)
            (_, call) = response.output
            found["call"] = (call.name, json.loads(call.arguments))
            items = [
                {"role": "user", "content": "1+2?"},
                *[item.model_dump() for item in response.output],
                {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
            ]
            events = await client.responses.create(
                model="x", input=items, instructions="Add.", tools=tools, stream=True
            )
            kinds = [event async for event in events]
            found["events"] = [event.type for event in kinds]
            found["text"] = kinds[-1].response.output_text
            found["models"] = [model.id async for model in client.models.list()]
            found["model"] = (await client.models.retrieve("org/any")).id  # a sole agent answers for any
            return 1.0

    (episode,) = played(harness(program), [{"agent": ["Yes! No", CALL, "three"]}])
    assert episode.error is None
    assert (found["chunks"], found["reason"], found["usage"]) == ("Yes", "stop", 4)
    assert found["call"] == ("add", {"a": 1, "b": 2})
    assert found["text"] == "three"
    assert [name.removeprefix("response.") for name in found["events"]] == [
        *("created", "output_item.added", "content_part.added", "output_text.delta", "output_text.done"),
        *("content_part.done", "output_item.done", "completed"),
    ]
    assert (found["models"], found["model"]) == (["agent"], "org/any")
    first, second = episode.trajectories["agent"]
    assert TOKENIZER.decode(first.token_ids).endswith("Yes!"), "the text that ends the reply is sampled"
    assert [turn.stop - turn.start for turn in first.turns] == [4]
    assert len(second.turns) == 2, "the call and its result are one conversation"


def test_the_settings_of_a_call() -> None:
    errors: list[Any] = []

    async def program(row: Any, endpoint: Any) -> float:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0) as client:
            create, messages = client.chat.completions.create, [{"role": "user", "content": "Q"}]
            mute = {"messages": [{"role": "user"}]}
            other = [{"stream": "yes"}, {"stop": 0}, {"tools": {}}, {"max_completion_tokens": "9"}]
            for bad in ({"temperature": 0.2}, {"top_logprobs": 2}, {"n": 99}, {"n": 0}, {"seed": 1}, mute, *other):
                try:
                    await create(**{"model": "agent", "messages": messages, **bad})  # type: ignore[call-overload]
                except openai.BadRequestError as error:
                    errors.append(error.body)
            await create(model="agent", messages=messages, temperature=1, top_p=0.5, user="me")  # type: ignore[call-overload]
            return 1.0

    (episode,) = played(harness(program, ignore=["top_p"]), [{"agent": ["a"]}])
    assert episode.error is None
    assert "only sampled tokens have log-probabilities" in errors[1]["message"]
    first = ["temperature", "top_logprobs", "n", "n", "seed", "messages[0].content"]
    assert [error["param"] for error in errors] == [*first, "stream", "stop", "tools", "max_completion_tokens"]
    assert "`ignore`" in errors[0]["message"]
    assert (errors[3]["message"], errors[5]["message"]) == (
        "n is 0; it must be a whole number of 1 or above",
        "messages[0].content is missing; give a text, or the tool calls of a reply",
    )
    assert (episode.metrics["refused"], episode.metrics["calls"]) == (10, 1)


def test_what_another_server_keeps_is_refused_although_it_is_to_be_ignored() -> None:
    found: list[Any] = []

    async def program(row: Any, endpoint: Any) -> float:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0) as client:
            first = await client.responses.create(model="agent", input="Q", previous_response_id=None)
            for more in ({"previous_response_id": first.id}, {"prompt": {"id": "p"}}):
                try:
                    await client.responses.create(model="agent", input="R", **more)  # type: ignore[call-overload]
                except openai.BadRequestError as error:
                    found.append((error.param, str(error)))
        return 1.0

    names = ["previous_response_id", "prompt"]
    (episode,) = played(harness(program, ignore=names), [{"agent": ["a"]}])
    assert (episode.error, episode.metrics["calls"], [param for param, _ in found]) == (None, 1, names)
    assert all("no conversation or prompt is kept here; send all messages" in message for _, message in found)


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_the_sampled_tokens_and_their_count_in_the_reasoning(stream: bool) -> None:
    """The speaker gives each character and the end -0.25."""
    found: list[Any] = []

    async def program(row: Any, endpoint: Any) -> float:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0) as client:
            options: Any = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            messages: Any = [{"role": "user", "content": "Q"}]
            made: Any = await client.chat.completions.create(model="x", messages=messages, logprobs=True, **options)
            answers = [chunk async for chunk in made] if stream else [made]
            found.extend(choice.logprobs for answer in answers for choice in answer.choices if choice.logprobs)
            found.append(answers[-1].usage)
        return 1.0

    (episode,) = played(harness(program), [{"agent": ["<think>7</think>8"]}])
    assert episode.error is None
    logprobs, usage = found
    assert [item.token for item in logprobs.content] == [*"<think>7</think>8", "<|end|>"]
    assert {(item.logprob, *item.top_logprobs) for item in logprobs.content} == {(-0.25,)}
    assert logprobs.content[-2].bytes == [ord("8")]
    assert (usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens) == (18, 16)


@pytest.mark.parametrize(
    ("follows", "said"),
    [
        ([], ["user", "<think>\nHm.\n</think>\n\n"]),
        ([{"role": "user", "content": "R"}], ["user", "<think>\nHm.\n</think>\n\n", "user"]),
        ([{"role": "assistant", "content": "4"}], ["user", "<think>\nHm.\n</think>\n\n4"]),
        (
            [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "So."}]}],
            ["user", "<think>\nHm.\nSo.\n</think>\n\n"],
        ),
    ],
)
def test_reasoning_items_are_kept_whatever_follows(follows: list[Any], said: list[str]) -> None:
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]}
    call = read_call("responses", {"model": "x", "input": [{"role": "user", "content": "Q"}, thought, *follows]}, ())
    assert [item.content if item.role == "assistant" else item.role for item in call.prompt.messages] == said


def test_log_probabilities_are_refused_in_each_form_of_asking() -> None:
    found: list[Any] = []

    async def program(row: Any, endpoint: Any) -> float:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0) as client:
            for included in ("reasoning.encrypted_content", "message.output_text.logprobs"):
                try:
                    await client.responses.create(model="agent", input="R", include=[included])
                except openai.BadRequestError as error:
                    found.append((included, error.param))
        return 1.0

    (episode,) = played(harness(program), [{"agent": ["a"]}])
    assert (episode.error, found) == (None, [("message.output_text.logprobs", "include")])


@pytest.mark.parametrize(
    ("method", "path", "status", "kind", "code"),
    [
        ("GET", "/v1/embeddings", 404, "invalid_request_error", "not_found"),
        ("GET", "/v1/chat/completions", 405, "invalid_request_error", "not_found"),
        ("POST", "/v1/messages/count_tokens", 404, "not_found_error", None),
    ],
)
def test_an_address_that_is_not_served_is_refused_in_the_protocol_s_form(
    method: str, path: str, status: int, kind: str, code: str | None
) -> None:
    found: list[Any] = []

    async def program(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {endpoint.key}"}) as http:
            await asked(http, endpoint, "agent", [{"role": "user", "content": "Q"}])
            async with http.request(method, endpoint.base_url.removesuffix("/v1") + path) as response:
                found.append((response.status, await response.json()))
        return 1.0

    (episode,) = played(harness(program), [{"agent": ["a"]}])
    assert (episode.error, episode.metrics["refused"]) == (None, 1)
    ((given, body),) = found
    assert (given, body["error"]["type"], body["error"].get("code")) == (status, kind, code)
    assert body["error"]["message"].startswith(f"{method} {path} is not served; there are POST /v1/chat/completions, ")


def test_the_shortest_bound_of_a_reply_counts() -> None:

    async def program(row: Any, endpoint: Any) -> float:
        async with aiohttp.ClientSession() as http:
            said = [{"role": "user", "content": "Q"}]
            await asked(http, endpoint, "agent", said, max_completion_tokens=7)
            return 1.0

    environment = harness(program)
    player = player_of(environment, [{"agent": ["a"]}])
    asks = player.engine.sample
    limits: list[int] = []

    async def noting(requests: Any) -> Any:
        limits.extend(request.sampling.max_tokens for request in requests)
        return await asks(requests)

    player.engine.sample = noting  # type: ignore[method-assign]
    try:
        player.play_blocking([EpisodeSpec("e0", environment.tasks("train")[0], "g", seed=0)])
    finally:
        player.close()
    assert limits == [7]


def test_rewards_are_posted_at_any_time() -> None:
    codes: list[Any] = []

    async def program(row: Any, endpoint: Any) -> None:
        async with aiohttp.ClientSession() as http:
            for number in range(2):
                await asked(http, endpoint, "a", [{"role": "user", "content": str(number)}])
                for body in ({"a": {"style": 0.5}}, {"b": 1}, {"a": "x"}):
                    async with http.post(f"{endpoint.url}/reward", json=body) as response:
                        codes.append(response.status)

    (episode,) = played(harness(program, agents=["a", "b"]), [{"a": ["x", "y"]}])
    assert (episode.error, episode.rewards()) == (None, {"a": 1.0})
    assert [turn.components for row in episode.trajectories["a"] for turn in row.turns] == [{"style": 0.5}] * 2
    assert codes == [200, 409, 400] * 2


def test_posted_rewards_count_for_the_success() -> None:
    async def program(row: Any, endpoint: Any) -> None:
        async with aiohttp.ClientSession() as http:
            for number in range(2):
                await asked(http, endpoint, "a", [{"role": "user", "content": str(number)}])
                async with http.post(f"{endpoint.url}/reward", json={"a": row["n"]}) as response:
                    assert response.status == 200

    episodes = played(harness(program, 2, agents=["a", "b"], success_at=1), [{"a": ["x", "y"]}] * 2)
    assert [(episode.reward, episode.success) for episode in episodes] == [(0.0, False), (1.0, True)]


def test_replies_to_calls_at_the_same_time_have_ids_of_their_own() -> None:
    keys: list[str] = []
    ids: list[str] = []

    async def program(row: Any, endpoint: Any) -> float:
        keys.append(endpoint.key.removeprefix("ep-"))
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=endpoint.key, max_retries=0) as client:
            said: Any = [{"role": "user", "content": "Q"}]
            create = client.chat.completions.create
            ids.extend(reply.id for reply in await asyncio.gather(*(create(model=x, messages=said) for x in "ab")))
        return 1.0

    (episode,) = played(harness(program, agents=["a", "b"]), [{"a": ["x"], "b": ["y"]}])
    assert (episode.error, len(set(ids))) == (None, 2)
    assert not any(keys[0] in name for name in ids)


def test_calls_of_others_in_a_history_are_shown() -> None:
    async def program(row: Any, endpoint: Any) -> float:
        made = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"tool": 1}'}}
        said = [
            {"role": "user", "content": "Q"},
            {"role": "assistant", "content": "Hm.", "tool_calls": [made]},
            {"role": "tool", "content": "3", "tool_call_id": "c"},
        ]
        async with aiohttp.ClientSession() as http:
            await asked(http, endpoint, "agent", said)
        return 1.0

    (episode,) = played(harness(program), [{"agent": ["a"]}])
    (row,) = episode.trajectories["agent"]
    call = '<tool_call>{"name": "add", "arguments": {"tool": 1}}</tool_call>'
    assert f"Hm.\n{call}" in TOKENIZER.decode(row.token_ids)


@pytest.mark.long
def test_two_hundred_episodes_at_once() -> None:
    started, ended = [], []

    async def program(row: Any, endpoint: Any) -> float:
        started.append(row["n"])
        async with aiohttp.ClientSession() as http:
            one = await asked(http, endpoint, "a", [{"role": "user", "content": str(row["n"])}])
            two = await asked(http, endpoint, "b", [{"role": "user", "content": one["content"]}])
        ended.append(len(started))
        return float(two["content"])

    plans = [{"a": ["x"], "b": [str(number)]} for number in range(200)]
    episodes = played(harness(program, 200, agents=["a", "b"]), plans)
    assert ended == [200] * 200, "all had started before the first one ended"
    assert [episode.rewards() for episode in episodes] == [{"a": float(n), "b": float(n)} for n in range(200)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": "python a.py"}, "a list of words"),
        ({"command": ["a"], "function": print}, "not both"),
        ({"max_calls": 0}, "max_calls is 0"),
        ({"lease_seconds": 0}, "lease_seconds is 0"),
        ({"host": "0.0.0.0"}, "MRLM_TOKEN"),
        ({"agents": "a"}, "harness: agents"),
    ],
)
def test_wrong_settings(options: Any, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        HarnessEnvironment([{"a": 1}], **options)


def test_a_taken_port_is_named() -> None:
    async def program(row: Any, endpoint: Any) -> float:
        return 1.0

    one = harness(program)
    port = int(one.gateway.start().rpartition(":")[2])
    other = harness(program, port=port)
    try:
        with pytest.raises(MRLMError, match=f"{port}.*choose another port"):
            asyncio.run(other.reset(other.tasks("train")[0]))
    finally:
        one.close()
        other.close()


def test_a_port_that_does_not_exist_is_named() -> None:
    environment = harness(print, port=1 << 16)
    for _ in range(2):
        with pytest.raises(MRLMError, match=r"65536.*choose another port"):
            asyncio.run(environment.reset(environment.tasks("train")[0]))
    environment.close()


def test_it_is_not_hosted_by_servers() -> None:
    with pytest.raises(ConfigurationError, match=r"'harness' cannot be hosted.*, and its programs anywhere"):
        hosted_environments(["harness"], {}, allow_settings=False)
    with pytest.raises(RemoteError, match="whole conversations"):
        to_json({"agent": Prompt((Message("user", "Q"),))})


def test_it_keeps_the_contract_of_environments() -> None:
    inner = mrlm_environments.KuhnPoker()
    data = {
        split: [{"environment": "KuhnPoker", "task": asdict(inner.tasks(split)[number])} for number in range(2)]
        for split in ("train", "validation", "test")
    }
    environment = HarnessEnvironment(data, function=native, agents=inner.agents)
    check_environment(environment, tasks_per_split=2).raise_on_failure()


def test_it_can_be_sent_to_another_process() -> None:
    copied = pickle.loads(pickle.dumps(harness(native)))
    (reward,) = copied.rewards.values()
    assert reward.call(0.5, {}) == 0.5, "a function's own result is the reward"
