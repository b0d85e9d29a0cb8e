"""Train on programming tasks with PPO and several attempts: an agent reads which tests fail, and tries again.

The built-in tiny model writes no programs; start from the first stage of train_hybrid_sft_ppo.py, or name your model.

python examples/training/train_hybrid_sft_ppo.py
python examples/training/train_code_ppo.py
"""

from jsonargparse import auto_cli
from mrlm_environments import CodeEnvironment

import mrlm_pl
from mrlm_pl.sandbox import Sandbox


def main(iterations: int = 20, output: str = "runs/code-ppo", model: str = "runs/hybrid/sft") -> None:
    """Train."""
    policy = mrlm_pl.Policy(model, learning_rate=5e-4)
    algorithm = mrlm_pl.PPO({"main": policy}, value_learning_rate=1e-2, lam=1.0, kl=mrlm_pl.KL(coefficient=0.01))
    environment = CodeEnvironment(
        difficulty=(1, 1), kinds=["number"], max_attempts=2, sandbox=Sandbox(wall_seconds=5, memory_mb=256)
    )
    sampling = mrlm_pl.Sampling(max_tokens=64)
    data = mrlm_pl.RolloutDataModule(environment, groups=8, iterations=iterations, sampling=sampling)
    mrlm_pl.Trainer(output=output, limit_val_batches=0, gradient_clip_val=1.0).fit(algorithm, data)


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
