"""Train the two agents of an unmodified program: examples/gateway/two_agents.py, which knows OpenAI's client only.

python examples/teams/gateway_team.py
"""

import runpy
from pathlib import Path

from jsonargparse import auto_cli
from mrlm_environments import HarnessEnvironment

import mrlm_pl

EXAMPLES = Path(__file__).parents[1]


def main(iterations: int = 40, output: str = "runs/gateway-team") -> None:
    """Train a policy for each agent."""
    play = runpy.run_path(str(EXAMPLES / "gateway" / "two_agents.py"))["play"]
    exact = runpy.run_path(str(EXAMPLES / "questions" / "rewards.py"))["exact"]
    agents = ["solver", "checker"]
    rows = str(EXAMPLES / "questions" / "rows.csv")
    environment = HarnessEnvironment(rows, function=play, agents=agents, rewards=[exact])
    policies = {agent: mrlm_pl.Policy("builtin:tiny", learning_rate=1e-3) for agent in agents}
    sampling = mrlm_pl.Sampling(max_tokens=16)
    data = mrlm_pl.RolloutDataModule(environment, groups=8, iterations=iterations, sampling=sampling)
    trainer = mrlm_pl.Trainer(output=output, limit_val_batches=0, gradient_clip_val=1.0)
    trainer.fit(mrlm_pl.GRPO(policies), data)


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
