"""Export policies, and publish them: model card, settings without secrets, upload to the Hugging Face Hub."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from mrlm_pl.durable_files import check_new, replacing
from mrlm_pl.errors import ConfigurationError, RemoteError, counted, did_you_mean, writing
from mrlm_pl.evaluation.intervals import with_interval
from mrlm_pl.model_folders import ADAPTER_FOLDER, CRITIC_FILE, exported_policies, policy_folder
from mrlm_pl.runs.records.run import SAVED, environments_of, read_run, recorded_configuration, recorded_iterations
from mrlm_pl.runs.state import installed_versions

CARD = "README.md"
MACHINE = ("engine", "workers", "processes", "retries")
"""Settings of the data that describe the machine."""

TRAINER = (
    "max_epochs",
    "max_steps",
    "accumulate_grad_batches",
    "gradient_clip_val",
    "gradient_clip_algorithm",
    "precision",
)
"""Settings of the trainer that decide the weights."""

_SECRET = re.compile(
    r"(.*[_-])?(token|secret|password|passwd|credentials?|authorization|(api|access|private|secret)[_-]?key)([_-]file)?"
    r"|env|headers",
    re.IGNORECASE,
)
"""Names of secret settings; ``env`` and ``headers`` hold secrets under any name."""

_KEY = re.compile(r"(?<=://)[^/\s@]+(?=@)|\b(?:sk|hf|gh[opsu]|github_pat|glpat|xox[bp])[-_][\w-]{16,}")
"""Secrets in texts: names and passwords in addresses, and keys of well-known services."""

_FOLDERS = re.compile(r"(?<![^\s'\"=:,;(\[{])(?:~[^\s/'\"]*/|/[^\s/'\":]+/)(?:[^\s/'\":]+/)*")
"""Folders of absolute paths in texts."""


def export(model: str | Path, output: str | Path) -> list[Path]:
    """Write the trained policies of a checkpoint or run, and return their Hugging Face folders.

    Critics with weights of their own are not among them.

    Args:
        model: ``RUN/checkpoints/NAME.ckpt``, a run folder, or a model that is copied.
        output: parent folder of the policies' folders, which have their names.

    Raises:
        ConfigurationError: there is no such model, or a folder exists or cannot be written.
    """
    from mrlm_pl.runs.seated_model import loaded_policy

    policies = read_run(str(model)).policies
    trained = {name: settings for name, settings in policies.items() if SAVED in settings} or policies
    folders = {name: Path(output).expanduser() / name for name in trained}
    for folder in folders.values():
        check_new("output", folder)
    for name, settings in trained.items():
        exported = "" if SAVED in settings else settings.get("model", "")
        with writing("output", folders[name]), replacing(folders[name]) as draft:
            if exported and Path(exported).expanduser().is_dir():
                shutil.copytree(Path(exported).expanduser(), draft)  # with all of its files, such as an adapter
            else:
                loaded_policy(settings, "cpu", name).save_pretrained(draft)
    return list(folders.values())


def push_to_hub(
    run: str | Path, repo: str, *, policy: str | None = None, private: bool = False, license: str | None = None
) -> str:
    """Upload an exported policy with its model card, and return the address of its page.

    The repository is created if it does not exist. The token is that of ``hf auth login`` or ``HF_TOKEN``, the hub that
    of ``HF_ENDPOINT``.

    Args:
        run: run folder, or the folder of a policy.
        repo: repository ``USER/NAME``.
        policy: name of the policy; None is the run's only one.
        private: make a new repository private; an existing public one is an error.
        license: license identifier for the card, such as ``apache-2.0``; None keeps the card's, ``unknown`` by default.

    Raises:
        ConfigurationError: there is no such policy, the repository's name is invalid, or it is public and ``private``
            is given, or the card cannot be written.
        RemoteError: the hub rejects the request or does not answer.
    """
    from huggingface_hub import HfApi, ModelCard
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
    from huggingface_hub.utils import validate_repo_id

    folder = _folder(str(run), policy)
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigurationError(f"repo: {repo!r} is not a repository, such as USER/NAME: {error}") from error
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
    except Exception as error:  # the hub client, its HTTP library and the system raise many classes
        reason = " ".join(str(error).split()) or type(error).__name__
        answered = isinstance(error, (HfHubHTTPError, LocalTokenNotFoundError))
        token = "a token that may write comes from `hf auth login` or HF_TOKEN"
        remedy = token if answered else f"check the connection to {api.endpoint}, the hub of HF_ENDPOINT"
        raise RemoteError(f"the hub does not take {str(folder)!r} as {repo!r}: {reason}; {remedy}") from error
    if exposed:
        remedy = "nothing was uploaded; make it private there, or leave out `--private`"
        raise ConfigurationError(f"private: the repository {repo!r} exists and is public; {remedy}")
    return str(page)


def write_cards(run: Path) -> None:
    """Write ``README.md`` into the folder of each policy that a run has exported, with the installed versions."""
    for folder in exported_policies(run):
        with replacing(folder / CARD) as draft:
            draft.write_text(model_card(folder, installed_versions()), encoding="utf-8")


def model_card(folder: Path, versions: Mapping[str, str]) -> str:
    """Return the text of the card.

    Args:
        folder: folder ``RUN/policies/NAME`` of the policy.
        versions: versions of the libraries that trained it; empty if they are unknown.

    Raises:
        ConfigurationError: the run's configuration cannot be read.
    """
    from huggingface_hub import ModelCardData

    folder = Path(os.path.abspath(folder))
    run, name = folder.parents[1], folder.name
    config = recorded_configuration(run)
    algorithm = re.split("[.:]", str((config.get("model") or {}).get("class_path") or ""))[-1]
    model, data = ((config.get(key) or {}).get("init_args") or {} for key in ("model", "data"))
    policies: Mapping[str, Any] = model.get("policies") or {"main": {}}
    is_policy = not (folder / CRITIC_FILE).exists()
    kind = "policy" if is_policy else "critic"
    base = str((policies.get(name) or {}).get("model") or "builtin:tiny") if is_policy else None
    metadata = ModelCardData(
        library_name="transformers",
        pipeline_tag="text-generation" if is_policy else None,
        license="unknown",
        base_model=base if base is not None and may_be_hub_id(base) else None,
        tags=["mrlm", "reinforcement-learning", *([algorithm.lower()] if algorithm else [])],
    )
    sections = [f"---\n{metadata.to_yaml()}\n---", f"# {name}"]
    if algorithm:
        rows = {
            "run": f"`{run.name}`, {counted(recorded_iterations(run), 'iteration')}",
            **({"initial model": f"`{_redact(base)}`"} if base is not None else {}),
            "algorithm": f"`{algorithm}`",
            "environment": ", ".join(f"`{item.class_name}`" for item in environments_of(data)) or "none: data files",
        }
        table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
        data = {key: value for key, value in data.items() if key not in MACHINE}
        trainer = {key: value for key, value in (config.get("trainer") or {}).items() if key in TRAINER}
        run_settings = {
            "seed_everything": config.get("seed_everything"),
            "model": {**config["model"], "init_args": model},
            "data": {**(config.get("data") or {}), "init_args": data},
            "trainer": trainer,
        }
        settings = yaml.safe_dump(_redact(run_settings), sort_keys=False).strip()
        sections.append(f"A {kind} trained with `mrlm`.\n\n| | |\n|---|---|\n{table}")
        sections.append(f"## Settings\n\n```yaml\n{settings}\n```")
    else:
        sections.append(f"A {kind} trained by a Python script with `mrlm`. The run recorded no settings.")
    sections.append(f"## Evaluation\n\n{_evaluation(run)}")
    if versions:
        sections.append("## Versions\n\n" + ", ".join(f"{library} {number}" for library, number in versions.items()))
    return "\n\n".join(sections) + "\n"


def may_be_hub_id(model: str) -> bool:
    """Return whether the name of a model may be a hub id: it is not a folder and not of the form of a path."""
    path = model.startswith(("builtin:", ".", "~", "/")) or model.count("/") > 1
    return not path and not Path(model).exists()


def without_secrets(value: Any) -> Any:
    """Return settings without those whose name is that of a secret, and without keys in texts.

    >>> without_secrets({"url": "https://me:sesame@host/v1", "env": {"A_TOKEN": "1"}, "API_KEY": "2", "max_tokens": 3})
    {'url': 'https://...@host/v1', 'max_tokens': 3}
    """
    if isinstance(value, Mapping):
        return {key: without_secrets(item) for key, item in value.items() if not _SECRET.fullmatch(str(key))}
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    return _KEY.sub("...", value) if isinstance(value, str) else value


def text_without_secrets(text: str) -> str:
    """Return a configuration's text with ``'...'`` instead of secrets; empty if it is not YAML.

    >>> text_without_secrets("a: {env: {K: 1}}  # a\\ntoken:\\n  b: 2\\nurl: x://me:sesame@host\\n")
    "a: {env: '...'}  # a\\ntoken:\\n  '...'\\nurl: x://...@host\\n"
    """
    text = text.removeprefix("\ufeff")  # which places do not count
    try:
        top = yaml.compose(text, yaml.CSafeLoader)
    except (yaml.YAMLError, RecursionError):
        return ""
    waiting, seen, secret = [top], set[int](), set[tuple[int, int]]()
    while waiting:
        node = waiting.pop()
        if id(node) in seen:  # by an alias, which would make endless work of a short text
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if not _SECRET.fullmatch(str(key.value)):
                waiting.append(value)
            elif not value.tag.endswith(":null"):
                start = value.start_mark.index
                secret.add((start, start + len(text[start : value.end_mark.index].rstrip())))
    shown, end = "", 0
    for start, stop in sorted(secret):
        if start >= end:  # else it is part of a longer one, which an alias names
            shown, end = f"{shown}{text[end:start]}'...'", stop
    return _KEY.sub("...", shown + text[end:])


def _redact(value: Any) -> Any:
    """Return settings without secrets, unset ones, servers of policies, and the folders of absolute paths."""
    if isinstance(value, Mapping):
        settings = {key: _redact(item) for key, item in without_secrets(value).items() if key != "served_by"}
        return {key: item for key, item in settings.items() if item is not None and item != {}}
    if isinstance(value, list):
        return [_redact(item) for item in value]
    return _FOLDERS.sub("", without_secrets(value)) if isinstance(value, str) else value


def _evaluation(run: Path) -> str:
    """Return the table of the held-out evaluations before and after training."""
    paths = {moment: run / f"evaluation_{moment}.json" for moment in ("before", "after")}
    reports = {moment: json.loads(path.read_text(encoding="utf-8")) for moment, path in paths.items() if path.is_file()}
    if not reports:
        return "The run has no held-out evaluation."
    rows = []
    for moment, by_environment in reports.items():
        for name, report in by_environment.items():
            reward = with_interval(report["mean_reward"], report["ci95"])
            accuracy = with_interval(report["accuracy"], report["accuracy_ci95"])
            rows.append(f"| {name} | {moment} | {report['split']} | {report['episodes']} | {reward} | {accuracy} |")
    before, after = (reports.get(moment, {}) for moment in ("before", "after"))
    changed = [name for name in after if name in before and before[name].get("settings") != after[name].get("settings")]
    note = [f"\nBefore training, {', '.join(changed)} had other settings."] if changed else []
    head = "| environment | training | split | episodes | mean reward [95 % interval] | accuracy [95 % interval] |"
    return "\n".join(["All policies of the run in their seats:\n", head, "|---|---|---|---|---|---|", *rows, *note])


def unpublished(adapter: Path) -> str:
    """Return the pattern of the files of an adapter that are not uploaded.

    If the base model is a folder, no file is uploaded: the files hold its path, and other users lack it. The weights
    with the adapter merged are uploaded in any case.
    """
    config = adapter / "adapter_config.json"
    base = json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path") if config.is_file() else ""
    return CARD if base and may_be_hub_id(base) else "*"


def _folder(run: str, policy: str | None) -> Path:
    """Return the folder of a policy.

    Raises:
        ConfigurationError: there is no policy of that name, or there are several and none is named.
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
