"""Train a small GPT-2 with its own byte-level tokenizer to play the coordination game.

The model answers with C at a given rate and can be any agent's policy.

python examples/other_family.py --output runs/other-family --collaborates 0.5
mrlm fit --config configs/models/two_families.yaml
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from random import Random

import torch
from lightning.pytorch import Trainer
from mrlm_environments import CoordinationGame
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from mrlm_pl import Optimization
from mrlm_pl.algorithms import SFT
from mrlm_pl.data import TrajectoryDataModule
from mrlm_pl.policy import Policy

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
EXAMPLES = 2048


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of at most 320 tokens, trained on ``texts``, with a chat template."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special = ["<pad>", "<end>", "<system>", "<user>", "<assistant>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<end>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Write a random two-layer GPT-2 with this tokenizer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=128,
            n_embd=64,
            n_layer=2,
            n_head=4,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        GPT2LMHeadModel(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def demonstrations(share: float, seed: int) -> list[dict[str, list[dict[str, str]]]]:
    """Return chats of the coordination game, in which the player answers C with probability ``share``, else A."""
    tasks, rng = CoordinationGame().tasks("train"), Random(seed)
    rows = []
    for index in range(EXAMPLES):
        answer = "C" if rng.random() < share else "A"
        question = tasks[index].data["question"]
        rows.append({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
    return rows


def teach(folder: Path, share: float, seed: int = 0) -> None:
    """Train a model that collaborates at this rate, and write it to ``folder``."""
    rows = demonstrations(share, seed)
    with tempfile.TemporaryDirectory() as scratch:
        start, data = Path(scratch) / "start", Path(scratch) / "demonstrations.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        make_model(start, make_tokenizer([row["messages"][0]["content"] for row in rows]), seed)
        algorithm = SFT({"main": Policy(str(start), learning_rate=3e-3)}, optimization=Optimization(schedule="cosine"))
        trainer = Trainer(
            accelerator="cpu",
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=scratch,
        )
        trainer.fit(algorithm, TrajectoryDataModule(str(data), batch_size=32, seed=seed))
        algorithm.policy("main").save_pretrained(folder)


def main() -> None:
    """Train the model with the command line's settings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/other-family"))
    parser.add_argument("--collaborates", type=float, default=0.5, help="rate of C among its answers")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    teach(arguments.output, arguments.collaborates, arguments.seed)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
