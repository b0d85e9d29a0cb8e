"""The modules that a fit imports, and the work that it does once for all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
SHORT = [
    *("--data.iterations", "1", "--data.groups", "2", "--data.group_size", "2"),
    *("--trainer.callbacks.episodes", "2", "--trainer.enable_progress_bar", "false"),
]
FIT = f"""
import gc, json, sys
from mrlm_pl.cli.main import main
sys.argv = ["mrlm", "fit", "--config", {str(CONFIG)!r}, *{SHORT!r}]
status = main()
print(json.dumps([status, gc.isenabled(), gc.get_freeze_count(), sorted(sys.modules)]))
"""


def run(code: str, **variables: str) -> str:
    """Return the output of a Python program."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **variables}, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_a_fit_imports_the_classes_that_it_names_and_collects_no_garbage_among_its_modules() -> None:
    status, collects, frozen, modules = json.loads(run(FIT).splitlines()[-1])
    assert status == 0
    assert collects
    assert frozen > 100_000  # objects of the imported modules, which no later collection looks at
    assert {"mrlm_pl.algorithms.grpo", "mrlm_environments.math.environment"} <= set(modules)
    roots = {name.partition(".")[0] for name in modules}
    assert not roots & {
        "aiohttp",
        "datasets",
        "grpc",
        "mcp",
        "pandas",
        "peft",
        "ray",
        "sklearn",
        "sqlglot",
        "tensorflow",
    }
    others = ("mrlm_pl.algorithms.ppo", "mrlm_pl.data.files.preferences", "mrlm_pl.engines.http", "mrlm_pl.engines.ray")
    others += ("mrlm_pl.sandbox", "mrlm_pl.serving.environments", "mrlm_callbacks.self_play")
    others += ("mrlm_environments.code", "mrlm_environments.debate", "mrlm_environments.sql")
    assert not [name for name in modules if name.startswith(others)]


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.long
def test_transformers_reads_its_model_folders_once_and_finds_the_same(once: bool) -> None:
    code = f"""
import sys
from mrlm_pl.cli.start_up import read_model_folders_once
if {once}:
    read_model_folders_once()
    read_model_folders_once()  # a second call changes nothing
import transformers
from transformers.utils import import_utils
opened = []
sys.addaudithook(lambda event, arguments: event == "open" and opened.append(str(arguments[0])))
import transformers.models
again = [path for path in opened if path.endswith("modeling_llama.py")]
import_utils.define_import_structure.cache_clear()
folder = transformers.models.__file__
whole = import_utils.define_import_structure.__wrapped__(folder)
import_utils.create_import_structure_from_path = getattr(
    import_utils.create_import_structure_from_path, "__wrapped__", import_utils.create_import_structure_from_path
)
assert whole == import_utils.define_import_structure.__wrapped__(folder)
assert sum(map(len, whole.values())) > 1000
print(len(again))
"""
    assert run(code).split() == ["0" if once else "1"]
