"""Two agents, each with its own policy, tell a story; the second text should be two to three times as long.

python examples/questions/length_ratio.py
"""

import math
from argparse import ArgumentParser

from mrlm_environments import QuestionEnvironment

import mrlm_pl

ArgumentParser(description=__doc__.partition("\n\n")[0]).parse_args()


def length_ratio(replies: dict[str, str], row: dict[str, str]) -> float:
    if not all(replies.values()):
        return 0.0
    ratio = len(replies["second"]) / len(replies["first"])
    return math.exp(-max(2 - ratio, ratio - 3, 0))


rows = [{"prompt": f"Write a story about number {n}:"} for n in range(100)]
environment = QuestionEnvironment(rows, [length_ratio], agents=["first", "second"])
policies = {agent: mrlm_pl.Policy("builtin:tiny", learning_rate=3e-4) for agent in environment.agents}
data = mrlm_pl.RolloutDataModule(environment, iterations=30, sampling=mrlm_pl.Sampling(max_tokens=32))
mrlm_pl.Trainer(limit_val_batches=0).fit(mrlm_pl.MAGRPO(policies), data)
