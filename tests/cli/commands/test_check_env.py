"""``mrlm check-env``."""

import json
import subprocess
import sys

import pytest

from mrlm_pl.environment.check import Check, CheckReport


def test_a_sound_environment_passes_with_its_arguments(mrlm):
    status, out, _ = mrlm("check-env", "parrot", "--environment.difficulty", "[4, 5]")
    assert status == 0, out
    lines = out.splitlines()
    assert len(lines) > 2
    assert [line for line in lines[:-1] if not line.startswith("ok ")] == [
        "--   copies in mid-episode: the environment's `forks` is False",
        "--   tools: there are no tools",
        "--   best replies: no best replies are known",
    ]
    assert lines[-1] == f"parrot: {len(lines) - 4} of {len(lines) - 4} checks passed, 3 do not apply"


def test_the_sizes_of_the_splits_are_named(mrlm, tmp_path):
    for split, size in (("train", 12), ("validation", 3), ("test", 1234)):
        rows = [{"question": f"What is {split} {number}?", "answer": str(number)} for number in range(size)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = json.dumps({split: str(tmp_path / f"{split}.jsonl") for split in ("train", "validation", "test")})
    status, out, err = mrlm("check-env", "math", "--environment.data", data)
    assert status == 0, out + err
    assert out.splitlines()[-1] == "math: 12 tasks in train, 3 tasks in validation, 1,234 tasks in test"
    assert "different problems found: 10 or more in train, 3 in validation, 10 or more in test; none" in out
    assert "warning: math has few different problems (3 in validation, in up to 64 tasks of a split)" in err


@pytest.mark.parametrize("folder", [__file__, "/proc"])  # a file, and a folder that takes no files
def test_an_output_that_cannot_be_written_is_named_before_the_checks(mrlm, folder):
    status, out, err = mrlm("check-env", "parrot", "--output", f"{folder}/checks.json")
    assert (status, out) == (2, "")
    assert f"error: output: '{folder}/checks.json' cannot be written: " in err


def test_no_warning_of_few_problems_where_there_are_enough(mrlm):
    status, out, err = mrlm("check-env", "math")
    assert (status, "few different problems" in out + err) == (0, False)


def test_arguments_reach_the_environment(mrlm, monkeypatch):
    seen = []

    def check(environment, level):
        seen.append(environment.difficulty)
        return CheckReport(
            environment.name, (Check("seed", True, "equal"), Check("split", False, "tasks 1 and 2 are equal"))
        )

    monkeypatch.setattr("mrlm_pl.cli.commands.check_env.check_environment", check)
    status, out, _ = mrlm("check-env", "--environment", "ParrotEnvironment", "--environment.difficulty=[4, 5]")
    assert (status, seen) == (1, [[4, 5]])
    assert out == "ok   seed: equal\nFAIL split: tasks 1 and 2 are equal\nparrot: 1 of 2 checks passed\n"


def test_the_semantic_level_adds_its_checks_and_writes_a_report(mrlm, tmp_path):
    status, out, _ = mrlm("check-env", "parrot", "--level", "semantic", "--output", "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert (status, report["level"], report["environment"], report["passed"]) == (0, "semantic", "parrot", True)
    ids = ["oracle", "floor", "injection", "canary", "leakage", "replay"]
    assert list(report["checks"])[-6:] == ids
    assert set(report["checks"]["oracle"]) == {"passed", "applies", "message", "measures"}
    lines = out.splitlines()
    marks = {True: "ok  ", False: "--  "}
    assert lines[:-1] == [f"{marks[c['applies']]} {name}: {c['message']}" for name, c in report["checks"].items()]
    applied = sum(check["applies"] for check in report["checks"].values())
    rest = len(report["checks"]) - applied
    assert lines[-1] == f"parrot: {applied} of {applied} checks passed, {rest} do not apply"
    status, _, err = mrlm("check-env", "parrot", "--level", "deep")
    assert (status, "contract" in err, len(err.splitlines())) == (2, True, 1)


def test_a_misspelled_level_is_named(mrlm):
    status, _, error = mrlm("check-env", "math", "--level", "semantc")
    expected = "level: expected one of 'contract', 'semantic', but the value is 'semantc'; did you mean 'semantic'?"
    assert (status, error) == (2, f"mrlm: error: {expected}\n")


@pytest.mark.parametrize("words", [[], ["--level", "semantic"]])
def test_a_missing_name_is_named(words, mrlm):
    status, _, error = mrlm("check-env", *words)
    expected = "environment missing: name it, as in `mrlm check-env math`; `mrlm info` lists them"
    assert (status, error) == (2, f"mrlm: error: {expected}\n")


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
    assert err.startswith("mrlm: error: rows.jsonl, row 1: the field 'test' is missing; a row is {prompt, ")
    assert len(err.splitlines()) == 1


ROWS = [
    {"prompt": "Double x.", "entry_point": "f", "pairs": [[[2], 4]], "solution": "def f(x): return 2 * x"},
    {"prompt": "Halve x.", "entry_point": "f", "pairs": [[[2], 1]], "solution": "def f(x): return x"},
    {"prompt": "Square x.", "entry_point": "f", "pairs": [[[2], 4]]},
    {"prompt": "Leave.", "entry_point": "f", "pairs": [[[2], 4]], "solution": "import os; os._exit(0)"},
    {"prompt": "P", "entry_point": "f"},
]


def test_rows_whose_reference_fails_are_named_and_can_be_left_out(mrlm, tmp_path, caplog):
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    status, out, _ = mrlm("check-env", "code", "--data", "rows.jsonl", "--output", "kept.jsonl")
    assert status == 1
    assert out.splitlines() == [
        "FAIL rows.jsonl, row 2: its reference earns 0 (answered)",
        "FAIL rows.jsonl, row 4: its reference earns -0.5 (invalid_program)",
        "code: of 5 rows 1 are solved by their reference, earning 2 to 2; 2 are not, 1 have none, 1 cannot be used",
        "kept.jsonl: the 2 usable rows",
    ]
    assert "row 5: the field 'test' is missing" in caplog.text
    kept = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert kept == [ROWS[0], ROWS[2]]
    status, out, _ = mrlm("check-env", "code", "--data", "kept.jsonl")
    assert (status, out.count("FAIL")) == (0, 0)
    status, out, _ = mrlm("check-env", "collaborative_coding", "--data", "kept.jsonl")
    assert (status, "1 are solved by their reference, earning 4 to 4" in out) == (0, True), "the mean of two agents"


def test_data_is_checked_where_there_is_some(mrlm):
    status, _, err = mrlm("check-env", "parrot", "--data", "rows.jsonl")
    assert status == 2
    assert "environment.data" in err


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


def test_the_environment_of_a_run_is_checked_with_its_arguments(mrlm, monkeypatch, tmp_path):
    seen = []

    def check(environment, level):
        seen.append(environment.difficulty)
        return CheckReport(environment.name, (Check("seed", True, "equal"),))

    monkeypatch.setattr("mrlm_pl.cli.commands.check_env.check_environment", check)
    environment = {"class_path": "ParrotEnvironment", "init_args": {"difficulty": [3, 7]}}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(json.dumps({"data": {"init_args": {"environment": environment}}}))
    for words in ((), ("parrot",), ("parrot", "--environment.difficulty", "[4, 5]")):
        assert mrlm("check-env", *words, "--model", "run")[0] == 0
    assert seen == [[3, 7], [3, 7], [4, 5]]
    assert "there is no folder './rum'; did you mean 'run'?" in mrlm("check-env", "--model", "./rum")[2]
    assert mrlm("check-env", "--model", "run/config.yaml")[0] == 0
    assert seen[3:] == [[3, 7]]
    (tmp_path / "rows.csv").write_text("question,answer\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "broken.yaml").write_text("data: {init_args: {environment: parrot, sampling: 5}}\n")
    (tmp_path / "eval.yaml").write_text("model: runs/x\nenvironment: math\n")
    (tmp_path / "model.yaml").write_text("model: {class_path: GRPO}\n")
    for words, message in (
        (("--config", "model.yaml"), "or its configuration by `--model FILE`"),
        (("--model", "binary"), "model: 'binary' cannot be read: 'utf-8' codec can't decode"),
        (("--model", "eval.yaml"), "environment missing: 'eval.yaml' has none"),
        (("--config", "run/config.yaml"), "or its configuration by `--model FILE`"),
        (("--model", "rows.csv"), "model: 'rows.csv' is not a configuration of a run"),
        (("--model", "broken.yaml"), "'broken.yaml' is not a configuration of a run: Expected `object | null`, got"),
    ):
        status, out, err = mrlm("check-env", *words)
        assert (status, out, message in err) == (2, "", True), err


def test_an_environment_of_a_file_has_its_name_in_the_run_and_runs_no_program_unnamed(mrlm, tmp_path):
    environments = [{"class_path": "ParrotEnvironment", "init_args": {"difficulty": [level]}} for level in (1, 2)]
    several = {"environment": environments, "names": ["easy", "hard"]}
    (tmp_path / "several.yaml").write_text(json.dumps({"data": {"init_args": several}}))
    status, out, err = mrlm("check-env", "hard", "--model", "several.yaml")
    assert (status, out.splitlines()[-1].partition(":")[0]) == (0, "parrot"), err
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "evil.py").write_text("raise AssertionError('it ran')\n")
    evil = {"data": {"init_args": {"environment": {"class_path": "own/evil.py:Evil"}}}}
    for place in ("own", "own/config.yaml"):
        (tmp_path / "own" / "config.yaml").write_text(json.dumps(evil))
        status, out, err = mrlm("check-env", "--model", place)
        assert (status, out, "is a program in the run folder; if you trust it" in err) == (2, "", True), err


def test_only_checks_read_a_configuration_file(mrlm, tmp_path):
    (tmp_path / "episodes.jsonl").write_text('{"a": 1}\n{"b": 2}\n')
    status, _, err = mrlm("replay", "episodes.jsonl")
    assert (status, err.count("\n"), "'episodes.jsonl' has none" in err) == (2, 1, True), err


def test_data_of_a_file_is_played_and_goes_with_no_level(mrlm, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "2+2?", "answer": "#### 4"}\n')
    (tmp_path / "check.yaml").write_text(f"data: {tmp_path / 'rows.jsonl'}\n")
    assert "math: of 1 rows 1 are solved" in mrlm("check-env", "math", "--config", str(tmp_path / "check.yaml"))[1]
    status, _, err = mrlm("check-env", "math", "--data", str(tmp_path / "rows.jsonl"), "--level", "semantic")
    assert (status, "level: 'semantic' is of checks, and --data plays its rows; leave out one" in err) == (2, True)
