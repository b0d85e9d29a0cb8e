"""Where the reward model is that a user names."""

from __future__ import annotations

from pathlib import Path

from mrlm_pl.errors import PolicyError


def verifier_folder(name: str) -> str:
    """The model's folder: that of the only policy of a run, or what was named, which may be a hub id.

    Raises:
        PolicyError: the run has several policies, or none yet, or there is no such folder.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") > 1:
            raise PolicyError(f"verifier: there is no folder {name!r}; check the path")
        return name
    if (folder / "config.json").is_file():
        return str(folder)
    exported = sorted(path.parent for path in (folder / "policies").glob("*/config.json"))
    if len(exported) == 1:
        return str(exported[0])
    if exported:
        choices = ", ".join(f"`--verifier {path}`" for path in exported)
        raise PolicyError(f"verifier: the run {name!r} has {len(exported)} policies; choose one: {choices}")
    if (folder / "config.yaml").is_file():
        raise PolicyError(
            f"verifier: the run {name!r} has no policies yet, they are written when it ends; continue it with "
            f"`mrlm train --output {name} --resume`"
        )
    raise PolicyError(f"verifier: {name!r} is neither a run nor the folder of a model: it has no config.json")
