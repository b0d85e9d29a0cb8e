"""The demonstration, and the page that opens without a server."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest

from mrlm_pl.viewer.export import exported
from mrlm_pl.viewer.runs import demonstration, find_runs
from tests.support.recorded_runs import HOSTILE, episode, write_run


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


def test_the_command_shows_the_demonstration(mrlm, tmp_path: Path) -> None:
    assert mrlm("view", "--demo", "--text")[1].count("finished") == 3
    status, out, _ = mrlm("view", "--demo", "--export", str(tmp_path / "new" / "page.html"))
    assert (status, "3 runs" in out) == (0, True)
    page = (tmp_path / "new" / "page.html").read_text()
    assert '"tree?run=debate-turn-tree&id=2-1-1-1-1-1"' in page
    assert "tree?run=debate-seed0" not in page
    assert "take `--demo` alone" in mrlm("view", "--demo", str(tmp_path))[2]
    assert mrlm("view")[0] == 2


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
    return exported(find_runs([str(write_run(folder, [episodes]))]))


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


def test_modules_share_no_name(page: str) -> None:
    code = re.findall(r'type="module">(.*?)</script>', page, re.DOTALL)[0]
    names = re.findall(r"^(?:async )?(?:function|const|let) (\w+)", code, re.MULTILINE)
    assert len(names) == len(set(names))
