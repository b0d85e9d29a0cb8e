"""Publish an exported policy on the Hugging Face Hub."""

from __future__ import annotations

import json
import os
from pathlib import Path

from mrlm_pl.durable_files import replacing
from mrlm_pl.errors import ConfigurationError, RemoteError, did_you_mean, writing
from mrlm_pl.model_folders import ADAPTER_FOLDER, exported_policies, policy_folder
from mrlm_pl.runs.model_card import CARD, may_be_hub_id, model_card


def push_to_hub(
    run: str | Path, repo: str, *, policy: str | None = None, private: bool = False, license: str | None = None
) -> str:
    """Upload an exported policy with its model card, and return the address of its page.

    The repository is made where it does not exist. The token is that of ``hf auth login`` or ``HF_TOKEN``, the hub that
    of ``HF_ENDPOINT``.

    Args:
        run: a run folder, or the folder of a policy.
        repo: ``USER/NAME``.
        policy: its name; None is the run's only one.
        private: make a new repository private; one that exists and is public is an error.
        license: identifier for the card, such as ``apache-2.0``; None keeps the card's, ``unknown`` by default.

    Raises:
        ConfigurationError: there is no such policy, the repository's name is none, or it is public and ``private`` is
            given, or the card cannot be written.
        RemoteError: the hub refuses or does not answer.
    """
    from huggingface_hub import HfApi, ModelCard
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id

    folder = _folder(str(run), policy)
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigurationError(f"repo: {repo!r} is no repository, such as USER/NAME: {error}") from error
    path = folder / CARD
    card = ModelCard(path.read_text(encoding="utf-8") if path.is_file() else model_card(folder, {}))
    if license is not None:
        card.data["license"] = license
    with writing("run", path), replacing(path) as draft:
        draft.write_text(str(card), encoding="utf-8")
    api = HfApi(library_name="mrlm")
    try:
        page = api.create_repo(repo, private=private, exist_ok=True)
        exposed = private and not api.model_info(page.repo_id).private
        if not exposed:
            api.upload_folder(
                repo_id=page.repo_id,
                folder_path=folder,
                commit_message=f"Upload policy {folder.name}",
                ignore_patterns=["*.part", ".*", "*/.*", f"{ADAPTER_FOLDER}/{unpublished(folder / ADAPTER_FOLDER)}"],
            )
    except Exception as error:  # of the hub's, its HTTP library's and the system's many classes
        reason = " ".join(str(error).split()) or type(error).__name__
        answered = isinstance(error, (HfHubHTTPError, LocalTokenNotFoundError))
        token = "a token that may write comes from `hf auth login` or HF_TOKEN"
        remedy = token if answered else f"check the connection to {api.endpoint}, the hub of HF_ENDPOINT"
        raise RemoteError(f"the hub does not take {str(folder)!r} as {repo!r}: {reason}; {remedy}") from error
    if exposed:
        remedy = "nothing was uploaded; make it private there, or leave out `--private`"
        raise ConfigurationError(f"private: the repository {repo!r} exists and is public; {remedy}")
    return str(page)


def unpublished(adapter: Path) -> str:
    """Return the pattern of the files of an adapter that are not uploaded.

    If the base model is a folder, all of them: they hold its path, and other users lack it. The weights with the
    adapter merged are uploaded in any case.
    """
    config = adapter / "adapter_config.json"
    base = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path") if config.is_file() else ""
    return CARD if base and may_be_hub_id(base) else "*"


def _folder(run: str, policy: str | None) -> Path:
    """Return the folder of a policy.

    Raises:
        ConfigurationError: there is none of that name, or several and none is named.
    """
    folder = Path(run).expanduser()
    if not folder.is_dir():
        raise ConfigurationError(f"run: there is no folder {run!r}; name the folder of a run")
    if policy is None:
        return Path(os.path.abspath(policy_folder(run, "run")))
    policies = {path.name: path for path in exported_policies(folder)}
    if policy not in policies:
        hint = did_you_mean(policy, policies, f"it has {sorted(policies) or 'no policies yet'}")
        raise ConfigurationError(f"policy: the run {run!r} has no exported policy {policy!r}; {hint}")
    return policies[policy]
