"""Pages of the site: all are in its contents, numbers are those of the results, named tests exist."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from mrlm_environments import CoordinationGame

import mrlm_pl
from benchmarks import readme_numbers, results_page, results_plots
from benchmarks.tables import overview
from benchmarks.tables.correctness import kills
from benchmarks.tables.results import RESULTS, read
from docs import catalog, options
from mrlm_pl.cli.main import COMMANDS
from mrlm_pl.sandbox import strongest
from tests.support.documents import ROOT

DOCS = ROOT / "docs"
NUMBER = re.compile(r"[+-]?\d\.\d{3} (?:± \d\.\d{3}|\[[^\]]+\])")
"""A mean with its interval, as results show it."""


def test_every_page_is_in_the_contents() -> None:
    toctrees = re.compile(r"^:::\{toctree\}\n(.*?)^:::", re.MULTILINE | re.DOTALL)
    listed = []
    for page in (index := DOCS / "index.md", options.INDEX):
        lines = [line for block in toctrees.findall(page.read_text()) for line in block.splitlines()]
        names = [line for line in lines if line and not line.startswith(":")]
        listed += [path for name in names for path in page.parent.glob(f"{name}.md") if path != page]
    assert {index, *listed} == {*DOCS.rglob("*.md")}, "add the page to a toctree of docs/index.md"


def test_every_algorithm_has_a_page_with_its_options() -> None:
    marked = {path for path in options.FOLDER.glob("*.md") if options.MARKS[0] in path.read_text()}
    assert {path for path, _ in options.pages()} == marked
    for path, current in options.pages():
        page = path.read_text()
        assert all(mark in page for mark in options.MARKS), f"{path.name} has no place for its options"
        assert page == options.with_options(page, current), f"{path.name} is old: run `python -m docs.options`"
    for stem, cls in options.classes().items():
        page = (options.FOLDER / f"{stem}.md").read_text()
        assert f"| [{cls.__name__}]({stem}.md) |" in options.INDEX.read_text(), f"{stem}.md is not listed"
        assert f"](../../mrlm_pl/algorithms/{stem}.py)" in page, f"{stem}.md does not link its code"
        assert "```bash\nmrlm " in page, f"{stem}.md has no command"


def test_the_table_of_hooks_names_the_algorithms_with_their_own() -> None:
    page = (DOCS / "extending/algorithm.md").read_text()
    named = dict(re.findall(r"^\| `([a-z_]+)`.* \| each .* \| ([^|]+) \|$", page, re.MULTILINE))
    members = {cls.__name__: vars(cls) for cls in options.classes().values()}
    own = {hook: ", ".join(sorted(name for name in members if hook in members[name])) for hook in named}
    assert named == {hook: names or "-" for hook, names in own.items()}
    assert len(named) > 9


def test_the_page_of_each_algorithm_shows_its_learning_curve() -> None:
    curves = results_plots.curves_by_page()
    assert {*curves} == {*options.classes()}
    for stem, panels in curves.items():
        page = (options.FOLDER / f"{stem}.md").read_text()
        assert f"](../images/results/curves/{stem}.svg)" in page, f"{stem}.md does not show its curve"
        assert "## Measured" in page
        picture = (results_plots.PLOTS / "curves" / f"{stem}.svg").read_text()
        for panel in panels:
            assert f">{panel.measure}</text>" in picture, "run `make results`"
            assert len(panel.curves) >= 3, f"{stem}: too few seeds for an interval"


def test_every_paper_has_a_command() -> None:
    """Another test parses the commands."""
    rows = re.findall(r"^\| \[.*", (DOCS / "results/papers.md").read_text(), re.MULTILINE)
    assert len(rows) > 30
    assert [row for row in rows if " | `mrlm fit --config configs/" not in row] == []


def test_the_reference_has_every_public_name() -> None:
    text = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    named = re.findall(r"auto(?:class|function|exception):: mrlm_pl\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(mrlm_pl.__all__)


def test_the_catalog_of_environments_is_that_of_the_classes() -> None:
    if strongest()[0] != "namespaces":
        pytest.skip("the environment shell needs namespaces")
    assert catalog.PAGE.read_text() == catalog.page(), "run `python -m docs.catalog`"


def test_the_catalog_links_episodes_of_each_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked = re.findall(r'href="episodes/(\w+)\.html"', catalog.PAGE.read_text())
    assert linked == [environment.name for environment in catalog.environments()]
    monkeypatch.setattr(catalog, "environments", lambda: [CoordinationGame()])
    catalog.write_pages_of_episodes(tmp_path)
    data = re.search(r'id="data">(.*?)</script>', (tmp_path / "coordination.html").read_text(), re.DOTALL)
    assert data
    table = json.loads(data.group(1))["episodes?run=coordination"]
    assert [row[table["columns"].index("reward")] for row in table["rows"]] == [1.0, 0.0]  # C and C; words


@pytest.mark.parametrize(("path", "text"), results_page.pages().items(), ids=lambda value: getattr(value, "stem", ""))
def test_the_results_pages_are_those_of_the_files(path: Path, text: str) -> None:
    assert path.read_text() == text, "run `make results`"


def test_the_overview_has_a_verdict_on_every_claim_that_the_papers_page_has() -> None:
    papers = (DOCS / "results/papers.md").read_text()
    rows = overview.papers().splitlines()[2:]
    assert sum(int(row.split(" | ")[1]) for row in rows) == len(re.findall(r"^\| \[", papers, re.MULTILINE))
    failed = re.findall(r"^\| (\[[^\]]+\]\([^)]+\)).*did not reproduce", papers, re.MULTILINE)
    assert len(failed) > 4
    assert [name for name in failed if name not in rows[0]] == []


def test_the_numbers_of_the_readme_are_those_of_the_files() -> None:
    readme = readme_numbers.README.read_text()
    assert readme_numbers.with_numbers(readme) == readme, "run `make results`"
    begin, end = readme_numbers.MARKS
    head, _, rest = readme.partition(begin)
    assert readme_numbers.with_numbers(f"{head}{begin}0.99\n{end}{rest.partition(end)[2]}") == readme


def test_the_readme_is_short_and_names_its_peers() -> None:
    readme = readme_numbers.README.read_text()
    assert len(readme.splitlines()) <= 160
    table = readme.partition(readme_numbers.MARKS[0])[2].partition("\n\n![")[0]
    assert all(f" {peer} " in table for peer in ("TRL", "CoMLRL", "verl"))


def test_every_file_of_results_is_on_the_page() -> None:
    shown = {name for sections in results_page.CHAPTERS.values() for name in sections}
    assert shown | {*results_page.ELSEWHERE} == {path.stem for path in RESULTS.glob("*.json")}
    assert all((results_plots.PLOTS / f"{name}.svg").is_file() for name in _plotted())


def test_plots_name_their_sides_and_have_several_ticks() -> None:
    for name in ("parity", "cost_curves"):
        picture = (results_plots.PLOTS / f"{name}.svg").read_text()
        assert all(f">{side}</text>" in picture for side in ("mrlm", "TRL", "CoMLRL")), "run `make results`"
    panels = re.split('id="axes_', picture)[1:]
    heights = [re.split('id="matplotlib.axis_', panel)[2] for panel in panels]
    assert min(axis.count('id="ytick_') for axis in heights) >= 2


def _plotted() -> Iterator[str]:
    for sections in results_page.CHAPTERS.values():
        yield from (name for name, section in sections.items() if section.plot)


def test_means_with_intervals_in_the_pages_are_those_of_the_files() -> None:
    known = {number for text in results_page.pages().values() for number in NUMBER.findall(text)}
    earlier = {f"{float(number):.3f}" for row in read("earlier")["measurements"] for number in row["numbers"]}
    pages = [path for path in DOCS.rglob("*.md") if path not in results_page.pages()]
    shown = {f"{path.name}: {number}" for path in pages for number in NUMBER.findall(path.read_text())}
    unknown = {place for place in shown if place.partition(": ")[2] not in known}
    assert {place for place in unknown if not {*re.findall(r"\d\.\d{3}", place)} <= earlier} == set()
    assert len(shown) > 20


def sentences() -> Iterator[tuple[str, str]]:
    """Yield pages with texts that follow from files of results."""
    count, runs, same = kills(read("kill_resume"))
    yield "../README.md", f"{same} of {runs} runs of SFT, GRPO, PPO, DPO and MAGRPO, resumed after {count} `kill -9`"
    yield "scaling/README.md", f"After {count} kills at random moments"
    yield "scaling/README.md", f"all {same} resumed runs" if same == runs else "not all resumed runs"
    step = read("distillation_step")
    yield "algorithms/on_policy_distillation.md", f"{step['cpu_ratio']:.2f} of the CPU time"
    yield "algorithms/on_policy_distillation.md", f"({step['ours']['cpu_s']:.1f} s / {step['trl']['cpu_s']:.1f} s)"
    yield "algorithms/on_policy_distillation.md", f"{step['peak_ratio']:.2f} of the memory"
    yield "training/gateway.md", f"{read('gateway')['ratio']:.3f} times as many tokens per second"
    sizes = read("run_size")["bytes"]
    for part in ("episodes", "metrics.csv", "tensorboard"):
        yield "runs/operations.md", f"| {sizes['per iteration'][part] / 1000:.1f} kB per iteration |"
    for part in ("checkpoints", "policies", "other"):
        yield "runs/operations.md", f"| {sizes['at the end'][part] / 1000:,.0f} kB |"
    records = read("records")
    per = records["per_1000_episodes"]
    text = f"{per['text_bytes'] / 1e6:.1f} MB of text, take {per['zstd 6']['bytes'] / 1e6:.2f} MB on disk"
    yield "data/files.md", text
    busy = {name: f"{row['busy_by_quiet']:.1f}" for name, row in read("shared_machine")["settings"].items()}
    spun, single = busy["GOMP_SPINCOUNT=1000"], busy["one thread"]
    text = f"{busy['default']} times as long, with `GOMP_SPINCOUNT=1000` {spun} times, "
    text += f"and with `OMP_NUM_THREADS=1` {single}"
    yield "scaling/README.md", text
    covered = read("interval_coverage")["summary"]["now"]["least coverage of 20 tasks or more"]
    yield "concepts/decisions.md", f"covers the true accuracy in {covered:.3f}"


@pytest.mark.parametrize(("page", "text"), [*sentences()])
def test_sentences_with_results_are_those_of_the_files(page: str, text: str) -> None:
    assert text in " ".join((DOCS / page).read_text().split()), "even across a line break"


def source_of(path: str, name: str) -> str:
    """Return the text of a test's file up to its definition, with its decorators."""
    text = (ROOT / path).read_text()
    assert re.search(rf"^(async )?def {name}\(", text, re.MULTILINE), f"{path} has no {name}"
    return text.partition(f"def {name}(")[0].rpartition("\n\n\n")[2]


def test_the_tests_that_the_readme_names_exist() -> None:
    named = re.findall(r"\]\((tests/[\w/]+\.py)#(test_\w+)\)", (ROOT / "README.md").read_text())
    assert len(named) >= 3
    for path, name in named:
        assert "mark.slow" not in source_of(path, name), f"{path}: {name} is not in the default tier"


def test_each_problem_of_other_frameworks_names_a_test_that_exists() -> None:
    rows = re.findall(r"^\| .*github\.com.*", (DOCS / "results/problems.md").read_text(), re.MULTILINE)
    assert len(rows) >= 10
    for row in rows:
        named = re.fullmatch(r".* \| `(tests/[\w/]+\.py)::(test_\w+)` \|", row)
        assert named, row
        assert "mark.slow" not in source_of(*named.groups()), f"{row} is not in the default tier"


def test_every_command_is_on_its_page() -> None:
    page = (DOCS / "reference/commands.md").read_text()
    assert [command for command in COMMANDS if not re.search(rf"\bmrlm {command}\b", page)] == []


def test_each_row_of_resumes_and_failures_names_a_test_that_exists() -> None:
    _, _, tables = (DOCS / "runs/operations.md").read_text().partition("## Resume")
    rows = [line for line in tables.splitlines() if line.startswith("| ") and not line.endswith("| test |")]
    assert len(rows) > 40
    for row in rows:
        named = re.fullmatch(r".* \| `(tests/[\w/]+\.py)::(test_\w+)` \|", row)
        assert named, row
        source_of(*named.groups())


def test_the_version_is_the_same_everywhere() -> None:
    places = {
        "pyproject.toml": r'^version = "(.+)"$',
        "CITATION.cff": r"^version: (.+)$",
        "CHANGELOG.md": r"^## ([\d.]+)",
    }
    found = [re.search(form, (ROOT / name).read_text(), re.MULTILINE) for name, form in places.items()]
    assert len({match and match.group(1) for match in found}) == 1
    assert None not in found
