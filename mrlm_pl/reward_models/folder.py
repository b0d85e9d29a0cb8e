"""Where the reward model is that a user names."""

from __future__ import annotations

from pathlib import Path

from mrlm_pl.errors import PolicyError, nearest_path

HUB_SECONDS = 5.0
"""Time for the hub to say whether it has a model."""


def verifier_folder(name: str) -> str:
    """The model's folder: that of the only policy of a run, or what was named, which may be a hub id.

    A name of the form ``A/B`` means a folder where there is a folder ``A`` here.

    Raises:
        PolicyError: the run has several policies, or none yet, or there is no such folder.
    """
    folder = Path(name).expanduser()
    if not folder.is_dir():
        is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
        if is_path or ("/" in name and folder.parent.is_dir()):
            raise PolicyError(f"verifier: there is no folder {name!r}; {_advice(folder)}")
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


def check_hub_model(name: str) -> None:
    """Refuse a name that is no folder and no model of the hub, without the hub's own many attempts.

    Raises:
        PolicyError: the hub has no such model, or does not answer within :data:`HUB_SECONDS` seconds.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(name).expanduser().is_dir():
        return
    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            HfApi().model_info(name, timeout=HUB_SECONDS)
    except HFValidationError as error:
        raise PolicyError(f"verifier: there is no folder {name!r}, and no hub id is of this form: {error}") from error
    except Exception as error:  # of the hub's, its HTTP library's and the system's many classes
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise PolicyError(
            f"verifier: there is no folder {name!r}, and the hub does not give such a model ({reason}); "
            f"{_advice(Path(name))}"
        ) from error


def _advice(folder: Path) -> str:
    """What may have been meant."""
    if (Path("runs") / folder).is_dir():
        return f"did you mean {str(Path('runs') / folder)!r}?"
    if not folder.parent.is_dir():
        return f"there is no folder {str(folder.parent)!r} either; check the path"
    near = nearest_path(folder, folders=True)
    return f"did you mean {str(near)!r}?" if near else "check the path"
