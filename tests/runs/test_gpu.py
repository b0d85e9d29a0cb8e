"""Engine, learner and strategies on an accelerator. Run with ``pytest -m gpu``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from mrlm_environments import CoordinationGame

from mrlm_pl.algorithms import GRPO, MAGRPO, PPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.trainer.fsdp import FSDP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


@pytest.fixture(scope="module")
def larger_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random Llama whose heads the attention kernel takes."""
    from transformers import LlamaForCausalLM

    from mrlm_pl.policy.tiny import build_config, build_tokenizer

    folder = tmp_path_factory.mktemp("larger")
    changes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(build_config(**changes)).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def fit(
    model_folder: Path,
    environment: Any,
    trainer: Any,
    cls: Any = GRPO,
    checkpoint: Path | None = None,
    mode: Any = "sync",
    **options: Any,
) -> Any:
    algorithm = cls({"main": Policy(str(model_folder), learning_rate=1e-3, **options)})
    data = RolloutDataModule(
        environment, groups=4, group_size=4, iterations=4, sampling=Sampling(max_tokens=8), mode=mode
    )
    trainer.fit(algorithm, data, ckpt_path=checkpoint, weights_only=False)
    return trainer.callback_metrics


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("cls", [GRPO, PPO])
def test_a_run_on_one_gpu(cls: Any, precision: str, model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    metrics = fit(model_folder, echo(turns=2), quiet_trainer(accelerator="gpu", devices=1, precision=precision), cls)
    assert float(metrics["train/ratio_deviation"]) < 1e-3
    assert float(metrics["train/grad_norm"]) > 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_rollouts_during_updates_on_a_gpu(precision: str, model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    trainer = quiet_trainer(accelerator="gpu", devices=1, precision=precision)
    metrics = fit(model_folder, echo(turns=4), trainer, mode="async")
    assert float(metrics["train/grad_norm"]) > 0


def test_adapters_on_a_gpu(model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    metrics = fit(model_folder, echo(), quiet_trainer(accelerator="gpu", devices=1), lora=LoRA(rank=2))
    assert float(metrics["train/ratio_deviation"]) < 1e-3


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_family_without_a_fused_step(precision: str, gpt2_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    metrics = fit(gpt2_folder, echo(turns=2), quiet_trainer(accelerator="gpu", devices=1, precision=precision))
    assert float(metrics["train/ratio_deviation"]) < 1e-3


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_strategies_on_a_gpu(strategy: str, model_folder: Path, echo: Any, quiet_trainer: Any) -> None:
    chosen: Any = FSDP() if strategy == "fsdp" else strategy
    metrics = fit(model_folder, echo(), quiet_trainer(accelerator="gpu", devices=1, strategy=chosen))
    assert float(metrics["train/grad_norm"]) > 0


@pytest.mark.parametrize(("precision", "most"), [("32-true", 1e-4), ("bf16-mixed", 5e-2)])
@pytest.mark.parametrize("lora", [None, LoRA(rank=4)])
def test_the_learner_gives_the_tokens_the_log_probabilities_of_the_sampler(
    precision: str, most: float, lora: LoRA | None, larger_model: Path, echo: Any, quiet_trainer: Any
) -> None:
    trainer = quiet_trainer(accelerator="gpu", devices=1, precision=precision)
    metrics = fit(larger_model, echo(turns=2), trainer, lora=lora)
    assert 0 < float(metrics["train/mismatch_max_ratio"]) - 1 < most


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_resumed_run_ends_in_the_same_weights(
    precision: str, larger_model: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    def weights(steps: int, checkpoint: Path | None = None) -> list[torch.Tensor]:
        trainer = quiet_trainer(accelerator="gpu", devices=1, precision=precision, max_steps=steps)
        fit(larger_model, echo(turns=2), trainer, checkpoint=checkpoint)
        trainer.save_checkpoint(tmp_path / f"{steps}.ckpt")
        return [weight.detach().cpu().clone() for weight in trainer.lightning_module.policies.parameters()]

    whole, half = weights(4), weights(2)
    resumed = weights(4, tmp_path / "2.ckpt")
    assert not all(torch.equal(one, other) for one, other in zip(whole, half, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(whole, resumed, strict=True))


def test_agents_with_adapters_on_one_model(larger_model: Path, quiet_trainer: Any) -> None:
    policies = {agent: Policy(str(larger_model), lora=LoRA(rank=4)) for agent in ("row", "column")}
    data = RolloutDataModule(CoordinationGame(), groups=4, group_size=4, iterations=2, sampling=Sampling(max_tokens=8))
    trainer = quiet_trainer(accelerator="gpu", devices=1, precision="bf16-mixed")
    trainer.fit(MAGRPO(policies), data)
    for agent in policies:
        assert float(trainer.callback_metrics[f"train/{agent}/grad_norm"]) > 0


def test_compiled_layers_of_the_learner(larger_model: Path, echo: Any, quiet_trainer: Any) -> None:
    trainer = quiet_trainer(accelerator="gpu", devices=1, precision="bf16-mixed")
    metrics = fit(larger_model, echo(), trainer, compile=True)
    assert float(metrics["train/ratio_deviation"]) < 1e-3
