"""The model card of an exported policy, and its publication on a hub."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from mrlm_pl.errors import RemoteError
from mrlm_pl.model_folders import CRITIC_FILE
from mrlm_pl.runs.publication import model_card, push_to_hub, unpublished, write_cards
from tests.support.documents import ROOT
from tests.support.runs.recorded_runs import write_run
from tests.support.servers.fake_hub import TOKEN, fake_hub

POLICIES = {"solver": {"model": "owner/base", "learning_rate": 1e-4, "served_by": None}, "critic": {"model": "."}}
DATA = {
    "environment": {"class_path": "mrlm_environments.MathEnvironment", "init_args": {"api_key": "sesame"}},
    "groups": 4,
    "workers": 3,
}
CONFIGURATION = {
    "seed_everything": 0,
    "model": {"class_path": "mrlm_pl.MAGRPO", "init_args": {"policies": POLICIES, "gamma": 0.5}},
    "data": {"class_path": "RolloutDataModule", "init_args": DATA},
    "trainer": {"gradient_clip_val": 1.0, "max_steps": None, "enable_progress_bar": False},
}


def evaluated(reward: float) -> dict[str, Any]:
    measured = {"mean_reward": reward, "ci95": [reward - 0.1, reward + 0.1], "accuracy": 0.5, "accuracy_ci95": None}
    return {"math": {"split": "test", "episodes": 64, **measured}}


def recorded(folder: Path, configuration: Mapping[str, Any] = CONFIGURATION, *policies: str) -> Path:
    run = write_run(folder, [], configuration)
    for name in policies or POLICIES:
        (run / "policies" / name).mkdir(parents=True)
        (run / "policies" / name / "config.json").write_text("{}")
        (run / "policies" / name / "model.safetensors").write_bytes(1000 * b"w")
    return run


def test_it_has_the_run_the_settings_the_evaluation_and_the_versions(tmp_path: Path) -> None:
    run = recorded(tmp_path / "team")
    for moment, reward in (("before", 0.25), ("after", 0.75)):
        (run / f"evaluation_{moment}.json").write_text(json.dumps(evaluated(reward)))
    text = model_card(run / "policies" / "solver", {"mrlm": "1.2.3"})
    card = ModelCard(text)
    assert (card.data.license, card.data.base_model, card.data.library_name) == (
        "unknown",
        "owner/base",
        "transformers",
    )
    assert card.data.tags == ["mrlm", "reinforcement-learning", "magrpo"]
    for line in (
        "| run | `team`, 0 iterations |",
        "| environment | `MathEnvironment` |",
        "| math | before | test | 64 | 0.250 [0.150, 0.350] | 0.500 |",
        "| math | after | test | 64 | 0.750 [0.650, 0.850] | 0.500 |",
        "mrlm 1.2.3",
    ):
        assert line in text.splitlines(), line
    settings = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    policies = {"solver": {"model": "owner/base", "learning_rate": 1e-4}, "critic": {"model": "."}}
    environment = {"class_path": "mrlm_environments.MathEnvironment"}
    assert settings == {
        "seed_everything": 0,
        "model": {"class_path": "mrlm_pl.MAGRPO", "init_args": {"policies": policies, "gamma": 0.5}},
        "data": {"class_path": "RolloutDataModule", "init_args": {"environment": environment, "groups": 4}},
        "trainer": {"gradient_clip_val": 1.0},
    }
    assert ModelCard(model_card(run / "policies" / "critic", {})).data.base_model is None, "a folder is not a hub id"


def test_evaluations_of_other_settings_are_no_gain(tmp_path: Path) -> None:
    run = recorded(tmp_path / "resumed")
    for moment, largest in (("before", 20), ("after", 40)):
        report = evaluated(0.5)
        report["math"]["settings"] = {"largest": largest}
        (run / f"evaluation_{moment}.json").write_text(json.dumps(report))
    note = "Before training, math had other settings."
    assert note in model_card(run / "policies" / "solver", {}).splitlines()
    (run / "evaluation_before.json").write_text(json.dumps(report))
    assert note not in model_card(run / "policies" / "solver", {})
    (run / "evaluation_before.json").unlink()
    assert note not in model_card(run / "policies" / "solver", {})


def test_a_run_without_settings_or_evaluation_says_so(tmp_path: Path) -> None:
    run = recorded(tmp_path / "script", {}, "main")
    (run / "config.yaml").unlink()
    write_cards(run)
    text = (run / "policies/main/README.md").read_text()
    assert "The run recorded no settings." in text
    assert "The run has no held-out evaluation." in text
    assert f"python {sys.version.split()[0]}, mrlm " in text


def test_neither_secrets_nor_folders_are_in_the_card(tmp_path: Path) -> None:
    tools = {"command": "/home/alice/bin/server", "env": {"GITHUB_TOKEN": "sesame"}, "url": "http://me:sesame@host/mcp"}
    arguments = {
        "data": "/home/alice/rows.jsonl",
        "tools": [{"class_path": "McpTools", "init_args": tools}],
        "rewards": ["/home/alice/my_rewards.py:exact"],
        "command": ["python", "~/agents.py", "--config=/home/alice/a b.yaml", "--key", "sk-0123456789abcdef"],
        "OPENAI_API_KEY": "sesame",
        "headers": {"X-Own": "sesame"},
        "max_tokens": 5,
        "retries": 2,
        "prompt": "Reply in <answer></answer> or http://example.org/a/b and/or /no_think.",
    }
    environment = {"class_path": "/home/alice/mine.py:Own", "init_args": arguments}
    model = {"class_path": "./mine.py:OwnGRPO", "init_args": {"policies": {"main": {"model": "/home/alice/base"}}}}
    data = {"init_args": {"environment": [environment], "retries": 3}}
    run = recorded(tmp_path / "secret", {"model": model, "data": data}, "main", "main-critic")
    text = model_card(run / "policies" / "main", {})
    assert not [word for word in ("alice", "sesame", "sk-0", str(tmp_path)) if word in text], text
    assert "| algorithm | `OwnGRPO` |\n| environment | `Own` |" in text
    assert "| initial model | `base` |" in text
    assert ModelCard(text).data.base_model is None, "also on a machine that has no such folder"
    shown = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])["data"]["init_args"]
    assert shown == {
        "environment": [
            {
                "class_path": "mine.py:Own",
                "init_args": {
                    "data": "rows.jsonl",
                    "tools": [
                        {"class_path": "McpTools", "init_args": {"command": "server", "url": "http://...@host/mcp"}}
                    ],
                    "rewards": ["my_rewards.py:exact"],
                    "command": ["python", "agents.py", "--config=a b.yaml", "--key", "..."],
                    "max_tokens": 5,
                    "retries": 2,
                    "prompt": arguments["prompt"],
                },
            }
        ]
    }
    (run / "policies" / "main-critic" / CRITIC_FILE).touch()
    critic = model_card(run / "policies" / "main-critic", {})
    assert "A critic trained with" in critic
    assert "initial model" not in critic
    (run / "config.yaml").unlink()
    critic = model_card(run / "policies" / "main-critic", {})
    assert "A critic trained by a Python script" in critic
    assert ModelCard(critic).data.pipeline_tag is None, "it writes no text"


def test_the_run_is_found_from_every_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path / "team")
    for place, folder in ((run / "policies" / "solver", "."), (run / "policies", "solver"), (run, "policies/solver")):
        monkeypatch.chdir(place)
        assert "| run | `team`, 0 iterations |" in model_card(Path(folder), {})


@pytest.mark.parametrize(
    ("base", "files"), [("owner/base", "README.md"), ("/home/alice/base", "*"), ("folder/base", "*"), (None, "*")]
)
def test_an_adapter_is_published_where_its_base_is_on_the_hub(
    base: str | None, files: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder/base").mkdir(parents=True)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    assert unpublished(tmp_path) == files


def push(*words: str, url: str, token: str = TOKEN) -> subprocess.CompletedProcess[str]:
    # The fake hub takes weights by git LFS, which Xet replaces on the real one.
    hub = {"HF_ENDPOINT": url, "HF_TOKEN": token, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_HOME": "hf"}
    command = [sys.executable, "-m", "mrlm_pl.cli.main", "push", *words]
    search = os.pathsep.join(str(ROOT / part) for part in ("", "environments", "callbacks"))
    environment = {**os.environ, **hub, "PYTHONPATH": search}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.long
def test_the_command_uploads_a_policy_with_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "team")
    for name in ("README.md.part", ".env"):
        Path("team/policies/solver", name).write_text("sesame")
    Path("team/policies/solver/adapter").mkdir()
    Path("team/policies/solver/adapter/README.md").write_text("base_model: /home/alice/base")
    Path("team/policies/solver/adapter/adapter_config.json").write_text(
        '{"base_model_name_or_path": "/home/alice/base"}'
    )
    with fake_hub() as hub:
        done = push("team", "--repo", "me/solver", "--policy", "solver", "--private", "--license", "mit", url=hub.url)
        assert (done.returncode, done.stdout) == (0, f"{hub.url}/me/solver\n"), done.stderr
        push("team", "--repo", "me/critic", "--policy", "critic", url=hub.url)
        before = dict(hub.files)
        (tmp_path / "team/policies/critic/more.json").write_text("{}")
        public = push("team", "--repo", "me/critic", "--policy", "critic", "--private", url=hub.url)
        assert hub.files == before
        refused = push("team", "--repo", "me/solver", "--policy", "solver", url=hub.url, token="hf_wrong")
    assert hub.private == {"me/solver": True, "me/critic": False}
    assert public.returncode == 2
    assert "the repository 'me/critic' exists and is public; nothing was uploaded" in public.stderr
    found = {path: content for (repository, path), content in hub.files.items() if repository == "me/solver"}
    assert set(found) == {"README.md", "config.json", "model.safetensors"}
    assert found["model.safetensors"] == 1000 * b"w"
    card = ModelCard(found["README.md"].decode())
    assert card.data.license == "mit"
    assert found["README.md"] == Path("team/policies/solver/README.md").read_bytes()
    assert refused.returncode == 1
    assert refused.stderr.startswith("mrlm: error: the hub does not take 'team/policies/solver' as 'me/solver': ")
    assert "`hf auth login` or HF_TOKEN" in refused.stderr


def test_a_hub_that_does_not_answer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(self: Any, *_: Any, **__: Any) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", unreachable)
    recorded(tmp_path / "team")
    with pytest.raises(RemoteError, match=r"Name or service not known; check the connection to http\S+, the hub"):
        push_to_hub(tmp_path / "team", "me/solver", policy="solver")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("team", "--repo", "me/a"),
            "'team' has 2 policies; name one: team/policies/critic, team/policies/solver",
        ),
        (("team", "--repo", "me/a", "--policy", "solvr"), "no exported policy 'solvr'; did you mean 'solver'?"),
        (("taem", "--repo", "me/a"), "run: there is no folder 'taem'"),
        (("team", "--repo", "a/b/c", "--policy", "solver"), "repo: 'a/b/c' is not a repository, such as USER/NAME"),
    ],
)
def test_a_mistake_is_named_before_the_hub_is_asked(words: tuple[str, ...], message: str, mrlm: Any) -> None:
    recorded(Path("team"))
    status, _, err = mrlm("push", *words)
    assert (status, message in err) == (2, True), err


def test_a_card_that_cannot_be_written_is_named(mrlm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    recorded(Path("team"))
    monkeypatch.setattr("mrlm_pl.durable_files.os.replace", refuse)
    status, _, err = mrlm("push", "team", "--repo", "me/a", "--policy", "solver")
    assert (status, "README.md' cannot be written: Permission denied; name a place" in err) == (2, True), err
