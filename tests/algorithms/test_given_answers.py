"""SimPO, ORPO and KTO: their losses by hand, learning, resuming, and the answers of KTO's baseline."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from mrlm_pl.algorithms import DPO, KTO, ORPO, CorrectnessModel, SimPO
from mrlm_pl.answers.records import Answer
from mrlm_pl.data import AnswerDataModule, PreferenceDataModule
from mrlm_pl.data.files.answers import labeled, unrelated
from mrlm_pl.episode import Trajectory
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.learner.batch import Batch, collate_rows
from mrlm_pl.losses import BatchTotals
from mrlm_pl.policy import Policy
from tests.support.runs.watching import Watch

PAIRS = [{"prompt": f"Add {n}+{n}:", "chosen": f"{2 * n} it is", "rejected": f"{3 * n + 1} or so"} for n in range(8)]
ANSWERS = [
    {"question": row["prompt"], "answer": row[side], "correct": side == "chosen"}
    for row in PAIRS
    for side in ("chosen", "rejected")
]


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def compared(algorithm: Any, sums: list[list[float]], **tensors: Any) -> tuple[float, dict[str, float]]:
    """Loss and log of rows of two sampled tokens with these log-probabilities, in an update of twice as many rows."""
    row = Trajectory("a", "main", (8, 9, 10), (False, True, True), (0.0, 0.0, 0.0), ())
    numbers = list(range(len(sums)))
    rows = collate_rows([row] * len(sums), numbers, numbers, numbers)
    for name, values in tensors.items():
        setattr(rows, name, torch.tensor(values))
    algorithm.policies["main"].forward = lambda _: torch.tensor([[0.0, *values] for values in sums])
    totals = BatchTotals(4.0 * len(sums), 2.0 * len(sums), 2.0 * len(sums))
    loss = algorithm.policy_loss("main", rows, Batch({"main": rows}, {"main": totals})).item()
    return loss, algorithm.metrics.take_update()


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_simpo_compares_the_means_of_the_tokens(model_folder: Path) -> None:
    algorithm = SimPO({"main": Policy(str(model_folder))}, beta=3.0, margin=0.6)
    loss, noted = compared(algorithm, [[-0.2, -0.6], [-1.0, -2.0]])  # means -0.4 and -1.5
    assert loss == pytest.approx(softplus(-(3.0 * 1.1 - 0.6)) / 2, rel=1e-6)
    assert noted["train/rewards_chosen"] == pytest.approx(-1.2)
    assert noted["train/rewards_rejected"] == pytest.approx(-4.5)
    assert noted["train/preference_accuracy"] == 1.0


def test_orpo_adds_the_odds_to_the_likelihood(model_folder: Path) -> None:
    algorithm = ORPO({"main": Policy(str(model_folder))}, odds_weight=0.5)
    loss, noted = compared(algorithm, [[-0.2, -0.6], [-1.0, -2.0]])
    odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in (-0.4, -1.5)]
    assert loss == pytest.approx((0.4 + 0.5 * math.log(1 + odds[1] / odds[0])) / 2, rel=1e-5)
    assert noted["train/reward_margin"] == pytest.approx(1.1)


@pytest.mark.parametrize(("others", "baseline"), [([-3.0, -5.0], 0.75), ([-6.0, -6.0], 0.0)])
def test_kto_compares_with_the_answers_to_other_questions(
    others: list[float], baseline: float, model_folder: Path
) -> None:
    # h = -2 - -4 = 2 for the right answer, -3 - -2 = -1 for the wrong one; z from -4 - -5.5 = 1.5 and 0, or below 0.
    policies = {"main": Policy(str(model_folder))}
    algorithm = KTO(policies, beta=0.2, desirable_weight=1.5, undesirable_weight=0.5)
    sums = [[-1.0, -1.0], [0.0, others[0]], [-1.0, -2.0], [0.0, others[1]]]
    references = [-4.0, -4.5, -2.0, -5.0]
    loss, noted = compared(algorithm, sums, reference_sums=references, correct=[1.0, 1.0, 0.0, 0.0])

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    right, wrong = 1 - sigmoid(0.2 * (2 - baseline)), 1 - sigmoid(0.2 * (baseline + 1))
    assert loss == pytest.approx((1.5 * right + 0.5 * wrong) / 4, rel=1e-5)
    assert noted["train/baseline_kl"] == pytest.approx(baseline)
    assert noted["train/reward_margin"] == pytest.approx(0.2 * ((2 - baseline) + (1 + baseline)) / 2)
    assert noted["train/preference_accuracy"] == 1.0


@pytest.mark.parametrize("cls", [SimPO, ORPO])
def test_pairs_are_learned_without_a_reference(
    cls: Any, model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    watch, source = Watch(), write(tmp_path, PAIRS)
    data = PreferenceDataModule(source, source, batch_size=8)
    trainer = quiet_trainer(max_epochs=12, limit_val_batches=1.0, check_val_every_n_epoch=12, callbacks=[watch])
    trainer.fit(cls({"main": Policy(str(model_folder), learning_rate=6e-3)}), data)
    assert not data.references
    assert watch.steps[-1]["train/preference_accuracy"] == 1.0
    assert watch.steps[-1]["train/loss"] < 0.7 * watch.steps[0]["train/loss"]
    assert trainer.callback_metrics["val/preference_accuracy"] == 1.0


@pytest.mark.parametrize("rows", [ANSWERS, PAIRS])
def test_kto_learns_from_labels_and_from_pairs(
    rows: list[dict[str, Any]], model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    watch = Watch()
    data = AnswerDataModule(write(tmp_path, rows), batch_size=16)
    trainer = quiet_trainer(max_epochs=12, callbacks=[watch])
    trainer.fit(KTO({"main": Policy(str(model_folder), learning_rate=1e-2)}, beta=0.5), data)
    assert watch.steps[0]["train/loss"] == pytest.approx(0.5, abs=1e-5), "the policy is the reference"
    assert watch.steps[0]["train/baseline_kl"] == pytest.approx(0.0, abs=1e-4)
    assert watch.steps[-1]["train/loss"] < 0.35
    assert watch.steps[-1]["train/preference_accuracy"] > 0.9


def side_by_side(rows: list[dict[str, Any]], folder: Path, model: Path, trainer: Any) -> list[tuple[str, str, float]]:
    """Return each answer's text in tokens, that of its question with another's answer, and its label."""
    data = AnswerDataModule(write(folder, rows), batch_size=len(rows))
    trainer.fit(KTO({"main": Policy(str(model))}), data)
    decode = data.learner()[1].tokenizer.decode
    return [
        (decode(answer.token_ids), decode(other.token_ids), example.correct)
        for example in data.examples["train"]
        for answer, other in [example.rows]
    ]


def test_kto_reads_single_answers_and_pairs_as_chats_or_as_text(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    def chat(role: str, text: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text}]

    asked = [[*chat("system", "Add."), *chat("user", f"{n}+1?"), *chat("assistant", "What?")] for n in (1, 2)]
    asked = [[*messages, *chat("user", "Say.")] for messages in asked]
    prompts = [
        f"<|system|>Add.<|end|><|user|>{n}+1?<|end|><|assistant|>What?<|end|><|user|>Say.<|end|>" for n in (1, 2)
    ]
    single = [
        {"prompt": p, "completion": chat("assistant", a), "label": a == "2"} for p, a in zip(asked, "23", strict=True)
    ]
    pair = [{"prompt": p, "chosen": chat("assistant", "a"), "rejected": chat("assistant", "b")} for p in asked]
    plain = [{"prompt": f"{n}+1=", "completion": str(n + 1), "label": n == 1} for n in (1, 2)]
    plain_pair = [{"prompt": f"{n}+1=", "chosen": str(n), "rejected": str(n + 5)} for n in (1, 2)]
    said = [
        (f"{prompts[n]}<|assistant|>{a}<|end|>", f"{prompts[n]}<|assistant|>{b}<|end|>")
        for n, a, b in ((0, 2, 3), (1, 3, 2))
    ]
    assert side_by_side(single, tmp_path, model_folder, quiet_trainer()) == [(*said[0], 1.0), (*said[1], 0.0)]
    assert side_by_side(plain, tmp_path, model_folder, quiet_trainer()) == [
        ("1+1=2<|end|>", "1+1=3<|end|>", 1.0),
        ("2+1=3<|end|>", "2+1=2<|end|>", 0.0),
    ]
    answers = [(answer, label) for answer, _, label in side_by_side(pair, tmp_path, model_folder, quiet_trainer())]
    assert answers == [(f"{p}<|assistant|>{a}<|end|>", float(a == "a")) for p in prompts for a in "ab"]
    answers = [
        (answer, label) for answer, _, label in side_by_side(plain_pair, tmp_path, model_folder, quiet_trainer())
    ]
    assert answers == [(f"{n}+1={a}<|end|>", float(a == n)) for n in (1, 2) for a in (n, n + 5)]
    for rejected in ([None], [[[]]], ["x"], 3):
        with pytest.raises(DataError, match=r"rows\.jsonl, row 1: .*; a row is \{question, answer, correct\}"):
            AnswerDataModule(write(tmp_path, [{"prompt": "2 + 2?", "chosen": "4", "rejected": rejected}]))
    for label in ("true", None, 2):
        with pytest.raises(DataError, match=rf"row 1: 'label' is {label!r}; it must be true or false"):
            AnswerDataModule(write(tmp_path, [{**plain[0], "label": label}]))


def test_the_baseline_of_kto_has_answers_to_other_questions(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    answer, other, _ = side_by_side(ANSWERS, tmp_path, model_folder, quiet_trainer())[0]
    assert answer == "<|user|>Add 0+0:<|end|><|assistant|>0 it is<|end|>"
    prompt, _, said = other.partition("<|assistant|>")
    assert prompt == "<|user|>Add 0+0:<|end|>"
    asked = {row["answer"]: row["question"] for row in ANSWERS}
    assert asked[said.removesuffix("<|end|>")] != "Add 0+0:"


@pytest.mark.long
def test_kto_continues_bit_for_bit(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    source = write(tmp_path, ANSWERS)

    def fit(ckpt: Any = None, rows: str = source, **options: Any) -> KTO:
        algorithm = KTO({"main": Policy(str(model_folder), learning_rate=3e-3)})
        quiet_trainer(max_epochs=2, **options).fit(algorithm, AnswerDataModule(rows, batch_size=4), ckpt_path=ckpt)
        return algorithm

    whole = fit()
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    fit(enable_checkpointing=True, callbacks=[saver])
    again = fit(ckpt=tmp_path / "step=3.ckpt")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigurationError, match=r"data\.train: .* differs from the examples the run started with"):
        fit(ckpt=tmp_path / "step=3.ckpt", rows=write(tmp_path / "other", ANSWERS[2:]))


@pytest.mark.parametrize("learner", [KTO, CorrectnessModel])
def test_a_run_is_not_resumed_with_other_labels(
    learner: type, model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "one.ckpt"
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(learner({"main": Policy(str(model_folder))}), AnswerDataModule(write(tmp_path, ANSWERS), batch_size=4))
    trainer.save_checkpoint(checkpoint)
    for rows in (ANSWERS, [{**ANSWERS[0], "correct": 0.75}, *ANSWERS[1:]]):
        again = learner({"main": Policy(str(model_folder))}), AnswerDataModule(write(tmp_path, rows), batch_size=4)
        refused = pytest.raises(ConfigurationError, match=r"rows.jsonl' differs from the examples the run started with")
        with nullcontext() if rows == ANSWERS else refused:
            quiet_trainer(max_steps=2).fit(*again, ckpt_path=checkpoint)


def test_every_question_meets_an_answer_to_another_one() -> None:
    answers = [labeled(Answer(question, f"{question}{n}", 1.0)) for question in "aab" for n in range(3)]
    found = unrelated(answers, 0, "f")
    assert found.keys() == set(answers)
    assert all(answer.question != other.question for answer, other in found.items())
    assert found == unrelated(answers, 0, "f")
    assert found != unrelated(answers, 1, "f")
    with pytest.raises(DataError, match="f: all answers are to the question 'a'; KTO estimates its baseline"):
        unrelated(answers[:3], 0, "f")


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (SimPO, {"beta": 0.0}, r"beta is 0\.0"),
        (SimPO, {"margin": -1.0}, r"margin is -1\.0"),
        (ORPO, {"odds_weight": 0.0}, r"odds_weight is 0\.0"),
        (KTO, {"beta": math.nan}, "beta is nan"),
        (KTO, {"undesirable_weight": -1.0}, r"undesirable_weight is -1\.0"),
        (
            KTO,
            {"desirable_weight": 0.0, "undesirable_weight": 0.0},
            "desirable_weight, undesirable_weight are 0",
        ),
    ],
)
def test_bad_settings_are_refused(cls: Any, options: dict[str, Any], message: str, model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        cls({"main": Policy(str(model_folder))}, **options)


@pytest.mark.parametrize("cls", [DPO, SimPO, ORPO, KTO, CorrectnessModel])
def test_several_policies_are_refused(cls: Any, model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"{cls.__name__} trains one policy; `policies` has \['a', 'b'\]"):
        cls({name: Policy(str(model_folder)) for name in "ab"})


def test_kto_and_pairs_name_the_data_module(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    data = PreferenceDataModule(write(tmp_path, PAIRS))
    with pytest.raises(ConfigurationError, match=r"not for KTO; give that one `--data .*AnswerDataModule"):
        quiet_trainer().fit(KTO({"main": Policy(str(model_folder))}), data)
