"""Play the next rollouts in two Ray workers while the learner updates; needs `pip install "mrlm[ray]"`.

python examples/async_ray.py
"""

from jsonargparse import auto_cli
from mrlm_environments import MathEnvironment

import mrlm_pl


def main(iterations: int = 40, output: str = "runs/async-ray", workers: int = 2) -> None:
    """Train on episodes that are at most two updates old."""
    policy = mrlm_pl.Policy("builtin:tiny", learning_rate=5e-4)
    algorithm = mrlm_pl.GRPO({"main": policy}, correction=mrlm_pl.Correction("truncated"))
    data = mrlm_pl.RolloutDataModule(
        MathEnvironment((1, 1)),
        groups=16,
        iterations=iterations,
        sampling=mrlm_pl.Sampling(max_tokens=32),
        engine=mrlm_pl.RayPool(workers=workers),
        mode="async",
        max_lag=2,
    )
    mrlm_pl.Trainer(output=output, limit_val_batches=0, gradient_clip_val=1.0).fit(algorithm, data)


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
