"""On-policy distillation: its numbers against plain transformers, its reprompts, fits, a resume and its errors."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from mrlm_pl.algorithms import ATGRPO, C3, COMA, GRPO, IPPO, OnPolicyDistillation, Shapley, TreeGRPO
from mrlm_pl.data import RolloutDataModule
from mrlm_pl.engines import Sampling
from mrlm_pl.episode import Episode, Message, Origin, Task, Trajectory, Turn
from mrlm_pl.errors import ConfigurationError
from mrlm_pl.learner.batch import Batch
from mrlm_pl.learner.contract import RolloutFacts
from mrlm_pl.learner.policies.distillation import Distillation, Teacher
from mrlm_pl.learner.policies.reprompts import REPROMPTS, Attempt
from mrlm_pl.losses import batch_totals
from mrlm_pl.policy import LoRA, Policy

SEATS = {"solver": "student"}


def policies(folder: Path, **teacher: Any) -> dict[str, Policy]:
    other = {"random_init_seed": 3, "trained": False, **teacher}
    return {"student": Policy(str(folder), learning_rate=1e-2), "teacher": Policy(str(folder), **other)}


def episode(policy: Policy, number: int, said: Mapping[str, Sequence[str]], success: bool | None = None) -> Episode:
    """Return an episode with these turns of each agent, after the question and after each reply ``Why?``."""
    rows = {}
    for agent, replies in said.items():
        messages, ids, mask, turns = [Message("user", f"Ask {agent}")], list[int](), list[bool](), list[Turn]()
        for reply in replies:
            prompt = policy.chat.encode(policy.chat.render(messages, generation_prompt=True))
            prompt, sampled = prompt[len(ids) :], [*policy.chat.encode(reply), policy.chat.end_id]
            prompt = prompt[1:] if ids and prompt[0] == ids[-1] else prompt
            start = len(ids) + len(prompt)
            turns.append(Turn(agent, len(turns), start, start + len(sampled), 0.0, {}, "stop", "student", 0, "e"))
            ids, mask = [*ids, *prompt, *sampled], [*mask, *[False] * len(prompt), *[True] * len(sampled)]
            messages += [Message("assistant", reply), Message("user", "Why?")]
        parts = (tuple(ids), tuple(mask), tuple(-1.0 * one for one in mask), tuple(turns), tuple(messages[:-1]))
        rows[agent] = (Trajectory(agent, "student", *parts),)
    task = Task("t", "train", 0, data={"answer": "42"})
    return Episode(str(number), task, "g", 0, 0, rows, "end", success=success)


def whole_logps(policy: Policy, prompt: Sequence[int], answer: Sequence[int]) -> Tensor:
    """Return the log-probabilities [t, V] before each token of an answer, from the model's own logits."""
    ids = torch.tensor([[*prompt, *answer]])
    return policy.model.eval()(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)


def prepared(algorithm: Any, episodes: list[Episode], trainer: Any) -> Any:
    agents = {agent for episode in episodes for agent in episode.trajectories}
    algorithm.configure_model()
    algorithm.trainer = trainer
    algorithm.check_rollouts(RolloutFacts(agents, ["t"]))
    with torch.no_grad():
        return algorithm.prepare(episodes, Sampling(max_tokens=8))["student"]


def test_the_advantage_of_a_sampled_token_is_the_gap_to_the_teachers(model_folder: Path, quiet_trainer: Any) -> None:
    teachers = [{"policy": "teacher", "weight": 0.5}, {"policy": "teacher", "reprompt": "demonstration"}]
    algorithm = OnPolicyDistillation(
        policies(model_folder), SEATS, distillation={"teachers": teachers, "coefficient": 2.0}
    )
    student, teacher = algorithm.policy("student"), algorithm.policy("teacher")
    played = episode(student, 0, {"solver": ["12", "9"]})
    rows = prepared(algorithm, [played], quiet_trainer())
    (row,) = played.trajectories["solver"]
    hinted = [Message("user", "Ask solver\n\nA correct answer: 42")]
    prompt = teacher.chat.encode(teacher.chat.render(hinted, generation_prompt=True))
    start, want = row.turns[0].start, torch.zeros(len(row.token_ids))
    rest = row.token_ids[start:]
    for weight, before in ((0.5, row.token_ids[:start]), (1.0, prompt)):
        found = whole_logps(teacher, before, rest).gather(-1, torch.tensor(rest)[:, None]).squeeze(-1)
        want[start:] += 2.0 * weight * (found - -1.0)  # the sampler's log-probabilities are -1
    want *= torch.tensor(row.action_mask)
    torch.testing.assert_close(rows.advantages[0], want, rtol=0, atol=1e-4)
    assert rows.teacher_prompts is None
    assert algorithm.metrics.rollout["train/student/taught_rows"] == 1.0


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("form", ["full", "top_k"])
def test_the_loss_has_the_gradient_of_the_whole_divergence(
    form: str, beside: bool, model_folder: Path, quiet_trainer: Any
) -> None:
    teachers = [
        {"policy": "teacher", "weight": 0.5},
        {"policy": "teacher", "reprompt": "majority", "agents": ["solver"]},
    ]
    settings: Any = {"teachers": teachers, "form": form, "beta": 0.0, "coefficient": 3.0, "top_k": 10_000}
    seats = {"solver": "student", "other": "student"}
    made: Any = GRPO if beside else OnPolicyDistillation
    algorithm = made(policies(model_folder), seats, distillation=settings)
    student, teacher = algorithm.policy("student"), algorithm.policy("teacher")
    episodes = [episode(student, number, {"solver": ["12"], "other": [text]}) for number, text in enumerate(("7", "7"))]
    rows = prepared(algorithm, episodes, quiet_trainer())
    batch = Batch({"student": rows}, {"student": batch_totals(rows.action_mask)})
    loss = algorithm.policy_loss("student", rows, batch)
    weight = student.model.model.layers[0].mlp.up_proj.weight
    (found,) = torch.autograd.grad(loss, weight)

    hinted = [Message("user", "Ask solver\n\nThe team's answer: 7")]
    total, count = torch.zeros(()), 0
    for row in (row for one in episodes for row in one.rows()):
        start = row.turns[0].start
        answer = row.token_ids[start:]
        own = whole_logps(student, row.token_ids[:start], answer)
        views = [(0.5, row.token_ids[:start])]
        if row.agent == "solver":
            views.append((1.0, student.chat.encode(student.chat.render(hinted, generation_prompt=True))))
        for factor, prompt in views:
            with torch.no_grad():
                of_teacher = whole_logps(teacher, prompt, answer)
            total = total + 3.0 * factor * F.kl_div(own, of_teacher, log_target=True, reduction="sum")
        count += len(answer)
    torch.testing.assert_close(loss.detach(), (total / count).detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, torch.autograd.grad(total / count, weight)[0], rtol=1e-3, atol=1e-5)
    metrics = algorithm.metrics.take_update()
    assert 0 < metrics["train/student/teacher_agreement"] < 1


@pytest.mark.parametrize("form", ["sampled", "full"])
def test_teachers_score_the_tokens_with_the_highest_entropy(form: str, model_folder: Path, quiet_trainer: Any) -> None:
    settings: Any = {"teachers": [{"policy": "teacher"}], "form": form}
    algorithm = OnPolicyDistillation(policies(model_folder), SEATS, distillation=settings, top_entropy=0.25)
    student, teacher = algorithm.policy("student"), algorithm.policy("teacher")
    played = episode(student, 0, {"solver": ["7 and 12"]})
    rows = prepared(algorithm, [played], quiet_trainer())
    (row,) = played.trajectories["solver"]
    start = row.turns[0].start
    with torch.no_grad():
        own, other = (whole_logps(one, row.token_ids[:start], row.token_ids[start:]) for one in (student, teacher))
    entropy = -(own.exp() * own).sum(-1)
    kept = entropy >= entropy.quantile(0.75)
    if form == "sampled":
        assert (rows.advantages[0, start:] != 0).tolist() == kept.tolist()
        return
    batch = Batch({"student": rows}, {"student": batch_totals(rows.action_mask)})
    divergences = (own.exp() * (own - other)).sum(-1)
    loss = algorithm.policy_loss("student", rows, batch)
    torch.testing.assert_close(loss.item(), (divergences * kept).mean().item(), rtol=1e-4, atol=1e-5)


def test_reprompts_hold_what_was_known_once_the_group_had_been_played(model_folder: Path) -> None:
    policy = Policy(str(model_folder))
    own = episode(policy, 0, {"solver": ["no", "still no"], "other": ["x", "7"]})
    right = episode(policy, 1, {"solver": ["yes"], "other": ["7"]}, success=True)
    wrong = episode(policy, 2, {"solver": ["bad"], "other": ["8"]}, success=False)
    attempt = Attempt(own, own.trajectories["solver"][0], [wrong, right])
    hints = {name: reprompt(attempt) for name, reprompt in REPROMPTS.items()}
    assert {name: message[-1].content for name, message in hints.items() if message} == {
        "sibling": "Ask solver\n\nA correct answer: yes",
        "demonstration": "Ask solver\n\nA correct answer: 42",
        "feedback": "Ask solver\n\nFeedback on an earlier attempt: Why?",
        "team": "Ask solver\n\nother: 7",
        "majority": "Ask solver\n\nThe team's answer: 7",
    }
    alone = Attempt(right, right.trajectories["solver"][0], [wrong])
    assert REPROMPTS["sibling"](alone) is None
    assert REPROMPTS["feedback"](alone) is None


def test_a_teacher_may_read_the_conversation_of_a_partner(model_folder: Path, quiet_trainer: Any) -> None:
    seats = {"solver": "student", "leader": "teacher"}
    made = policies(model_folder)
    played = episode(made["student"], 0, {"solver": ["12"], "leader": ["a", "b"]})
    algorithm = OnPolicyDistillation(made, seats, distillation={"teachers": [{"partner": "leader"}], "form": "full"})
    rows = prepared(algorithm, [played], quiet_trainer())
    (leader,) = played.trajectories["leader"]
    prompt = leader.token_ids[: leader.turns[1].start]
    assert rows.teacher_prompts[0].tolist()[0][: 1 + len(prompt)] == [len(prompt), *prompt]
    assert rows.teacher_prompts[1, 0, 0] == -1, "the partner does not teach itself"
    idle = replace(leader, turns=(), action_mask=(False,) * len(leader.token_ids))
    begun = replace(played, trajectories={**played.trajectories, "leader": (leader, idle)})
    again = prepared(algorithm, [begun], quiet_trainer())
    assert torch.equal(again.teacher_prompts[0], rows.teacher_prompts[0]), "its last row has no turn yet"


def hints(algorithm: Any, rows: Any) -> list[str]:
    """Return the text of the first teacher's prompt of each row."""
    lengths = rows.teacher_prompts[:, 0, 0].tolist()
    chat = algorithm.policy("student").chat
    return [
        chat.decode(prompt[1 : 1 + max(length, 0)].tolist())
        for prompt, length in zip(rows.teacher_prompts[:, 0], lengths, strict=True)
    ]


def test_rows_with_equal_tokens_are_taught_by_their_own_episodes(model_folder: Path, quiet_trainer: Any) -> None:
    settings: Any = {"teachers": [{"reprompt": "feedback"}], "form": "full"}
    algorithm = OnPolicyDistillation({"student": Policy(str(model_folder))}, SEATS, distillation=settings)
    student = algorithm.policy("student")
    episodes = [episode(student, 0, {"solver": ["7", "8"]}), episode(student, 1, {"solver": ["7"]})]
    first, second = hints(algorithm, prepared(algorithm, episodes, quiet_trainer()))
    assert "Why?" in first
    assert not second, "an episode without feedback was taught with that of another"


def test_a_frozen_agent_with_the_same_answer_takes_no_teacher_from_the_student(
    model_folder: Path, quiet_trainer: Any
) -> None:
    settings: Any = {"teachers": [{"policy": "teacher", "agents": ["solver"]}], "form": "full"}
    algorithm = OnPolicyDistillation(
        policies(model_folder), {"solver": "student", "judge": "teacher"}, distillation=settings
    )
    played = episode(algorithm.policy("student"), 0, {"solver": ["7"]})
    (row,) = played.trajectories["solver"]
    judge = replace(row, agent="judge", policy="teacher", turns=(replace(row.turns[0], agent="judge"),))
    played = replace(played, trajectories={"judge": (judge,), "solver": (row,)})
    rows = prepared(algorithm, [played], quiet_trainer())
    assert rows.teacher_prompts[:, 0, 0].tolist() == [0]


def test_a_row_longer_than_the_window_of_a_teacher_has_none(model_folder: Path, quiet_trainer: Any) -> None:
    made = policies(model_folder)
    short, long = (
        episode(made["student"], number, {"solver": [said]}) for number, said in enumerate(("7", "7 and 8 and 9"))
    )
    algorithm = OnPolicyDistillation(made, SEATS, distillation={"teachers": [{"policy": "teacher"}], "form": "full"})
    made["teacher"].context_window = len(short.trajectories["solver"][0].token_ids)
    rows = prepared(algorithm, [short, long], quiet_trainer())
    assert rows.teacher_prompts[:, 0, 0].tolist() == [0, -1]


def test_a_branch_of_an_episode_is_no_sibling(model_folder: Path, quiet_trainer: Any) -> None:
    settings: Any = {"teachers": [{"reprompt": "sibling"}], "form": "full"}
    algorithm = OnPolicyDistillation({"student": Policy(str(model_folder))}, SEATS, distillation=settings)
    student = algorithm.policy("student")
    played = episode(student, 0, {"solver": ["7"]}, success=False)
    branch = replace(episode(student, 1, {"solver": ["7"]}, success=True), origin=Origin("0", ("other",), 0))
    right = episode(student, 2, {"solver": ["9"]}, success=True)
    found = hints(algorithm, prepared(algorithm, [played, branch, right], quiet_trainer()))
    assert ["answer: 9" in hint for hint in found] == [True, True, False]


@pytest.mark.parametrize(
    "made",
    [
        lambda *given, **settings: IPPO(*given, reward="team", **settings),
        ATGRPO,
        Shapley,
        TreeGRPO,
        C3,
    ],
    ids=["IPPO", "ATGRPO", "Shapley", "TreeGRPO", "C3"],
)
def test_rows_of_every_credit_find_their_episode(made: Any, model_folder: Path, quiet_trainer: Any, echo: Any) -> None:
    settings: Any = {"teachers": [{"reprompt": "feedback"}], "form": "full"}
    algorithm = made({"student": Policy(str(model_folder))}, {"agent": "student"}, distillation=settings)
    data = RolloutDataModule(echo(turns=2), groups=2, group_size=2, iterations=1, sampling=Sampling(max_tokens=4))
    trainer = quiet_trainer()
    trainer.fit(algorithm, data)
    assert trainer.callback_metrics["train/taught_rows"] > 0


def own_reprompt(attempt: Attempt) -> Sequence[Message] | None:
    return None if attempt.episode.task.index % 2 else (Message("user", "Say 1"),)


FORMS: dict[str, dict[str, Any]] = {
    "sampled": {"teachers": [{"policy": "teacher"}]},
    "full": {"teachers": [{"policy": "teacher"}], "form": "full", "beta": 0.5},
    "top_k": {"teachers": [{"policy": "teacher"}], "form": "top_k", "top_k": 4, "beta": 0.0},
    "self": {"teachers": [{"reprompt": own_reprompt}], "form": "full"},
    "self, sampled": {"teachers": [{"reprompt": "feedback"}]},
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.long_after(2)
def test_a_run_updates_the_weights(name: str, model_folder: Path, quiet_trainer: Any, echo: Any) -> None:
    made = policies(model_folder)
    if "self" in name:
        made = {"student": Policy(str(model_folder), learning_rate=1e-2, lora=LoRA(rank=2), max_forward_tokens=40)}
    algorithm = OnPolicyDistillation(made, {"agent": "student"}, distillation=FORMS[name])
    trainer = quiet_trainer()
    data = RolloutDataModule(echo(turns=2), groups=2, group_size=2, iterations=2, sampling=Sampling(max_tokens=4))
    trainer.fit(algorithm, data)
    assert trainer.global_step == 2
    prefix = "train/" if len(made) == 1 else "train/student/"
    assert trainer.callback_metrics[f"{prefix}grad_norm"] > 0
    assert 0 < trainer.callback_metrics[f"{prefix}teacher_agreement"] <= 1
    assert trainer.callback_metrics[f"{prefix}taught_rows"] > 0


def test_a_student_comes_closer_to_its_teacher(model_folder: Path, quiet_trainer: Any, echo: Any) -> None:
    made = policies(model_folder) | {"teacher": Policy(trained=False)}
    algorithm = OnPolicyDistillation(made, {"agent": "student"}, distillation={**FORMS["full"], "beta": 0.0})
    found: list[float] = []
    algorithm.on_train_batch_end = lambda *_: found.append(algorithm.metrics.update["train/student/teacher_divergence"])
    data = RolloutDataModule(echo(), groups=2, group_size=4, iterations=12, sampling=Sampling(max_tokens=6))
    quiet_trainer(gradient_clip_val=1.0).fit(algorithm, data)
    assert found[-1] < 0.7 * found[0]


@pytest.mark.parametrize("name", ["sampled", "self"])
@pytest.mark.long
def test_a_run_resumed_within_the_passes_equals_an_uninterrupted_one(
    name: str, model_folder: Path, quiet_trainer: Any, echo: Any, tmp_path: Path
) -> None:
    def run(trainer: Any, resumed: Path | None = None) -> Any:
        made = policies(model_folder) if name == "sampled" else {"student": Policy(str(model_folder), 1e-2)}
        algorithm = OnPolicyDistillation(made, {"agent": "student"}, distillation=FORMS[name])
        sampling = Sampling(max_tokens=4)
        data = RolloutDataModule(echo(), groups=2, group_size=2, iterations=2, passes=2, sampling=sampling)
        trainer.fit(algorithm, data, ckpt_path=resumed)
        return algorithm

    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = run(quiet_trainer(callbacks=[saves], enable_checkpointing=True)).policy("student").model.state_dict()
    again = run(quiet_trainer(), tmp_path / "step=1.ckpt").policy("student").model.state_dict()
    assert all(torch.equal(weight, again[key]) for key, weight in whole.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teachers": []}, "teachers is empty; name a policy"),
        ({"teachers": [{"policy": "teacher"}], "form": "all"}, "form is 'all'; choose from sampled, top_k, full"),
        ({"teachers": [{"policy": "teacher"}], "beta": 0.0}, r"beta is 0\.0, but form sampled is the reverse KL"),
        ({"teachers": [{"policy": "teecher"}]}, "policy is 'teecher'; did you mean 'teacher'?"),
        ({"teachers": [{"policy": "student"}]}, "'student' is trained; set `trained: false`"),
        (
            {"teachers": [{"partner": "solver"}]},
            "'student' of the partner 'solver' is trained; set `policy` to a frozen",
        ),
        ({"teachers": [{}]}, "is the student itself, and has nothing to teach"),
        ({"teachers": [{"policy": "teacher", "reprompt": "peer"}]}, "reprompt is 'peer'; choose from sibling"),
        ({"teachers": [{"reprompt": "team", "partner": "x"}]}, "reprompt is 'team' and partner 'x'; give one of them"),
        ({"teachers": [{"policy": "teacher", "agents": []}]}, "agents is empty; name some, or leave it out for all"),
        ({"teachers": [{"policy": "teacher", "environments": []}]}, "environments is empty; name some"),
        ({"teachers": [{"policy": "teacher", "weight": 0.0}]}, r"weight is 0\.0; it must be above 0"),
    ],
)
def test_wrong_teachers_are_named(settings: dict[str, Any], message: str, model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        OnPolicyDistillation(policies(model_folder), SEATS, distillation=settings)


def test_a_teacher_must_read_the_tokens_of_its_student(model_folder: Path) -> None:
    settings = Distillation([Teacher("teacher")])
    with pytest.raises(ConfigurationError, match=r"has another chat template than its student 'student' .*; set the"):
        GRPO(
            policies(model_folder, chat_template="{% for m in messages %}{{ m['content'] }}{% endfor %}"),
            distillation=settings,
        )
    with pytest.raises(ConfigurationError, match=r"is served by 127\.0\.0\.1:9, which scores no tokens"):
        GRPO(policies(model_folder, served_by="127.0.0.1:9", random_init_seed=None), distillation=settings)
    larger = policies(model_folder)
    larger["teacher"].tokenizer.add_tokens(["<more>"])
    with pytest.raises(ConfigurationError, match="has another vocabulary than its student 'student'"):
        GRPO(larger, distillation=settings)
    padded = policies(model_folder)
    padded["teacher"].config.vocab_size += 8
    with pytest.raises(
        ConfigurationError, match="predicts 112 tokens, and its student 'student' 104; set distillation"
    ):
        GRPO(padded, distillation=Distillation([Teacher("teacher")], form="full"))


def test_what_cannot_be_combined_is_an_error(model_folder: Path) -> None:
    with pytest.raises(ConfigurationError, match="OnPolicyDistillation has no teacher"):
        OnPolicyDistillation()
    for made in (OnPolicyDistillation, GRPO):
        with pytest.raises(ConfigurationError, match="zero_variance is exclude"):
            made(
                policies(model_folder), SEATS, distillation=Distillation([Teacher("teacher")]), zero_variance="exclude"
            )
    for unread in ({"overlong_buffer": 4}, {"task_normalization": "scale_only"}):
        with pytest.raises(ConfigurationError, match=f"form sampled does not read {next(iter(unread))};"):
            OnPolicyDistillation(policies(model_folder), SEATS, distillation=FORMS["sampled"], **unread)
    OnPolicyDistillation(policies(model_folder), SEATS, distillation=FORMS["sampled"], loss="cispo")
    for unread in (
        {"loss": "gspo"},
        {"clip": {"high": 0.4}},
        {"correction": {"kind": "truncated"}},
        {"off_policy_threshold": 1.0},
    ):
        with pytest.raises(ConfigurationError, match=f"form full does not read .*{next(iter(unread))}"):
            OnPolicyDistillation(policies(model_folder), SEATS, distillation=FORMS["full"], **unread)
    misnamed: dict[str, dict[str, Any]] = {
        "agents is 'solvr'; did you mean 'solver'?": {"agents": ["solvr"]},
        "environments is 'maths'; did you mean 'math'?": {"environments": ["maths"]},
        "partner is 'judge'; choose from solver": {"partner": "judge"},
    }
    for message, option in misnamed.items():
        made = policies(model_folder)
        seats = {"solver": "student", "solvr": "student", "judge": "teacher"}
        teacher = Teacher("teacher", **option)
        algorithm = COMA(made, seats, distillation=Distillation([teacher]))
        assert algorithm.distiller is not None
        with pytest.raises(ConfigurationError, match=re.escape(f"distillation.teachers: {message}")):
            algorithm.distiller.check_rollouts(["solver"], ["math"])


def test_a_teacher_without_a_student_is_an_error(model_folder: Path, quiet_trainer: Any, echo: Any) -> None:
    made = policies(model_folder)
    seats = {"solver": "student", "judge": "teacher"}
    frozen = OnPolicyDistillation(made, seats, distillation={"teachers": [{"policy": "teacher", "agents": ["judge"]}]})
    with pytest.raises(ConfigurationError, match="agents has 'judge', for which the frozen policy 'teacher' decides"):
        frozen.check_rollouts(RolloutFacts(["solver", "judge"], ["t"]))
    for reprompt in ("team", "majority"):
        settings: Any = {"teachers": [{"reprompt": reprompt}]}
        alone = OnPolicyDistillation({"student": Policy(str(model_folder))}, distillation=settings)
        with pytest.raises(ConfigurationError, match=f"reprompt is '{reprompt}', the answers of other agents"):
            alone.check_rollouts(RolloutFacts(["solver"], ["t"]))
    siblings = OnPolicyDistillation(
        {"student": Policy(str(model_folder))}, distillation=Distillation([Teacher(reprompt="sibling")])
    )
    wrong, right = (episode(siblings.policy("student"), 0, {"solver": ["7"]}, success) for success in (False, True))
    assert [siblings.lacks_signal(group) for group in ([wrong, wrong], [wrong, right])] == [True, False]
    data = RolloutDataModule(echo(), groups=2, group_size=1, iterations=1, sampling=Sampling(max_tokens=4))
    with pytest.raises(ConfigurationError, match="compares at least 2 episodes of each task"):
        quiet_trainer().fit(siblings, data)


def test_a_first_rollout_without_a_teacher_is_a_warning(
    model_folder: Path, quiet_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings: Any = {"teachers": [{"reprompt": "feedback"}], "form": "full"}
    algorithm = OnPolicyDistillation({"student": Policy(str(model_folder))}, SEATS, distillation=settings)
    student = algorithm.policy("student")
    prepared(algorithm, [episode(student, 0, {"solver": ["7"]})], quiet_trainer())
    prepared(algorithm, [episode(student, 0, {"solver": ["7"]})], quiet_trainer())
    assert caplog.text.count("no trajectory of the first rollout has a teacher") == 1


@pytest.mark.parametrize(("success", "cause"), [(None, "set its `success_at`"), (False, "no episode succeeds")])
def test_siblings_without_a_success_name_it(
    success: bool | None, cause: str, model_folder: Path, quiet_trainer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    settings: Any = {"teachers": [{"reprompt": "sibling"}], "form": "full"}
    algorithm = OnPolicyDistillation({"student": Policy(str(model_folder))}, distillation=settings)
    student = algorithm.policy("student")
    prepared(algorithm, [episode(student, n, {"solver": ["7"]}, success) for n in range(2)], quiet_trainer())
    assert cause in caplog.text


def test_whole_divergences_refuse_fp16(model_folder: Path, quiet_trainer: Any) -> None:
    algorithm = OnPolicyDistillation(policies(model_folder), SEATS, distillation=FORMS["full"])
    played = episode(algorithm.policy("student"), 0, {"solver": ["7"]})
    with pytest.raises(ConfigurationError, match=r"precision is 16-true, in which it would vanish; set trainer.precis"):
        prepared(algorithm, [played], quiet_trainer(precision="16-true"))


def test_a_teacher_must_read_the_tokens_of_the_partner(model_folder: Path) -> None:
    made = policies(model_folder)
    made["other"] = Policy(str(model_folder), trained=False, chat_template="{{ messages[0]['content'] }}")
    settings = Distillation([Teacher("teacher", partner="leader")])
    with pytest.raises(ConfigurationError, match="another chat template than 'other', which decides for its partner"):
        OnPolicyDistillation(made, {"solver": "student", "leader": "other"}, distillation=settings)
