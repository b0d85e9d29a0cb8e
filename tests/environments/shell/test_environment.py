from __future__ import annotations

import gc
import os
import threading
from collections.abc import Mapping
from typing import Any

import pytest
from mrlm_environments.code.environment import CodeEnvironment
from mrlm_environments.shell.environment import SHOWN_CHARACTERS, ShellEnvironment
from mrlm_environments.shell.tasks import matches, task_data

from mrlm_pl.environment import Step, Task
from mrlm_pl.environment.check import HOSTILE_REPLIES, check_environment
from mrlm_pl.environment.hosts import EnvironmentHosts
from mrlm_pl.environment.trial import SPAM
from mrlm_pl.episode import Message, ToolCall
from mrlm_pl.errors import ConfigurationError, SandboxError
from mrlm_pl.sandbox import Sandbox
from tests.support.environments.shell_rows import COUNT, FINISH, answer, bash, call
from tests.support.runs.logs import logged_here
from tests.support.servers.environment_servers import eventually

pytestmark = pytest.mark.usefixtures("namespaces")

QUICK = Sandbox(minimum="namespaces", wall_seconds=1.5)
PATIENT = Sandbox(minimum="namespaces", wall_seconds=20.0)


def task_of(row: Mapping[str, Any]) -> Task:
    return Task("shell", "train", 0, 0, task_data(row))


def play(replies: list[str | Message], row: Mapping[str, Any] = COUNT, **options: Any) -> list[Step]:
    """Return the steps of an episode that is played with the replies."""
    environment = ShellEnvironment(**options)
    environment.reset(task_of(row))
    steps: list[Step] = []
    for reply in replies:
        steps.append(environment.step({"agent": reply if isinstance(reply, Message) else Message("assistant", reply)}))
        if steps[-1].done:
            break
    environment.close()
    return steps


def solved(replies: list[str | Message], row: Mapping[str, Any] = COUNT, **options: Any) -> bool:
    last = play(replies, row, **options)[-1]
    assert last.done
    assert last.components["agent"] == {"solved": float(last.success is True)}
    assert last.rewards["agent"] == float(last.success is True)
    return last.success is True


def seen(step: Step) -> list[str]:
    return [message.content for message in step.observations["agent"]]


def checked(*checks: Any, example: str | None = None, init: str = "") -> dict[str, Any]:
    evaluation = {"check": list(checks), "example": example}
    return {"description": "Do it.", "create": {"init": init}, "evaluation": evaluation}


def test_a_question_is_looked_into_and_answered() -> None:
    first, last = play([bash("ls ~/d"), answer(" 3\n")])
    (message,) = first.observations["agent"]
    assert (message.role, message.content, message.name) == ("tool", "a\nb\nc", "bash_action")
    assert first.components["agent"] == {"solved": 0.0}
    assert (last.rewards["agent"], last.success, last.stop_reason, last.truncated) == (1.0, True, "answered", False)
    assert not solved([answer("4")])
    assert not solved([answer("")])
    assert not solved([answer("three")])
    assert not solved([FINISH])


def test_what_the_agent_sees_at_first() -> None:
    environment = ShellEnvironment(system_prompt="You use a shell.")
    messages = environment.reset(task_of(COUNT))["agent"]
    assert [(m.role, m.content) for m in messages] == [("system", "You use a shell."), ("user", COUNT["description"])]
    assert [tool.name for tool in environment.tools("agent")] == ["bash_action", "finish_action", "answer_action"]
    environment.close()


def test_what_an_agent_changes_changes_nothing_that_is_expected() -> None:
    assert not solved([bash("rm ~/d/*"), answer("0")])
    assert solved([bash("rm -rf ~/d"), answer("3")])
    tricks = "alias ls='echo 9'; ls() { echo 9; }; export -f ls; echo 'echo 9' >> ~/.bashrc; mkdir -p ~/bin /usr/bin"
    assert not solved([bash(tricks), answer("9")])
    assert solved([bash("(while :; do touch ~/d/$RANDOM; done) & sleep 0.2"), answer("3")])


RANDOM = {
    "description": "How many files are in ~/d, and what does ~/number hold?",
    "create": {
        "init": "mkdir ~/d; for _ in $(seq $((RANDOM % 90 + 9))); do mktemp ~/d/XXXXXXXX; done\n"
        "echo $RANDOM > ~/number; chmod 400 ~/number; ln -s number ~/link\n"
        "mkfifo ~/pipe; chmod 700 ~/d; touch -d 2020-01-02 ~/d"
    },
    "start": "sleep 60 & until pgrep sleep; do :; done",
    "evaluation": {
        "check": [None, {"file": "check/string-match.py"}],
        "example": "ls ~/d | wc -l; cat ~/link; stat -c '%a %Y' ~/number ~/d; ls ~; touch ~/d/late; pgrep -c sleep",
    },
}


def test_a_random_setup_is_compared_with_its_own_reference() -> None:
    example = RANDOM["evaluation"]["example"]  # type: ignore[index]
    seen_answers = set()
    for _ in range(3):
        environment = ShellEnvironment()
        environment.reset(task_of(RANDOM))
        printed = seen(environment.step({"agent": Message("assistant", bash(example))}))[0]
        seen_answers.add(printed)
        assert printed.splitlines()[-1] == "1", "the background processes of the set-up are there"
        assert environment.step({"agent": Message("assistant", answer(printed))}).success, printed
    assert len(seen_answers) == 3
    assert not solved([bash("rm ~/d/*; echo 1 > ~/n; mv -f ~/n ~/number"), answer("0\n1")], RANDOM)
    assert ShellEnvironment().gold(task_of(RANDOM)) is None, "there is no answer for every episode"


def test_a_system_too_large_to_be_copied_is_named(caplog: pytest.LogCaptureFixture) -> None:
    create = {"init": {"code": "head -c 40000000 /dev/zero > ~/large"}}
    ShellEnvironment().reset(task_of({**RANDOM, "create": create}))
    assert "are too large to be copied" in caplog.text
    caplog.clear()
    ShellEnvironment().reset(task_of(RANDOM))
    assert not logged_here(caplog)


def test_a_large_system_is_compared_with_a_second_one() -> None:
    row = {**COUNT, "create": {"init": "mkdir ~/d; touch ~/d/a; head -c 40M /dev/zero > ~/d/b"}}
    assert solved([answer("2")], row)


def test_errors_of_the_reference_are_no_answer() -> None:
    evaluation = {"check": [None, {"file": "string-match"}], "example": "echo right; echo wrong >&2; ls /nowhere"}
    assert solved([answer("right")], {**COUNT, "evaluation": evaluation})
    only = {"check": [None, {"file": "containing"}], "example": "ls /nowhere"}
    assert not solved(
        [answer("ls: cannot access '/nowhere': No such file or directory")], {**COUNT, "evaluation": only}
    )
    second = {"language": "bash", "code": '[ "$2" = out ]'}
    first = {"language": "bash", "code": "echo err >&2; printf out"}
    assert solved([FINISH], checked(first, second))


def test_the_best_replies_to_a_change_with_an_answer_give_both() -> None:
    moved = {"language": "bash", "code": '[ -e ~/new/file ] && [ "$1" = old ]'}
    row = checked(moved, example="mv ~/old ~/new; echo old", init="mkdir ~/old; touch ~/old/file")
    replies = [bash("mv ~/old ~/new; echo old"), answer("old")]
    assert ShellEnvironment().gold(task_of(row)) == {"agent": replies}
    assert solved([*replies], row)


def test_output_of_background_programs_is_no_answer() -> None:
    said = "until [ -e ~/said ]; do sleep .01; done"
    row = {
        **COUNT,
        "create": {"init": "(until [ -e ~/go ]; do sleep .01; done; echo noise; touch ~/said) &"},
        "evaluation": {"check": [None, {"file": "string-match"}], "example": f"touch ~/go; {said}; echo 3"},
    }
    assert solved([answer("3")], row, sandbox=PATIENT)


def test_a_reference_counts_the_processes_that_the_agent_counts() -> None:
    count = "sleep 60 & set -- /proc/[0-9]*; echo $#"
    row = {**COUNT, "evaluation": {"check": [None, {"file": "integer-match"}], "example": count}}
    (shown,) = play([bash(count)], row)
    assert solved([answer(seen(shown)[0])], row)


@pytest.mark.parametrize(
    "field", [{"create": {"init": "mkdir ~/d; useradd jack"}}, {"start": "exit 3"}, {"create": {"init": "cat <("}}]
)
def test_a_setup_that_fails_is_not_posed(field: dict[str, Any]) -> None:
    with pytest.raises(SandboxError, match=r"sets the system up left with status \d+: .*it printed"):
        ShellEnvironment().reset(task_of({**COUNT, **field}))


def test_an_agent_may_say_why_it_finishes() -> None:
    row = checked({"language": "bash", "code": "true"})
    assert solved([call("finish_action", thought="The work is done.")], row)
    native = Message("assistant", "", tool_calls=(ToolCall("c1", "finish_action", {"thought": ""}),))
    assert solved([native], row)


def test_scripts_find_what_a_system_has() -> None:
    """Its own processes, process substitution, names of folders, and a system folder without an owner."""
    (shown,) = play(
        [bash("diff <(echo a) <(echo a) && ls / | grep -cx -e etc -e usr -e home; ls /etc | grep -c passwd")]
    )
    assert seen(shown) == ["3\n1"]
    # The child has its name only after its exec.
    there = "for try in {1..400}; do pgrep -x yes > /dev/null && break; sleep .01; done; kill -0 $! && pgrep -xc yes"
    script = f"yes > /dev/null & {there}; id -un; getent passwd student | cut -d: -f6"
    (shown,) = play([bash(script)], sandbox=PATIENT)
    assert seen(shown) == ["1\nstudent\n/home/student"]
    (shown,) = play([bash("echo out > /dev/stdout; cat /dev/stdin <<< in; ls /proc/self/fd > /dev/null && echo fd")])
    assert seen(shown) == ["out\nin\nfd"]


def test_scripts_write_everywhere_except_into_folders_of_the_machine() -> None:
    made = "echo 7 > /usr/.log; mkdir /data; echo x > /testfile; cat /usr/.log; ls / | grep -cx -e data -e testfile"
    (shown,) = play([bash(made)])
    assert seen(shown) == ["7\n2"]
    places = "/usr/bin /usr/lib /usr/local/lib /usr/local/.bin /usr/share /bin /lib /etc /dev /proc"
    (shown,) = play([bash(f"for place in {places}; do (: > $place/new) 2> /dev/null && echo $place; done")])
    assert seen(shown) == ["[exit status 1]"]
    (shown,) = play([bash("ls -d /usr/.log /data /testfile 2> /dev/null | wc -l")])
    assert seen(shown) == ["0"], "another system"
    assert not os.path.lexists("/usr/.log")
    assert not os.path.lexists("/testfile")


def test_a_command_of_the_agent_is_found_in_the_path() -> None:
    made = "printf '#!/bin/bash\\necho $(($*))' > calc; chmod +x calc; mv calc /usr/local/bin/"
    row = checked({"language": "bash", "code": '[ "$(calc "6 * 7")" = 42 ]'})
    assert solved([bash(made), FINISH], row)
    assert not solved([bash("ls"), FINISH], row)


def test_a_random_setup_in_a_folder_of_the_system_is_compared_with_its_own_reference() -> None:
    example = "awk '{s += $1} END {print s}' /usr/numbers.log /n/1"
    row = {
        "description": "What is the sum of /usr/numbers.log and /n/1?",
        "create": {"init": "mkdir /n; echo $RANDOM > /n/1; for _ in 1 2 3; do echo $RANDOM >> /usr/numbers.log; done"},
        "evaluation": {"check": [None, {"file": "integer-match"}], "example": example},
    }
    environment = ShellEnvironment()
    environment.reset(task_of(row))
    printed = seen(environment.step({"agent": Message("assistant", bash(example))}))[0]
    assert environment.step({"agent": Message("assistant", answer(printed))}).success, printed


REPLACEMENTS = """
library=~/fake/lib/$(python3 -c 'import sys; print("python%d.%d" % sys.version_info[:2])')
mkdir -p ~/fake/bin $library/lib-dynload; touch $library/os.py
echo 'import posix; posix._exit(0)' | tee $library/encodings.py ~/sitecustomize.py > /usr/local/sitecustomize.py
for place in / /usr /usr/bin /usr/local; do echo "home = $HOME/fake/bin" > $place/pyvenv.cfg; done
printf '#!/bin/sh\\nexit 0\\n' | tee /usr/local/bin/python3 /usr/local/bin/test > ~/bash
chmod +x ~/bash /usr/local/bin/*
echo ~/fake/evil.so > /etc/ld.so.preload
for place in /usr /usr/bin /usr/lib /usr/local /bin /lib /lib64 /etc; do mv $place $place.old; rm -f $place; done
cp ~/bash /bin/bash; ln -sf ~/bash /bin/sh
"""


@pytest.mark.parametrize(
    "check",
    [
        {
            "language": "python",
            "code": "import os, sys; sys.exit(0 if os.path.exists(os.environ['HOME'] + '/x') else 1)",
        },
        {"language": "bash", "code": "python3 -c 'import os; assert os.path.exists(\"x\")' && test -e x"},
    ],
)
def test_checks_run_the_machines_own_programs(check: dict[str, str]) -> None:
    assert not solved([bash(REPLACEMENTS), FINISH], checked(check), sandbox=PATIENT)
    assert solved([bash(f"{REPLACEMENTS}touch ~/x"), FINISH], checked(check), sandbox=PATIENT)


def test_an_agent_does_not_supply_the_interpreter_that_a_machine_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrlm_environments.shell.environment.MACHINE_PATH", "/nothing")
    script = "ln -sf /bin/true /usr/local/bin/python3"
    assert not solved([bash(script), FINISH], checked({"language": "python", "code": "raise SystemExit(1)"}))


def test_files_last_and_scripts_share_nothing_else() -> None:
    steps = play([bash("cd /tmp; export A=1; echo x > ~/kept"), bash('echo "$A$(pwd)"; cat ~/kept'), bash("exit 7")])
    assert seen(steps[0]) == ["[no output]"]
    assert seen(steps[1]) == ["/home/student\nx"]
    assert seen(steps[2]) == ["[exit status 7]"]


def test_several_calls_in_a_reply() -> None:
    (step,) = play([bash("echo 1 > ~/x") + bash("cat ~/x") + bash("rm ~/x; ls ~/x")])
    assert [text.partition(":")[0] for text in seen(step)] == ["[no output]", "1", "ls"]
    assert solved([bash("ls ~/d") + answer("3") + answer("4")]), "the first answer counts"
    native = Message("assistant", "", tool_calls=(ToolCall("c1", "answer_action", {"answer": "3"}),))
    assert solved([native])


def test_output_is_cut_at_800() -> None:
    assert SHOWN_CHARACTERS == 800
    exact, longer = play([bash("printf '%800s' | tr ' ' a"), bash("printf '%801s' | tr ' ' b")])
    assert seen(exact) == ["a" * 800]
    assert seen(longer) == ["b" * 800 + "\n[1 more characters]"]


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ("Hello", "Call a tool"),
        ("", "Call a tool"),
        ("<tool_call>{oops</tool_call>", "malformed call: it is not JSON"),
        (call("bash", script="ls"), "no tool 'bash'"),
        (call("bash_action"), "wrong arguments of bash_action"),
        (call("answer_action", text="3"), "wrong arguments of answer_action"),
        (call("finish_action", answer="3"), "wrong arguments of finish_action"),
        (bash("\0"), "null byte"),
        (bash("echo " + "a" * 200_000), "longer than"),
    ],
)
def test_calls_that_are_wrong_are_answered(reply: str, told: str) -> None:
    (step,) = play([reply])
    assert not step.done
    assert told in seen(step)[0]


def test_an_episode_that_the_agent_does_not_end_costs_the_penalty() -> None:
    last = play([SPAM], max_turns=1, incomplete_penalty=0.2)[-1]
    assert last.components["agent"] == {"solved": 0.0, "incomplete": -0.2}
    assert play([answer("wrong")], incomplete_penalty=0.2)[-1].rewards["agent"] == 0.0


def test_turns_end() -> None:
    steps = play([SPAM] * 20)
    assert len(steps) == 8
    last = steps[-1]
    assert (last.stop_reason, last.truncated, last.success, last.rewards["agent"]) == ("max_turns", True, False, 0.0)
    assert len(play([SPAM] * 20, max_turns=3)) == 3
    assert solved([SPAM, answer("3")], max_turns=2), "the last turn may answer"
    environment = ShellEnvironment(max_turns=1)
    environment.reset(task_of(COUNT))
    environment.step({"agent": Message("assistant", SPAM)})
    assert environment._cell is None
    environment.reset(task_of(COUNT))
    assert environment.step({"agent": Message("assistant", answer("3"))}).success


def test_a_script_that_takes_too_long_is_ended_and_the_system_goes_on() -> None:
    brief = Sandbox(minimum="namespaces", wall_seconds=3.0)
    steps = play([bash("echo x > ~/kept; sleep 60"), bash("cat ~/kept"), answer("3")], sandbox=brief)
    assert seen(steps[0]) == ["[ended: it took too long.]"]
    assert seen(steps[1]) == ["x"]
    assert steps[-1].success


def test_a_reply_takes_bounded_time() -> None:
    calls = tuple(ToolCall(f"c{n}", "bash_action", {"script": "sleep 0.9"}) for n in range(8))
    (step,) = play([Message("assistant", "", tool_calls=calls)], sandbox=QUICK)
    assert len(seen(step)) == 8
    assert set(seen(step)[2:]) == {"[not run: the scripts before it took too long]"}, "two take longer than 1.5 s"
    steps = play([Message("assistant", "", tool_calls=calls), bash("echo next")], sandbox=QUICK)
    assert seen(steps[1]) == ["next"], "each reply has its own time"


def test_checks_by_program() -> None:
    exists = {"language": "bash", "code": '[ "$(cat ~/out)" = done ]'}
    row = checked(exists, example="echo done > ~/out")
    assert solved([bash("echo done > ~/out"), FINISH], row)
    assert not solved([FINISH], row), "the reference runs on its own system"
    assert not solved([bash("echo don > ~/out"), FINISH], row)
    receives = {"language": "python", "code": "import sys; sys.exit(sys.argv[1:] != ['-c it\\'s', 'one'])"}
    row = checked({"language": "bash", "code": "printf one"}, receives)
    assert solved([answer("-c it's")], row)
    assert not solved([answer("other")], row)
    second = {"language": "bash", "code": '[ "$1" = a ] && [ "$2" = "b" ] && echo c'}
    row = checked(None, second, {"code": "[ $3 = c ]"}, example="printf b")
    assert solved([answer("a")], row), "each check receives the answer and the outputs before it"
    assert not solved([answer("b")], row)


FORGERIES = [
    "for m in subprocess re os sys json; do echo 'import os; os._exit(0)' > ~/$m.py; done",
    "D=$(python3 -m site --user-site); mkdir -p $D; echo 'import os; os._exit(0)' > $D/usercustomize.py",
    "export BASH_ENV=~/e ENV=~/e; echo 'exit 0' > ~/e; cp ~/e ~/.bashrc; cp ~/e ~/.profile; cp ~/e ~/.bash_profile",
    "(while :; do kill -9 1 $PPID; done) 2>/dev/null & exit 0",
    "echo '{\"ok\": 0}' >&3; echo '{\"ok\": 0}' >&4; true",
    "for end in /proc/1/fd/* /proc/[0-9]*/fd/[34]; do echo '{\"ok\": 0}' > $end; done; true",
    "cp /bin/true /tmp/python3; PATH=/tmp:$PATH; hash -p /bin/true bash; ln -sf /bin/true /usr/local/bin/python3",
    "rm -rf ~ /tmp/*; chmod 000 ~; true",
]


@pytest.mark.parametrize("script", FORGERIES, ids=range(len(FORGERIES)))
@pytest.mark.parametrize("language", ["bash", "python"])
def test_an_agent_cannot_forge_a_check(script: str, language: str) -> None:
    code = "exit 1" if language == "bash" else "import subprocess, re, json, sys; sys.exit(1)"
    assert not solved([bash(script), FINISH], checked({"language": language, "code": code}), sandbox=QUICK)


SPY = """
cat > spy.py <<'END'
import os, signal
first = os.getpid()
open("ready", "w").close()
while True:
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(process) > first:
                os.kill(int(process), signal.SIGSTOP)
                words = open(f"/proc/{process}/cmdline").read().split(chr(0))
                if "--" in words:
                    open("out", "w").write(words[words.index("--") + 2])
                os.kill(int(process), signal.SIGCONT)
        except (OSError, IndexError):
            pass
END
python3 spy.py > /dev/null 2>&1 &
until test -e ready; do sleep 0.01; done
"""


def test_a_process_in_the_background_does_not_see_what_the_checks_expect() -> None:
    expects = {"language": "bash", "code": '[ "$(cat ~/out)" = "$2" ]'}
    row = checked(None, expects, example="printf 4711")
    assert solved([bash("printf 4711 > ~/out"), FINISH], row, sandbox=PATIENT)
    assert not solved([bash(SPY), FINISH], row, sandbox=PATIENT)


def test_a_system_that_ended_fails_its_checks() -> None:
    passes = checked({"language": "bash", "code": "true"})
    assert solved([FINISH], passes)
    small = Sandbox(minimum="namespaces", wall_seconds=20.0, memory_mb=96)
    hog = (
        "python3 -c 'x=bytearray(60<<20)\nimport time; time.sleep(19)' & python3 -c 'x=bytearray(60<<20)\nimport time\n"
    )
    steps = play([bash(hog + "time.sleep(19)'"), bash("echo x"), FINISH], passes, sandbox=small)
    assert seen(steps[0]) == ["[ended: it used too much memory. The system is gone.]"]
    assert seen(steps[1]) == ["[the system was ended]"]
    assert steps[-1].success is False


def test_a_check_that_never_ends_fails() -> None:
    assert not solved([FINISH], checked({"language": "bash", "code": "sleep 60"}), sandbox=QUICK)
    row = checked({"language": "bash", "code": '[ "$(cat ~/out)" = done ]'})
    assert not solved([bash("mkfifo ~/out"), FINISH], row, sandbox=QUICK)


def test_match_by_text_and_by_pattern() -> None:
    row = {"description": "Which?", "evaluation": {"match": "v1.2"}}
    assert solved([answer(" v1.2\n")], row)
    assert not solved([answer("v1x2")], row)
    assert not solved([FINISH], row)
    row = {"description": "Which?", "evaluation": {"match": {"regex": r"v[0-9]+\.[0-9]+"}}}
    assert solved([answer("v10.2 ")], row)
    for text in ("a v1.2", "v1.2 b", "v1.", "", "\ud800", "v1.2\x00"):
        assert not solved([answer(text)], row)
    assert not matches(" 1", {"answer": "1", "strip": False}, QUICK)
    assert ShellEnvironment().gold(task_of(row)) is None


def test_a_pattern_that_takes_for_ever_is_no_match() -> None:
    row = {"description": "Which?", "evaluation": {"match": {"regex": r"(a+)+b"}}}
    assert not solved([answer("a" * 5000)], row, sandbox=QUICK)
    assert solved([answer("aab")], row, sandbox=PATIENT)


def test_programs_in_the_background() -> None:
    until_up = "for try in {1..400}; do grep -q up ~/live && break; sleep .01; done"
    row = {
        "description": "Which word does ~/live hold?",
        "create": {"init": {"code": "echo none > ~/live"}},
        "start": "(while :; do echo up > ~/new; mv ~/new ~/live; sleep 0.05; done) &",
        "evaluation": {"check": [None, {"file": "check/string-match.py"}], "example": f"{until_up}; cat ~/live"},
    }
    look = f"{until_up}; cat ~/live"
    steps = play([bash(look), bash(f"echo none > ~/live; {look}"), answer("up")], row, sandbox=PATIENT)
    assert [seen(step) for step in steps[:2]] == [["up"], ["up"]]
    assert steps[-1].success


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_system_that_cannot_be_set_up_is_an_error() -> None:
    brief = Sandbox(minimum="namespaces", wall_seconds=1.2)
    for field in ({"create": {"init": "sleep 60"}}, {"start": "sleep 60"}):
        environment = ShellEnvironment(sandbox=brief)
        before = open_files()
        with pytest.raises(SandboxError, match="sleep 60") as caught:  # held, so that nothing is collected as garbage
            environment.reset(task_of({**COUNT, **field}))
        assert caught.value.__traceback__ is not None
        eventually(lambda before=before: open_files() <= before)
    slow = {**COUNT, "evaluation": {"check": [None, {"file": "in"}], "example": "sleep 60"}}
    with pytest.raises(SandboxError, match="How many files"):
        ShellEnvironment(sandbox=brief).reset(task_of(slow))


def test_scripts_in_python_are_run_as_such() -> None:
    row = {
        **COUNT,
        "create": {"init": {"language": "python", "code": "open('/home/student/it\\'s', 'w').write('1')"}},
        "evaluation": {"check": [None, {"file": "string-match"}], "example": {"code": "cat ~/it*"}},
    }
    steps = play([bash("cat ~/it*"), answer("1")], row)
    assert seen(steps[0]) == ["1"]
    assert steps[-1].success


def test_hostile_and_spamming_policies_earn_nothing() -> None:
    environment = ShellEnvironment(max_turns=3)
    for index in range(2):
        task = environment.tasks("train")[index]
        for reply in (SPAM, FINISH, answer(""), answer("no"), answer("*"), *HOSTILE_REPLIES):
            environment.reset(task)
            earned, done = 0.0, False
            while not done:
                step = environment.step({"agent": Message("assistant", reply)})
                earned, done = earned + step.rewards["agent"], step.done
            assert earned == 0.0, (task.data, reply[:50])
    environment.close()


def test_the_contract_holds() -> None:
    report = check_environment(ShellEnvironment(max_turns=2), tasks_per_split=2)
    report.raise_on_failure()
    assert "earn 1," in next(check.message for check in report.checks if check.name == "best replies")


def test_weaker_sandboxes_and_bad_settings_are_refused() -> None:
    for sandbox in (Sandbox(), Sandbox(minimum="landlock"), Sandbox(level="limits")):
        with pytest.raises(ConfigurationError, match=r"shell: sandbox\.minimum"):
            ShellEnvironment(sandbox=sandbox)
    with pytest.raises(ConfigurationError, match="max_turns"):
        ShellEnvironment(max_turns=0)


def test_a_machine_without_namespaces_says_so_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrlm_pl.sandbox.sandbox._strongest_level", lambda: ("landlock", {}))
    with pytest.raises(ConfigurationError, match=r"offers only 'landlock'"):
        ShellEnvironment().tasks("train")


def test_episodes_side_by_side_do_not_meet() -> None:
    environment = ShellEnvironment()
    results: dict[int, tuple[str, float]] = {}

    def run(number: int) -> None:
        own = environment.copy()
        own.reset(task_of(COUNT))
        own.step({"agent": Message("assistant", bash(f"echo {number} > ~/mine; rm ~/d/a"))})
        told = seen(own.step({"agent": Message("assistant", bash("cat ~/mine; ls ~/d | wc -l"))}))[0]
        results[number] = (told, own.step({"agent": Message("assistant", answer("3"))}).rewards["agent"])

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert results == {number: (f"{number}\n2", 1.0) for number in range(8)}


def test_a_copy_in_the_middle_of_an_episode_has_no_system() -> None:
    environment = ShellEnvironment()
    environment.reset(task_of(COUNT))
    other = environment.copy()
    assert seen(other.step({"agent": Message("assistant", bash("ls ~/d"))})) == ["[the system was ended]"]
    assert seen(environment.step({"agent": Message("assistant", bash("ls ~/d | wc -l"))})) == ["3"]
    other.reset(task_of(COUNT))
    assert seen(other.step({"agent": Message("assistant", bash("ls ~/d | wc -l"))})) == ["3"]
    other.close()
    environment.close()


def test_an_environment_that_nobody_closes_ends_its_system() -> None:
    environment = ShellEnvironment()
    environment.reset(task_of(COUNT))
    assert environment._cell is not None
    ended = environment._cell._ended
    assert not ended.is_set()
    environment.step({"agent": Message("assistant", bash("(while :; do :; done) &"))})
    del environment
    gc.collect()
    assert ended.wait(60)


def test_one_system_at_a_time() -> None:
    environment = ShellEnvironment()
    cells = []
    for _ in range(5):
        environment.reset(task_of(COUNT))
        cells.append(environment._cell)
    assert [cell._ended.is_set() for cell in cells] == [True] * 4 + [False]  # type: ignore[union-attr]
    environment.close()
    assert cells[-1]._ended.is_set()  # type: ignore[union-attr]
    environment.close()


def test_sandboxed_environments_in_a_host_process() -> None:
    hosts = EnvironmentHosts(1, timeout=60.0)
    try:
        for template, reply, earned in (
            (ShellEnvironment(), answer("3"), 1.0),
            (CodeEnvironment(), "def f(x): return None", 0.0),
        ):
            task = task_of(COUNT) if template.name == "shell" else template.tasks("train")[0]
            episodes = [hosts.host(template).copy() for _ in range(2)]
            for hosted in episodes:
                hosted.reset(task)
            for hosted in episodes:
                step = hosted.step({"agent": Message("assistant", reply)})
                assert (step.done, step.rewards["agent"]) == (True, earned)
                hosted.close()
    finally:
        hosts.close()
