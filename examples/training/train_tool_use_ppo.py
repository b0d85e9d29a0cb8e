"""Train an agent that calls a calculator with SFT and PPO: first on calls, then on rewards for right answers.

python examples/training/train_tool_use_ppo.py
"""

import json
from pathlib import Path

from jsonargparse import auto_cli
from mrlm_environments import ToolEnvironment

import mrlm_pl
from mrlm_pl.environment import Message


def demonstration(environment: ToolEnvironment, index: int) -> dict[str, object]:
    """Return a chat with a call of the calculator, its result and the answer."""
    task = environment.tasks("train")[index]
    (question,) = environment.reset(task)["agent"]
    call = {"name": "calculator", "arguments": {"expression": task.data["question"].removesuffix("=?")}}
    said = f"<tool_call>{json.dumps(call)}</tool_call>"
    (result,) = environment.step({"agent": Message("assistant", said)}).observations["agent"]
    answer = Message("assistant", f"<answer>{task.data['answer']}</answer>")
    chat = [question, Message("assistant", said), result, answer]
    tools = [schema.to_chat() for schema in environment.tools("agent")]
    return {"messages": [message.to_chat() for message in chat], "tools": tools}


def main(rows: int = 4000, iterations: int = 20, output: str = "runs/tool-use") -> None:
    """Train in both stages."""
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    environment = ToolEnvironment(tools=["calculator"], max_turns=3)
    lines = [json.dumps(demonstration(environment, index)) for index in range(rows)]
    (folder / "calls.jsonl").write_text("\n".join(lines) + "\n")
    student = mrlm_pl.Policy("builtin:tiny", learning_rate=3e-3)
    calls = mrlm_pl.TrajectoryDataModule(str(folder / "calls.jsonl"), batch_size=16)
    mrlm_pl.Trainer(output=str(folder / "sft"), gradient_clip_val=1.0).fit(mrlm_pl.SFT({"main": student}), calls)
    policy = mrlm_pl.Policy(str(folder / "sft"), learning_rate=5e-4)
    algorithm = mrlm_pl.PPO({"main": policy}, value_learning_rate=1e-2, kl=mrlm_pl.KL(coefficient=0.01))
    sampling = mrlm_pl.Sampling(max_tokens=96)
    data = mrlm_pl.RolloutDataModule(environment, groups=8, iterations=iterations, sampling=sampling)
    mrlm_pl.Trainer(output=str(folder / "ppo"), limit_val_batches=0, gradient_clip_val=1.0).fit(algorithm, data)


if __name__ == "__main__":
    auto_cli(main, description=__doc__.partition("\n\n")[0])
