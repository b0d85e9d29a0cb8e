"""Train on math with GRPO and DAPO's settings: an asymmetric clip, a length penalty, and no groups without a signal.

python examples/training/train_grpo_math.py
"""

from jsonargparse import auto_cli
from mrlm_environments import MathEnvironment

import mrlm_pl


def main(iterations: int = 60, output: str = "runs/grpo-math") -> None:
    """Train."""
    policy = mrlm_pl.Policy("builtin:tiny", learning_rate=5e-4)
    algorithm = mrlm_pl.GRPO({"main": policy}, clip=mrlm_pl.Clip(high=0.28), overlong_buffer=8)
    data = mrlm_pl.RolloutDataModule(
        MathEnvironment((1, 1)),
        groups=16,
        minibatches=2,
        resample_rounds=2,
        iterations=iterations,
        sampling=mrlm_pl.Sampling(max_tokens=32),
    )
    mrlm_pl.Trainer(output=output, resume=True, limit_val_batches=0, gradient_clip_val=1.0).fit(algorithm, data)


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
