"""Train one policy on three environments in one run, each with its own share, group size and name.

python examples/training/train_multi_environment.py
"""

from jsonargparse import auto_cli
from mrlm_environments import CoordinationGame, MathEnvironment

import mrlm_pl


def main(iterations: int = 40, output: str = "runs/multi-environment") -> None:
    """Train, and print the reward of the last rollout in each environment."""
    algorithm = mrlm_pl.GRPO({"main": mrlm_pl.Policy("builtin:tiny", learning_rate=5e-4)})
    data = mrlm_pl.RolloutDataModule(
        [MathEnvironment((1, 1)), MathEnvironment((1, 1), kinds=["word"]), CoordinationGame()],
        names=["sums", "stories", "game"],
        weights=[2.0, 2.0, 1.0],
        task_settings={"game": mrlm_pl.TaskSettings(group_size=4)},
        groups=20,
        iterations=iterations,
        sampling=mrlm_pl.Sampling(max_tokens=32),
    )
    trainer = mrlm_pl.Trainer(output=output, resume=True, limit_val_batches=0, gradient_clip_val=1.0)
    trainer.fit(algorithm, data)
    for name in data.environments:
        print(name, round(float(trainer.callback_metrics[f"rollout/{name}/reward"]), 3))


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
