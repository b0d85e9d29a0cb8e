"""MAPoRL in four steps: collect answers, train a verifier on them, co-train two policies on its scores, evaluate.

The tiny model learns to please so small a verifier: the score triples, and the accuracy stays below a tenth. Compare
both in your own runs (docs/training/verifier.md#reward-hacking).

python examples/teams/maporl_steps.py
"""

from pathlib import Path

from jsonargparse import auto_cli
from mrlm_environments import CollaborativeReasoningEnvironment, MathEnvironment

import mrlm_pl
from mrlm_pl.algorithms import CorrectnessModel
from mrlm_pl.cli.main import main as mrlm
from mrlm_pl.data import AnswerDataModule
from mrlm_pl.reward_models import RewardModel
from mrlm_pl.reward_models.scorer import VERIFIER_SCORE


def main(answers: int = 8000, iterations: int = 20, output: str = "runs/maporl", episodes: int = 400) -> None:
    """Take all four steps."""
    folder, sampling = Path(output), mrlm_pl.Sampling(max_tokens=24)
    folder.mkdir(parents=True, exist_ok=True)
    # 1. Answers to word problems, right and wrong, at several temperatures.
    problems, collected = MathEnvironment((1, 1), kinds=["word"]), str(folder / "answers.jsonl.gz")
    mrlm_pl.collect("builtin:tiny", problems, output=collected, num_episodes=answers, temperatures=[0.7, 1.3])
    # 2. A verifier of as many right as wrong answers to each question.
    balanced = str(folder / "balanced.jsonl")
    mrlm(["balance", collected, "--fill-wrong", "--output", balanced])
    verifier = CorrectnessModel({"main": mrlm_pl.Policy("builtin:tiny", learning_rate=3e-3)})
    trainer = mrlm_pl.Trainer(output=str(folder / "verifier"), gradient_clip_val=1.0, max_epochs=4)
    trainer.fit(verifier, AnswerDataModule(balanced, batch_size=32))
    # 3. Two policies discuss; each answer earns its score, and the later scores that it influences.
    scorer = RewardModel(str(folder / "verifier" / "policies" / "main"))
    policies = {name: mrlm_pl.Policy("builtin:tiny", learning_rate=1e-3) for name in ("solver_1", "solver_2")}
    algorithm = mrlm_pl.MAPoRL(policies, value_learning_rate=1e-2, alpha1=0.1, beta1=0.1)
    discussion = CollaborativeReasoningEnvironment(max_turns=3, scorer=scorer)
    data = mrlm_pl.RolloutDataModule(discussion, groups=8, iterations=iterations, sampling=sampling)
    trainer = mrlm_pl.Trainer(output=str(folder / "team"), limit_val_batches=0, gradient_clip_val=1.0)
    trainer.fit(algorithm, data)
    # 4. The verifier's score next to the accuracy by the problems' own answers, before and after.
    for when, model in (("before", "builtin:tiny"), ("after", str(folder / "team"))):
        held_out = CollaborativeReasoningEnvironment(max_turns=3, scorer=scorer)
        report = mrlm_pl.evaluate(model, held_out, num_episodes=episodes, sampling=sampling)
        score = report.metrics[VERIFIER_SCORE].value
        print(f"{when}: score {score:.3f}, accuracy {report.accuracy:.3f}, 95 % {report.accuracy_ci95}")


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
