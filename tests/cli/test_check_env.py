"""``mrlm check-env``."""

import subprocess
import sys

import mrlm_pl.environment_check
from mrlm_pl.environment_check import Check, CheckReport


def test_a_sound_environment_passes_with_its_arguments(mrlm):
    status, out, _ = mrlm("check-env", "parrot", "--environment.difficulty", "[4, 5]")
    assert status == 0, out
    lines = out.splitlines()
    assert len(lines) > 2
    assert all(line.startswith("ok ") for line in lines[:-1])
    assert lines[-1] == f"parrot: {len(lines) - 1} of {len(lines) - 1} checks passed"


def test_arguments_reach_the_environment(mrlm, monkeypatch):
    seen = []

    def check(environment):
        seen.append(environment.difficulty)
        return CheckReport(
            environment.name, (Check("seed", True, "equal"), Check("split", False, "tasks 1 and 2 are equal"))
        )

    monkeypatch.setattr(mrlm_pl.environment_check, "check_environment", check)
    status, out, _ = mrlm("check-env", "--environment", "ParrotEnvironment", "--environment.difficulty=[4, 5]")
    assert (status, seen) == (1, [[4, 5]])
    assert out == "ok   seed: equal\nFAIL split: tasks 1 and 2 are equal\nparrot: 1 of 2 checks passed\n"


def test_environment_from_a_file(mrlm, tmp_path):
    (tmp_path / "env.yaml").write_text("environment: {class_path: parrot, init_args: {difficulty: [4]}}\n")
    assert mrlm("check-env", "--config", "env.yaml")[0] == 0


def test_misspelt_environment_and_argument(mrlm):
    status, _, err = mrlm("check-env", "parot")
    assert status == 2
    assert "did you mean 'parrot'?" in err
    status, _, err = mrlm("check-env", "parrot", "--environment.dificulty", "[1]")
    assert status == 2
    assert "environment.dificulty" in err
    assert "did you mean 'difficulty'?" in err


def test_data_that_cannot_be_read_is_a_mistake_and_no_finding(mrlm, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "P", "entry_point": "f"}\n')
    status, out, err = mrlm("check-env", "code", "--environment.data", "rows.jsonl")
    assert (status, out) == (2, "")
    assert err.startswith(
        "mrlm: error: code data 'rows.jsonl', row 1: the field 'test' is missing; a row has {prompt, "
    )
    assert len(err.splitlines()) == 1


def test_our_environments_are_found_without_torch():
    code = (
        "import sys\n"
        "from mrlm_pl.cli.main import main\n"
        "status = main(['check-env', 'math'])\n"
        "sys.exit('torch was imported' if {'torch', 'lightning', 'transformers'} & set(sys.modules) else status)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "math: " in done.stdout
