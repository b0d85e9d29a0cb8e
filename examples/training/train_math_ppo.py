"""Train on math with PPO and a KL penalty in the reward, several passes over a rollout, and a comparison of accuracies.

python examples/training/train_math_ppo.py
"""

from jsonargparse import auto_cli
from mrlm_environments import MathEnvironment

import mrlm_pl


def main(iterations: int = 60, output: str = "runs/math-ppo", episodes: int = 500) -> None:
    """Train, then compare with the initial policy on the same held-out problems."""
    policy = mrlm_pl.Policy("builtin:tiny", learning_rate=5e-4)
    algorithm = mrlm_pl.PPO({"main": policy}, value_learning_rate=1e-2, lam=1.0, kl=mrlm_pl.KL(coefficient=0.01))
    sampling = mrlm_pl.Sampling(max_tokens=32)
    data = mrlm_pl.RolloutDataModule(
        MathEnvironment((1, 1)), groups=32, passes=2, minibatches=2, iterations=iterations, sampling=sampling
    )
    mrlm_pl.Trainer(output=output, resume=True, limit_val_batches=0, gradient_clip_val=1.0).fit(algorithm, data)
    for model in ("builtin:tiny", output):
        report = mrlm_pl.evaluate(model, MathEnvironment((1, 1)), num_episodes=episodes, sampling=sampling)
        print(f"{model}: accuracy {report.accuracy:.3f}, 95 % {report.accuracy_ci95}")


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
