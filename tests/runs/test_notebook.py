"""Python in a notebook without ipywidgets trains and exports like the command."""

from __future__ import annotations

import re
from pathlib import Path

import nbclient
import nbformat
import pytest

COMMON = """
import lightning
from mrlm_environments import MathEnvironment
from mrlm_pl.algorithms import GRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.policy import Policy
from mrlm_pl.runs import RunProgress

def fit(folder, callbacks):
    algorithm = GRPO({"main": Policy("builtin:tiny", learning_rate=5e-4)})
    data = RolloutDataModule(
        MathEnvironment(difficulty=[1, 1]), groups=2, group_size=4, iterations=2, sampling=Sampling(max_tokens=16)
    )
    options = {"default_root_dir": folder, "logger": False, "enable_checkpointing": False}
    lightning.Trainer(max_epochs=1, callbacks=callbacks, **options).fit(algorithm, data)
"""


@pytest.mark.long
def test_runs_in_a_notebook_export_their_weights(tmp_path: Path) -> None:
    sources = (COMMON, "fit('own', [RunProgress()])", "fit('lightnings', [])")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for folder in ("own", "lightnings"):
        assert (tmp_path / folder / "policies/main/model.safetensors").is_file(), folder
    text = "".join(output.get("text", "") for output in notebook.cells[1].outputs)
    assert re.search(r"iterations 1/2  [\w/]+ -?\d", text), text
