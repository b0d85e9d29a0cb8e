"""Train with PPO in two processes; each plays its own tasks, and both make the same update.

python examples/training/train_distributed_ppo.py
"""

from jsonargparse import auto_cli
from mrlm_environments import MathEnvironment

import mrlm_pl


def main(iterations: int = 30, output: str = "runs/distributed-ppo", strategy: str = "ddp") -> None:
    """Train; ``fsdp`` shards the weights as well."""
    policy = mrlm_pl.Policy("builtin:tiny", learning_rate=5e-4)
    algorithm = mrlm_pl.PPO({"main": policy}, value_learning_rate=1e-2, lam=1.0)
    sampling = mrlm_pl.Sampling(max_tokens=32)
    data = mrlm_pl.RolloutDataModule(MathEnvironment((1, 1)), groups=16, iterations=iterations, sampling=sampling)
    trainer = mrlm_pl.Trainer(
        output=output, accelerator="cpu", devices=2, strategy=strategy, limit_val_batches=0, gradient_clip_val=1.0
    )
    trainer.fit(algorithm, data)


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
