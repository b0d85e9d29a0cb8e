"""Ask a stored run what else could have happened: other decisions instead of a wrong one, and other credit.

python examples/what_if.py
"""

from jsonargparse import auto_cli
from mrlm_environments import MathEnvironment

import mrlm_pl


def main(iterations: int = 10, output: str = "runs/what-if", samples: int = 16) -> None:
    """Train, replay the run, replace its first wrong answer, and compute its advantages under RLOO."""
    environment = MathEnvironment((1, 1))
    algorithm = mrlm_pl.GRPO({"main": mrlm_pl.Policy("builtin:tiny", learning_rate=5e-4)})
    sampling = mrlm_pl.Sampling(max_tokens=32)
    data = mrlm_pl.RolloutDataModule(environment, groups=8, iterations=iterations, sampling=sampling)
    mrlm_pl.Trainer(output=output, limit_val_batches=0).fit(algorithm, data)
    print("equal to their records:", mrlm_pl.replay(output, MathEnvironment((1, 1))).equal)
    wrong = next(episode for episode in mrlm_pl.read_episodes(f"{output}/episodes") if not episode.reward)
    report = mrlm_pl.whatif(output, environment, episode=wrong.id, agent="agent", turn=0, samples=samples)
    print(wrong.task.data["question"], wrong.rows()[0].messages[-1].content)
    print(f"advantage of this answer {report.advantage:.3f}, 95 % {report.ci95}")
    print("correlation with RLOO's advantages:", mrlm_pl.recredit(output, mrlm_pl.RLOO()).agents["agent"].correlation)


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
