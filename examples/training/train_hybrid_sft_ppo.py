"""Fine-tune on solutions of small programming tasks, then train the result with PPO on hidden tests in the sandbox.

python examples/training/train_hybrid_sft_ppo.py
"""

import json
from pathlib import Path

from jsonargparse import auto_cli
from mrlm_environments import CodeEnvironment

import mrlm_pl


def write_demonstrations(path: Path, rows: int) -> None:
    """Write training tasks with their solutions as chats."""
    tasks = CodeEnvironment(difficulty=(1, 1), kinds=["number"]).tasks("train")
    with path.open("w") as file:
        for index in range(rows):
            task = tasks[index]
            solution = f"```python\n{task.data['solution']}\n```"
            chat = [{"role": "user", "content": task.data["prompt"]}, {"role": "assistant", "content": solution}]
            file.write(json.dumps({"messages": chat}) + "\n")


def main(rows: int = 4000, iterations: int = 20, output: str = "runs/hybrid") -> None:
    """Train in both stages; the second one starts from the first one's exported policy."""
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    write_demonstrations(folder / "demonstrations.jsonl", rows)
    student = mrlm_pl.Policy("builtin:tiny", learning_rate=3e-3)
    demonstrations = mrlm_pl.TrajectoryDataModule(str(folder / "demonstrations.jsonl"), batch_size=16)
    mrlm_pl.Trainer(output=str(folder / "sft"), gradient_clip_val=1.0).fit(
        mrlm_pl.SFT({"main": student}, optimization=mrlm_pl.Optimization(schedule="cosine")), demonstrations
    )
    policy = mrlm_pl.Policy(str(folder / "sft"), learning_rate=5e-4)
    algorithm = mrlm_pl.PPO({"main": policy}, value_learning_rate=1e-2, lam=1.0, kl=mrlm_pl.KL(coefficient=0.01))
    tasks = CodeEnvironment(difficulty=(1, 1), kinds=["number"])
    sampling = mrlm_pl.Sampling(max_tokens=64)
    data = mrlm_pl.RolloutDataModule(tasks, groups=8, iterations=iterations, sampling=sampling)
    mrlm_pl.Trainer(output=str(folder / "ppo"), limit_val_batches=0, gradient_clip_val=1.0).fit(algorithm, data)


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
