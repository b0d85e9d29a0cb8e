"""A batch reaches the training step with the numbers of the sampler."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import FSDPPrecision, HalfPrecision, Precision
from torch.utils.data import DataLoader

from mrlm_pl.advantages import turn_discounts
from mrlm_pl.engines import Sampling
from mrlm_pl.engines.local.sampling import Sampler
from mrlm_pl.episode import Trajectory
from mrlm_pl.learner.batch import Batch, PolicyBatch, collate_rows
from mrlm_pl.losses import BatchTotals
from mrlm_pl.policy.value_head import ValueHead

THIRD = 1 / 3
"""A number that bf16 rounds to 0.333984375."""


def rows() -> PolicyBatch:
    row = Trajectory("a", "p", (5, 6), (False, True), (0.0, -THIRD), ())
    return collate_rows([row], [0], [0], [0], temperature=THIRD, advantages=[THIRD])


def batch() -> Batch:
    return Batch({"p": rows()}, {"p": BatchTotals(1.0, 1.0, 1.0)}, without_gradient={"q": rows()})


def assert_unchanged(found: Batch) -> None:
    for table in (found.policies["p"], found.without_gradient["q"]):
        assert table is not None
        for name, value in rows().tensors().items():
            torch.testing.assert_close(table.tensors()[name], value, rtol=0, atol=0)


@pytest.mark.parametrize("plugin", [HalfPrecision("bf16-true"), HalfPrecision("16-true"), FSDPPrecision("bf16-true")])
def test_a_precision_plugin_leaves_a_batch_alone(plugin: Precision) -> None:
    alone = dataclasses.replace(rows(), trajectories=())  # records are frozen
    assert plugin.convert_input(alone).advantages.dtype != torch.float32, "a table of rows outside a batch is cast"
    given = batch()
    assert plugin.convert_input(given) is given
    assert_unchanged(given)


class Receiver(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.received: list[Batch] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        self.received.append(batch)
        return self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_a_run_in_bf16_hands_on_the_sampler_s_numbers(tmp_path: Any) -> None:
    module = Receiver()
    options: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(precision="bf16-true", accelerator="cpu", max_steps=1, default_root_dir=tmp_path, **options)
    trainer.fit(module, DataLoader([batch()], batch_size=None))
    assert module.weight.dtype == torch.bfloat16
    assert_unchanged(module.received[0])


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_the_default_dtype_of_torch_changes_no_number(default: torch.dtype) -> None:
    mask = torch.tensor([[True, False]])
    samplings = [Sampling(temperature=1.0), Sampling(temperature=0.5)]
    logits = torch.tensor([[1.0, THIRD], [1.0, THIRD]])

    def numbers() -> list[torch.Tensor]:
        sampled = Sampler([1, 2], samplings, 1, torch.device("cpu")).draw(logits, 0)[1]
        head = ValueHead(2).linear.weight.detach()
        return [sampled, rows().advantages, turn_discounts(mask, THIRD), head]

    expected = numbers()
    torch.set_default_dtype(default)
    try:
        found = numbers()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
