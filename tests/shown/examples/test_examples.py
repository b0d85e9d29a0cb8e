"""The list of examples is complete, and each script of `examples/training` and `examples/teams` runs."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mrlm_pl
from mrlm_pl.episode_files import read_episodes
from mrlm_pl.errors import SandboxError
from mrlm_pl.sandbox import Sandbox
from tests.support.documents import EXAMPLES, ROOT, code_of

FOLDER = ROOT / "examples"
TINY = str(ROOT / "mrlm_pl" / "policy" / "tiny_model")
SCRIPTS: dict[str, dict[str, Any]] = {
    "training/simple_ppo.py": {"iterations": 1},
    "training/train_math_ppo.py": {"iterations": 1, "episodes": 20},
    "training/train_grpo_math.py": {"iterations": 1},
    "training/train_dpo_preferences.py": {"episodes": 160},
    "training/train_sft_world_model.py": {"episodes": 64},
    "training/train_hybrid_sft_ppo.py": {"rows": 32, "iterations": 1},
    "training/train_code_ppo.py": {"iterations": 1, "model": TINY},
    "training/train_tool_use_ppo.py": {"rows": 32, "iterations": 1},
    "training/train_multi_environment.py": {"iterations": 1},
    "training/train_from_config.py": {"iterations": 1, "config": str(ROOT / "configs/quickstart.yaml")},
    "teams/summarize.py": {"iterations": 1},
    "teams/debate.py": {"iterations": 1},
    "teams/self_play.py": {"iterations": 2, "games": 4},
    "teams/maporl_steps.py": {"answers": 800, "iterations": 1, "episodes": 10},
    "teams/gateway_team.py": {"iterations": 1},
    "async_ray.py": {"iterations": 3},
    "what_if.py": {"iterations": 1, "samples": 2},
}
"""Arguments of ``main`` by script."""

RAN_ELSEWHERE = {"training/train_distributed_ppo.py"}
DEFAULT_TIER = {"training/simple_ppo.py", "what_if.py"}


def test_the_list_has_every_example() -> None:
    text = (FOLDER / "README.md").read_text()
    linked = set(re.findall(r"\]\(([\w/]+\.py)\)", text))
    there = {path.relative_to(FOLDER).as_posix() for path in EXAMPLES if path.parent.name != "tiny_model"}
    assert linked == there
    scripts = {name for name in there if name.startswith(("training/", "teams/"))} | {"async_ray.py", "what_if.py"}
    assert scripts == {*SCRIPTS, *RAN_ELSEWHERE}


@pytest.mark.parametrize("name", [*SCRIPTS, *RAN_ELSEWHERE])
def test_a_script_begins_with_its_command_and_is_short(name: str) -> None:
    text = (FOLDER / name).read_text()
    assert f"python examples/{name}" in code_of(text.split('"""')[1])
    assert len(text.partition('"""\n\n')[2].splitlines()) <= 60


@pytest.mark.parametrize(
    "path", [path for path in EXAMPLES if "description=" in path.read_text()], ids=lambda path: path.stem
)
def test_help_is_the_beginning_of_the_docstring(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")  # no word is divided
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(path), run_name="__main__")
    told = " ".join(capsys.readouterr().out.split())
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    begin = " ".join(docstring.partition("\n\n")[0].split())
    assert begin in told
    assert f"{begin} python " not in told, "the command is not a sentence of it"


def marked(name: str) -> Any:
    return pytest.param(name, marks=() if name in DEFAULT_TIER else pytest.mark.slow)


@pytest.mark.parametrize("name", [marked(name) for name in SCRIPTS])
def test_a_script_runs(
    name: str, example: Callable[[str], ModuleType], outside_the_repository: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "code" in name or "hybrid" in name:
        try:
            _ = Sandbox().isolation
        except SandboxError as error:
            pytest.skip(str(error))
    if "ray" in name:
        pytest.importorskip("ray")
    monkeypatch.setenv("MRLM_RUN_FOLDER", "")  # so that the test restores it
    monkeypatch.delenv("MRLM_RUN_FOLDER")
    example(name).main(**SCRIPTS[name])
    (output,) = Path("runs").iterdir()
    assert list(output.rglob("model.safetensors"))
    played = list(output.rglob("episodes/*.jsonl.zst"))
    assert all(list(read_episodes(path)) for path in played)
    assert played or "iterations" not in SCRIPTS[name]


@pytest.mark.slow
def test_the_other_family_plays_the_game(
    example: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = example("other_family.py")
    monkeypatch.setattr(script, "EXAMPLES", 64)
    script.teach(tmp_path / "model", 0.5)
    report = mrlm_pl.evaluate(str(tmp_path / "model"), "coordination", num_episodes=4, device="cpu")
    assert report.episodes == 4


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_the_distributed_script_runs_in_two_processes(strategy: str, tmp_path: Path) -> None:
    text = (FOLDER / "training/train_distributed_ppo.py").read_text()
    text = text.replace("iterations: int = 30", "iterations: int = 1").replace('= "ddp"', f'= "{strategy}"')
    script = tmp_path / "script.py"
    script.write_text(text)
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    episodes = tmp_path / "runs/distributed-ppo/episodes"
    assert len([episode for path in episodes.iterdir() for episode in read_episodes(path)]) == 16 * 8
    assert (tmp_path / "runs/distributed-ppo/policies/main/model.safetensors").is_file()
