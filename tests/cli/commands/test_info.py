"""``mrlm info``."""

import json
from types import SimpleNamespace

import torch

from mrlm_pl.cli.commands import info
from mrlm_pl.sandbox.host import server_process


def test_json_has_versions_devices_and_what_can_be_named(mrlm):
    status, out, _ = mrlm("info", "--json")
    facts = json.loads(out)
    assert status == 0
    build = "+"  # PyPI's builds for CUDA name it in torch alone, not in the package's version
    assert facts["packages"]["torch"].partition(build)[0] == torch.__version__.partition(build)[0]
    assert facts["devices"][0].startswith("cpu")
    algorithms = {item["name"]: item for item in facts["algorithms"]}
    assert algorithms["ToyAlgorithm"] == {
        "name": "ToyAlgorithm",
        "class": "mrlm_toy.ToyAlgorithm",
        "summary": "Moves one weight.",
        "package": "mrlm_toy",
    }
    assert algorithms["GRPO"]["package"] == "mrlm_pl"
    assert "Algorithm" not in algorithms
    (parrot,) = [item for item in facts["environments"] if item["name"] == "parrot"]
    assert (parrot["class"], parrot["summary"]) == ("mrlm_toy.ParrotEnvironment", "Say the word back.")


def test_engines_are_listed_and_whether_ray_is_installed(mrlm, monkeypatch):
    versions = {"ray": [SimpleNamespace(version="2.0.1")]}
    monkeypatch.setattr(info, "distributions", lambda name: versions.get(name, []))
    _, out, _ = mrlm("info", "--json")
    facts = json.loads(out)
    engines = {item["name"]: item["class"] for item in facts["engines"]}
    assert engines["RayPool"] == "mrlm_pl.RayPool"
    assert "EngineWrapper" not in engines, "a base of engines is none to choose"
    assert {"InProcessEngine", "OpenAICompatible"} <= set(engines)
    assert facts["packages"]["ray"] == "2.0.1"
    del versions["ray"]
    _, out, _ = mrlm("info")
    assert "\nray           not installed\n" in out
    assert "\nengines:\n" in out


def test_plain_text(mrlm):
    status, out, _ = mrlm("info")
    assert status == 0
    assert "Say the word back. [mrlm_toy]" in out


def test_summaries_of_a_kind_stand_in_one_column():
    names = ["GRPO", "REINFORCEPlusPlusBaseline"]
    described = [{"name": name, "summary": "Learns.", "package": "mrlm_pl"} for name in names]
    facts = {**info.collect(), "algorithms": described}
    lines = [line for line in info._facts_text(facts).splitlines() if line.endswith("Learns. [mrlm_pl]")]
    assert [line.index("Learns.") for line in lines] == [2 + len(names[1]) + 2] * 2


def test_the_sandbox_level_is_named(mrlm):
    level, reasons = server_process.strongest()
    _, out, _ = mrlm("info", "--json")
    assert json.loads(out)["sandbox"] == {"level": level, "missing": reasons}
    _, out, _ = mrlm("info")
    assert f"sandbox       {level}\n" in out


def test_missing_sandbox_levels_are_explained(mrlm, monkeypatch):
    offered = {"landlock"}

    def server(level):
        if level not in offered:
            raise server_process.LevelError(f"no {level} on this kernel")

    monkeypatch.setattr(server_process, "server", server)
    _, out, _ = mrlm("info", "--json")
    missing = {"namespaces": "no namespaces on this kernel"}
    assert json.loads(out)["sandbox"] == {"level": "landlock", "missing": missing}
    _, out, _ = mrlm("info")
    assert "sandbox       landlock\n              namespaces is missing: no namespaces on this kernel\n" in out
    offered.clear()
    _, out, _ = mrlm("info")
    assert "sandbox       none: untrusted code cannot be run\n" in out
    assert "no limits on this kernel" in out


def test_one_thread_is_singular(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert info.devices()[0] == "cpu (1 thread)"
