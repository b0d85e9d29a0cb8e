"""Your own prompts and reward: a reply earns its number of different characters.

python examples/questions/different_letters.py
"""

from argparse import ArgumentParser

from mrlm_environments import QuestionEnvironment

import mrlm_pl

ArgumentParser(description=__doc__.partition("\n\n")[0]).parse_args()


def different_letters(reply: str, row: dict[str, str]) -> int:
    return len(set(reply.lower()))


rows = [{"prompt": f"Tell me about number {n}."} for n in range(100)]
model = mrlm_pl.GRPO({"main": mrlm_pl.Policy("builtin:tiny", learning_rate=1e-3)})
data = mrlm_pl.RolloutDataModule(QuestionEnvironment(rows, [different_letters]), iterations=30)
mrlm_pl.Trainer(limit_val_batches=0).fit(model, data)
