"""Compiled layers of the decode step: the numbers of the layers as they were written, from code that is made once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import InProcessEngine, Sample, SampleRequest, Sampling
from mrlm_pl.engines.local import compiled_layers
from mrlm_pl.engines.local.sampling import Sampler
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import ConfigurationError, EngineError
from mrlm_pl.policy import Policy
from mrlm_pl.policy.compilation import compilation_seconds
from mrlm_pl.policy.lora import LoRA
from tests.engines.conftest import FUSED, VOCABULARY, build, request, run
from tests.engines.local.test_adapters import adapted, draw_adapter

MakeEngine = Callable[..., InProcessEngine]


def some_requests(rows: int, most: int, **settings: Any) -> list[SampleRequest]:
    """Rows of unequal prompts, the first of one token, some of them shared, that end at different steps."""
    return [
        request(
            [1 + (row // 3 + place * place) % (VOCABULARY - 1) for place in range(1 + 13 * (row // 3 % 4))],
            row,
            max_tokens=1 + (row * 37) % most,
            stop_ids=(row % VOCABULARY,) if row % 5 == 0 else (),
            **settings,
        )
        for row in range(rows)
    ]


def assert_same(found: Sequence[Sample], expected: Sequence[Sample], error: float = 1e-5) -> None:
    """Compare tokens, and log-probabilities up to the order in which float32 numbers are added."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=error)


def assert_as_written(
    make_engine: MakeEngine, name: str, dtype: torch.dtype | None, error: float, **changes: Any
) -> None:
    """Check that compiled layers sample the tokens and log-probabilities of the layers as they are written."""
    model = build(name, max_position_embeddings=256, **changes)
    plain, compiled = (make_engine(model, dtype=dtype, compile=on) for on in (False, True))
    for requests in (some_requests(13, 20), some_requests(1, 5), some_requests(30, 90)):
        assert_same(run(compiled, *requests), run(plain, *requests), error)


@pytest.mark.long
def test_the_tokens_are_those_of_the_layers_as_written_and_code_is_made_once(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, made = compiled_layers._codes, dict[Hashable, compiled_layers.Code]()
    monkeypatch.setattr(compiled_layers, "_codes", made)  # forgets the code of other tests
    before = compilation_seconds()
    counters.clear()
    model = build("qwen2", max_position_embeddings=256)
    with caplog.at_level(logging.INFO, logger="mrlm_pl"):
        compiled, plain = make_engine(model, compile=True), make_engine(model)
    assert caplog.text.count("policy 'p': layers of the decode step compiled in") == 1, "both layers share their code"
    seconds = compilation_seconds()
    assert seconds > before
    assert counters, "they count the compiler's work"
    counters.clear()
    for rows, most in ((1, 5), (13, 20), (40, 90), (2, 30)):  # lengths from 1 on, beyond the room for 64 own tokens
        for settings in ({}, {"temperature": 0.6}, {"top_k": 5}):
            requests = some_requests(rows, most, **settings)
            assert_same(run(compiled, *requests), run(plain, *requests))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    for engine in (compiled, plain):
        engine.load("p", model, 2)
        engine.load("q", build("qwen2", 5, max_position_embeddings=256), 2)
    both = [*some_requests(9, 20), *some_requests(9, 30, policy="q")]
    assert_same(run(compiled, *both), run(plain, *both))
    assert {sample.version for sample in run(compiled, *both)} == {2}
    assert not counters, "no part of PyTorch's compiler ran"
    assert compilation_seconds() == seconds
    known.update(made)  # other tests need not make it again


@pytest.mark.parametrize("policies", ["p", "pq", "qpr"])
@pytest.mark.long
def test_sessions_of_all_policies_continue_in_one_batch(
    policies: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = {name: build("qwen2", seed, max_position_embeddings=256) for seed, name in enumerate("pqr")}
    draws = []
    draw = Sampler.draw

    def counted(self: Sampler, logits: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        draws.append(len(logits))
        return draw(self, logits, n)

    monkeypatch.setattr(Sampler, "draw", counted)
    turns = []
    for on in (False, True):
        engine = make_engine(models["p"], compile=on)
        for name in "qr":
            engine.load(name, models[name], 1)
        owners = [policies[row % len(policies)] for row in range(5)]
        most = (9, 6, 10, 7, 8)  # the first and other rows of a policy, and the first and other policies, end first
        first = run(
            engine,
            *[
                request([3, 4, 5 + row], row, policy=name, max_tokens=most[row], session=f"s{row}")
                for row, name in enumerate(owners)
            ],
        )
        later = [
            request([3, 4, 5 + row, *one.token_ids, 7], row, policy=name, max_tokens=8, session=f"s{row}")
            for row, (name, one) in enumerate(zip(owners, first, strict=True))
        ]
        turns.append([*first, *run(engine, *later)])
        assert engine.stats.cached_tokens == sum(len(one.token_ids) - 1 + 3 for one in first)
    assert_same(turns[1], turns[0])
    assert draws == [5, 5, 5, 5, 5, 5, 4, 3, 2, 1, *[5] * 8] * 2, "one draw of all policies' rows for each step"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FUSED if name != "qwen2"])
def test_every_family(name: str, make_engine: MakeEngine) -> None:
    assert_as_written(make_engine, name, None, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"num_key_value_heads": 4}, {"num_key_value_heads": 1}, {"num_hidden_layers": 1}])
def test_any_number_of_heads_and_layers(changes: dict[str, int], make_engine: MakeEngine) -> None:
    assert_as_written(make_engine, "llama", None, 1e-5, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2", "llama"])
def test_half_precision(name: str, make_engine: MakeEngine) -> None:
    assert_as_written(make_engine, name, torch.bfloat16, 0.05)


@pytest.mark.slow
def test_adapters_on_one_base(make_engine: MakeEngine) -> None:
    models = adapted("llama", [LoRA(rank=2), LoRA(rank=3, target_modules=("q_proj", "up_proj"))])
    engines = [make_engine(models["p"], compile=on) for on in (False, True)]
    assert_same(*(run(engine, *some_requests(7, 9)) for engine in engines))
    for engine in engines:
        engine.load("q", models["q"], 2)  # from now on the adapter of p is not added to the weights
    both = [*some_requests(7, 9), *some_requests(7, 9, policy="q")]
    assert_same(*(run(engine, *both) for engine in engines))
    draw_adapter(models["p"], "another")
    for engine in engines:
        engine.load("p", models["p"], 3)
    assert_same(*(run(engine, *both) for engine in engines))


@pytest.mark.slow
def test_code_does_not_depend_on_what_it_is_made_for(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed process has another first batch and other weights, and computes the same numbers bit for bit."""
    found = []
    for seed in (3, 0):
        monkeypatch.setattr(compiled_layers, "_codes", {})
        engine = make_engine(build("qwen3", seed), compile=True)
        run(engine, *some_requests(1 + 20 * seed, 9))
        engine.load("p", build("qwen3"), 1)
        assert len(compiled_layers._codes) == 1
        found.append(run(engine, *some_requests(12, 15)))
    assert found[0] == found[1]


def fit(folder: Path, echo: Any, trainer: Any, compile: bool, checkpoint: Path | None = None) -> Any:
    """Return tokens, log-probabilities and the last weights of a run."""
    policy, engine = Policy(str(folder), learning_rate=1e-3), InProcessEngine(compile=compile)
    settings = {"groups": 2, "group_size": 4, "iterations": 2, "sampling": Sampling(max_tokens=6)}
    data = RolloutDataModule(echo, engine=engine, **settings)
    trainer.fit(GRPO({"main": policy}), data, ckpt_path=checkpoint, weights_only=False)
    episodes = read_episodes(Path(trainer.default_root_dir) / "episodes")
    steps = [step for episode in episodes for steps in episode.trajectories.values() for step in steps]
    logprobs = [logprob for step in steps for logprob in step.logprobs]
    weights = {name: tensor.clone() for name, tensor in policy.network.state_dict().items()}
    return [step.token_ids for step in steps], logprobs, weights


@pytest.mark.slow
def test_a_run_has_the_tokens_of_one_without_and_a_resumed_one_is_bit_exact(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_(name: str, compile: bool = True, epochs: int = 2, checkpoint: Path | None = None) -> Any:
        trainer = quiet_trainer(default_root_dir=tmp_path / name, max_epochs=epochs)
        found = fit(model_folder, echo(), trainer, compile, checkpoint)
        trainer.save_checkpoint(tmp_path / f"{name}.ckpt")
        return found

    plain = run_("plain", compile=False)
    whole = run_("whole")
    assert whole[0] == plain[0]
    assert whole[1] == pytest.approx(plain[1], abs=1e-5)
    run_("half", epochs=1)
    monkeypatch.setattr(compiled_layers, "_codes", {})  # as in a new process
    resumed = run_("half", checkpoint=tmp_path / "half.ckpt")
    assert resumed[:2] == whole[:2]
    assert all(torch.equal(tensor, whole[2][name]) for name, tensor in resumed[2].items())


def test_what_cannot_be_compiled_is_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigurationError, match="compile: true compiles the fused decode step"):
        InProcessEngine(compile=True, fused=False)
    for model, reason in (
        (build("gpt2"), "policy 'p' generates through its own forward .*'gpt2'.*, which is not compiled"),
        (build("qwen2").to("meta"), "policy 'p' is on meta, and compile is for CPUs"),
    ):
        engine = InProcessEngine(compile=True)
        with pytest.raises(EngineError, match=reason):
            engine.load("p", model, 1)
        with pytest.raises(EngineError, match="not loaded"):
            run(engine, request([1]))
        engine.close()


@pytest.mark.slow
def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_layers, "_codes", {})
    # monkeypatch would delete the setting afterwards, as it does with attributes that a class does not hold itself
    without_compiler = torch._inductor.config.patch({"cpp.cxx": (None, "/nowhere/g++")})
    with without_compiler, pytest.raises(EngineError, match="cannot be compiled: InvalidCxxCompiler"):
        InProcessEngine(compile=True).load("p", build("qwen2"), 1)
