"""The verifier of answers: its loss, its measures, the probe that knows the question alone, and its export."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from mrlm_pl.algorithms import SFT, CorrectnessModel
from mrlm_pl.algorithms.correctness_model import AnswerMeasures
from mrlm_pl.answers.records import Answer
from mrlm_pl.data import AnswerDataModule
from mrlm_pl.episode import Message
from mrlm_pl.errors import ConfigurationError, DataError, NonFiniteError
from mrlm_pl.losses import last_token_mask
from mrlm_pl.policy import LoRA, Policy
from mrlm_pl.reward_models import RewardModel
from tests.support.runs.watching import Watch


def write(folder: Path, rows: list[dict[str, Any]], name: str = "answers.jsonl") -> str:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(question: str, answer: str, correct: Any) -> dict[str, Any]:
    return {"question": question, "answer": answer, "correct": correct}


ROWS = [row(f"{n}+{n}?", f"{n + n + wrong}", not wrong) for n in range(8) for wrong in (0, 1)]


class Validations(Watch):
    """Keeps the metrics of each validation as well."""

    def __init__(self) -> None:
        super().__init__()
        self.validations: list[dict[str, float]] = []

    def on_validation_end(self, trainer: Any, algorithm: Any) -> None:
        self.validations.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def model(folder: Path, *, learning_rate: float = 3e-3, lora: LoRA | None = None, **options: Any) -> CorrectnessModel:
    return CorrectnessModel({"main": Policy(str(folder), learning_rate=learning_rate, lora=lora)}, **options)


def with_a_head(algorithm: CorrectnessModel) -> CorrectnessModel:
    """A head and a probe that say something; they begin at 0."""
    algorithm.read_weights()
    head, probe = algorithm.policy("main").value_head, algorithm.question_probe
    assert head is not None
    assert probe is not None
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for linear in (head.linear, probe.linear):
            linear.weight.copy_(0.3 * torch.randn(linear.weight.shape, generator=generator))
            linear.bias.fill_(0.1)
    return algorithm


def answer_values(algorithm: CorrectnessModel, question: str, answer: str) -> torch.Tensor:
    """Values after the prompt and after each character of the answer, from the transformers model itself."""
    policy = algorithm.policy("main")
    assert policy.value_head is not None
    text = f"<|user|>{question}<|end|><|assistant|>{answer}<|end|>"
    ids = torch.tensor([policy.tokenizer.encode(text)])
    policy.model.eval()
    hidden = policy.model(ids, output_hidden_states=True).hidden_states[-1][0]
    return policy.value_head(hidden)[-len(answer) - 2 : -1]


@pytest.mark.parametrize("score_tokens", ["last", "response"])
def test_loss_and_gradient_are_those_of_the_values_at_the_answer(
    score_tokens: str, model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    rows = [row("2+2?", "4", True), row("2+2?", "about 5", False), row("3+3?", "no idea", 0.25), row("1?", "", 0)]
    algorithm = with_a_head(model(model_folder, learning_rate=0.0, score_tokens=score_tokens))  # type: ignore[arg-type]
    seen = Validations()
    quiet_trainer(callbacks=[seen]).fit(algorithm, AnswerDataModule(write(tmp_path, rows), batch_size=4))
    algorithm.zero_grad()
    losses = []
    for given in rows:
        values = answer_values(algorithm, given["question"], given["answer"])
        # After each token of the answer; an empty one is judged after the prompt.
        chosen = values[-1:] if score_tokens == "last" or len(values) == 1 else values[1:]
        right = float(given["correct"])
        terms = [-right * torch.sigmoid(v).log() - (1 - right) * torch.sigmoid(-v).log() for v in chosen]
        losses.append(torch.stack(terms).mean())
    expected = torch.stack(losses).mean()
    expected.backward()
    assert seen.steps[0]["train/loss"] == pytest.approx(expected.item(), rel=1e-5)
    compared = 0
    for name, weight in algorithm.policies.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(seen.gradients[f"policies.{name}"], weight.grad, rtol=1e-3, atol=1e-6)
            compared += 1
    assert compared > 20


def test_it_has_no_networks_before_its_weights_are_read(model_folder: Path) -> None:
    algorithm = CorrectnessModel({"main": Policy(str(model_folder))})
    assert algorithm.networks() == []
    algorithm.read_weights()
    assert len(algorithm.networks()) == 3


def test_the_probe_learns_from_the_state_before_the_answer(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    rows = [row("2+2?", "4", True), row("9-3?", "about 5", False)]
    algorithm = with_a_head(model(model_folder, learning_rate=0.0))
    seen = Validations()
    quiet_trainer(callbacks=[seen]).fit(algorithm, AnswerDataModule(write(tmp_path, rows), batch_size=4))
    policy, probe = algorithm.policy("main"), algorithm.question_probe
    assert probe is not None
    gradient, loss = torch.zeros_like(probe.linear.weight), 0.0
    for given in rows:
        ids = torch.tensor([policy.tokenizer.encode(f"<|user|>{given['question']}<|end|><|assistant|>")])
        state = policy.model(ids, output_hidden_states=True).hidden_states[-1][0, -1]
        guess = torch.sigmoid(probe.linear(state))
        gradient += ((guess - float(given["correct"])) * state).detach() / 2
        loss -= math.log(float(guess if given["correct"] else 1 - guess)) / 2
    torch.testing.assert_close(seen.gradients["question_probe.linear.weight"], gradient, rtol=1e-4, atol=1e-6)
    assert seen.steps[0]["train/question_only_loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.long
def test_it_learns_and_begins_at_chance(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    seen = Validations()
    data = AnswerDataModule(write(tmp_path, ROWS), batch_size=16)
    quiet_trainer(max_epochs=60, callbacks=[seen]).fit(model(model_folder, learning_rate=1e-2), data)
    assert seen.steps[0]["train/loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert seen.steps[-1]["train/accuracy"] == 1.0
    assert seen.steps[-1]["train/loss"] < 0.2
    assert seen.steps[-1]["train/question_only_loss"] > 0.6, "each question has a right and a wrong answer"


def unbalanced(first: int, count: int) -> list[dict[str, Any]]:
    """Questions of two kinds: of one three in four answers are right, of the other one in four."""
    return [
        row(f"{kind} {n}?", f"{n}{place}", (place == 0) == (kind == "hard"))
        for n in range(first, first + count)
        for kind in ("easy", "hard")
        for place in range(4)
    ]


@pytest.mark.long
def test_the_probe_stays_at_chance_on_balanced_and_rises_on_unbalanced_answers(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    found = []
    balanced = [
        row(f"{kind} {n}?", f"{n}{place}", place % 2 == 0)
        for n in range(12)
        for kind in ("easy", "hard")
        for place in range(4)
    ]
    for train, held_out in ((balanced[:64], balanced[64:]), (unbalanced(0, 8), unbalanced(8, 4))):
        seen = Validations()
        files = [write(tmp_path, rows, f"{n}.jsonl") for n, rows in enumerate((train, held_out))]
        data = AnswerDataModule(*files, batch_size=32)
        trainer = quiet_trainer(max_epochs=12, limit_val_batches=1.0, check_val_every_n_epoch=12, callbacks=[seen])
        trainer.fit(model(model_folder, learning_rate=0.0, value_learning_rate=0.1), data)
        found.append(seen.validations[-1])
    # Each question's guess is the guess of equally many right and wrong answers: exactly one half.
    assert found[0]["val/question_only_auc"] == pytest.approx(0.5, abs=1e-6)
    # Three in four of one kind, one in four of the other: 0.75 for a probe that tells the kinds apart.
    assert found[1]["val/question_only_auc"] == pytest.approx(0.75, abs=0.01)
    assert found[0]["train/question_only_loss"] > 0.65
    assert found[1]["train/question_only_loss"] < 0.62  # 0.5623 for the shares 0.75 and 0.25


def test_the_probes_guess_depends_on_the_question_alone(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    rows = [row("2+2?", "4", True), row("2+2?", "it is 5, as everybody knows", False), row("3?", "3", True)]
    algorithm = with_a_head(model(model_folder, learning_rate=0.0))
    data = AnswerDataModule(write(tmp_path, rows))
    quiet_trainer(limit_train_batches=0).fit(algorithm, data)
    (first, second, third), losses = (
        algorithm._question_losses("main", data.collate("train", [0, 1, 2])["main"])[part] for part in (1, 0)
    )
    assert float(first) == pytest.approx(float(second), abs=1e-6)
    assert abs(float(first) - float(third)) > 1e-3
    assert losses.requires_grad


def test_measures_are_those_of_arithmetic() -> None:
    measures = AnswerMeasures()
    chances, labels = torch.tensor([0.9, 0.4, 0.6, 0.1]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    guesses = torch.tensor([2.0, -1.0, 2.0 + 1e-5, -1.0])
    for part in (slice(0, 3), slice(3, 4), slice(4, 4)):  # batches of 3, 1 and none
        measures.add(torch.logit(chances)[part], guesses[part], labels[part])
    measures.add(torch.tensor([5.0]), torch.tensor([9.0]), torch.tensor([0.5]))  # neither right nor wrong
    found = measures.take()
    assert found["auc"] == pytest.approx(3 / 4)  # of 4 pairs, 0.4 against 0.6 is lost
    assert found["question_only_auc"] == pytest.approx(1 / 2)  # a win, a loss and two ties
    assert found["accuracy"] == pytest.approx(2 / 4)
    # |1 - 0.9|, |1 - 0.4|, |0 - 0.6| and |0 - 0.1|, each in its own bin, a quarter each
    assert found["calibration_error"] == pytest.approx((0.1 + 0.6 + 0.6 + 0.1) / 4, abs=1e-5)
    measures.add(torch.tensor([1.0, -1.0]), torch.zeros(2), torch.ones(2))
    again = measures.take()
    assert math.isnan(again["auc"])
    assert math.isnan(again["question_only_auc"])
    assert again["accuracy"] == pytest.approx(1 / 2), "the counts were reset"
    assert all(math.isnan(value) for value in measures.take().values())


def test_validation_logs_what_the_scores_say(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    algorithm = with_a_head(model(model_folder, learning_rate=0.0))
    source = write(tmp_path, ROWS)
    (numbers,) = quiet_trainer().test(algorithm, AnswerDataModule(source, test=source, batch_size=3))
    scores = [(float(answer_values(algorithm, r["question"], r["answer"])[-1]), r["correct"]) for r in ROWS]
    right, wrong = ([score for score, correct in scores if correct == kind] for kind in (True, False))
    wins = sum((a > b) + 0.5 * (a == b) for a in right for b in wrong)
    assert numbers["test/auc"] == pytest.approx(wins / (len(right) * len(wrong)), abs=1e-5)
    assert numbers["test/accuracy"] == pytest.approx(sum((s > 0) == c for s, c in scores) / len(scores))
    loss = sum(math.log1p(math.exp(-s if c else s)) for s, c in scores) / len(scores)
    assert numbers["test/loss"] == pytest.approx(loss, rel=1e-4)


def test_a_batch_of_one_kind_has_no_curve(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    rows = sorted(ROWS, key=lambda given: given["correct"])
    source, seen = write(tmp_path, rows), Validations()
    data = AnswerDataModule(source, source, batch_size=4)
    quiet_trainer(limit_val_batches=1, callbacks=[seen]).fit(model(model_folder), data)
    assert math.isnan(seen.validations[-1]["val/auc"])
    assert math.isnan(seen.validations[-1]["val/question_only_auc"])
    assert 0 <= seen.validations[-1]["val/accuracy"] <= 1


@pytest.mark.parametrize("lora", [None, LoRA(rank=2)])
def test_the_exported_folder_gives_the_scores_of_the_module(
    lora: LoRA | None, model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    data = AnswerDataModule(write(tmp_path, ROWS), batch_size=4)
    trainer = quiet_trainer(max_epochs=3)
    algorithm = model(model_folder, lora=lora, learning_rate=1e-2)
    trainer.fit(algorithm, data)
    rows = data.collate("train", range(len(ROWS)))["main"]
    with torch.no_grad():
        own = algorithm.critic.scores("main", rows, last_token_mask, 0)[last_token_mask(rows.action_mask)].tolist()
    assert max(own) - min(own) > 0.01
    exported = RewardModel(str(Path(trainer.default_root_dir) / "policies" / "main"))
    for given, score in zip(ROWS, own, strict=True):
        messages = (Message("user", given["question"]), Message("assistant", given["answer"]))
        assert exported.score(messages).value == pytest.approx(score, abs=1e-5)


@pytest.mark.long
def test_a_run_goes_on_bit_for_bit(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    source = write(tmp_path, ROWS)

    def fit(ckpt: Any = None, **options: Any) -> CorrectnessModel:
        algorithm = model(model_folder, optimization={"schedule": "cosine"})
        trainer = quiet_trainer(max_epochs=2, limit_val_batches=1.0, **options)
        trainer.fit(algorithm, AnswerDataModule(source, source, batch_size=4), ckpt_path=ckpt)
        return algorithm

    whole = fit()
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    fit(enable_checkpointing=True, callbacks=[saver])
    again = fit(tmp_path / "step=3.ckpt").state_dict()
    assert "question_probe.linear.weight" in again
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, again[name]), name


def test_accumulation_does_not_change_the_gradient(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    found = []
    for size, pieces in ((16, 1), (4, 4)):
        seen = Validations()
        algorithm = with_a_head(model(model_folder))
        trainer = quiet_trainer(accumulate_grad_batches=pieces, callbacks=[seen])
        trainer.fit(algorithm, AnswerDataModule(write(tmp_path, ROWS), batch_size=size))
        found.append(seen.gradients)
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_answers_of_one_kind_are_refused(tmp_path: Path) -> None:
    good = write(tmp_path, ROWS)
    for label, told in ((True, "3 of 3 answers are right and 0 wrong"), (0.5, "0 of 3 answers are right and 0 wrong")):
        source = write(tmp_path, [row("a?", str(n), label) for n in range(3)], "one.jsonl")
        for files in ((source,), (good, source)):
            with pytest.raises(DataError, match=rf"one\.jsonl: {told}; both are needed"):
                AnswerDataModule(*files)


def test_long_answers_are_left_out_and_none_may_be_left(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path, caplog: Any
) -> None:
    data = AnswerDataModule(write(tmp_path, [*ROWS, row("a?", "b" * 50, True)]), max_tokens=20)
    quiet_trainer().fit(model(model_folder), data)
    assert data.count("train") == len(ROWS)
    assert "left out 1 of 17 examples" in caplog.text
    with pytest.raises(DataError, match=r"no answer of .* fits into 3 tokens"):
        quiet_trainer().fit(model(model_folder), AnswerDataModule(write(tmp_path, ROWS), max_tokens=3))


def test_questions_in_both_files_are_a_warning(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path, caplog: Any
) -> None:
    source = write(tmp_path, ROWS)
    other = write(tmp_path, [row("other?", "1", True), row("other?", "2", False)], "other.jsonl")
    quiet_trainer().fit(model(model_folder), AnswerDataModule(source, other))
    assert "training question" not in caplog.text
    algorithm, data = model(model_folder), AnswerDataModule(source, write(tmp_path, ROWS[:4], "same.jsonl"))
    quiet_trainer().fit(algorithm, data)
    quiet_trainer().validate(algorithm, data)
    assert caplog.text.count("2 training questions in") == 1, "one warning for all stages"


def test_wrong_arguments_are_refused(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="score_tokens is 'first'; choose from last, response"):
        model(model_folder, score_tokens="first")  # type: ignore[arg-type]
    policies = {name: Policy(str(model_folder)) for name in "ab"}
    with pytest.raises(ConfigurationError, match="CorrectnessModel trains one policy"):
        CorrectnessModel(policies)
    data = AnswerDataModule(write(tmp_path, ROWS))
    with pytest.raises(ConfigurationError, match="AnswerDataModule is for CorrectnessModel and KTO, not for SFT"):
        quiet_trainer().fit(SFT({"main": Policy(str(model_folder))}), data)


def test_scores_that_are_not_finite_end_an_evaluation(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    algorithm = with_a_head(model(model_folder))
    head = algorithm.policy("main").value_head
    assert head is not None
    with torch.no_grad():
        head.linear.bias.fill_(math.nan)
    source = write(tmp_path, ROWS)
    with pytest.raises(NonFiniteError, match="16 of 16 losses are not finite: scores, or labels outside"):
        quiet_trainer().test(algorithm, AnswerDataModule(source, test=source))


def test_labels_of_a_data_module_outside_0_and_1_end_training_and_evaluation(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    class Doubled(AnswerDataModule):
        def read(self, source: str, split: str) -> list[Answer]:
            return [replace(answer, correct=2 * answer.correct) for answer in super().read(source, split)]

    source = write(tmp_path, ROWS)
    with pytest.raises(NonFiniteError, match="8 of 16 losses are not finite: scores, or labels outside"):
        quiet_trainer().test(with_a_head(model(model_folder)), Doubled(source, test=source, batch_size=16))
    with pytest.raises(NonFiniteError, match="the loss is nan"):
        quiet_trainer().fit(model(model_folder), Doubled(source, batch_size=16))
