"""The container files: commands that parse, paths that exist, and a seccomp profile under which the sandbox works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mrlm_pl.sandbox import strongest
from mrlm_pl.sandbox.wall import kernel, system_calls
from tests.support.documents import ROOT, parse

DOCKER = ROOT / "docker"
PROFILE = json.loads((DOCKER / "seccomp.json").read_text())
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
REFUSED = {name for rule in PROFILE["syscalls"] for name in rule["names"]}


def tables() -> dict[str, dict[str, int]]:
    """Return the tables of system calls of the sandbox: numbers on this machine by name."""
    return {name: table for name, table in vars(system_calls).items() if name.isupper() and type(table) is dict}


def test_the_profile_refuses_no_call_that_the_sandbox_or_its_programs_make() -> None:
    assert PROFILE["defaultAction"] == "SCMP_ACT_ALLOW"
    assert {rule["action"] for rule in PROFILE["syscalls"]} == {"SCMP_ACT_ERRNO"}
    setting_up = set(re.findall(r"libc\.(unshare|setns|mount|umount2|prctl)\(", Path(kernel.__file__).read_text()))
    assert setting_up == {"unshare", "setns", "mount", "umount2", "prctl"}
    of_programs = {name for table, names in tables().items() if table != "_PRIVILEGED" for name in names}
    assert len(of_programs) > 200
    assert not REFUSED & {*setting_up, *of_programs, "pivot_root", "mount_setattr", "clone3", "ptrace"}
    assert {"bpf", "kexec_load", "init_module", "open_by_handle_at", "keyctl", "reboot"} <= REFUSED


UNDER_THE_FILTER = """
import ctypes, struct, sys
from mrlm_pl.sandbox.wall import kernel

refused = [int(number) for number in sys.argv[2:]]
steps = [(0x20, 0, 0, 0)]  # load the number of the call
for number in refused:
    steps += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)]  # equal: EPERM
steps.append((0x06, 0, 0, 0x7FFF0000))  # allow

class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))

code = b"".join(struct.pack("HBBI", *step) for step in steps)
buffer = ctypes.create_string_buffer(code, len(code))
kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
kernel.prctl(22, 2, ctypes.byref(Program(len(steps), ctypes.cast(buffer, ctypes.c_void_p))))
try:
    kernel.syscall(refused[0], 0, 0, 0)
except PermissionError:
    print("refused")

from mrlm_pl.sandbox import Sandbox

done = Sandbox(level=sys.argv[1]).run("6 * 7")
print(done.output.strip(), done.error)
"""


@pytest.mark.slow
def test_the_sandbox_starts_at_its_strongest_level_under_the_profile() -> None:
    numbers = tables()["_PRIVILEGED"]
    refused = [str(numbers[name]) for name in sorted(REFUSED & numbers.keys())]
    assert len(refused) > 15
    command = [sys.executable, "-c", UNDER_THE_FILTER, strongest()[0], *refused]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.stdout.splitlines() == ["refused", "42 None"], done.stderr[-3000:]


@pytest.mark.parametrize("service", COMPOSE["services"])
def test_a_service_has_a_command_that_parses(
    service: str, outside_the_repository: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = COMPOSE["services"][service]
    monkeypatch.setenv("MRLM_RUN_FOLDER", "")  # so that the test restores it
    monkeypatch.delenv("MRLM_RUN_FOLDER")
    Path("configs").symlink_to(ROOT / "configs")
    assert parse(["mrlm", *settings["command"]]) == 0
    assert settings["init"] is True, "`mrlm` as the first process would leave ended processes of others in the list"
    if "healthcheck" in settings:
        assert parse(settings["healthcheck"]["test"][1:]) == 0
    for option in settings.get("security_opt", ()):
        kind, _, value = option.partition("=")
        assert kind in ("seccomp", "apparmor")
        assert kind != "seccomp" or (DOCKER / value).is_file()


def test_the_image_has_the_files_that_it_copies() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for name in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line.removeprefix("!") for line in ignored if line.startswith("!")} == copied
    torch = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert torch
    assert f"ARG TORCH={torch.group(1)}\n" in text
    build = COMPOSE["services"]["environments"]["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
