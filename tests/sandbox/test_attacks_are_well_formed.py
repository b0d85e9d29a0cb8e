"""The attacks themselves: they are attacks, and they work where nothing stops them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from tests.support.attacks.bait import Bait
from tests.support.attacks.catalogue import (
    ATTACKS,
    CALLS,
    DANGEROUS,
    HONEST,
    NOT_COMPILING,
    RUN_TWICE,
    SHELL_ATTACKS,
    Attack,
)
from tests.support.servers.environment_servers import eventually

BY_NAME = {attack.name: attack for attack in (*ATTACKS, *SHELL_ATTACKS, *HONEST)}
# These end by a limit only, or leave a process.
SLOW = {"closes_every_channel_and_lives_on"}
SAFE = [attack for attack in ATTACKS if attack.kind == "faking" and attack.name not in SLOW]
# They go for the bait only, so that they may succeed.
HARMLESS = [
    "reads_etc_passwd",
    "reads_etc_passwd_through_pwd",
    "reads_a_file_outside",
    "reads_a_file_outside_by_raw_system_calls",
    "reads_a_file_outside_through_a_symbolic_link",
    "reads_through_dots",
    "reads_through_roots_in_proc",
    "reads_the_repository",
    "lists_the_folder_outside",
    "lists_the_temporary_folder_of_the_host",
    "secret_in_the_environment",
    "secret_in_the_environment_of_a_child",
    "secret_in_proc_self_environ",
    "secret_in_own_memory",
    "secret_in_the_environment_of_the_c_library",
    "command_lines_of_other_processes",
    "environment_of_every_process",
    "tcp_to_the_host",
    "tcp_by_raw_system_calls",
    "tcp_fast_open",
    "tcp_from_a_forked_child",
    "tcp_from_another_interpreter",
    "tcp_from_a_shell",
    "http_request",
    "udp_to_the_host",
    "unix_socket_of_the_host",
    "unix_socket_bound_outside",
    "abstract_socket_of_the_host",
    "a_socket_pair_shared_with_a_daemon_that_connects",
    "writes_a_file_outside",
    "appends_to_and_truncates_a_file_outside",
    "truncates_a_file_outside_by_path_alone",
    "renames_or_removes_a_file_outside",
    "changes_mode_and_times_of_a_file_outside",
    "makes_a_folder_and_a_link_outside",
    "writes_outside_through_a_symbolic_link",
    "writes_outside_from_a_shell",
    "writes_to_tmp",
    "writes_to_the_repository",
    "signals_the_process_of_the_bait",
    "attributes_of_a_file_outside",
    "names_of_attributes_of_a_file_outside",
    "watches_folders_of_the_host",
    "watches_a_folder_by_its_descriptor",
    "shared_memory_of_the_host",
    "unix_datagram_to_the_host",
    "unix_datagram_with_flags_and_raw_kinds",
    "unix_datagram_by_a_message",
    "unix_pair_connected_anew",
    "times_of_a_folder_that_everybody_may_write",
    "message_in_a_queue_of_the_host",
    "removes_a_queue_of_the_host",
    "disk_bomb_in_open_files_without_a_name",
    "disk_bomb_in_mapped_files_without_a_name",
    "disk_bomb_in_files_on_their_way",
    "disk_bomb_below_long_names",
    "disk_bomb_in_a_folder_that_cannot_be_listed",
    "takes_off_its_death_signal",
    "shell_reads_passwd",
    "shell_reads_outside",
    "shell_reads_through_a_link",
    "shell_reads_secrets_in_the_environment",
    "shell_reads_the_folder_of_the_trainer",
    "shell_writes_outside",
    "shell_writes_through_a_link",
    "shell_copies_to_the_temporary_folder_of_the_host",
    "shell_dev_tcp",
    "shell_dev_udp",
]
# Harm that the program itself cannot see: the bait must.
SEEN_OUTSIDE = ["daemon_by_double_fork", "daemon_at_import", "shell_daemon_by_setsid", "shell_daemon_by_nohup"]
CHILD = """
import json, sys, types
kind, dump, calls = type, json.dump, json.loads(sys.argv[3])
with open(sys.argv[1], newline="") as file: source = file.read()
sys.modules["candidate"] = types.ModuleType("candidate")
scope = vars(sys.modules["candidate"])
exec(compile(source, "candidate", "exec"), scope)
values = [scope["add"](a, b) for a, b, _ in calls]
with open(sys.argv[2], "w") as file: dump([value if kind(value) is int else None for value in values], file)
"""
# A harness that shares its process, and the expected values, with the candidate.
LEAKY = """
import json, sys
def check(case, scope):
    expected = case["expected"]
    result = scope["add"](*case["args"])
    return result == expected
def main():
    cases = [{"args": call[:2], "expected": call[2]} for call in json.loads(sys.argv[2])]
    scope = {"__name__": "candidate"}
    exec(open(sys.argv[1]).read(), scope)
    passed = all([check(case, scope) for case in cases])
    print(json.dumps({"passed": passed}))
main()
"""


def run(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Runs in its own session, in ``folder``; a program that takes longer than 200 seconds is an error.

    Output goes to a file: a daemon would hold a pipe open.
    """
    with TemporaryFile() as output:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.DEVNULL,
            timeout=200,
            start_new_session=True,
            env={**os.environ, **variables},
            check=False,
        )
        output.seek(0)
        return subprocess.CompletedProcess(command, done.returncode, output.read())


def score(source: str, folder: Path, **variables: str) -> float:
    """Return the share of right values, compared outside the candidate's process without other protection."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "candidate.py").write_text(source, newline="")
    reply = folder.parent / f"{folder.name}-values"
    run([sys.executable, "-c", CHILD, "candidate.py", str(reply), json.dumps(CALLS)], folder, **variables)
    try:
        values = json.loads(reply.read_bytes())
    except (FileNotFoundError, ValueError):  # it gave no answer, or scribbled over it
        return 0.0
    if not isinstance(values, list):
        return 0.0
    return sum(
        type(value) is int and value == expected for value, (_, _, expected) in zip(values, CALLS, strict=False)
    ) / len(CALLS)


def fools_the_naive_grader(attack: Attack, folder: Path) -> bool:
    """The published way: candidate and asserts in one process, exit code 0 or a printed word for success."""
    folder.mkdir()
    asserts = "\n".join(f"assert add({a}, {b}) == {expected}" for a, b, expected in CALLS)
    (folder / "candidate.py").write_text(f"{attack.source}\n{asserts}\nprint('PASSED')\n")
    done = run([sys.executable, "candidate.py"], folder)
    return done.returncode == 0 or b"PASSED" in done.stdout


def fools_the_leaky_grader(attack: Attack, folder: Path) -> bool:
    """The harness shares the candidate's process; the first line that has a verdict counts."""
    folder.mkdir()
    (folder / "candidate.py").write_text(attack.source)
    done = run([sys.executable, "-c", LEAKY, "candidate.py", json.dumps(CALLS)], folder)
    return b'"passed": true' in done.stdout


def succeeds(attack: Attack, bait: Bait, folder: Path) -> bool:
    """Return whether the attack reports success when run without protection."""
    source = bait.program(attack.source)
    if not attack.shell:
        return score(source, folder, MRLM_TEST_SECRET="hidden") == 1.0
    folder.mkdir(exist_ok=True)
    return b"SUCCEEDED" in run(["bash", "-c", source], folder, MRLM_TEST_SECRET="hidden").stdout


def test_there_are_enough_of_every_kind() -> None:
    kinds = Counter(attack.kind for attack in ATTACKS)
    assert len(ATTACKS) >= 75
    assert len(SHELL_ATTACKS) >= 15
    assert len(HONEST) >= 20
    assert len(BY_NAME) == len(ATTACKS) + len(SHELL_ATTACKS) + len(HONEST)
    assert set(kinds) == {
        "faking", "network", "reading", "writing", "processes", "resources", "persistence", "broken"
    }  # fmt: skip
    assert min(kinds.values()) >= 5
    assert {attack.kind for attack in SHELL_ATTACKS} == {"reading", "writing", "network", "processes", "resources"}
    assert all(attack.shell for attack in SHELL_ATTACKS)
    assert not any(attack.shell for attack in (*ATTACKS, *HONEST))


def test_named_sets_name_attacks() -> None:
    for names in (DANGEROUS, NOT_COMPILING, RUN_TWICE, set(HARMLESS), set(SEEN_OUTSIDE)):
        assert names <= set(BY_NAME)
    assert not DANGEROUS & {*HARMLESS, *SEEN_OUTSIDE, *(attack.name for attack in SAFE)}


def test_placeholders_are_filled_and_programs_compile(tmp_path: Path) -> None:
    with Bait(tmp_path / "bait") as bait:
        for attack in (*ATTACKS, *HONEST):
            source = bait.program(attack.source)
            assert not any(f"@{name}@" in source for name in ("OUTSIDE", "PORT", "TOKEN", "NEKOT", "REPOSITORY"))
            if attack.name not in NOT_COMPILING:
                compile(source, attack.name, "exec")
        for attack in SHELL_ATTACKS:
            done = run(["bash", "-n", "-c", bait.program(attack.source)], tmp_path)
            assert done.returncode == 0, attack.name
            assert "SUCCEEDED" not in attack.source
        assert bait.harm() == []


@pytest.mark.parametrize("name", sorted(NOT_COMPILING - {"a_million_minus_signs", "a_sum_of_fifty_thousand_powers"}))
def test_some_sources_do_not_compile(name: str) -> None:
    with pytest.raises((SyntaxError, ValueError)):
        compile(BY_NAME[name].source, name, "exec")


def test_no_attack_is_an_honest_program() -> None:
    for attack in ATTACKS:
        guarded = "_WORKED[0] = attack()" in attack.source
        assert attack.source.count("a + b") == (1 if guarded or "sum_of" in attack.source else 0), attack.name


@pytest.mark.long
def test_cheats_have_no_marks_and_honest_programs_all(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        programs = [*SAFE, *HONEST]
        with Bait(tmp_path / "bait") as bait:
            scores = pool.map(lambda it: score(bait.program(it.source), tmp_path / it.name), programs)
            found = {attack.name: mark for attack, mark in zip(programs, scores, strict=True)}
    wrong = {name: mark for name, mark in found.items() if mark != (BY_NAME[name].kind == "honest")}
    assert not wrong


@pytest.mark.parametrize(("grader", "least"), [(fools_the_naive_grader, 25), (fools_the_leaky_grader, 25)])
@pytest.mark.long
def test_cheats_fool_a_grader_in_the_same_process(grader: Callable, least: int, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        fooled = list(pool.map(lambda attack: grader(attack, tmp_path / attack.name), SAFE))
    assert sum(fooled) >= least, [attack.name for attack, done in zip(SAFE, fooled, strict=True) if not done]


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() != "x86_64", reason="system calls by number")
@pytest.mark.parametrize("name", HARMLESS)
@pytest.mark.long_after(8)
def test_attacks_succeed_where_nothing_stops_them(name: str, tmp_path: Path) -> None:
    with Bait(tmp_path / "bait") as bait:
        assert succeeds(BY_NAME[name], bait, tmp_path / "run")


# The others show in a process that serves several runs only.
@pytest.mark.parametrize("name", ["finds_a_file_of_an_earlier_run", "finds_a_bytecode_cache_of_an_earlier_run"])
def test_what_an_earlier_run_left_is_found_on_the_second(name: str, tmp_path: Path) -> None:
    with Bait(tmp_path / "bait") as bait:
        assert [succeeds(BY_NAME[name], bait, tmp_path / "run") for _ in range(2)] == [False, True]


@pytest.mark.parametrize("name", SEEN_OUTSIDE)
def test_the_bait_sees_processes_that_live_on(name: str, tmp_path: Path) -> None:
    with Bait(tmp_path / "bait") as bait:
        assert not succeeds(BY_NAME[name], bait, tmp_path / "run")
        # It has its name a moment after its start.
        eventually(lambda: any("lives on" in line for line in bait.harm()))
    assert not bait.survivors()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("tcp_to_the_host", "connection to"),
        ("unix_socket_of_the_host", "connection to"),
        ("udp_to_the_host", "connection to the datagram socket"),
        ("unix_datagram_to_the_host", "connection to the datagram socket"),
        ("writes_a_file_outside", "changed or made or removed: written"),
        ("truncates_a_file_outside_by_path_alone", "changed or made or removed: kept.txt"),
        ("renames_or_removes_a_file_outside", "changed or made or removed: kept.txt"),
        ("writes_to_tmp", "written to /tmp"),
        ("signals_the_process_of_the_bait", "the process of the bait was killed"),
    ],
)
def test_the_bait_sees_harm(name: str, line: str, tmp_path: Path) -> None:
    with Bait(tmp_path / "bait") as bait:
        assert bait.harm() == []
        succeeds(BY_NAME[name], bait, tmp_path / "run")
        # Another thread accepts connections, and a process takes a moment to end.
        eventually(lambda: any(found.startswith(line) for found in bait.harm()))
