"""A solver and a checker with OpenAI's plain client, each trained as its own policy.

mrlm fit --config configs/tasks/harness.yaml
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from typing import Any

from openai import AsyncOpenAI

# Made once: that takes as long as many calls.
client = AsyncOpenAI(api_key=os.environ.get("OPENAI_API_KEY", "of each episode"))


async def ask(client: AsyncOpenAI, agent: str, text: str) -> str:
    """Return an agent's reply to one message."""
    reply = await client.chat.completions.create(model=agent, messages=[{"role": "user", "content": text}])
    return reply.choices[0].message.content or ""


async def answer(client: AsyncOpenAI, question: str) -> str:
    """Return the checker's answer, which has seen the solver's."""
    draft = await ask(client, "solver", question)
    return await ask(client, "checker", f"{question} Draft: {draft}")


async def main() -> None:
    """Print the answer to the question on the command line; the client reads ``OPENAI_BASE_URL`` and its key."""
    print(await answer(client, sys.argv[1]))


async def play(row: Mapping[str, Any], endpoint: Any) -> str:
    """Return the answer for a row: the same without a process for each episode; all share the client's connections."""
    return await answer(client.with_options(base_url=endpoint.base_url, api_key=endpoint.key), row["question"])


if __name__ == "__main__":
    asyncio.run(main())
