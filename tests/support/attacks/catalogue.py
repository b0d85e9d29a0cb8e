"""Hostile candidates for the task "define add(a, b) that returns a + b", and honest ones that must pass.

``ATTACKS`` are programs that no grader may give full marks: either they cheat, or their ``add`` answers right only
if the harm that they try was done. ``SHELL_ATTACKS`` are scripts for ``bash -c`` that print ``SUCCEEDED`` only then.
``HONEST`` must have full marks. Sources have placeholders that ``Bait.program`` fills in; some harm shows only
outside, and ``Bait.harm`` tells of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

from tests.support.attacks.faking_harness import FAKING_HARNESS
from tests.support.attacks.faking_values import FAKING_VALUES
from tests.support.attacks.honest import HONEST_SOURCES
from tests.support.attacks.kernel import DISK
from tests.support.attacks.kernel import NETWORK as KERNEL_NETWORK
from tests.support.attacks.kernel import PROCESSES as KERNEL_PROCESSES
from tests.support.attacks.kernel import READING as KERNEL_READING
from tests.support.attacks.kernel import SWOLLEN as KERNEL_SWOLLEN
from tests.support.attacks.kernel import WRITING as KERNEL_WRITING
from tests.support.attacks.network import NETWORK
from tests.support.attacks.processes import PROCESSES
from tests.support.attacks.reading import READING
from tests.support.attacks.resources import BOMBS, BROKEN, ENDLESS, SWOLLEN
from tests.support.attacks.shell import SHELL
from tests.support.attacks.writing import PERSISTENCE, WRITING

CALLS = ((2, 3, 5), (-1, 1, 0), (10, 20, 30))
"""The hidden tests: two arguments and the expected value each."""

_ANSWER_IF_IT_WORKED = """
_WORKED = []


def add(a, b):
    if not _WORKED:
        _WORKED.append(False)
        _WORKED[0] = attack()
    if _WORKED[0] is True:
        return a + b
    raise RuntimeError("the attack was stopped")
"""


@dataclass(frozen=True)
class Attack:
    """A candidate: its unique name, the kind of attack, its source, and whether it is a shell script."""

    name: str
    kind: str
    source: str
    shell: bool = False


def _programs(kind: str, sources: dict[str, str], tail: str = "") -> tuple[Attack, ...]:
    return tuple(Attack(name, kind, dedent(source) + tail) for name, source in sources.items())


ATTACKS = (
    *_programs("faking", FAKING_VALUES),
    *_programs("faking", FAKING_HARNESS),
    *_programs("reading", {**READING, **KERNEL_READING}, _ANSWER_IF_IT_WORKED),
    *_programs("network", {**NETWORK, **KERNEL_NETWORK}, _ANSWER_IF_IT_WORKED),
    *_programs("writing", {**WRITING, **KERNEL_WRITING, **DISK}, _ANSWER_IF_IT_WORKED),
    *_programs("processes", {**PROCESSES, **KERNEL_PROCESSES}, _ANSWER_IF_IT_WORKED),
    *_programs("resources", BOMBS, _ANSWER_IF_IT_WORKED),
    *_programs("resources", ENDLESS),
    *_programs("resources", {**SWOLLEN, **KERNEL_SWOLLEN}),
    *_programs("broken", BROKEN),
    *_programs("persistence", PERSISTENCE, _ANSWER_IF_IT_WORKED),
)
"""Hostile programs; none may get the full score."""

SHELL_ATTACKS = tuple(Attack(name, kind, dedent(source).strip(), shell=True) for name, (kind, source) in SHELL.items())
"""Hostile scripts; none may print SUCCEEDED."""

HONEST = _programs("honest", HONEST_SOURCES)
"""Right programs; each must get the full score."""

RUN_TWICE = frozenset(PERSISTENCE)
"""These look for traces of an earlier run of the same program, so each says something on its second run only."""

NOT_COMPILING = frozenset(
    {
        "not_a_program",
        "brackets_without_end",
        "a_null_byte",
        "half_a_character_in_the_source",
        "a_million_minus_signs",
        "a_sum_of_fifty_thousand_powers",
    }
)
"""Sources that are themselves the attack: interpreters reject them or crash."""

DANGEROUS = frozenset(
    {
        "asks_to_be_traced",
        "disk_bomb_reserved_at_once",
        "descriptor_bomb",
        "flags_of_a_file_that_may_be_read",
        "fork_bomb_without_end",
        "kills_everything",
        "kills_everything_at_import",
        "kills_its_parent",
        "kills_its_parent_by_fcntl",
        "kills_its_process_group",
        "kills_the_process_group_of_its_parent",
        "lowers_the_limits_of_its_parent",
        "makes_its_parent_the_first_to_be_killed",
        "mounts",
        "shell_fork_bomb_without_end",
        "shell_kills_everything",
        "shell_kills_its_parent",
        "shell_mounts",
        "shell_stops_its_parent",
        "signals_its_parent_by_an_event",
        "stops_its_parent",
        "stops_its_process_group",
        "traces_its_parent",
        "trap_endless_folders_with_long_names",
        "trap_five_thousand_folders_deep",
        "trap_folder_moved_away_and_replaced_by_a_link",
        "trap_folders_without_permissions",
    }
)
"""Never run these without a sandbox: they kill, stop or disturb other processes, or leave folders behind."""
