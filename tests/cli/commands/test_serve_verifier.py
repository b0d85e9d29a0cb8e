"""``mrlm serve --verifier``."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.environment import Message
from mrlm_pl.errors import PolicyError
from mrlm_pl.model_folders import policy_folder
from mrlm_pl.reward_models import RewardModel
from mrlm_pl.serving import RemoteEnvironment
from mrlm_pl.serving.verifiers import VerifierClient
from tests.support.models.verifier_models import tiny
from tests.support.servers.environment_servers import ServerProcess, played
from tests.support.servers.ports import free_port

SERVE = ["-m", "mrlm_pl.cli.main", "serve", "--port", "0"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with one policy that has a value head."""
    folder = tmp_path_factory.mktemp("run")
    tiny(folder / "policies" / "main", "value")
    (folder / "config.yaml").write_text("model: {}\n")
    return folder


@pytest.fixture
def process() -> Iterator[Callable[..., ServerProcess]]:
    started: list[ServerProcess] = []

    def start(*arguments: str) -> ServerProcess:
        started.append(ServerProcess(arguments=[*SERVE, *arguments]))
        return started[-1]

    yield start
    for server in started:
        server.end()


@pytest.mark.slow
def test_a_run_is_served_beside_environments(process: Any, run_folder: Path, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    metrics = free_port()
    server = process(
        *("--verifier", str(run_folder), "--verifier-max-tokens", "40", "--token-file", str(token)),
        *("--environments", "math", "--metrics_port", str(metrics)),
    )
    questions, answers = ["1 + 1 = ?", "2 + 2 = ?", "3"], ["2", "5", "3" * 100]
    client = VerifierClient(server.target, token_file=str(token))
    found = client.score_texts(questions, answers)
    here = RewardModel(str(run_folder / "policies" / "main"), max_tokens=40)
    assert found == pytest.approx(here.score_texts(questions, answers), abs=2e-6)
    assert found == [client.score_texts([question], [answer])[0] for question, answer in zip(questions, answers)]  # noqa: B905
    assert [item.truncated for item in client.score_batch([(Message("user", "1" * n),) for n in (5, 50)])] == [
        False,
        True,
    ]
    environment = RemoteEnvironment(server.target, "math", token_file=str(token))
    assert played(environment, "0", task=environment.tasks("train")[0]).done
    numbers = urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=100).read().decode()
    assert "mrlm_verifier_scores_total 8.0" in numbers
    assert "mrlm_verifier_queue 0.0" in numbers
    server.send(signal.SIGTERM)
    assert server.process.wait(100) == 0


def test_mistakes_are_told_before_the_port_is_open(mrlm: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("MRLM_TOKEN", raising=False)
    tiny(tmp_path / "bare", "none")
    tiny(tmp_path / "two" / "policies" / "one", "value")
    tiny(tmp_path / "two" / "policies" / "other", "none")
    (tmp_path / "young").mkdir()
    (tmp_path / "young" / "config.yaml").write_text("")
    (tmp_path / "empty").mkdir()
    for arguments, text in (
        ([str(tmp_path / "bare")], "lacks 'score.weight'; give a sequence classifier with one label, or a policy's"),
        ([str(tmp_path / "two")], f"has 2 policies; name one: {tmp_path}/two/policies/one, {tmp_path}/two"),
        ([str(tmp_path / "young")], "has no policies, they are written when it ends"),
        (
            [str(tmp_path / "empty")],
            "it has no config.json; name another, or write a model there with `save_pretrained`",
        ),
        ([str(tmp_path / "none")], f"there is no folder '{tmp_path}/none'"),
        (["x", "--host", "0.0.0.0"], "there is no token; put one into MRLM_TOKEN"),
        ([str(tmp_path / "bare"), "--device", "warp"], "device: 'warp' cannot be used"),
        (["x", "--verifier_batch", "0"], "verifier_batch"),
        (["x", "--verifier_precision", "16"], "verifier_precision"),
        (
            ["x", "--controller", "true"],
            "controller: it hosts nothing; leave out environments, settings, policies",
        ),
    ):
        status, out, err = mrlm("serve", "--port", "0", "--verifier", *arguments)
        assert (status, out) == (2, ""), arguments
        assert text in err


def test_which_folder_is_meant(run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = run_folder / "policies" / "main"
    assert policy_folder(str(run_folder), "verifier") == policy_folder(str(model), "verifier") == str(model)
    assert policy_folder("someone/model", "verifier") == "someone/model"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PolicyError, match=r"no folder '\./nothing'"):
        policy_folder("./nothing", "verifier")


def test_a_folder_that_is_not_there_is_told_at_once(mrlm: Any, monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("runs/correctness_model").mkdir(parents=True)

    class Hub:
        """A hub that cannot be reached."""

        def model_info(self, name: str, timeout: float) -> None:
            assert timeout <= 5
            raise OSError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    for name, advice in (
        ("runs/corectness_model", "did you mean 'runs/correctness_model'?"),
        ("runs/other", "check the path"),
        ("correctness_model", "the hub does not give such a model (Name or service not known); did you mean 'runs/"),
        ("somebody/model", "(Name or service not known); there is no folder 'somebody' either; check the path"),
        ("a b", "the hub does not give such a model (Repo id must"),
    ):
        status, _, err = mrlm("serve", "--verifier", name)
        assert status == 2
        assert f"verifier: there is no folder {name!r}" in err
        assert advice in err


def test_the_documents_serve_verifiers_that_their_commands_make() -> None:
    root = Path(__file__).parents[3]
    made = {f"runs/{path.stem}" for path in (root / "configs").rglob("*.yaml")}
    pages = [path.read_text() for path in (root / "docs").rglob("*.md")]
    named = [name for page in pages for name in re.findall(r"--verifier (runs/\S+)", page)]
    assert named
    for name in named:
        run, _, policy = name.partition("/policies/")
        assert run in made, name
        assert policy in ("", "main", "critic"), name


def test_a_server_without_a_verifier_needs_no_torch() -> None:
    found = "sorted({'torch', 'transformers', 'lightning'} & set(sys.modules))"
    code = f"import sys, mrlm_pl.cli.commands.serve; print({found})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
