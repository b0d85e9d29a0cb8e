"""``mrlm completion``: the script completes in bash, and knows all options."""

from __future__ import annotations

import os
import pty
import select
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mrlm_pl.cli.commands.completion import whole_parser
from mrlm_pl.cli.main import COMMANDS, TRAINING

COMPLETE = """
source ./script
COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_shtab_mrlm
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def script(shell: str) -> str:
    """Return the script for a shell, made without torch."""
    code = (
        f"import sys; from mrlm_pl.cli.main import main; main(['completion', {shell!r}]); "
        "assert 'torch' not in sys.modules"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300).stdout


def test_an_unknown_shell_is_answered_in_one_line(mrlm: Any) -> None:
    told = "mrlm: error: shell: expected one of 'bash', 'zsh', but the value is 'bas'; did you mean 'bash'?\n"
    assert mrlm("completion", "bas") == (2, "", told)


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.long
def test_bash_completes_commands_options_and_names(tmp_path: Path) -> None:
    (tmp_path / "script").write_text(script("bash"))
    (tmp_path / "quick.yaml").touch()

    def completed(*words: str) -> list[str]:
        code = COMPLETE.format(words=" ".join(map(shlex.quote, words)))
        done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=250)
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


def until(terminal: int, text: str) -> str:
    """Return the output of a terminal up to a text."""
    shown, deadline = "", time.monotonic() + 120
    while text not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 1 << 16).decode(errors="replace")
    return shown


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh")
def test_zsh_completes_commands_options_and_names(tmp_path: Path) -> None:
    (tmp_path / "_mrlm").write_text(script("zsh"))
    (tmp_path / "quick.yaml").touch()
    (tmp_path / ".zshrc").write_text(
        f"fpath=({tmp_path} $fpath); autoload -Uz compinit; compinit -u -D\n"
        'mrlm() { print -r -- "<<$*>>" }\n'
        "zle-line-init() { print READY }; zle -N zle-line-init\n"
    )
    terminal, shell = pty.openpty()
    variables = {**os.environ, "ZDOTDIR": str(tmp_path), "TERM": "dumb"}
    zsh = subprocess.Popen(
        ["zsh", "-i"], cwd=tmp_path, env=variables, stdin=shell, stdout=shell, stderr=shell, start_new_session=True
    )
    try:
        until(terminal, "READY")
        for words, completed in (
            ("repl", "replay"),
            ("fit --data.sampling.temp", "fit --data.sampling.temperature"),
            ("fit --model GRP", "fit --model GRPO"),
            ("train --trainer.strat", "train --trainer.strategy"),
            ("fit --config qu", "fit --config quick.yaml"),
            ("eval --environment kuhn", "eval --environment kuhn_poker"),
            ("check-env kuhn", "check-env kuhn_poker"),
            ("completion z", "completion zsh"),
        ):
            os.write(terminal, f"mrlm {words}\t\n".encode())
            assert f"<<{completed}>>" in until(terminal, "READY")
    finally:
        zsh.kill()
        zsh.wait(60)
        os.close(terminal)
        os.close(shell)


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
