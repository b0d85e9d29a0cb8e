"""Compiled layers give the numbers of the layers as they were written, in training alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.engines.local.transformers_model import GenericModel
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import PolicyError
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.policy.compilation import compilation_seconds, compile_layers
from mrlm_pl.policy.forward.packing import TokenRows
from mrlm_pl.policy.sharding import layers


def update(policy: Policy, rows: int, length: int) -> tuple[Tensor, list[Tensor]]:
    """Return log-probabilities and gradients of groups of two rows with a common beginning."""
    generator = torch.Generator().manual_seed(rows + length)
    ids = torch.randint(8, 90, (rows, length), generator=generator)
    ids[1::2, : length // 2] = ids[::2, : length // 2]
    mask = (torch.arange(length) >= length // 2).expand(rows, length)
    lengths = torch.full((rows,), length)
    policy.zero_grad()
    logp = policy(TokenRows(ids, lengths, mask, prefix_groups=torch.arange(rows) // 2))
    (logp * torch.linspace(-1, 1, length)).mean().backward()
    return logp.detach(), [weight.grad.clone() for weight in policy.parameters() if weight.grad is not None]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"max_forward_tokens": 20}, id="bounded", marks=pytest.mark.slow),
        pytest.param({"lora": LoRA(rank=2)}, id="lora", marks=pytest.mark.slow),
    ],
)
@pytest.mark.long
def test_gradients_are_those_of_the_layers(model_folder: Path, options: dict[str, Any]) -> None:
    torch._dynamo.reset()  # forgets the code of other tests
    plain, compiled = (Policy(str(model_folder), compile=on, **options) for on in (False, True))
    plain.load()
    compiled.load()
    compiled.load_state_dict(plain.state_dict())
    counters.clear()
    seconds = compilation_seconds()
    for shape in ((4, 12), (6, 20), (2, 30)):
        expected, found = update(plain, *shape), update(compiled, *shape)
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-5)
        assert len(found[1]) == len(expected[1]) > 0
        for mine, theirs in zip(found[1], expected[1], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    assert counters["stats"]["unique_graphs"] > 0, "the layers did run as compiled code"
    assert compilation_seconds() > seconds


@pytest.mark.long
def test_layers_share_two_graphs(model_folder: Path) -> None:
    if not hasattr(torch._dynamo.config, "nested_graph_breaks"):
        pytest.skip(f"PyTorch {torch.__version__} divides a layer into four graphs")
    torch._dynamo.reset()
    policy = Policy(str(model_folder), compile=True)
    policy.load()
    assert len(layers(policy.network)) == 2
    counters.clear()
    update(policy, 4, 12)
    assert counters["stats"]["unique_graphs"] == 2, "before and after attention"


@pytest.mark.long
def test_new_shapes_take_no_new_code(model_folder: Path) -> None:
    policy = Policy(str(model_folder), compile=True)
    policy.load()
    update(policy, 4, 12)
    counters.clear()
    for shape in ((6, 20), (2, 30), (8, 11)):
        update(policy, *shape)
    assert counters["stats"]["unique_graphs"] == 0


def run(folder: Path, echo: Any, trainer: Any, compile: bool) -> tuple[list[Any], Tensor]:
    """Return the tokens of a short run and its last weights."""
    policy = Policy(str(folder), learning_rate=1e-3, compile=compile)
    data = RolloutDataModule(echo, groups=2, group_size=4, iterations=2, sampling=Sampling(max_tokens=6))
    trainer.fit(GRPO({"main": policy}, kl={"coefficient": 0.05}), data)
    episodes = read_episodes(Path(trainer.default_root_dir) / "episodes")
    tokens = [step.token_ids for episode in episodes for steps in episode.trajectories.values() for step in steps]
    return tokens, policy.network.model.layers[0].mlp.up_proj.weight.detach().clone()


@pytest.mark.long
def test_a_run_learns_the_same(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    plain, compiled = (run(model_folder, echo(), quiet_trainer(), on) for on in (False, True))
    assert compiled[0] == plain[0]
    torch.testing.assert_close(compiled[1], plain[1], rtol=0, atol=1e-6)


def test_generation_by_the_model_itself_runs_no_compiled_code(model_folder: Path) -> None:
    policy = Policy(str(model_folder), compile=True)
    policy.load()
    update(policy, 4, 12)
    counters.clear()
    ids = torch.arange(8, 24)[None]
    logits, cache = GenericModel(policy.network, torch.float32).forward(ids, None, None)
    plain = Policy(str(model_folder))
    plain.load()
    expected = plain.network(ids).logits[:, -1]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5)
    assert cache is None, "not checked yet, so not used"
    assert counters["stats"]["unique_graphs"] == 0


def test_checkpointed_layers_are_refused(model_folder: Path) -> None:
    with pytest.raises(PolicyError, match="has compile and gradient_checkpointing"):
        Policy(str(model_folder), compile=True, gradient_checkpointing=True)


def test_a_model_that_names_no_layers_is_refused() -> None:
    with pytest.raises(PolicyError, match="Linear does not name its layers, so it cannot be compiled"):
        compile_layers(nn.Linear(2, 2))
