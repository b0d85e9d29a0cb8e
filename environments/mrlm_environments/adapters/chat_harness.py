"""A harness of verifiers that converses in this process; only the virtual environment of verifiers can import it."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from aiohttp import ClientSession, ClientTimeout
from verifiers.v1.dialects.chat import message_to_wire

__all__ = ["ChatHarness"]


class ChatHarness(vf.Harness[vf.HarnessConfig]):
    """Asks for one reply to the conversation, without its own program."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> Any:
        """Make the call."""
        system, prompt = self.resolve_prompt(data)
        said = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
        said = [*([vf.SystemMessage(content=system)] if system else []), *said]
        body = {"model": ctx.model, "messages": [message_to_wire(message) for message in said]}
        async with ClientSession(headers={"Authorization": f"Bearer {secret}"}, timeout=ClientTimeout(None)) as session:
            answer = await session.post(f"{endpoint}/chat/completions", json=body)
            return vf.ProgramResult(int(answer.status != 200), "", await answer.text())
