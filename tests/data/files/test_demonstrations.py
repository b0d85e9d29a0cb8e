from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from mrlm_pl.algorithms import GRPO, SFT
from mrlm_pl.data import JointPreferenceDataModule, PreferenceDataModule, RolloutDataModule, TrajectoryDataModule
from mrlm_pl.data.files.base import EpochStream
from mrlm_pl.data.files.demonstrations import demonstration_of, demonstration_rows
from mrlm_pl.engines import Sampling
from mrlm_pl.environment.tools import tool_schema
from mrlm_pl.episode import Trajectory
from mrlm_pl.errors import ConfigurationError, DataError
from mrlm_pl.policy import ChatFormat, Policy
from mrlm_pl.policy.chat.template import with_arguments
from mrlm_pl.policy.tiny import build_tokenizer
from tests.support.numbered_examples import NumberedExamples

TOKENIZER = build_tokenizer()
CHAT = ChatFormat(TOKENIZER)


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def test_a_chat_trains_on_the_assistants_words_and_the_end_token() -> None:
    (row,) = demonstration_rows(demonstration_of(chat("2+2?", "4")), CHAT, "main")
    assert TOKENIZER.decode(row.token_ids) == "<|user|>2+2?<|end|><|assistant|>4<|end|>"
    trained = [token for token, action in zip(row.token_ids, row.action_mask, strict=True) if action]
    assert TOKENIZER.decode(trained) == "4<|end|>"


@pytest.mark.parametrize(
    ("prompt", "completion"), [("2+2?", chat("a", "b")["messages"]), (chat("a", "b")["messages"], "4")]
)
def test_text_beside_messages_is_named_as_such(tmp_path: Path, prompt: Any, completion: Any) -> None:
    file = write(tmp_path / "rows.jsonl", [{"prompt": prompt, "completion": completion}])
    with pytest.raises(DataError, match="row 1: prompt and completion must both be text, or both lists"):
        TrajectoryDataModule(file)


def test_a_bad_row_after_empty_lines_has_the_number_of_its_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n" + json.dumps(chat("a", "b")) + "\n\n" + json.dumps({"prompt": "", "completion": "b"}) + "\n")
    with pytest.raises(DataError, match="row 4: the prompt is empty"):
        TrajectoryDataModule(str(file))
    file.write_text("\n" + json.dumps({"prompt": "a", "chosen": "b"}) + "\n")
    with pytest.raises(DataError, match="row 2: it lacks the field 'rejected'"):
        PreferenceDataModule(str(file))
    with pytest.raises(DataError, match="row 2"):
        JointPreferenceDataModule(str(file))


def test_every_assistant_turn_of_a_chat_counts_once() -> None:
    messages = [*chat("a", "b")["messages"], *chat("c", "d")["messages"]]
    (row,) = demonstration_rows(demonstration_of({"messages": messages}), CHAT, "main")
    text = "<|user|>a<|end|><|assistant|>b<|end|><|user|>c<|end|><|assistant|>d<|end|>"
    assert TOKENIZER.decode(row.token_ids) == text
    trained = [token for token, action in zip(row.token_ids, row.action_mask, strict=True) if action]
    assert TOKENIZER.decode(trained) == "b<|end|>d<|end|>"


def test_a_prompt_of_messages_is_given_and_only_the_completion_is_trained() -> None:
    row = {"prompt": [*chat("a", "b")["messages"], {"role": "user", "content": "c"}]}
    row["completion"] = [{"role": "assistant", "content": "d"}]
    (built,) = demonstration_rows(demonstration_of(row), CHAT, "main")
    trained = [token for token, action in zip(built.token_ids, built.action_mask, strict=True) if action]
    assert TOKENIZER.decode(trained) == "d<|end|>"


def test_replies_of_weight_0_are_context_and_may_not_follow_others() -> None:
    first, second = chat("a", "b")["messages"], chat("c", "d")["messages"]
    unweighted = {**first[1], "weight": 0}
    for row in (
        {"messages": [first[0], unweighted, *second]},
        {"prompt": first[:1], "completion": [unweighted, *second]},
    ):
        (built,) = demonstration_rows(demonstration_of(row), CHAT, "main")
        trained = [token for token, action in zip(built.token_ids, built.action_mask, strict=True) if action]
        assert TOKENIZER.decode(built.token_ids).endswith("<|assistant|>b<|end|><|user|>c<|end|><|assistant|>d<|end|>")
        assert TOKENIZER.decode(trained) == "d<|end|>"
    for messages, fault in (
        ([*first, second[0], {**second[1], "weight": 0}], "a message of weight 0 follows an assistant message that is"),
        ([first[0], unweighted], "it has no assistant message to learn from"),
        ([first[0], {**first[1], "weight": 0.5}], "has the weight 0.5; it must be 0"),
    ):
        with pytest.raises(ValueError, match=fault):
            demonstration_of({"messages": messages})


def test_a_chat_with_a_prompt_beside_its_messages_is_its_messages(tmp_path: Path) -> None:
    (alone,) = demonstration_rows(demonstration_of(chat("2+2?", "4")), CHAT, "main")
    for prompt in ("2+2?", chat("2+2?", "4")["messages"][:1]):
        data = TrajectoryDataModule(write(tmp_path / "a.jsonl", [{**chat("2+2?", "4"), "prompt": prompt}]))
        assert demonstration_rows(data._examples["train"][0], CHAT, "main") == [alone]


def test_the_tools_of_a_chat_are_told_as_the_template_tells_them() -> None:
    function = {"name": "add", "description": "Sum.", "parameters": {"type": "object"}}
    row = {**chat("2+2?", "4"), "tools": [{"type": "function", "function": function}]}
    (built,) = demonstration_rows(demonstration_of(row), CHAT, "main")
    told = '<|system|>{"name": "add", "description": "Sum.", "parameters": {"type": "object"}}\n<|end|>'
    assert TOKENIZER.decode(built.token_ids) == f"{told}<|user|>2+2?<|end|><|assistant|>4<|end|>"
    assert sum(built.action_mask) == 2


@pytest.mark.parametrize("tools", [{"name": "add"}, ["add"], [{"name": "add"}], [{"type": "function", "function": {}}]])
def test_tools_that_no_template_could_tell_are_refused(tmp_path: Path, tools: Any) -> None:
    with pytest.raises(DataError, match=r"row 2: .*tool"):
        TrajectoryDataModule(write(tmp_path / "a.jsonl", [chat("a", "b"), {**chat("a", "b"), "tools": tools}]))


def test_tools_of_plain_text_are_refused(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    modules: list[tuple[Any, list[str]]] = [
        (TrajectoryDataModule, ["prompt", "completion"]),
        (PreferenceDataModule, ["prompt", "chosen", "rejected"]),
    ]
    for module, fields in modules:
        row = {**dict.fromkeys(fields, "text"), "tools": None}
        module(write(tmp_path / "a.jsonl", [row]))
        with pytest.raises(
            DataError, match="row 1: plain text has no chat template that describes its tools; leave them out"
        ):
            module(write(tmp_path / "a.jsonl", [{**row, "tools": tools}]))


def test_a_row_whose_tools_are_null_has_none(tmp_path: Path) -> None:
    TrajectoryDataModule(write(tmp_path / "a.jsonl", [{**chat("a", "b"), "tools": None}]))
    (row,) = demonstration_rows(demonstration_of({**chat("a", "b"), "tools": None}), CHAT, "main")
    assert TOKENIZER.decode(row.token_ids) == "<|user|>a<|end|><|assistant|>b<|end|>"


def test_plain_text_is_used_without_a_template() -> None:
    (row,) = demonstration_rows(demonstration_of({"prompt": "One, two,", "completion": " three"}), CHAT, "main")
    assert TOKENIZER.decode(row.token_ids) == "One, two, three<|end|>"
    assert sum(row.action_mask) == len(" three") + 1


def test_plain_text_that_spells_its_eos_token_ends_once() -> None:
    """Data sets of rendered chats end their completions with it."""
    (row,) = demonstration_rows(demonstration_of({"prompt": "1+1=", "completion": "2<|end|>"}), CHAT, "main")
    assert TOKENIZER.decode(row.token_ids) == "1+1=2<|end|>"
    assert row.action_mask == (False,) * 4 + (True,) * 2


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"text": "x"}, "lacks the field 'messages'"),
        ({"prompt": "x"}, "lacks the field 'completion'"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "is not a message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "answers nothing"),
        ({"prompt": [], "completion": [{"role": "assistant", "content": "x"}]}, "the prompt is empty"),
        ({"prompt": "", "completion": "x"}, "the prompt is empty"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "is not a message"),
    ],
)
def test_a_bad_row_is_named_by_its_number(tmp_path: Path, row: dict[str, Any], fault: str) -> None:
    path = write(tmp_path / "d.jsonl", [chat("a", "b"), row])
    with pytest.raises(DataError, match=rf"row 2: .*{fault}"):
        TrajectoryDataModule(path)


def test_training_lowers_the_likelihood_loss_and_epochs_differ_in_order(
    tmp_path: Path, model_folder: Path, quiet_trainer: Any
) -> None:
    path = write(tmp_path / "d.jsonl", [chat(f"{n}?", str(n % 3)) for n in range(24)])
    algorithm = SFT({"main": Policy(str(model_folder), learning_rate=3e-3)})
    data = TrajectoryDataModule(path, validation=path, batch_size=8)
    trainer = quiet_trainer(max_epochs=8, limit_val_batches=1.0, accumulate_grad_batches=1)
    trainer.fit(algorithm, data)
    assert trainer.global_step == 24
    assert data.epoch == 8
    # Uniform over 105 tokens is 4.65 nats.
    assert trainer.callback_metrics["val/nll"] < 3.0
    assert data.order(0) != data.order(1)


def test_another_algorithm_begins_with_the_first_epoch(tmp_path: Path, model_folder: Path, quiet_trainer: Any) -> None:
    path = write(tmp_path / "d.jsonl", [chat(f"{n}?", "12345"[: 1 + n % 5]) for n in range(16)])
    data, found = TrajectoryDataModule(path, batch_size=8), []
    for _ in range(2):
        algorithm = SFT({"main": Policy(str(model_folder), learning_rate=1e-3)})
        quiet_trainer(accumulate_grad_batches=1).fit(algorithm, data)
        found.append([weight.sum().item() for weight in algorithm.policies["main"].parameters()])
    assert found[0] == found[1]


def test_the_validation_of_another_algorithm_keeps_the_place_in_the_data(
    tmp_path: Path, model_folder: Path, quiet_trainer: Any
) -> None:
    path = write(tmp_path / "d.jsonl", [chat(f"{n}?", "12345"[: 1 + n % 5]) for n in range(16)])
    data = TrajectoryDataModule(path, validation=path, batch_size=4)
    trained, other = (SFT({"main": Policy(str(model_folder), learning_rate=1e-3)}) for _ in range(2))
    quiet_trainer(accumulate_grad_batches=1, max_steps=2, limit_val_batches=0).fit(trained, data)
    place = (data.epoch, data.position)
    quiet_trainer(accumulate_grad_batches=1).validate(other, data, verbose=False)
    assert (data.epoch, data.position) == place == (0, 8)


def test_accumulation_does_not_change_the_update(tmp_path: Path, model_folder: Path, quiet_trainer: Any) -> None:
    path = write(tmp_path / "d.jsonl", [chat(f"{n}?", "12345"[: 1 + n % 5]) for n in range(16)])
    results = []
    for batch_size, accumulation in ((8, 1), (4, 2), (2, 4)):
        algorithm = SFT({"main": Policy(str(model_folder), learning_rate=1e-3)})
        quiet_trainer(accumulate_grad_batches=accumulation).fit(algorithm, TrajectoryDataModule(path, None, batch_size))
        results.append(torch.cat([weight.flatten() for weight in algorithm.policies["main"].parameters()]))
    # AdamW's first steps are sign-like, so equal to rounding in the gradient is not equal to rounding in the weight.
    for other in results[1:]:
        assert torch.allclose(results[0], other, atol=2e-5)


def test_epochs_have_the_length_that_the_trainer_sets_and_go_through_all_rows(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    seen: list[int] = []

    class Watch(SFT):
        def policy_loss(self, name: str, rows: Any, batch: Any) -> Any:
            seen.append(int(rows.token_ids[0, 1]))
            return super().policy_loss(name, rows, batch)

    source = write(tmp_path / "rows.jsonl", [chat(f"{letter}?", "x") for letter in "abcdefghij"])
    data = TrajectoryDataModule(source, batch_size=1)
    algorithm = Watch({"main": Policy(str(model_folder))})
    trainer = quiet_trainer(max_epochs=3, limit_train_batches=7)
    trainer.fit(algorithm, data)
    assert trainer.global_step == 21
    first, second = seen[:10], seen[10:20]
    assert first != second, "every pass has its own order"
    assert (data.epoch, data.position) == (2, 1)
    other = TrajectoryDataModule(source, batch_size=1, seed=1)
    other.examples = data.examples
    assert other.order("train") != TrajectoryDataModule.order(data, "train")


def test_content_that_is_no_text_is_named(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": None}, {"role": "assistant", "content": "4"}]}
    with pytest.raises(DataError, match=r"row 2: .*text as content"):
        TrajectoryDataModule(write(tmp_path / "rows.jsonl", [chat("a", "b"), row]))


class Updates(Callback):
    """The examples of each update (their first letters), and the number of action tokens that it divides by."""

    def __init__(self) -> None:
        self.pieces: list[list[str]] = [[]]
        self.totals: list[set[float]] = [set()]

    def on_train_batch_start(self, trainer: Any, algorithm: Any, batch: Any, batch_idx: int) -> None:
        for rows in batch.policies.values():
            self.pieces[-1] += [TOKENIZER.decode(ids[1:2]) for ids in rows.token_ids]
        self.totals[-1].add(batch.totals["main"].tokens)

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.pieces.append([])
        self.totals.append(set())


def test_the_size_of_an_update_is_that_of_the_batches_which_the_trainer_accumulates(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    # Each answer has as many letters as the place of its question in the alphabet.
    source = write(tmp_path / "rows.jsonl", [chat(f"{letter}?", "x" * n) for n, letter in enumerate("abcdefg", 1)])
    seen = Updates()
    algorithm = SFT({"main": Policy(str(model_folder))})
    # Epochs of 3 batches of 1 amid the data's 7: updates of 2 batches and of 1, never of batches 1 and 2 of the data.
    trainer = quiet_trainer(max_epochs=4, limit_train_batches=3, accumulate_grad_batches=2, callbacks=[seen])
    trainer.fit(algorithm, TrajectoryDataModule(source, batch_size=1))
    updates = [update for update in seen.pieces if update]
    assert [len(update) for update in updates] == [2, 1] * 4
    assert sorted("".join(letter for update in updates for letter in update)[:7]) == list("abcdefg")
    for update, totals in zip(updates, seen.totals, strict=False):
        assert totals == {float(sum("abcdefg".index(letter) + 2 for letter in update))}


def test_an_epoch_is_shuffled_once_however_many_batches_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    data, shuffled = NumberedExamples(10, batch_size=3), list[int]()
    order = data.order
    monkeypatch.setattr(data, "order", lambda epoch: [shuffled.append(epoch), *order(epoch)][1:])
    data.epoch, data.position = 4, 3
    batches, places = zip(*itertools.islice(data.upcoming(3), 7), strict=True)
    assert shuffled == [4, 5]
    assert list(itertools.chain(*batches)) == order(4)[3:] + order(5)
    assert places == ((4, 6), (4, 9), (5, 0), (5, 3), (5, 6), (5, 9), (6, 0))


def test_a_run_goes_on_with_another_batch_size_at_the_same_example(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    source = write(tmp_path / "rows.jsonl", [chat(f"{letter}?", "x") for letter in "abcdefghij"])
    first, second = Updates(), Updates()
    data = TrajectoryDataModule(source, batch_size=4)
    trainer = quiet_trainer(max_steps=1, callbacks=[first])
    trainer.fit(SFT({"main": Policy(str(model_folder))}), data)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    again = TrajectoryDataModule(source, batch_size=3)
    quiet_trainer(max_epochs=2, max_steps=3, callbacks=[second]).fit(
        SFT({"main": Policy(str(model_folder))}), again, ckpt_path=tmp_path / "one.ckpt"
    )
    served = [letter for update in (*first.pieces, *second.pieces) for letter in update]
    assert sorted(served) == list("abcdefghij")
    assert (again.epoch, again.position) == (1, 0)


def test_a_run_is_not_resumed_with_other_examples(model_folder: Path, quiet_trainer: Any, tmp_path: Path) -> None:
    """The place in a longer file is beyond the end of a shorter one, and the first update would be empty."""
    rows = [chat(f"{letter}?", "x") for letter in "abcdefghij"]
    source, other = write(tmp_path / "rows.jsonl", rows), write(tmp_path / "other.jsonl", rows[:4])
    checkpoint = tmp_path / "two.ckpt"

    def sft(**options: Any) -> SFT:
        return SFT({"main": Policy(str(model_folder), **options)})

    trainer = quiet_trainer(max_steps=2)
    trainer.fit(sft(), TrajectoryDataModule(source, batch_size=3))
    trainer.save_checkpoint(checkpoint)
    with pytest.raises(ConfigurationError, match=r"data\.train: .*other.* differs from the examples the run started w"):
        quiet_trainer(max_steps=3).fit(sft(), TrajectoryDataModule(other, batch_size=3), ckpt_path=checkpoint)
    quiet_trainer().validate(sft(), TrajectoryDataModule(other, source), ckpt_path=checkpoint)  # trains on none
    data = TrajectoryDataModule(source, batch_size=3)
    quiet_trainer(max_steps=3).fit(sft(), data, ckpt_path=checkpoint)
    del (state := data.state_dict())["digest"]
    with pytest.raises(ConfigurationError, match=r"data\.train: .*rows.*, or an earlier version, which names none, "):
        data.load_state_dict(state)  # as earlier versions wrote it
    template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    quiet_trainer(max_steps=1).fit(sft(chat_template=template), data)  # a new run, with other tokens of these rows


def test_a_run_is_resumed_on_another_day_than_its_chat_template_wrote(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    """Those of Llama 3 and gpt-oss write the date before the first message."""
    source = write(tmp_path / "rows.jsonl", [chat(f"{letter}?", "x") for letter in "abcdefgh"])
    for day in (9, 10):
        template = f"Day {day}\n{{% for m in messages %}}{{{{ m['content'] }}}}\n{{% endfor %}}"
        data, checkpoint = TrajectoryDataModule(source, batch_size=2), tmp_path / "two.ckpt"
        trainer = quiet_trainer(max_steps=day - 7)
        trainer.fit(
            SFT({"main": Policy(str(model_folder), chat_template=template)}),
            data,
            ckpt_path=checkpoint if checkpoint.exists() else None,
        )
        trainer.save_checkpoint(checkpoint)
    assert data.position == 3 * 2


def test_the_ranks_share_all_examples_and_one_may_get_none() -> None:
    data = Stub(9, batch_size=4)
    shares = [list(EpochStream(data.of(rank, 2), "validation")) for rank in (0, 1)]
    assert [[batch.policies for batch in share] for share in shares] == [
        [{"main": [0, 2, 4, 6]}, {"main": [8]}],
        [{"main": [1, 3, 5, 7]}, {}],
    ]
    assert [share[1].totals["main"].sequences for share in shares] == [1.0, 0.0]


class Stub(NumberedExamples):
    def of(self, rank: int, ranks: int) -> Stub:
        self.trainer = SimpleNamespace(
            strategy=SimpleNamespace(distributed_sampler_kwargs={"rank": rank, "num_replicas": ranks}),
            accumulate_grad_batches=1,
        )
        return self


def test_the_test_file_is_evaluated_and_its_absence_is_told(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    path = write(tmp_path / "d.jsonl", [chat(f"{n}?", "1") for n in range(5)])
    algorithm = SFT({"main": Policy(str(model_folder))})
    trainer = quiet_trainer()
    (numbers,) = trainer.test(algorithm, TrajectoryDataModule(path, test=path, batch_size=2))
    assert numbers["test/nll"] > 1.0
    with pytest.raises(ConfigurationError, match=r"data\.test names no file"):
        quiet_trainer().test(SFT({"main": Policy(str(model_folder))}), TrajectoryDataModule(path))


ADD = tool_schema("add", "Sum.", {"a": {"type": "integer"}}, {"b": {"type": "string"}}).to_chat()


def calling(*arguments: Any, content: str | None = None) -> dict[str, Any]:
    """Return a chat with a reply that calls a tool with each of the arguments, as OpenAI's clients write it."""
    functions = [{"name": "add", "arguments": given} for given in arguments]
    calls = [{"id": f"call{n:05d}", "type": "function", "function": f} for n, f in enumerate(functions)]
    answers = [{"role": "tool", "name": "add", "tool_call_id": call["id"], "content": "4"} for call in calls]
    reply = {"role": "assistant", "content": content, "tool_calls": calls}
    user, end = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "It is 4."}
    return {"messages": [user, reply, *answers, end], "tools": [ADD]}


def template_of(family: str) -> str:
    return (Path(__file__).parents[1] / "templates" / f"{family}.jinja").read_text()


def of_family(name: str) -> ChatFormat:
    """Return the chat format of a model family."""
    return ChatFormat(TOKENIZER, template_of(name))


def acted(row: Trajectory, tokenizer: Any = TOKENIZER) -> str:
    """Return the trained text of a row."""
    return tokenizer.decode([token for token, acts in zip(row.token_ids, row.action_mask, strict=True) if acts])


@pytest.mark.parametrize(("family", "several"), [("qwen2.5", False), ("qwen2.5", True), ("llama3.1", False)])
def test_tool_calls_are_written_as_the_template_writes_them(family: str, several: bool) -> None:
    """The text is that of transformers, whose template closes each turn after the EOS token of ours."""
    chat_format = of_family(family)
    row = calling({"a": 2, "b": "x"}, {"a": 3, "b": "y"}, content="Hm.") if several else calling({"a": 2, "b": "x"})
    native = TOKENIZER.apply_chat_template(
        row["messages"], tools=[ADD], chat_template=chat_format.template, tokenize=False
    )
    (made,) = demonstration_rows(demonstration_of(row), chat_format, "main")
    text = TOKENIZER.decode(made.token_ids).replace(TOKENIZER.eos_token, "")
    assert native in (f"{text}<|im_end|>\n", f"{text}<|eot_id|>")
    shown, end, last = acted(made).partition(TOKENIZER.eos_token)
    assert shown in native
    assert shown.count('"add"') == 1 + several
    assert (shown.startswith("Hm."), last) == (several, f"It is 4.{end}")


def test_a_template_is_not_applied_again_for_what_no_reply_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt with its tools, and the end of a turn: tools are most of the text of many chats."""
    chat_format, chat_row = of_family("qwen2.5"), demonstration_of(calling({"a": 2}))
    expected, applied, apply = demonstration_rows(chat_row, chat_format, "main"), [], TOKENIZER.apply_chat_template
    monkeypatch.setattr(TOKENIZER, "apply_chat_template", lambda *a, **k: applied.append(0) or apply(*a, **k))
    assert demonstration_rows(chat_row, chat_format, "main") == expected
    # The reply with a call: its prompt, itself, and itself before a next message. The plain reply: not itself alone.
    assert len(applied) == 3 + 2


def test_results_are_written_where_the_template_writes_calls_and_leaves_results_out() -> None:
    template = template_of("qwen2.5").replace('message.role == "tool"', "false")
    (made,) = demonstration_rows(demonstration_of(calling({"a": 2})), ChatFormat(TOKENIZER, template), "main")
    assert "<tool_response>\n4\n</tool_response>" in TOKENIZER.decode(made.token_ids)
    assert acted(made).startswith('<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>')


def test_a_reply_may_have_more_calls_than_an_agent_may() -> None:
    (made,) = demonstration_rows(demonstration_of(calling(*({"a": n} for n in range(9)))), of_family("qwen2.5"), "main")
    assert acted(made).count('"add"') == 9


def test_reasoning_before_a_call_may_get_other_line_breaks() -> None:
    (row,) = demonstration_rows(
        demonstration_of(calling({"a": 2}, content="<think>Hm.</think>Go.")), of_family("qwen3"), "main"
    )
    assert "<think>\nHm.\n</think>\n\nGo.\n<tool_call>" in TOKENIZER.decode(row.token_ids)


@pytest.mark.parametrize(
    ("family", "reasoning"), [("qwen3", ""), ("qwen3", "Hm."), ("glm4.5", ""), ("glm4.5", "Hm."), ("gpt_oss", "")]
)
def test_a_chat_with_calls_is_one_row_as_the_template_renders_it(family: str, reasoning: str) -> None:
    """But for the empty reasoning that Qwen 3 writes in the last reply alone."""
    chat_format, row = of_family(family), calling({"a": 2}, content="")
    question, call, result, end = row["messages"]
    for reply in (call, end):
        reply.update({"reasoning_content": reasoning} if reasoning else {})
    row["messages"] = [question, call, result, call, result, end]
    (made,) = demonstration_rows(demonstration_of(row), chat_format, "main")
    native = TOKENIZER.apply_chat_template(
        row["messages"], tools=[ADD], chat_template=chat_format.template, tokenize=False
    ).replace("<think>\n\n</think>\n\n", "")
    text, native = (text.replace(TOKENIZER.eos_token, "") for text in (TOKENIZER.decode(made.token_ids), native))
    assert native.removesuffix("<|im_end|>\n").removesuffix("<|return|>") == text
    assert [acted(made).count(part) for part in ("add", "Hm.", "It is 4.")] == [2, 3 * bool(reasoning), 1]


@pytest.mark.parametrize("reasons", [True, False])
def test_the_channels_of_gpt_oss_are_its_templates_and_a_next_question_begins_a_row(reasons: bool) -> None:
    """An answer ends with another token before a next message than where the model ends it."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|return|>", "additional_special_tokens": ["<|call|>"]})
    chat_format = ChatFormat(tokenizer, template_of("gpt_oss"), [tokenizer.convert_tokens_to_ids("<|call|>")])
    row = calling({"a": 2}, content="")
    for reply in row["messages"][1::2]:
        reply.update({"thinking": "Hm."} if reasons else {})
    row["messages"] += [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "No."}]
    first, second = demonstration_rows(demonstration_of(row), chat_format, "main")
    analysis = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant" * reasons
    final = "<|channel|>final<|message|>"
    call = ' to=functions.add<|channel|>commentary json<|message|>{"a": 2}<|call|>'
    assert acted(first, tokenizer) == f"{analysis}{call}{analysis}{final}It is 4.<|return|>"
    assert acted(second, tokenizer) == f"{final}No.<|return|>"
    assert f"<|start|>assistant{call}<|start|>functions.add to=assistant" in tokenizer.decode(second.token_ids)
    assert f"{final}It is 4.<|end|><|start|>user" in tokenizer.decode(second.token_ids)


@pytest.mark.parametrize(
    ("opened", "content", "said"),
    [
        (True, "<think>\nHm.\n</think>\n\nIt is 4.", "Hm.\n</think>\n\nIt is 4."),
        (True, "<think>Hm.</think>It is 4.", "Hm.\n</think>\n\nIt is 4."),
        (False, "<think>\nHm.\n</think>\n\nIt is 4.", "Hm.\n</think>\n\nIt is 4."),
        (False, "<think>Hm.</think>It is 4.", "Hm.</think>It is 4."),
        (False, "\nHm.</think>It is 4.", "\nHm.</think>It is 4."),
    ],
)
def test_reasoning_that_the_prompt_opens_is_not_opened_again(opened: bool, content: str, said: str) -> None:
    """The template of DeepSeek-R1's distilled models leaves it out of replies, that of Qwen 3 (2507) does not."""
    template = template_of("deepseek_r1_distill")
    if opened:
        place = template_of("qwen3").rindex("assistant\\n") + len("assistant\\n")
        template = f"{template_of('qwen3')[:place]}<think>\\n{template_of('qwen3')[place:]}"
    (made,) = demonstration_rows(demonstration_of(chat("2+2?", content)), ChatFormat(TOKENIZER, template), "main")
    assert TOKENIZER.decode(made.token_ids).count("<think>") == 1
    assert acted(made) == f"{said}<|end|>"


def test_reasoning_in_the_text_of_a_call_stays_where_the_template_has_no_calls() -> None:
    row = calling({"a": 2}, content="<think>\nHm.\n</think>\n\nGo.")
    first, _ = demonstration_rows(demonstration_of(row), of_family("deepseek_r1_distill"), "main")
    call = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    assert acted(first) == f"Hm.\n</think>\n\nGo.\n{call}<|end|>"


def test_empty_reasoning_that_stays_until_the_next_question_is_part_of_a_call() -> None:
    """As in Qwen 3.5: before the result of a tool a reply is written otherwise than before a question."""
    template = template_of("qwen3").replace("loop.last or (not loop.last and reasoning_content)", "true")
    row = calling({"a": 2}, content="")
    (made,) = demonstration_rows(demonstration_of(row), ChatFormat(TOKENIZER, template), "main")
    assert acted(made).startswith("<think>\n\n</think>\n\n<tool_call>")


def test_a_template_of_a_single_turn_writes_replies() -> None:
    refusing = "{% if messages | length > 2 %}{{ raise_exception('one turn') }}{% endif %}"
    (made,) = demonstration_rows(
        demonstration_of(chat("2+2?", "4")), ChatFormat(TOKENIZER, refusing + template_of("qwen3")), "main"
    )
    assert acted(made) == "<think>\n\n</think>\n\n4<|end|>"


def test_reasoning_that_a_template_leaves_out_is_an_error(tmp_path: Path) -> None:
    row = chat("2+2?", "4")
    row["messages"][1]["reasoning_content"] = "Hm."
    disabled = ChatFormat(TOKENIZER, with_arguments(template_of("qwen3"), {"enable_thinking": False}, "m"))
    for chat_format in (CHAT, of_family("qwen2.5"), disabled):
        with pytest.raises(ValueError, match=r"leaves out the reasoning of a reply.*'Hm\.'"):
            demonstration_rows(demonstration_of(row), chat_format, "main")
    for message, reasoning in ((0, "Hm."), (1, ["Hm."])):
        row["messages"][message]["reasoning_content"] = reasoning
        named = re.escape(f"row 1: its reasoning {reasoning!r} must be text, and of an assistant message")
        with pytest.raises(DataError, match=named):
            TrajectoryDataModule(write(tmp_path / "d.jsonl", [row]))
        row["messages"][message].pop("reasoning_content")


def test_parts_that_a_template_leaves_out_are_errors() -> None:
    """The one of Llama 3.1 writes a single call and no text beside it."""
    with pytest.raises(ValueError, match=r"leaves out the text of a reply with calls: 'Hm\.'"):
        demonstration_rows(demonstration_of(calling({"a": 2}, content="Hm.")), of_family("llama3.1"), "main")
    with pytest.raises(ValueError, match=r"leaves out some of the 2 calls"):
        demonstration_rows(demonstration_of(calling({"a": 2}, {"a": 3})), of_family("llama3.1"), "main")


def test_arguments_may_be_text_and_a_template_without_calls_shows_them_as_agents_are_told() -> None:
    as_text = calling('{"a": 2}')
    del as_text["messages"][1]["tool_calls"][0]["id"], as_text["tools"]
    chat_format = ChatFormat(
        TOKENIZER, "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}assistant:"
    )
    (row,) = demonstration_rows(demonstration_of(as_text), chat_format, "main")
    called = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    answered = "tool:4<|end|>assistant:It is 4.<|end|>"
    assert TOKENIZER.decode(row.token_ids) == f"user:2+2?<|end|>assistant:{called}<|end|>{answered}"


def test_a_call_with_an_end_of_its_own_has_no_other() -> None:
    """As in gpt-oss, whose calls end with a stop token that other turns do not end with."""
    call = '<call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}<|user|>'
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}"
        f"{{% for c in m.tool_calls or [] %}}{call}{{% else %}}<|end|>{{% endfor %}}{{% endfor %}}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    chat_format = ChatFormat(TOKENIZER, template, TOKENIZER.encode("<|user|>", add_special_tokens=False))
    (row,) = demonstration_rows(demonstration_of(calling({"a": 2})), chat_format, "main")
    assert acted(row) == '<call>{"name": "add", "arguments": {"a": 2}}<|user|>It is 4.<|end|>'


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        ({"function": {"arguments": {}}}, "not an object with a"),
        ({"function": {"name": "add", "arguments": "{"}}, "arguments.* are not an object"),
        ({"name": "add", "arguments": {}}, "not an object with a"),
        ("add", "not an object with a"),
    ],
)
def test_calls_that_cannot_be_read_are_refused_with_the_form(tmp_path: Path, call: Any, fault: str) -> None:
    row = calling({})
    row["messages"][1]["tool_calls"] = [call]
    with pytest.raises(DataError, match=rf"row 1: its call .*{fault}.*write .*\"type\": \"function\""):
        TrajectoryDataModule(write(tmp_path / "d.jsonl", [row]))
    row["messages"][1] |= {"tool_calls": None, "content": "4"}  # as parquet writes it
    assert TrajectoryDataModule(write(tmp_path / "d.jsonl", [row]))._examples["train"]


def test_fields_that_parquet_fills_with_null_are_absent_and_null_in_json_stays(tmp_path: Path) -> None:
    import pyarrow.parquet

    other = tool_schema("find", "Finds.", {"text": {"type": "string", "enum": ["x"]}}).to_chat()
    rows = [calling({"a": 2, "b": "x"}), calling({"a": 3, "c": [{"d": 1}, {"e": 2}]}) | {"tools": [ADD, other]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    as_json, as_parquet = (
        [[acted(made), TOKENIZER.decode(made.token_ids)] for made in demonstration_rows(example, CHAT, "main")]
        for path in (write(tmp_path / "d.jsonl", rows), str(tmp_path / "d.parquet"))
        for example in TrajectoryDataModule(path)._examples["train"][1:]
    )
    assert as_parquet == as_json
    (null,) = TrajectoryDataModule(write(tmp_path / "n.jsonl", [calling({"a": None})]))._examples["train"]
    assert '{"a": null}' in acted(demonstration_rows(null, CHAT, "main")[0])


def test_a_call_in_the_form_before_tool_calls_is_refused(tmp_path: Path) -> None:
    row = calling({})
    row["messages"][1] = {"role": "assistant", "content": "", "function_call": {"name": "add", "arguments": "{}"}}
    with pytest.raises(DataError, match=r"row 1: .* has a function_call; write it as tool_calls"):
        TrajectoryDataModule(write(tmp_path / "d.jsonl", [row]))


def test_a_user_who_calls_tools_is_refused(tmp_path: Path) -> None:
    row = calling({})
    row["messages"][0]["tool_calls"] = row["messages"][1]["tool_calls"]
    with pytest.raises(DataError, match=r"row 1: .*is not the assistant's and calls tools"):
        TrajectoryDataModule(write(tmp_path / "d.jsonl", [row]))


@pytest.mark.parametrize(
    ("refusal", "fault"), [("raise_exception('no system')", "no system"), ("'a' + none", "concatenate")]
)
def test_an_example_that_the_template_refuses_is_named(
    refusal: str, fault: str, model_folder: Path, quiet_trainer: Any, tmp_path: Path
) -> None:
    template = f"{{% for m in messages %}}{{% if m.role == 'system' %}}{{{{ {refusal} }}}}"
    template += "{% endif %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
    rows = [chat("a", "b"), {"messages": [{"role": "system", "content": "s"}, *chat("a", "b")["messages"]]}]
    data = TrajectoryDataModule(write(tmp_path / "d.jsonl", rows))
    with pytest.raises(DataError, match=rf"d\.jsonl, row 2: .*{fault}"):
        quiet_trainer(max_steps=1).fit(SFT({"main": Policy(str(model_folder), chat_template=template)}), data)


@pytest.mark.parametrize(
    ("max_tokens", "limit"), [(None, "2048 tokens, the context window"), (2047, "2047 tokens, data.max_tokens")]
)
def test_rows_that_are_too_long_name_the_limit(
    model_folder: Path, quiet_trainer: Any, tmp_path: Path, caplog: Any, max_tokens: int | None, limit: str
) -> None:
    long = chat("a" * 2048, "b")
    none, one = (write(tmp_path / f"{n}.jsonl", [long, *others]) for n, others in enumerate(([], [chat("a", "b")])))
    policies = {"main": Policy(str(model_folder))}
    with pytest.raises(DataError, match=f"no row with an action token of .* fits into {limit}; give shorter ones"):
        quiet_trainer(max_steps=1).fit(SFT(policies), TrajectoryDataModule(none, max_tokens=max_tokens))
    quiet_trainer(max_steps=1).fit(SFT(policies), TrajectoryDataModule(one, batch_size=1, max_tokens=max_tokens))
    assert f"left out 1 of 2 examples of {one}: longer than {limit}, or without" in caplog.text


def test_a_checkpoint_is_refused_by_a_run_on_rollouts(
    model_folder: Path, echo: Any, quiet_trainer: Any, tmp_path: Path
) -> None:
    rows, checkpoint = tmp_path / "rows.jsonl", tmp_path / "sft.ckpt"
    rows.write_text('{"prompt": "1+1=", "completion": "2"}\n' * 4)
    trainer = quiet_trainer(max_steps=1)
    trainer.fit(SFT({"main": Policy(str(model_folder))}), TrajectoryDataModule(str(rows), batch_size=2))
    trainer.save_checkpoint(checkpoint)
    data = RolloutDataModule(echo(), groups=1, group_size=2, iterations=1, sampling=Sampling(max_tokens=2))
    fault = "the checkpoint is of a run with TrajectoryDataModule, and this one has RolloutDataModule; .*as `model`"
    with pytest.raises(ConfigurationError, match=fault):
        quiet_trainer().fit(GRPO({"main": Policy(str(model_folder))}), data, ckpt_path=checkpoint, weights_only=False)
