"""``mrlm info``."""

import json

import torch


def test_json_has_versions_devices_and_what_can_be_named(mrlm):
    status, out, _ = mrlm("info", "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["packages"]["torch"] == torch.__version__
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


def test_plain_text(mrlm):
    status, out, _ = mrlm("info")
    assert status == 0
    assert "Say the word back. [mrlm_toy]" in out
