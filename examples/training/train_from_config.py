"""Train a configuration file from Python with changed settings, as ``mrlm fit`` does, and look at its episodes.

python examples/training/train_from_config.py
"""

from jsonargparse import auto_cli

from mrlm_pl import read_episodes
from mrlm_pl.cli.main import main as mrlm


def main(iterations: int = 30, output: str = "runs/from-config", config: str = "configs/quickstart.yaml") -> None:
    """Train, and print the best answer of the last rollout."""
    changes = ["--data.iterations", str(iterations), "--model.clip.high", "0.28", "--trainer.callbacks", "null"]
    if mrlm(["fit", "--config", config, "--output", output, *changes]):
        raise SystemExit("the run failed")
    *_, best = sorted(read_episodes(f"{output}/episodes"), key=lambda episode: (episode.iteration, episode.reward))
    print(best.task.data["question"], "->", best.rows()[0].messages[-1].content)


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
