"""Fine-tune on the environment's answers instead of the agent's: a model that predicts the feedback.

python examples/training/train_sft_world_model.py
"""

from jsonargparse import auto_cli
from mrlm_environments import MathEnvironment

import mrlm_pl


def main(episodes: int = 2000, output: str = "runs/world-model") -> None:
    """Collect episodes of up to three attempts, and train on the feedback to wrong ones."""
    played = f"{output}/episodes.jsonl"
    mrlm_pl.collect(
        "builtin:tiny",
        MathEnvironment((1, 1), max_attempts=3),
        output=played,
        num_episodes=episodes,
        sampling=mrlm_pl.Sampling(max_tokens=32),
    )
    algorithm = mrlm_pl.SFT({"main": mrlm_pl.Policy("builtin:tiny", learning_rate=1e-3)}, objective="world_model")
    mrlm_pl.Trainer(output=f"{output}/sft", gradient_clip_val=1.0).fit(algorithm, mrlm_pl.TrajectoryDataModule(played))


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
