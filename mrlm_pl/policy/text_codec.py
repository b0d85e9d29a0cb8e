"""Token ids for servers that take and give only text: what is sent is proven to be read as these ids again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from mrlm_pl.errors import EngineError, PolicyError
from mrlm_pl.policy.tiny import tiny_model_path

BUILTIN_TINY = "builtin:tiny"


class TextCodec:
    """The text of token ids, and the ids of text, for one tokenizer.

    Args:
        tokenizer: folder or hub id of the served model, or ``builtin:tiny``.

    Raises:
        PolicyError: no tokenizer can be read there.

    Attributes:
        source: the folder or hub id.
        window: how many tokens fit into the model's context; None if its configuration does not say.
    """

    def __init__(self, tokenizer: str) -> None:
        self.source = str(tiny_model_path()) if tokenizer == BUILTIN_TINY else tokenizer
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(self.source, trust_remote_code=False)
            config = AutoConfig.from_pretrained(self.source, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise PolicyError(
                f"the tokenizer of {tokenizer!r} cannot be read ({str(error).strip()[:200]}); give the folder or hub "
                "id of the model that is served"
            ) from error
        self.window: int | None = getattr(config, "max_position_embeddings", None)
        self._special = set(self.tokenizer.all_special_ids)
        self._special |= {number for number, token in self.tokenizer.added_tokens_decoder.items() if token.special}

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text that the served tokenizer reads as exactly these ids, special tokens that it adds included.

        Raises:
            EngineError: there is none.
        """
        text = self._decoded(token_ids, without_special=False)
        read = self.tokenizer(text)["input_ids"]
        if list(read) == list(token_ids):
            return text
        # A server puts the tokens in front that its tokenizer adds; they need not be sent.
        head = self._decoded(token_ids[:1], without_special=False)
        if token_ids and token_ids[0] in self._special and text.startswith(head):
            shorter = text.removeprefix(head)
            if list(self.tokenizer(shorter)["input_ids"]) == list(token_ids):
                return shorter
        raise EngineError(
            f"a context of {len(token_ids)} tokens would be read as {len(read)} others when it is sent as text "
            "(sampled tokens are often not the tokenizer's own choice); use a server that takes token ids"
        )

    def ids_of(self, text: str) -> list[int]:
        """Token ids of ``text``, of which decoding makes the same text again.

        Raises:
            EngineError: it does not.
        """
        token_ids = list(self.tokenizer.encode(text, add_special_tokens=False))
        back = self._decoded(token_ids, without_special=True)
        if back != text:
            raise EngineError(f"the sampled text {text[:80]!r} becomes {back[:80]!r} when it is encoded and decoded")
        return token_ids

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files into a folder."""
        self.tokenizer.save_pretrained(folder)

    def _decoded(self, token_ids: Sequence[int], *, without_special: bool) -> str:
        return str(
            self.tokenizer.decode(
                list(token_ids), skip_special_tokens=without_special, clean_up_tokenization_spaces=False
            )
        )
