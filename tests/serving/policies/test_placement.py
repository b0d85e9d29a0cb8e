"""A frozen policy of a run whose weights are on a server: nothing changes but where it generates."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrlm_pl.cli.main import main
from mrlm_pl.concurrency.event_loop import EventLoopThread
from mrlm_pl.engines import InProcessEngine, OpenAICompatible, RoutingEngine, SampleRequest, Sampling
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError, PolicyError, RemoteError
from mrlm_pl.policy import Policy, pretrained
from mrlm_pl.policy.tiny import tiny_model_path
from mrlm_pl.serving.environments.hosted import Offer
from mrlm_pl.serving.policies import placement as served_policies
from mrlm_pl.serving.policies.placement import with_served
from mrlm_pl.serving.policies.service import PolicyService
from mrlm_pl.serving.server import Endpoint, EnvironmentServer
from mrlm_pl.serving.transport.environment_pb2 import PolicyDescription
from mrlm_pl.serving.transport.security import PLAIN, Identity
from tests.support.servers.certificates import Authority
from tests.support.servers.environment_servers import ServerProcess, eventually
from tests.support.servers.ports import nowhere

ROOT = Path(__file__).parents[3]
TINY = "builtin:tiny"


class Partner:
    """A server with a policy, in this process; the engine notes how often it is asked."""

    def __init__(
        self, port: int = 0, name: str = "partner", vocabulary: str | None = None, identity: Identity = PLAIN
    ) -> None:
        policy = Policy(TINY)
        policy.load()
        self.engine = InProcessEngine()
        self.engine.load(name, policy.model.eval(), 0)
        described = PolicyDescription(name=name, model=TINY, vocabulary=vocabulary or policy.vocabulary_digest)
        service = PolicyService(self.engine, [described])
        self.server = EnvironmentServer(Offer({}, 0, 10.0), Endpoint(port=port, identity=identity), policies=service)
        self.loop = EventLoopThread()
        self.loop.submit(self.server.start()).result(100)
        self.target = f"127.0.0.1:{self.server.port}"

    def stop(self) -> None:
        self.loop.submit(self.server.stop()).result(100)
        self.loop.close()
        self.engine.close()


@pytest.fixture
def partner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Partner]]:
    monkeypatch.delenv("MRLM_TOKEN", raising=False)
    monkeypatch.setattr(served_policies, "ANSWER_SECONDS", 100.0)
    started: list[Partner] = []

    def start(*arguments: Any, **options: Any) -> Partner:
        started.append(Partner(*arguments, **options))
        return started[-1]

    yield start
    for server in started:
        server.stop()


def arguments(folder: Path, iterations: int, served_by: str | None) -> list[str]:
    config = yaml.safe_load((ROOT / "configs/scaling/coordination_served.yaml").read_text())
    described = config["model"]["init_args"]["policies"]["partner"]
    described.pop("served_by")
    if served_by is not None:
        described["served_by"] = served_by
    path = folder.parent / f"{folder.name}.yaml"
    path.write_text(yaml.safe_dump(config))
    options = {
        "--config": str(path),
        "--data.groups": "2",
        "--data.group_size": "4",
        "--data.iterations": str(iterations),
        "--trainer.default_root_dir": str(folder),
        "--trainer.enable_progress_bar": "false",
        "--trainer.accelerator": "cpu",
    }
    return ["fit", *(word for option in options.items() for word in option)]


def weights(folder: Path) -> bytes:
    return (folder / "policies/learner/model.safetensors").read_bytes()


@pytest.mark.long
def test_a_run_is_the_same_wherever_its_partner_generates(partner: Any, tmp_path: Path) -> None:
    served = partner()
    assert main(arguments(tmp_path / "there", 3, served.target)) == 0
    assert served.engine.stats.sampled_tokens > 0, "the server was asked"
    assert main(arguments(tmp_path / "here", 3, None)) == 0
    assert weights(tmp_path / "there") == weights(tmp_path / "here")
    assert not (tmp_path / "there/policies/partner").exists()
    played = ["--environment", "coordination", "--num-episodes", "4", "--output", str(tmp_path / "report.json")]
    assert main(["eval", "--model", str(tmp_path / "there"), *played]) == 0, "it reads the partner's weights itself"


def test_an_evaluation_is_the_same_wherever_its_policy_generates(partner: Any, tmp_path: Path) -> None:
    server = partner(name="main")
    reports = []
    for name, options in {"here": [], "there": ["--served_by", f"{{main: '{server.target}'}}"]}.items():
        report = tmp_path / f"{name}.json"
        model = ["--model", TINY, "--environment", "math", "--environment.difficulty", "[1, 1]", "-n", "8"]
        assert main(["eval", *model, "--max_tokens", "16", "--device", "cpu", *options, "--output", str(report)]) == 0
        reports.append(json.loads(report.read_text()))
    assert server.engine.stats.requests == 8
    assert reports[0]["mean_reward"] == reports[1]["mean_reward"]


def test_the_files_of_tls_are_those_of_the_environment(
    partner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path, "authority")
    certificate, key = authority.identity("server")
    served = partner(identity=Identity(certificate, key, authority.file))
    policies = {"partner": Policy(TINY, trained=False, served_by=served.target)}
    with pytest.raises(RemoteError, match="MRLM_TLS_AUTHORITY"):
        with_served(InProcessEngine(), policies)
    for name, path in zip(("CERTIFICATE", "KEY"), authority.identity("client"), strict=True):
        monkeypatch.setenv(f"MRLM_TLS_{name}", path)
    monkeypatch.setenv("MRLM_TLS_AUTHORITY", authority.file)
    engine = with_served(InProcessEngine(), policies)
    (sample,) = asyncio.run(engine.sample([SampleRequest((7, 8), "partner", 0, Sampling(max_tokens=2))]))
    assert len(sample.token_ids) == 2


@pytest.mark.long
def test_a_partner_elsewhere_plays_while_the_learner_updates(partner: Any, tmp_path: Path) -> None:
    served = partner()
    assert main([*arguments(tmp_path / "run", 3, served.target), "--data.mode", "async", "--data.max_lag", "2"]) == 0
    turns = [
        turn for episode in read_episodes(tmp_path / "run/episodes") for row in episode.rows() for turn in row.turns
    ]
    assert {turn.policy for turn in turns} == {"learner", "partner"}
    assert len(turns) == 3 * 2 * 4 * 2
    assert {turn.version for turn in turns if turn.policy == "partner"} == {0}


def test_no_weights_are_read_here() -> None:
    policy = Policy(TINY, trained=False, served_by="127.0.0.1:1")
    policy.load(reference=True)
    assert (policy.model, policy.reference, policy.networks(), list(policy.parameters())) == (None, None, [], [])
    assert policy.chat.stop_ids
    assert policy.context_window > 0
    for wrong in ({}, {"trained": False, "random_init_seed": 1}):
        with pytest.raises(PolicyError, match=r"served by 127\.0\.0\.1:1, which has its weights; set `trained: false`"):
            Policy(TINY, served_by="127.0.0.1:1", **wrong)


def test_a_server_of_text_is_asked_for_the_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str | None] = []
    for name in ("AutoConfig", "AutoTokenizer", "GenerationConfig"):
        own = getattr(pretrained, name).from_pretrained

        def noted(source: Any, *, revision: str | None, own: Any = own, **options: Any) -> Any:
            if source == "lab/model":
                read.append(revision)
            return own(tiny_model_path(), **options)

        monkeypatch.setattr(getattr(pretrained, name), "from_pretrained", noted)
    monkeypatch.setattr(OpenAICompatible, "check", lambda self, name: None)
    policy = Policy("lab/model", revision="v1.2", trained=False, served_by="transformers+http://127.0.0.1:9")
    routed = with_served(InProcessEngine(), {"main": policy})
    assert read == ["v1.2"] * 5, "of the policy and of the text"
    assert routed.elsewhere["main"].dialect.source == "lab/model@v1.2", "the name that `transformers serve` reads"


def served_policy(target: str) -> dict[str, Policy]:
    return {"main": Policy(TINY), "partner": Policy(TINY, trained=False, served_by=target)}


def test_what_the_server_has_is_checked_first(
    partner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = InProcessEngine()
    assert with_served(engine, {"main": Policy(TINY)}) is engine
    routed = with_served(engine, served_policy(partner().target))
    assert isinstance(routed, RoutingEngine)
    assert set(routed.elsewhere) == {"partner"}
    with pytest.raises(ConfigurationError, match=r"served_by: \S+ has no policy 'partner'; there are: judge; start it"):
        with_served(engine, served_policy(partner(name="judge").target))
    with pytest.raises(
        ConfigurationError, match=r"policies\.partner\.model: .* has another vocabulary than 'builtin:t"
    ):
        with_served(engine, served_policy(partner(vocabulary="of another").target))
    with pytest.raises(ConfigurationError, match="'here' is not HOST:PORT"):
        served_policy("here")
    monkeypatch.setattr(served_policies, "ANSWER_SECONDS", 0.7)
    away = nowhere()
    with pytest.raises(RemoteError, match=rf"at {away} did not answer within 0\.7 s; start their server again"):
        with_served(engine, served_policy(away))
    assert f"the server of policies at {away} does not answer (UNAVAILABLE" in caplog.text
    assert "; retrying for 0.7 s: start it if it is not running" in caplog.text
    engine.close()


def test_vocabularies_are_equal_when_each_number_is_the_same_token(model_folder: Path) -> None:
    tiny = Policy(TINY)
    assert tiny.vocabulary_digest == Policy(TINY).vocabulary_digest
    assert tiny.vocabulary_digest == Policy(str(model_folder)).vocabulary_digest, "the tokenizer alone counts"
    before = tiny.vocabulary_digest
    tiny.tokenizer.add_tokens(["<one more>"])
    assert tiny.vocabulary_digest != before


@pytest.mark.long
def test_a_partner_that_stays_away_ends_the_run_with_the_reason(
    partner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(served_policies, "ANSWER_SECONDS", 2.0)
    served = partner()
    loop = EventLoopThread()

    async def leave() -> None:
        while not list((tmp_path / "run/episodes").glob("*")):
            await asyncio.sleep(0.02)
        await asyncio.wrap_future(served.loop.submit(served.server.stop()))

    leaving = loop.submit(leave())
    started = time.monotonic()
    assert main(arguments(tmp_path / "run", 2000, served.target)) == 1
    assert time.monotonic() - started < 200
    leaving.result(100)
    loop.close()
    told = capsys.readouterr().err
    assert f"the policies at {served.target} did not answer within 2 s; start their server again" in told
    assert "Traceback" not in told


@pytest.mark.slow
def test_a_run_waits_for_a_partner_that_was_killed_and_comes_back(tmp_path: Path) -> None:
    def serve(port: int) -> ServerProcess:
        policies = json.dumps({"partner": TINY})
        return ServerProcess(arguments=["-m", "mrlm_pl.cli.main", "serve", "--policies", policies, "--port", str(port)])

    server = serve(0)
    words = [sys.executable, "-m", "mrlm_pl.cli.main"]
    options: Any = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    run = subprocess.Popen([*words, *arguments(tmp_path / "run", 60, server.target)], **options)
    try:
        for kills in range(2):
            eventually(lambda kills=kills: len(list((tmp_path / "run/episodes").glob("*"))) > 10 * (kills + 1), 240)
            assert run.poll() is None
            server.end()
            time.sleep(1.0)
            server = serve(server.port)
        output, _ = run.communicate(timeout=300)
    finally:
        run.kill()
        server.end()
    assert run.returncode == 0, output[-3000:]
    assert "does not answer (UNAVAILABLE" in output
    assert "; retrying for 300 s" in output
    # served too: in one process both policies are sampled in one batch, whose rounding differs
    server = serve(0)
    try:
        undisturbed = [*words, *arguments(tmp_path / "undisturbed", 60, server.target)]
        calm = subprocess.run(undisturbed, cwd=ROOT, capture_output=True, text=True)
    finally:
        server.end()
    assert calm.returncode == 0, calm.stderr[-3000:]
    assert weights(tmp_path / "run") == weights(tmp_path / "undisturbed"), "nothing was lost"
