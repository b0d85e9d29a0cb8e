"""The dialect of ``transformers serve``, with text in both directions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mrlm_pl.engines.base import SampleRequest
from mrlm_pl.engines.http.dialects import Dialect, Drawn, SglangDialect, VllmDialect
from mrlm_pl.engines.http.replicas import PassingError
from mrlm_pl.errors import ConfigurationError, EngineError
from mrlm_pl.policy.pretrained import BUILTIN_TINY, context_window, read_config, read_tokenizer
from mrlm_pl.policy.tiny import tiny_model_path
from mrlm_pl.settings import one_of


class TransformersDialect(Dialect):
    """``transformers serve``: ``POST /v1/completions`` with text; it has no token ids and no log-probabilities.

    A context is sent as text only if the tokenizer reads that text as exactly the context's tokens, and their number
    must be the server's count. The sampled text is encoded, and must decode to itself; its tokens may be others than
    the sampled ones. The first of the request's stop tokens stands for any of them. The log-probability of every token
    is 0 and means nothing. Training rejects such samples.

    Args:
        tokenizer: folder or hub id of the served model, the latter also as ``ID@REVISION``, or ``builtin:tiny``.

    Raises:
        PolicyError: the tokenizer cannot be read.

    Attributes:
        source: the folder or hub id.
        window: the model's context window in tokens; None if its configuration does not say.
    """

    name, path = "transformers", "/v1/completions"
    reports_logprobs, names_folders = False, True

    def __init__(self, tokenizer: str) -> None:
        self.source = str(tiny_model_path()) if tokenizer == BUILTIN_TINY else tokenizer
        name, _, revision = (self.source, "", "") if Path(self.source).is_dir() else self.source.partition("@")
        named = tokenizer, name, revision or "main"
        self.tokenizer, config = read_tokenizer(*named), read_config(*named)
        self.window = context_window(config)

    def body(self, request: SampleRequest, model: str, limit: int, seed: int) -> dict[str, Any]:
        sampling = request.sampling
        drawing = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
        config: dict[str, Any] = {"do_sample": sampling.temperature > 0, "max_new_tokens": limit, "use_cache": True}
        config |= drawing if config["do_sample"] else {}
        if request.stop_ids:
            config |= {"eos_token_id": list(request.stop_ids), "pad_token_id": request.stop_ids[0]}
        return {
            "model": model,
            "prompt": self.text_of(request.token_ids),
            "generation_config": json.dumps(config),
            "seed": seed,
        }

    def read(self, reply: Any, request: SampleRequest) -> Drawn:
        choice, usage = reply["choices"][0], reply["usage"]
        text, ended = choice["text"], choice["finish_reason"]
        prompt, sampled = usage["prompt_tokens"], usage["completion_tokens"]
        if prompt != len(request.token_ids):
            raise EngineError(
                f"the server read the context as {prompt} tokens, and it has {len(request.token_ids)}; give the served "
                "model's tokenizer in `tokenizer`"
            )
        if ended not in ("stop", "length"):
            raise PassingError(f"the server ended a sample with {ended!r}")
        token_ids = self.ids_of(text)
        stopped = bool(request.stop_ids) and (ended == "stop" or sampled == len(token_ids) + 1)
        # Special tokens are not part of the text; the one missing at the end is a stop token.
        if stopped and not (token_ids and token_ids[-1] in request.stop_ids):
            token_ids.append(request.stop_ids[0])
        if not token_ids:
            raise EngineError("the server sampled special tokens alone, which are not part of text")
        return Drawn(tuple(token_ids), (0.0,) * len(token_ids), stopped)

    def save(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """Return the text that the served tokenizer reads as exactly these ids, including special tokens that it adds.

        Raises:
            EngineError: there is no such text.
        """
        text, head = (self._decode(ids, without_special=False) for ids in (token_ids, token_ids[:1]))
        read, shorter = list(self.tokenizer(text)["input_ids"]), text.removeprefix(head)
        if read == list(token_ids):
            return text
        if list(self.tokenizer(shorter)["input_ids"]) == list(token_ids):  # a server adds the first token itself
            return shorter
        raise EngineError(
            f"a context of {len(token_ids)} tokens would be read as {len(read)} others when it is sent as text "
            "(sampled tokens often differ from the tokenizer's own choice); use a server that takes token ids"
        )

    def ids_of(self, text: str) -> list[int]:
        """Return the token ids of ``text``, which decode to the same text.

        Raises:
            EngineError: the ids decode to another text.
        """
        token_ids = list(self.tokenizer.encode(text, add_special_tokens=False))
        back = self._decode(token_ids, without_special=True)
        if back != text:
            raise EngineError(f"the sampled text {text[:80]!r} becomes {back[:80]!r} when it is encoded and decoded")
        return token_ids

    def _decode(self, token_ids: Sequence[int], *, without_special: bool) -> str:
        options = {"skip_special_tokens": without_special, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(token_ids), **options))


def dialect_of(name: str, tokenizer: str | None) -> Dialect:
    """Return the dialect with this name; a dialect of text takes a tokenizer, as a folder or hub id.

    Raises:
        ConfigurationError: the name is unknown, or the tokenizer is missing or not used.
    """
    if name == "transformers":
        if tokenizer is None:
            raise ConfigurationError(
                "dialect transformers sends and gets text; set data.engine.tokenizer to the folder or hub id of the "
                "served model"
            )
        return TransformersDialect(tokenizer)
    if tokenizer is not None:
        raise ConfigurationError(f"dialect {name} sends and gets token ids; leave data.engine.tokenizer out")
    one_of(("vllm", "sglang", "transformers"), dialect=name)
    return VllmDialect() if name == "vllm" else SglangDialect()
