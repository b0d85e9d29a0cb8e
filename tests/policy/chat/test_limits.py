"""Chat templates from strangers end: by their deadline, or by being rejected."""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from unittest import mock

import pytest

from mrlm_pl.cli.main import main
from mrlm_pl.episode import Message
from mrlm_pl.policy.chat import ChatFormat, Conversation, limits
from mrlm_pl.policy.chat.limits import EndlessTemplateError, check_template, deadline
from mrlm_pl.policy.tiny import build_tokenizer

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}" * 1
LOOPS += "{% endfor %}{% endfor %}"
RECURSION = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(30) }}"
FILTERS = "{% for a in range(99999) %}{{ range(99999) | map('string') | map('upper') | list | length }}{% endfor %}"
SQUARES = "{% set n = namespace(x=3) %}{% for a in range(99999) %}{% set n.x = n.x * n.x %}{% endfor %}"
ENDLESS = {"loops": LOOPS, "recursion": RECURSION, "filters": FILTERS, "squares": SQUARES}
REST = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}<|assistant|>"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RENDER_SECONDS", 0.3)


@pytest.mark.parametrize("kind", ENDLESS)
@pytest.mark.long_after(1)
def test_an_endless_template_is_interrupted_once(kind: str) -> None:
    chat = ChatFormat(build_tokenizer(), ENDLESS[kind] + REST)
    with mock.patch.object(limits._watch(), "begin", wraps=limits._watch().begin) as watched:
        for _ in range(20):
            with pytest.raises(
                EndlessTemplateError, match=r"was not rendered within 0\.3 s of CPU time; give .* `chat_template`"
            ):
                chat.render([Message("user", "x")], generation_prompt=True)
    watched.assert_called_once()


def test_a_probe_that_does_not_end_is_no_template_without_tools() -> None:
    chat = ChatFormat(build_tokenizer(), "{% if tools %}" + LOOPS + "{% endif %}" + REST)
    tool = {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}
    with pytest.raises(EndlessTemplateError):
        Conversation(chat, [tool]).observe([Message("user", "x")])


@pytest.mark.parametrize("template", ["{{ 10 ** 10 ** 10 }}", "{% set x = 'a' | urlize %}", "{{ 9\n**\n9 }}"])
def test_what_no_deadline_interrupts_is_refused(template: str) -> None:
    with pytest.raises(EndlessTemplateError, match="could compute forever"):
        ChatFormat(build_tokenizer(), template + REST)


@pytest.mark.parametrize("template", ["** urlize", "{{ '**' }}", "{{ d(a=1, **b) }}{{ d(**b) }}", "{% oops", REST])
def test_other_uses_of_the_same_signs_are_let_through(template: str) -> None:
    check_template(template, "m")


@pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="the system has no clocks of threads")
def test_waiting_for_a_busy_machine_is_no_fault_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RENDER_SECONDS", 0.05)
    interrupted = True
    with suppress(EndlessTemplateError), deadline("m"):
        time.sleep(0.4)  # several looks of the watch
        interrupted = False
    assert not interrupted


def test_a_deadline_that_is_kept_interrupts_nothing_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RENDER_SECONDS", 0.05)
    fault: list[BaseException] = []

    def busy() -> None:
        try:
            for _ in range(30):
                with suppress(EndlessTemplateError), deadline("m"):  # a busy machine may exceed it
                    time.sleep(0.001)
            end = time.monotonic() + 0.5
            while time.monotonic() < end:
                pass
        except BaseException as error:
            fault.append(error)

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not fault


def test_an_evaluation_with_an_endless_template_ends(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").write_text(LOOPS + REST)
    arguments = ["eval", "--model", str(folder), "--environment", "math", "--num-episodes", "2"]
    assert main(arguments) == 2
    assert "was not rendered within 0.3 s" in capsys.readouterr().err
