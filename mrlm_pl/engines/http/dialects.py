"""HTTP interfaces of servers: the request for a sample, its reply, and the update of weights.

vLLM: ``POST /v1/completions`` with a list of token ids as ``prompt`` and ``return_token_ids``, and, of its development
mode, ``/pause``, ``/collective_rpc`` and ``/resume``. SGLang: ``POST /generate`` with ``input_ids`` and
``return_logprob``, and ``/update_weights_from_disk``. Both follow the source of vLLM 0.17 to 0.33 and SGLang 0.5.5 to
0.5.23.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrlm_pl.engines.base import LARGEST_LOGPROB, SampleRequest
from mrlm_pl.engines.http.replicas import PassingError
from mrlm_pl.errors import ConfigurationError, EngineError, RemoteError


@dataclass(frozen=True)
class Drawn:
    """The tokens of a reply.

    Args:
        token_ids: sampled tokens, including the stop token.
        logprobs: the server's log-probability of each token.
        stopped: whether the tokens end with a stop token, according to the server.
        version: the server's label of its weights, or empty.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stopped: bool
    version: str = ""


Call = tuple[str, dict[str, Any]]
"""Path and body of a POST."""


class Dialect(ABC):
    """The HTTP interface of one kind of server.

    Attributes:
        name: value of the option ``dialect``.
        path: path of requests for samples.
        reports_logprobs: whether samples have log-probabilities.
        names_folders: whether requests name the folder of a trained policy's weights.
        seed_bits: number of bits of the largest seed.
        spare_tokens: tokens of the context window that the server keeps free.
        scaling: how to start the server so that it reports log-probabilities at the request's temperature.
        updating: end of an error's remedy, which says how to start the server so that it takes new weights.
    """

    name: str
    path: str
    reports_logprobs, names_folders = True, False
    seed_bits, spare_tokens = 63, 0
    scaling = updating = ""

    @abstractmethod
    def body(self, request: SampleRequest, model: str, limit: int, seed: int) -> dict[str, Any]:
        """Return the request for one sample of at most ``limit`` tokens.

        Raises:
            EngineError: the context cannot be sent.
        """

    @abstractmethod
    def read(self, reply: Any, request: SampleRequest) -> Drawn:
        """Return the tokens of a reply.

        Raises:
            ConfigurationError: the reply has no token ids or log-probabilities.
            PassingError: the server aborted the request.
        """

    def update(self, folder: str, label: str) -> list[Call]:
        """Return the calls that load the weights of a folder; none if requests name the folder."""
        return []

    def wake(self) -> list[Call]:
        """Return the calls that end an interrupted update, so that the server samples again; harmless to others."""
        return []

    def save(self, folder: Path) -> None:
        """Write files that the server needs besides a model's into the folder of its weights."""

    def updated(self, reply: Any) -> None:
        """Validate the reply to a call of an update.

        Raises:
            RemoteError: the update failed.
        """
        if isinstance(reply, dict) and reply.get("error"):  # of a proxy that answers errors with status 200
            raise RemoteError(f"the server did not load the weights: {_short(reply)}")


def _sampling_fields(request: SampleRequest) -> dict[str, Any]:
    """Return the sampling parameters that vLLM and SGLang share."""
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        # Explicit, since their defaults come from the model's generation config.
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": list(request.stop_ids),
    }


class VllmDialect(Dialect):
    """vLLM's OpenAI-compatible server."""

    name, path = "vllm", "/v1/completions"
    scaling = "start vLLM with `--logprobs-mode processed_logprobs`"
    updating = " with VLLM_SERVER_DEV_MODE=1 (0.17 or newer)"

    def body(self, request: SampleRequest, model: str, limit: int, seed: int) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": list(request.token_ids),
            "max_tokens": limit,
            **_sampling_fields(request),
            "seed": seed,
            "ignore_eos": True,  # a turn ends at the request's stop tokens and at no others
            "add_special_tokens": False,
            "skip_special_tokens": False,
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    def read(self, reply: Any, request: SampleRequest) -> Drawn:
        choice = reply["choices"][0]
        token_ids, prompt = choice.get("token_ids"), choice.get("prompt_token_ids")
        if token_ids is None or prompt is None:
            raise ConfigurationError(
                "the server gives no token ids (`token_ids` and `prompt_token_ids` for `return_token_ids`), and no "
                "engine re-tokenizes text; use vLLM 0.17 or newer, or another `dialect`"
            )
        if tuple(prompt) != request.token_ids:
            raise RemoteError(
                f"the server generated from {len(prompt)} tokens that are not the {len(request.token_ids)} of the "
                "request; a proxy on the way may have changed them"
            )
        if choice.get("finish_reason") not in ("stop", "length"):
            raise PassingError(f"the server ended a sample with {choice.get('finish_reason')!r}")
        logprobs = choice.get("logprobs") or {}
        names = [name for name in logprobs.get("tokens") or () if name.startswith("token_id:")]  # others are plain text
        if names and names != [f"token_id:{token}" for token in token_ids]:
            fault = f"the server's log-probabilities are of {names[:3]}..., and its token_ids are {token_ids[:3]}..."
            raise RemoteError(f"{fault}; update vLLM, and check proxies on the way")
        return _drawn(token_ids, logprobs.get("token_logprobs"), choice["finish_reason"])

    def probe(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the request for a sample whose reply has the two most probable tokens of each position."""
        return {**body, "logprobs": 2}

    def likeliest(self, reply: Any) -> list[float]:
        """Return the log-probabilities of the first token's two most probable choices, in nats, in any order."""
        return list(reply["choices"][0]["logprobs"]["top_logprobs"][0].values())

    def update(self, folder: str, label: str) -> list[Call]:
        return [
            ("/pause?mode=wait", {}),
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
            *self.wake(),
        ]

    def wake(self) -> list[Call]:
        return [("/resume", {})]


class SglangDialect(Dialect):
    """SGLang's own interface; its OpenAI-compatible one gives no token ids."""

    name, path = "sglang", "/generate"
    scaling = "start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB"
    seed_bits, spare_tokens = 31, 6

    def body(self, request: SampleRequest, model: str, limit: int, seed: int) -> dict[str, Any]:
        return {
            "input_ids": list(request.token_ids),
            "sampling_params": {
                "max_new_tokens": limit,
                **_sampling_fields(request),
                "sampling_seed": seed,
                "skip_special_tokens": False,
            },
            "return_logprob": True,
        }

    def read(self, reply: Any, request: SampleRequest) -> Drawn:
        meta = reply["meta_info"]
        finish = meta.get("finish_reason") or {}
        if finish.get("type") not in ("stop", "length"):
            raise PassingError(f"the server ended a sample with {finish}")
        if meta.get("prompt_tokens") != len(request.token_ids):
            raise RemoteError(
                f"the server generated from {meta.get('prompt_tokens')} tokens, and the request has "
                f"{len(request.token_ids)}; a proxy on the way may have changed them"
            )
        pairs, version = meta.get("output_token_logprobs"), str(meta.get("weight_version") or "")
        token_ids, output_ids = [pair[1] for pair in pairs or ()], reply.get("output_ids")
        if pairs is not None and output_ids is not None and output_ids != token_ids:
            raise RemoteError("the server's output_ids are not the tokens of its output_token_logprobs; update SGLang")
        return _drawn(token_ids, pairs and [pair[0] for pair in pairs], finish["type"], version)

    def probe(self, body: dict[str, Any]) -> dict[str, Any]:
        """See :meth:`VllmDialect.probe`."""
        return {**body, "top_logprobs_num": 2}

    def likeliest(self, reply: Any) -> list[float]:
        """See :meth:`VllmDialect.likeliest`."""
        return [candidate[0] for candidate in reply["meta_info"]["output_top_logprobs"][0]]

    def update(self, folder: str, label: str) -> list[Call]:
        return [("/update_weights_from_disk", {"model_path": folder, "weight_version": label, "flush_cache": True})]

    def updated(self, reply: Any) -> None:
        if not isinstance(reply, dict) or not reply.get("success"):
            raise RemoteError(f"the server did not load the weights: {_short(reply)}")


def _drawn(token_ids: Sequence[int], logprobs: Sequence[float] | None, ended: str, version: str = "") -> Drawn:
    if logprobs is None:
        raise ConfigurationError("the server gives no log-probabilities of sampled tokens; training needs them")
    valid_ids = all(type(token) is int and 0 <= token < 2**31 for token in token_ids)
    valid_logprobs = all(type(value) in (int, float) and -math.inf < value <= LARGEST_LOGPROB for value in logprobs)
    if not token_ids or len(token_ids) != len(logprobs) or not valid_ids or not valid_logprobs:
        raise RemoteError(
            f"the server gave {len(token_ids)} tokens {token_ids[:3]}... and {len(logprobs)} log-probabilities "
            f"{logprobs[:3]}...; each of one or more token ids must have a finite one of at most 0; check the "
            "server's version and options, such as vLLM's `--logprobs-mode`"
        )
    return Drawn(tuple(token_ids), tuple(map(float, logprobs)), ended == "stop", version)


def _short(reply: Any) -> str:
    try:
        return str(reply)[:200]
    except RecursionError:
        return "JSON that is nested too deeply"


def read_reply(dialect: Dialect, reply: Any, request: SampleRequest) -> Drawn:
    """Return the tokens of any reply.

    Raises:
        RemoteError: the reply does not follow the protocol.
        Exception: see :meth:`Dialect.read`.
    """
    try:
        return dialect.read(reply, request)
    except (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError) as error:
        fault = f"not a reply of {dialect.name}: {_short(reply)}; check the server's URL and its `dialect`"
        raise RemoteError(fault) from error


def ended_by_stop(drawn: Drawn, request: SampleRequest) -> bool:
    """Return whether a stop token of the request ends the tokens.

    Raises:
        EngineError: another token ended them.
    """
    last = drawn.token_ids[-1]
    if drawn.stopped and last not in request.stop_ids:
        raise EngineError(
            f"the server ended a turn at token {last}, which is not among the policy's stop tokens {request.stop_ids}; "
            "its generation config names more: name the served model in the policy's `model`, or start the server "
            "without that config"
        )
    return last in request.stop_ids
