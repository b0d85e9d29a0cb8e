"""The real parsers accept every command of the documents, configurations and examples."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml

from mrlm_pl.cli.commands.completion import whole_parser
from mrlm_pl.cli.main import COMMANDS, main
from mrlm_pl.cli.parsing.config_files import with_underscores
from tests.support.documents import CONFIGS, OWN_MODULE, ROOT, blocks, commands, inline, parse, shown_commands

OWN_FUNCTION = """
def absolute(logp, ref_logp, action_mask):
    return (logp - ref_logp).abs()
"""

SHOWN = shown_commands()
PARSED = {place: words for place, words in SHOWN.items() if words[0] in ("mrlm", "python") and words[1] != "-m"}
IN_DOCUMENTS = [words for place, words in PARSED.items() if ".md:" in place.split()[0]]
IN_FILES = [words for words in PARSED.values() if words not in IN_DOCUMENTS]
"""Commands at the top of configurations and examples."""


def _first_of_their_kind(shown: Sequence[list[str]]) -> list[list[str]]:
    """Return the commands with a subcommand or an option that no earlier one has."""
    known, first = set(), []
    for words in shown:
        kinds = {(*words[:2], word.partition("=")[0]) for word in words if word.startswith("--")} | {(*words[:2], "")}
        if not kinds <= known:
            first.append(words)
        known |= kinds
    return first


FIRST = _first_of_their_kind(IN_DOCUMENTS)
LATER = [words for words in IN_DOCUMENTS if words not in FIRST]

WORKFLOWS = {
    f"{path.name} {step['run']}": words
    for path in sorted((ROOT / ".github" / "workflows").glob("*.yml"))
    for job in yaml.safe_load(path.read_text())["jobs"].values()
    for step in job["steps"]
    for words in commands(step.get("run", "").replace(".venv/bin/python -m pip", "pip"))
}
UNSHOWN = [
    ["mrlm", "fit", "--config", path.relative_to(ROOT).as_posix()]
    for path in CONFIGS
    if path.parent.name != "servers" and not any(path.relative_to(ROOT).as_posix() in words for words in SHOWN.values())
]
"""Configurations without a shown command."""

RUNS = {
    "runs/quickstart": "configs/quickstart.yaml",
    "runs/team": "configs/tasks/teams/collaborative_reasoning.yaml",
    "runs/proposer": "configs/tasks/teams/proposer.yaml",
}
"""Run folders that commands read, with their configurations."""

OF_RUNS = {"eval", "collect", "recredit", "replay", "rescore", "whatif", "report", "arena"}
"""Commands that read a run."""

RUN_FILES = {"a.yaml": "configs/quickstart.yaml", "b.yaml": "configs/quickstart.yaml"}
"""The reader's own configurations, each with a stand-in."""

OTHER_PROGRAMS = ("vllm", "transformers", "ray", "tensorboard", "docker", "sbatch", "sed")
OTHER_OPTIONS = (
    "--model-timeout",
    "--max-model-len",
    "--logprobs-mode",
    "--enable-deterministic-inference",
    "--security-opt",
)
OTHER_OPTIONS += ("--build-arg", "--gpus", "--init", "--stop-timeout", "--cap-drop", "--requeue")
"""Other programs and their options."""

DOTTED = {
    "data.agents": "configs/recipes/tiny.yaml",
    "data.engine.engine": "configs/scaling/ray_pool.yaml",
    "data.engine.": "configs/scaling/served_rollouts.yaml",
    "data.environment.data": "configs/tasks/agentbench/sql.yaml",
    "data.environment.max_turns": "configs/tasks/agentbench/sql.yaml",
    "data.environment.output_characters": "configs/tasks/agentbench/sql.yaml",
    "model.agent_critics": "configs/algorithms/teams/ippo.yaml",
    "model.policies.first": "configs/tasks/teams/collaborative_reasoning.yaml",
}
"""Configurations for options in running text that the quick start rejects, by prefix of the option."""


@pytest.fixture(scope="session")
def workplaces(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two folders with the repository's files: one without runs, one with the runs that commands read."""
    before, after = tmp_path_factory.mktemp("before"), tmp_path_factory.mktemp("after")
    for folder in (before, after):
        for name in ("configs", "examples", "benchmarks"):
            (folder / name).symlink_to(ROOT / name)
        (folder / "my_file.py").write_text(OWN_MODULE)
        (folder / "my_rules.py").write_text(OWN_FUNCTION)
        for name, config in RUN_FILES.items():
            (folder / name).write_text((ROOT / config).read_text())
    for run, config in RUNS.items():
        policy = after / run / "policies" / "main"
        policy.mkdir(parents=True)
        (policy / "config.json").write_text("{}")
        (after / run / "checkpoints").mkdir()
        (after / run / "checkpoints" / "best.ckpt").touch()
        (after / run / "config.yaml").write_text(_output("fit", "--config", str(ROOT / config), "--print_config"))
    return before, after


@pytest.fixture
def there(
    workplaces: tuple[Path, Path], outside_the_repository: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[[Sequence[str]], int]:
    """Return a parser of shown commands in a suitable folder."""

    def parse_there(words: Sequence[str]) -> int:
        monkeypatch.chdir(workplaces[bool(OF_RUNS & {*words[:2]})])
        return parse(words)

    monkeypatch.setenv("MRLM_RUN_FOLDER", "")  # so that the test restores it
    monkeypatch.delenv("MRLM_RUN_FOLDER")
    return parse_there


@pytest.mark.long_after(len(FIRST))
@pytest.mark.parametrize("words", [*FIRST, *LATER, *IN_FILES, *UNSHOWN], ids=shlex.join)
def test_the_parser_accepts_it(words: list[str], there: Callable[[Sequence[str]], int]) -> None:
    if words[0] == "mrlm":
        assert there(words) == 0
    elif re.search(r"\bargparse|\bparser_of\(", (ROOT / words[1]).read_text()):
        assert there(words[1:]) == 0
    else:
        assert words[2:] == [], "the program has no options"


@pytest.mark.parametrize(
    "line",
    [
        "mrlm fit --config configs/quickstart.yaml --data.gruops 3",
        "mrlm train --config configs/quickstart.yaml --ouput runs/a",
        "mrlm validate --confg configs/quickstart.yaml",
        "mrlm eval --model builtin:tiny --environment math --num-episode 3",
        "mrlm eval --model builtin:tiny --environment math --environment.kind '[word]'",
        "mrlm collect --model builtin:tiny --environment mth --output a.jsonl",
        "mrlm balance a.jsonl --outptu b.jsonl",
        "mrlm serve --environments math --prot 1",
        "mrlm check-env math --environment.kind '[word]'",
        "mrlm sessions 127.0.0.1:50051 --jsn",
        "mrlm consolidate folder",
        "mrlm export runs/a",
        "mrlm info --jsno",
        "mrlm inof",
        "examples/specialists.py --ouput a",
    ],
)
def test_a_mistake_is_found(line: str, there: Callable[[Sequence[str]], int]) -> None:
    assert there(shlex.split(line)) == 2


def test_other_commands_name_what_exists() -> None:
    """Check targets of make, extras of pip, scripts and tests, including in the workflows."""
    project = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = re.findall(r"^(\w+) = ", project, re.MULTILINE)
    makefile = (ROOT / "Makefile").read_text()
    for place, (program, *rest) in {**SHOWN, **WORKFLOWS}.items():
        names = [word for word in rest if not word.startswith("-")]
        if program == "make":
            targets = [word for word in names if "=" not in word]
            assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in targets), place
        elif program == "pip":
            wanted = re.findall(r"(?:mrlm|\.)\[(.*?)\]", " ".join(names))
            assert {extra for group in wanted for extra in group.split(",")} <= set(extras), place
        elif program == ".":
            assert names == [".venv/bin/activate"], place
        elif program in ("bash", "pytest"):
            assert (ROOT / names[-1]).exists(), place
        else:
            assert program in ("mrlm", "python", *OTHER_PROGRAMS), place
    assert len(SHOWN) > 100, "the commands are found"
    assert len(WORKFLOWS) > 6


@pytest.mark.parametrize("target", ["quickstart", "install"])
def test_an_installation_announces_its_minutes(target: str, tmp_path: Path) -> None:
    command = ["make", "--dry-run", target, f"VENV={tmp_path / 'venv'}"]
    planned = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    torch = planned.index("install --quiet torch")
    assert re.search(r'^echo ".*torch.*some minutes', planned[:torch], re.MULTILINE)


def test_every_python_runs_the_default_and_the_long_tier_and_no_other() -> None:
    steps = yaml.safe_load((ROOT / ".github" / "workflows" / "check.yml").read_text())["jobs"]["check"]["steps"]
    assert {"make test", "make test-long"} <= {step.get("run") for step in steps}
    planned = subprocess.run(["make", "--dry-run", "test-long"], capture_output=True, text=True, check=True, cwd=ROOT)
    assert '-m "long and not slow and not gpu and not browser"' in planned.stdout


def test_blocks_with_commands_say_that_they_are_bash() -> None:
    for place, text in [*blocks(""), *blocks("text"), *blocks("sh"), *blocks("console")]:
        assert not re.search(r"^(\$ )?(mrlm|make|python|pip|bash) ", text, re.MULTILINE), place


@pytest.fixture(scope="session")
def help_of() -> Callable[[str], str]:
    """Return the help of a command."""
    known: dict[str, str] = {}

    def text(command: str) -> str:
        if command not in known:
            known[command] = _output(command, "--help")
        return known[command]

    return text


def _output(*arguments: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as written:
        assert main(arguments) == 0
    return written.getvalue()


def test_commands_in_running_text_have_the_options_that_they_name(help_of: Callable[[str], str]) -> None:
    for place, code in inline("mrlm "):
        command, *words = with_underscores(shlex.split(code)[1:])
        assert command in COMMANDS, place
        for word in words:
            if word.startswith("--") and "." not in word and not word.endswith("help"):
                assert re.search(rf"(?<!\S){word.partition('=')[0]}\b", help_of(command)), f"{place}: {code}"


def test_completion_knows_the_options_of_every_help(help_of: Callable[[str], str]) -> None:
    (children,) = [action for action in whole_parser({})._actions if action.dest == "command"]
    for command in {*COMMANDS} - {"train", "validate", "test", "predict"}:
        shown = set(re.findall(r"^  (?:-\w, )?(--[a-z][a-z0-9_.]*)", help_of(command), re.MULTILINE)) - {"--help"}
        known = children.choices[command]._option_string_actions
        inner = {option for option in shown if option.endswith(".help") or option == "--print_config"}
        assert not shown - inner - {*known}, command


def test_plain_options_in_running_text_belong_to_some_command(help_of: Callable[[str], str]) -> None:
    helps = "\n".join(help_of(command) for command in COMMANDS if command not in ("test", "predict"))
    scripts = "\n".join(path.read_text() for path in (ROOT / "benchmarks").rglob("*.py"))
    for place, code in inline("--"):
        for option in re.findall(r"(?<!\S)(--[a-z][\w-]*)(?![\w.-])", code):
            forms = "|".join((option, *with_underscores([option])))
            assert option in OTHER_OPTIONS or re.search(rf"({forms})\b", f"{helps}\n{scripts}"), f"{place}: {code}"


@pytest.mark.parametrize("code", sorted({code for _, code in inline("--") if re.match(r"--[a-z_]+\.[a-z]", code)}))
@pytest.mark.long_after(8)
def test_dotted_options_in_running_text_are_accepted(code: str, there: Callable[[Sequence[str]], int]) -> None:
    words = shlex.split(code)
    base = next((config for start, config in DOTTED.items() if words[0][2:].startswith(start)), RUNS["runs/quickstart"])
    assert there(["mrlm", "fit", "--config", base, *words, *(["1"] if len(words) == 1 else [])]) == 0
