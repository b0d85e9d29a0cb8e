"""The server that has a policy's weights."""

from __future__ import annotations

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.settings import check_address


def check_place(place: str) -> None:
    """Validate that a policy's ``served_by`` is ``HOST:PORT`` or ``[DIALECT+]http[s]://HOST:PORT``.

    Raises:
        ConfigurationError: it is neither.
    """
    if "://" not in place:
        check_address(place)
    elif not place.removeprefix("sglang+").removeprefix("transformers+").startswith(("http://", "https://")):
        raise ConfigurationError(
            f"served_by {place!r} is neither HOST:PORT, nor http://HOST:PORT (vLLM), sglang+http://HOST:PORT or "
            "transformers+http://HOST:PORT"
        )
