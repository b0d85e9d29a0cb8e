"""Language models that an environment may ask for a text: an OpenAI-compatible endpoint, or a policy that is served."""

from __future__ import annotations

import functools
import http.client
import json
import os
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mrlm_pl.concurrency.calls import in_daemon
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, EngineError, MRLMError, RemoteError
from mrlm_pl.settings import ChecksArguments, NonNegativeFloat, PositiveFloat, PositiveInt

if TYPE_CHECKING:
    from mrlm_pl.policy import ChatFormat
    from mrlm_pl.serving.policies.engine import RemoteEngine

T = TypeVar("T")
MAX_REPLY_BYTES = 1 << 20
_AGAIN = (408, 409, 425, 429)


class GenerationError(MRLMError):
    """A model gave no text; ``again`` tells whether asking once more may help."""

    def __init__(self, text: str, again: bool = True) -> None:
        super().__init__(text)
        self.again = again


class TextGenerator(ChecksArguments, ABC):
    """Writes a reply to a conversation. Called from several threads at the same time, and pickled with its judge."""

    label: str = "the model"
    """Name of the model or server, for messages."""

    @abstractmethod
    def generate(self, messages: Sequence[Message], seed: int) -> str:
        """Return the reply; it must come within a deadline of the generator's own.

        Raises:
            GenerationError: there was none.
        """

    def close(self) -> None:
        """Free the generator's resources; may be called twice, and the generator may be used again."""


class ChatEndpoint(TextGenerator):
    """A server that speaks OpenAI's chat completions: OpenAI, vLLM, SGLang, llama.cpp, Ollama and many others.

    Args:
        url: URL up to and without ``/chat/completions``, for example ``http://localhost:8000/v1``.
        model: name of the model on the server.
        max_tokens: maximum number of tokens of a reply.
        temperature: sampling temperature; 0 takes the most probable tokens.
        seconds: deadline of a reply.
        key_variable: environment variable with the API key; where it is not set, none is sent.
        body: extra fields of the request, or other values of those above; null leaves a field out.

    Raises:
        ConfigurationError: the address is not an HTTP address, or a value is out of its range.
    """

    def __init__(
        self,
        url: str,
        model: str,
        max_tokens: PositiveInt = 256,
        temperature: NonNegativeFloat = 0.0,
        seconds: PositiveFloat = 15.0,
        key_variable: str = "OPENAI_API_KEY",
        body: dict[str, Any] | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigurationError(f"chat endpoint: url is {url!r}; it must begin with http:// or https://")
        self.url = url.rstrip("/") + "/chat/completions"
        self.seconds, self.key_variable = seconds, key_variable
        self.body = {"model": model, "max_tokens": max_tokens, "temperature": temperature, **(body or {})}
        self.label = f"{model} at {url}"

    def generate(self, messages: Sequence[Message], seed: int) -> str:
        """Return the text of the first choice; see :meth:`TextGenerator.generate`."""
        asked = {"messages": [message.to_chat() for message in messages], "seed": seed % (1 << 31), **self.body}
        body = json.dumps({name: value for name, value in asked.items() if value is not None}).encode()
        raw = within(self.seconds, lambda: self._post(body), self.label)
        try:
            content = json.loads(raw)["choices"][0]["message"]["content"]
        except (ValueError, RecursionError, LookupError, TypeError) as error:
            raise GenerationError(f"{self.label} answered no chat completion: {raw[:200]!r}") from error
        if not isinstance(content, str):
            raise GenerationError(f"{self.label} answered without a text: {raw[:200]!r}")
        return content

    def _post(self, body: bytes) -> bytes:
        headers = {"Content-Type": "application/json"}
        key = os.environ.get(self.key_variable)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url, data=body, headers=headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=self.seconds) as response:
                raw: bytes = response.read(MAX_REPLY_BYTES + 1)
        except urllib.error.HTTPError as error:
            with error:
                response_text = error.read(200)
            again = error.code >= 500 or error.code in _AGAIN
            raise GenerationError(
                f"{self.label} answered with status {error.code}: {response_text!r}", again
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise GenerationError(f"{self.label} cannot be asked: {type(error).__name__}: {error}") from error
        if len(raw) > MAX_REPLY_BYTES:
            raise GenerationError(f"{self.label} answered more than {MAX_REPLY_BYTES} bytes")
        return raw


class ServedPolicy(TextGenerator):
    """A policy of ``mrlm serve --policies NAME=MODEL``. Its tokenizer is read here, with the first text.

    Args:
        address: ``HOST:PORT`` of the server.
        policy: name of the policy on the server.
        model: hub id or folder that the tokenizer is read from; None is the model that the server names.
        max_tokens: maximum number of tokens of a reply.
        temperature: sampling temperature; 0 takes the most probable tokens.
        seconds: deadline of a reply.
        token_file: file with the server's token; without it, the environment variable ``MRLM_TOKEN``.
        tls_authority: PEM file of the certificates that sign the server's; with it the connection is encrypted.

    Raises:
        ConfigurationError: a value is out of its range.
    """

    def __init__(
        self,
        address: str,
        policy: str,
        model: str | None = None,
        max_tokens: PositiveInt = 256,
        temperature: NonNegativeFloat = 0.0,
        seconds: PositiveFloat = 15.0,
        token_file: str | None = None,
        tls_authority: str | None = None,
    ) -> None:
        self.address, self.policy, self.model = address, policy, model
        self.max_tokens, self.temperature, self.seconds = max_tokens, temperature, seconds
        self.token_file, self.tls_authority = token_file, tls_authority
        self.label = f"policy {policy!r} at {address}"

    def generate(self, messages: Sequence[Message], seed: int) -> str:
        """Return the sampled turn as text; see :meth:`TextGenerator.generate`."""
        # Imported here: only this generator needs gRPC.
        from mrlm_pl.engines.base import SampleRequest, Sampling
        from mrlm_pl.serving.transport.connection import submit

        def sampled() -> str:
            engine, chat = _served(self.address, self.policy, self.model, self.token_file, self.tls_authority)
            ids = tuple(chat.encode(chat.render(messages, generation_prompt=True)))
            sampling = Sampling(temperature=self.temperature, max_tokens=self.max_tokens)
            (sample,) = submit(engine.sample([SampleRequest(ids, self.policy, seed, sampling, chat.stop_ids)])).result()
            return chat.decode([token for token in sample.token_ids if token not in chat.stop_ids])

        try:
            return within(self.seconds, sampled, self.label)
        except (EngineError, RemoteError) as error:
            raise GenerationError(f"{self.label} gave no text: {error}", isinstance(error, RemoteError)) from error


@functools.lru_cache(maxsize=8)
def _served(
    address: str, policy: str, model: str | None, token_file: str | None, tls_authority: str | None
) -> tuple[RemoteEngine, ChatFormat]:
    """Return the engine and the chat format of a served policy; kept, since copies of an environment come and go."""
    from mrlm_pl.serving.policies.engine import RemoteEngine
    from mrlm_pl.serving.transport.security import Identity

    engine = RemoteEngine(address, token_file, Identity(authority=tls_authority))
    if model is None:
        policies = engine.described()
        if policy not in policies:
            raise EngineError(f"there is no policy {policy!r} there; there are {', '.join(sorted(policies))}")
        model = policies[policy].model
    from mrlm_pl.policy import Policy  # imported here: it brings torch

    return engine, Policy(model=model).chat


def within(seconds: float, call: Callable[[], T], label: str) -> T:
    """Return or raise the call's result; it runs in a thread that is abandoned at the deadline.

    Socket timeouts bound individual reads: a server that sends a byte now and then would never time out.

    Raises:
        GenerationError: it took longer.
    """
    try:
        return in_daemon(call).result(seconds)
    except TimeoutError as error:
        raise GenerationError(f"{label} did not answer within {seconds:g} s") from error
