"""Record the runs of ``mrlm view --demo``: a debate with two seeds, and its turn tree.

The weights stay out; a run keeps its configuration, metrics, episodes and the tokenizers of its policies.

  python examples/record_viewer_demo.py --output mrlm_pl/viewer/demo
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHORT = ["--trainer.limit_val_batches", "0", "--data.sampling.max_tokens", "16", "--data.save_episodes.tokens", "3"]
UPDATES = ["--model.kl.coefficient", "0.01", "--model.entropy.coefficient", "0.001", "--data.minibatches", "2"]
DEBATE = ["--config", str(ROOT / "configs/tasks/teams/debate.yaml"), "--data.groups", "2", "--data.group_size", "4"]
RUNS = {
    "debate-seed0": [*DEBATE, "--data.iterations", "4", *SHORT, *UPDATES],
    "debate-seed1": [*DEBATE, "--data.iterations", "4", "--seed_everything", "1", *SHORT, *UPDATES],
    "debate-turn-tree": [
        *DEBATE,
        "--model",
        json.dumps({"class_path": "MAGRPO", "init_args": {}}),
        "--data.group_size",
        "2",
        "--data.iterations",
        "3",
        *SHORT,
    ],
}
POLICY = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
KEPT = ("config.yaml", "state.json", "metrics.csv", "episodes", "tokens", *(f"policies/*/{name}" for name in POLICY))


def main() -> None:
    """Record the runs below the folder that ``--output`` names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    output = parser.parse_args().output.resolve()
    for name, options in RUNS.items():
        with tempfile.TemporaryDirectory() as work:
            command = [sys.executable, "-m", "mrlm_pl.cli.main", "train", "--output", name, *options]
            subprocess.run(command, cwd=work, check=True)
            shutil.rmtree(output / name, ignore_errors=True)
            for pattern in KEPT:
                for source in (Path(work) / name).glob(pattern):
                    target = output / name / source.relative_to(Path(work) / name)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)


if __name__ == "__main__":
    main()
