"""Learn tic-tac-toe against a pool of past snapshots, with ratings against the initial policy.

python examples/teams/self_play.py
"""

from jsonargparse import auto_cli
from mrlm_callbacks import AnchorGames, SelfPlay
from mrlm_environments import TicTacToe

import mrlm_pl


def main(iterations: int = 60, output: str = "runs/self-play", games: int = 256) -> None:
    """Train, and print the score against the initial policy at each rating."""
    opponent = mrlm_pl.Policy("builtin:tiny", trained=False)
    algorithm = mrlm_pl.GRPO(
        {"learner": mrlm_pl.Policy("builtin:tiny", learning_rate=5e-4), "opponent": opponent},
        seats={"alpha": "learner", "beta": "opponent"},
    )
    sampling = mrlm_pl.Sampling(temperature=1.5, max_tokens=1)
    data = mrlm_pl.RolloutDataModule(TicTacToe(), groups=8, group_size=16, iterations=iterations, sampling=sampling)
    league = SelfPlay(snapshot_every=10, anchors=AnchorGames(every=20, games=games))
    mrlm_pl.Trainer(output=output, limit_val_batches=0, callbacks=[league]).fit(algorithm, data)
    print([round(rating["score"], 3) for rating in league.history])


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
