"""``mrlm completion``: the script completes in bash, and knows all options."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mrlm_pl.cli.commands.completion import whole_parser
from mrlm_pl.cli.main import COMMANDS, TRAINING

COMPLETE = """
source ./script
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_mrlm
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def script() -> str:
    """Return the script for bash, made without torch."""
    code = (
        "import sys; from mrlm_pl.cli.main import main; main(['completion', 'bash']); assert 'torch' not in sys.modules"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_commands_options_and_names(script: str, tmp_path: Path) -> None:
    (tmp_path / "script").write_text(script)
    (tmp_path / "quick.yaml").touch()

    def completed(*words: str) -> list[str]:
        code = COMPLETE.format(words=" ".join(map(shlex.quote, words)))
        done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    assert completed("mrlm", "rep") == ["replay", "report"]
    assert completed("mrlm", "fit", "--data.sampling.t") == [
        f"--data.sampling.{name}" for name in ("temperature", "top_k", "top_p")
    ]
    assert completed("mrlm", "fit", "--model", "GRP") == ["GRPO"]
    assert completed("mrlm", "train", "--trainer.strat") == ["--trainer.strategy"]
    assert completed("mrlm", "fit", "--config", "qu") == ["quick.yaml"]
    assert completed("mrlm", "eval", "--environment", "kuhn") == ["kuhn_poker"]
    assert completed("mrlm", "check-env", "kuhn") == ["kuhn_poker"]
    assert completed("mrlm", "eval", "--temp") == ["--temperature"]
    assert completed("mrlm", "completion", "z") == ["zsh"]


def test_every_command_has_options() -> None:
    (children,) = [action for action in whole_parser({})._actions if action.dest == "command"]
    options = {name: {*child._option_string_actions} - {"-h", "--help"} for name, child in children.choices.items()}
    assert set(options) == set(COMMANDS)
    assert {name for name, found in options.items() if not found} == {"consolidate", "completion"}
    for command in TRAINING:
        wanted = {"--config", "--output", "--resume", "--seed_everything", "--model.kl.coefficient", "--data.groups"}
        assert wanted <= options[command]
    assert {"--seeds", "--grid", "--jobs", "--at", "--config", "--trainer.devices"} <= options["sweep"]


def test_a_missing_library_is_an_error_with_its_extra(mrlm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    status, _, err = mrlm("completion", "bash")
    assert (status, 'pip install "mrlm[completion]"' in err) == (2, True)
