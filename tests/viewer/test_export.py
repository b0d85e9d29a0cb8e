"""The demonstration, and the page that opens without a server."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from mrlm_pl.episode_files import read_episodes
from mrlm_pl.viewer.export import export_page
from mrlm_pl.viewer.records import Summary
from mrlm_pl.viewer.runs import demonstration, find_runs
from tests.support.runs.recorded_runs import HOSTILE, episode, write_run


def test_the_demonstration_has_seeds_and_a_turn_tree() -> None:
    runs = demonstration()
    heads = {name: run.head() for name, run in runs.items()}
    assert [head["state"] for head in heads.values()] == ["finished"] * 3
    assert heads["debate-seed0"]["family"] == heads["debate-seed1"]["family"] != heads["debate-turn-tree"]["family"]
    assert [head["seed"] for head in heads.values()] == [0, 1, 0]
    tree = runs["debate-turn-tree"].index
    assert len(tree.branches("0-0-0-0-0-0")["actions"]) == 2 + 4 + 8 + 16  # two decisions in each of four steps
    assert runs["debate-seed0"].record("0-0-0")["named"] is None
    folder = Path(runs["debate-seed0"].path).parent
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < 150_000


@pytest.mark.long
def test_the_command_shows_the_demonstration(mrlm, tmp_path: Path) -> None:
    assert mrlm("view", "--demo", "--text")[1].count("finished") == 3
    status, out, _ = mrlm("view", "--demo", "--export", str(tmp_path / "new" / "page.html"))
    assert (status, "3 runs" in out) == (0, True)
    page = (tmp_path / "new" / "page.html").read_text()
    assert '"tree?run=debate-turn-tree&id=2-1-1-1-1-1"' in page
    assert "tree?run=debate-seed0" not in page
    assert "take `--demo` alone" in mrlm("view", "--demo", str(tmp_path))[2]
    assert mrlm("view")[0] == 2


def test_an_exported_page_holds_a_turn_tree_once() -> None:
    data = held(export_page({"a": demonstration()["debate-turn-tree"]}))
    trees = {address: found for address, found in data.items() if address.startswith("tree?")}
    kept = {address for address, found in trees.items() if not isinstance(found, str)}
    assert len(trees) == sum(row[Summary._fields.index("tree")] for row in data["episodes?run=a"]["rows"]) > len(kept)
    groups = {address.partition("&id=")[2][:3] for address in kept}  # ITERATION-GROUP
    assert len(kept) == len(groups)
    assert all(found in kept for found in trees.values() if isinstance(found, str))


def test_an_exported_page_holds_both_trees_of_a_group_that_was_played_again(tmp_path: Path) -> None:
    """The replaced tree has the group's name, and is a separate record behind those of other groups."""
    paths = list(read_episodes(Path(demonstration()["debate-turn-tree"].path) / "episodes"))
    first, other = ([path for path in paths if path.group == group] for group in ("0-0", "0-1"))
    again = [replace(path, id=path.id.replace("0-0", "0-0+1", 1)) for path in first]
    run = write_run(tmp_path / "run", [[*again, *other, *first]])
    data = held(export_page({"a": next(iter(find_runs([str(run)]).values()))}))
    for path in (first[1], again[1]):
        tree = data[f"tree?run=a&id={path.id}"]
        tree = data[tree] if isinstance(tree, str) else tree
        assert path.id in {action["path"] for action in tree["actions"]}


@pytest.mark.parametrize("name", demonstration())
def test_the_demonstration_can_be_played_again(name: str, mrlm) -> None:
    status, out, error = mrlm("replay", str(demonstration()[name].path))
    assert status == 0, error
    count, total = re.findall(r"(\d+) of (\d+) episodes are equal to their record", out)[0]
    assert count == total


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    texts = [text.replace("\ud800", "") for text in HOSTILE]
    folder = tmp_path_factory.mktemp("runs") / "a"
    episodes = [episode(f"{n // 4}-{n}", text) for n, text in enumerate(texts * 4)]
    return export_page(find_runs([str(write_run(folder, [episodes]))]))


def test_an_exported_page_runs_only_its_own_code(page: str) -> None:
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", page, re.DOTALL)
    assert [attributes.strip() for attributes, _ in scripts] == ['type="application/json" id="data"', 'type="module"']
    digest = base64.b64encode(hashlib.sha256(scripts[1][1].encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'" in page
    assert not re.search(r"^(import|export) ", scripts[1][1], re.MULTILINE)
    assert "src=" not in page.partition("<script")[0]


def test_an_exported_page_holds_whole_groups(page: str) -> None:
    data = json.loads(re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)[0])
    (run,) = data["runs"]["runs"]
    table = data[f"episodes?run={run['key']}"]
    assert len(table["rows"]) == 64
    assert table["notes"] == ["the exported page holds the newest 64 of 80 episodes"]
    for row in table["rows"]:
        assert data[f"episode?run={run['key']}&id={row[0]}"]["id"] == row[0]


def held(page: str) -> dict[str, Any]:
    return json.loads(re.findall(r'id="data">(.*?)</script>', page, re.DOTALL)[0])


def test_a_page_that_cannot_be_written_whole_leaves_the_former(
    tmp_path: Path, mrlm, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    page.write_text("former")
    monkeypatch.setattr("mrlm_pl.cli.commands.view.export_page", lambda *_: "half\ud800")
    with pytest.raises(UnicodeEncodeError):
        mrlm("view", "--demo", "--export", str(page))
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("page.html", "former")]


def test_a_page_or_report_behind_a_link_replaces_the_file_and_not_the_link(tmp_path: Path, mrlm: Any) -> None:
    folder = str(write_run(tmp_path / "run", [[episode("00-0"), episode("00-1")]]))
    Path(folder, "metrics.csv").write_text("step,rollout/reward\n1,0.5\n2,0.6\n")
    for command, option, name in (("view", "--export", "page.html"), ("report", "--output", "table.md")):
        link, target = tmp_path / name, tmp_path / f"of-{name}"
        link.symlink_to(target)
        assert mrlm(command, folder, option, str(link)) == (0, ANY, ANY)
        assert link.is_symlink()
        assert target.read_text()


def test_the_exported_episodes_can_be_chosen(tmp_path: Path, mrlm, monkeypatch: pytest.MonkeyPatch) -> None:
    iterations = [[episode(f"{n}{m // 2}-{m % 2}", iteration=n, task=m) for m in range(4)] for n in range(3)]
    folder, page = str(write_run(tmp_path / "run", iterations)), tmp_path / "page.html"

    def chosen(*words: str) -> tuple[list[str], list[str]]:
        assert mrlm("view", folder, "--export", str(page), *words)[0] == 0
        table = held(page.read_text())[f"episodes?run={folder}"]
        return sorted(row[0] for row in table["rows"]), table["notes"]

    whole = ["the exported page holds the episodes of iteration 1"]
    assert chosen("--iteration", "1") == (["10-0", "10-1", "11-0", "11-1"], whole)
    assert chosen("--episode", "01-0") == (["01-0", "01-1"], ["the exported page holds episode 01-0 and its group"])
    assert "no episode of iteration 7" in mrlm("view", folder, "--export", str(page), "--iteration", "7")[2]
    assert "no episode 'x'" in mrlm("view", folder, "--export", str(page), "--episode", "x")[2]
    monkeypatch.setattr("mrlm_pl.viewer.episode_index.NEWEST", 2)
    assert chosen("--episode", "10-0")[0] == ["10-0", "10-1"], "also where its iteration has more than a table holds"


def test_an_exported_page_counts_the_run_and_compares_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [[episode(f"{n}-0", iteration=n, task=n)] for n in range(3)]
    folders = [str(write_run(tmp_path / name, own, rewards=[0.5] * 3)) for name in "ab"]
    monkeypatch.setattr("mrlm_pl.viewer.export.EPISODES", 1)
    data = held(export_page(find_runs(folders)))
    found = data[f"compare?run={folders[0]}&other={folders[1]}"]
    assert (found["tasks"], len(found["pairs"]), found["pairs_left_out"], found["newest"]) == (3, 1, 2, None)
    monkeypatch.setattr("mrlm_pl.viewer.episode_index.NEWEST", 2)
    monkeypatch.setattr("mrlm_pl.viewer.comparison.NEWEST", 2)
    data = held(export_page(find_runs(folders)))
    assert data[f"episodes?run={folders[0]}"]["notes"] == ["the exported page holds the newest 1 of 12 episodes"]
    assert data[f"compare?run={folders[0]}&other={folders[1]}"]["newest"] == 2


def test_modules_share_no_name(page: str) -> None:
    code = re.findall(r'type="module">(.*?)</script>', page, re.DOTALL)[0]
    names = re.findall(r"^(?:async )?(?:function|const|let) (\w+)", code, re.MULTILINE)
    assert len(names) == len(set(names))
