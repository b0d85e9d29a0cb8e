"""Two policies summarize a text together, trained with MAGRPO: one writes a short summary, the other a longer version.

The rewards are CoMLRL's: ratios of length and of new words, shared words, linking phrases.

python examples/teams/summarize.py
"""

from jsonargparse import auto_cli
from mrlm_environments import WritingEnvironment

import mrlm_pl


def main(iterations: int = 16, output: str = "runs/summarize") -> None:
    """Train."""
    environment = WritingEnvironment()
    policies = {agent: mrlm_pl.Policy("builtin:tiny", learning_rate=1e-3) for agent in environment.agents}
    sampling = mrlm_pl.Sampling(max_tokens=128)
    data = mrlm_pl.RolloutDataModule(environment, groups=4, iterations=iterations, sampling=sampling)
    trainer = mrlm_pl.Trainer(output=output, resume=True, limit_val_batches=0, gradient_clip_val=1.0)
    trainer.fit(mrlm_pl.MAGRPO(policies), data)


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
