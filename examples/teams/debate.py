"""Two debaters, each with its own policy, learn to argue with new words; a judge by rules scores them.

python examples/teams/debate.py
"""

from jsonargparse import auto_cli
from mrlm_environments import DebateEnvironment, RuleJudge

import mrlm_pl


def main(iterations: int = 20, output: str = "runs/debate") -> None:
    """Train, and print the last debate."""
    policies = {side: mrlm_pl.Policy("builtin:tiny", learning_rate=1e-3) for side in ("pro", "con")}
    environment = DebateEnvironment(RuleJudge(words=8), reward="score")
    sampling = mrlm_pl.Sampling(max_tokens=24)
    data = mrlm_pl.RolloutDataModule(environment, groups=4, group_size=8, iterations=iterations, sampling=sampling)
    trainer = mrlm_pl.Trainer(output=output, resume=True, limit_val_batches=0, gradient_clip_val=1.0)
    trainer.fit(mrlm_pl.GRPO(policies), data)
    *_, last = mrlm_pl.read_episodes(f"{output}/episodes")
    for agent, rows in last.trajectories.items():
        print(agent, [turn.reward for row in rows for turn in row.turns], rows[-1].messages[-1].content)


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
