"""Train with DPO on a model's own answers: the best against the worst of eight to each problem.

python examples/training/train_dpo_preferences.py
"""

from jsonargparse import auto_cli
from mrlm_environments import MathEnvironment

import mrlm_pl


def main(episodes: int = 4000, output: str = "runs/dpo-preferences") -> None:
    """Collect answers, train on the pairs, and print the accuracy."""
    sampling, answers = mrlm_pl.Sampling(max_tokens=32), f"{output}/answers.jsonl"
    mrlm_pl.collect(
        "builtin:tiny",
        MathEnvironment((1, 1)),
        output=answers,
        num_episodes=episodes,
        samples_per_task=8,
        sampling=sampling,
    )
    policy = mrlm_pl.Policy("builtin:tiny", learning_rate=1e-4)
    optimization = mrlm_pl.Optimization(schedule="cosine", warmup_steps=10)
    algorithm = mrlm_pl.DPO({"main": policy}, beta=1.0, optimization=optimization)
    pairs = mrlm_pl.PreferenceDataModule(answers, batch_size=16)
    mrlm_pl.Trainer(output=f"{output}/dpo", gradient_clip_val=1.0).fit(algorithm, pairs)
    report = mrlm_pl.evaluate(
        f"{output}/dpo", MathEnvironment((1, 1)), num_episodes=min(episodes, 500), sampling=sampling
    )
    print(f"accuracy {report.accuracy:.3f}, 95 % {report.accuracy_ci95}")


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
