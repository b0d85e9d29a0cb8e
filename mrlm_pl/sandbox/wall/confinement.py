"""Locks a process down: the server once, in namespaces with its own root, and each child for good."""

from __future__ import annotations

import errno
import functools
import os
import re
import resource
import signal
import sys
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass

from mrlm_pl.sandbox.wall import kernel as syscalls
from mrlm_pl.sandbox.wall import landlock, seccomp
from mrlm_pl.sandbox.wall.system_calls import Filter

NOBODY = 65534
INNER_USER = 1000
"""User and group inside the namespaces."""

FIRST_CELL_USER = 60_000
OPEN_FILES, SHELL_OPEN_FILES = 64, 128
"""Maximum open files of each process. Scripts of published tasks redirect descriptors up to 123."""

BOX = "/box"
HOME = "/home/student"
SYSTEM_FOLDERS = ("/home", "/root", "/tmp", "/var", "/srv", "/opt")
"""Folders that a shell finds private and empty, whatever the machine holds in them."""

_LINKER_CACHE = "/etc/ld.so.cache"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/alternatives", _LINKER_CACHE, "/etc/localtime")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")
_LINKS = ("bin", "sbin", "lib", "lib64")
_USERS = ("root:0:/root", "daemon:1:/usr/sbin", "bin:2:/bin", "sys:3:/dev", "mail:8:/var/mail", "www-data:33:/var/www")
_ETC = {
    "/etc/passwd": "".join(
        f"{name}:x:{number}:{number}:{name}:{home}:{'/bin/bash' if name == 'root' else '/usr/sbin/nologin'}\n"
        for name, number, home in (user.split(":") for user in (*_USERS, f"nobody:{NOBODY}:/nonexistent"))
    )
    + f"student:x:{INNER_USER}:{INNER_USER}::{HOME}:/bin/bash\n",
    "/etc/group": "".join(f"{name}:x:{number}:\n" for name, number, _ in (user.split(":") for user in _USERS))
    + f"sudo:x:27:\nusers:x:100:\nnogroup:x:{NOBODY}:\nstudent:x:{INNER_USER}:\n",
    "/etc/hostname": "sandbox\n",
    "/etc/hosts": "127.0.0.1 localhost sandbox\n",
    "/etc/shells": "/bin/sh\n/bin/bash\n",
}
"""Files of the system folder that a shell finds: of no real system."""

OWN_PROGRAMS = "/usr/local/bin"
"""Folder for programs of the scripts, next to links to those of the machine."""

MACHINE_PATH = "/usr/bin:/bin:/usr/local/.bin"
"""Folders of the machine's programs, which no script can replace; the last one may hold links to places that it can."""

_NEVER_THEIRS = {
    **{f"{folder}/pyvenv.cfg": "/dev/null" for folder in ("", "/usr", "/usr/local")},
    **{f"/usr/local/{folder}": "/old" for folder in ("lib", "lib64", "share")},
}
"""Places in which Python and Perl look for modules and settings: something empty where the machine has none."""

_LOG = "2024-01-01 00:00:00 startup archives unpack\n"
"""Content of the one log file of a shell's system."""

_DESCRIPTORS = {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}
_SAFE = syscalls.MS_NOSUID | syscalls.MS_NODEV
_READ_ONLY = syscalls.MS_RDONLY | _SAFE
MEBIBYTE = 1 << 20
MAX_FILES = 4096
"""Maximum number of files in a cell's private folder."""

PYTHON_TASKS, SHELL_TASKS = 32, 64
"""Maximum threads of a Python program, and maximum processes and threads of a shell script."""


@dataclass(frozen=True)
class CellSettings:
    """The resources that one child may use.

    Args:
        number: number of the child, unique in its server.
        memory_mb: address space of each process, in MiB.
        cpu_seconds: CPU time of each process.
        disk_mb: size of its private folder, in MiB.
        shell: whether it runs scripts: it may then start programs, and all but the machine's folders is writable.
        folders: extra folders that it may read, of packages.
    """

    number: int
    memory_mb: int
    cpu_seconds: int
    disk_mb: int
    shell: bool
    folders: tuple[str, ...] = ()


@functools.cache
def interpreter_folders() -> tuple[str, ...]:
    """Return folders that this interpreter loads its modules from."""
    return tuple(sorted({os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix)}))


@functools.cache
def _program_folders() -> tuple[str, ...]:
    """Return places of programs and their libraries, without those inside others: each costs a child's start."""
    folders = {os.path.realpath(path) for path in (*_SYSTEM, *interpreter_folders()) if os.path.exists(path)}
    return tuple(path for path in sorted(folders) if not any(path.startswith(f"{other}/") for other in folders))


@functools.cache
def _libraries_are_shown() -> bool:
    """Return whether a shell's root holds all folders that the linker's cache names; scripts could make the others."""
    with suppress(OSError), open(_LINKER_CACHE, "rb") as file:
        folders = {os.fsdecode(folder) for folder in re.findall(rb"(?<=\0)(/[^\0]*)/[^/\0]+\0", file.read())}
        hidden = tuple(f"{folder}/" for folder in SYSTEM_FOLDERS)
        return all(os.path.isdir(folder) and not folder.startswith(hidden) for folder in folders)
    return True


def prepare(level: str) -> None:
    """Compute in the server what all its children need, so that none of them does."""
    _program_folders()
    _libraries_are_shown()
    for shell in (False, True):
        if level == "namespaces":
            seccomp.program(_filter_in_namespaces(shell))
        if level == "landlock":
            for own_user in (False, True):
                seccomp.program(_filter_by_landlock(shell, own_user))


def enter_namespaces(folders: Iterable[str]) -> None:
    """Put this process, and the next child as first process, in namespaces with a root that holds programs only.

    Args:
        folders: extra folders that are shown in it, read-only.

    Raises:
        OSError: the machine does not allow it.
    """
    filesystem = syscalls.CLONE_NEWNS | syscalls.CLONE_NEWNET | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUTS
    as_root = False
    if os.getuid() == 0:
        # Root of the machine makes the file system first, as the interpreter may be in its own folder, and then
        # becomes nobody. Root of a container may lack the right to, and goes the way of an ordinary user.
        with suppress(PermissionError):
            syscalls.unshare(filesystem)
            as_root = True
    if as_root:
        _make_root(folders)
        syscalls.become_user(NOBODY)
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)  # else its own /proc entries, which set the maps, are root's
    user, group = os.getuid(), os.getgid()
    namespaces = syscalls.CLONE_NEWNS if as_root else filesystem
    syscalls.unshare(namespaces | syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWPID)
    syscalls.map_identity(INNER_USER, INNER_USER, user, group)
    if not as_root:
        _make_root(folders)


def _make_root(folders: Iterable[str]) -> None:
    """Make a new root: the system's programs and this interpreter, read-only, four devices, and empty folders."""
    syscalls.mount("none", "/", None, syscalls.MS_REC | syscalls.MS_PRIVATE)
    paths = [path for path in dict.fromkeys([*_SYSTEM, *interpreter_folders(), *folders]) if os.path.exists(path)]
    paths = [path for path in paths if not os.path.islink(path) and (path == "/usr" or not path.startswith("/usr/"))]
    # Held open, because the new root is put over /tmp, which may hide some of them.
    sources = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in [*paths, *_DEVICES, "/proc"]}
    root = "/tmp"
    syscalls.mount("tmpfs", root, "tmpfs", _SAFE, "size=1m,nr_inodes=512,mode=755")
    for path in [*paths, *_DEVICES, "/proc"]:
        target = root + path
        _bind_mount(f"/proc/self/fd/{sources[path]}", target)
        if path != "/proc":  # in which children write the maps of their users
            syscalls.restrict_mounts(target, _READ_ONLY if path in paths else syscalls.MS_RDONLY)
    for descriptor in sources.values():
        os.close(descriptor)
    for name in _LINKS:
        if os.path.islink(f"/{name}"):
            os.symlink(os.readlink(f"/{name}"), f"{root}/{name}")
    for folder in (BOX, "/old", "/etc", *SYSTEM_FOLDERS):
        os.makedirs(root + folder, exist_ok=True)
    for path, text in _ETC.items():
        with open(root + path, "w") as file:
            file.write(text)
    for name, end in _DESCRIPTORS.items():
        os.symlink(f"/proc/self/fd{end}", f"{root}/dev/{name}")
    os.chdir(root)
    syscalls.pivot_root(".", "old")
    os.chdir("/")
    syscalls.detach("/old")
    syscalls.restrict_mounts("/", _READ_ONLY, below=False)  # else what one child leaves in it, the next one finds


def confine_in_namespaces(cell: CellSettings) -> None:
    """Lock this child down: its own user and mount namespace, a sized private disk, no rights, Landlock, seccomp.

    Raises:
        OSError: a step failed; the child must end.
    """
    os.setsid()  # process groups reach over namespaces: without this, kill(0) would reach the server
    own_processes = cell.shell and _mount_own_proc()
    syscalls.unshare(syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWNS)
    syscalls.map_identity(INNER_USER, INNER_USER, INNER_USER, INNER_USER)
    mode = 755 if cell.shell else 700
    syscalls.mount("tmpfs", BOX, "tmpfs", _SAFE, f"size={cell.disk_mb}m,nr_inodes={MAX_FILES},mode={mode}")
    if own_processes:
        # This process is none of theirs to see: its descriptors lead to the trainer.
        syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
    else:  # unmounting /proc is rejected here, as it was mounted outside; so it is covered
        syscalls.mount("none", "/proc", "tmpfs", syscalls.MS_RDONLY | syscalls.MS_NOEXEC | _SAFE, "size=4k,nr_inodes=2")
    if cell.shell:
        _enter_own_root()
    os.chdir(HOME if cell.shell else BOX)
    syscalls.drop_capabilities()
    _set_limits(cell)
    _close_file_system(cell, ["/"] if cell.shell else [BOX])  # the machine's folders in a shell's root are read-only
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    seccomp.install(_filter_in_namespaces(cell.shell))


def _enter_own_root() -> None:
    """Make the private disk the root, with the folders of the present one in it, read-only where they are.

    Every folder and link that leads to programs is a mount, which can be neither removed nor replaced: checks run these
    programs after the scripts.
    """
    for folder in (*SYSTEM_FOLDERS, HOME, "/var/log", "/var/tmp", OWN_PROGRAMS):
        os.makedirs(BOX + folder, exist_ok=True)
    with open(f"{BOX}/var/log/dpkg.log", "w") as file:
        file.write(_LOG)
    for folder in ("/usr", "/usr/local"):
        syscalls.mount(BOX + folder, BOX + folder, None, syscalls.MS_BIND)
    path_of_target = {path: path for folder in ("/", "/usr", "/usr/local") for path in _paths_in(folder)}
    path_of_target["/usr/local/.bin"] = path_of_target.pop(OWN_PROGRAMS, "/old")
    for path in _paths_in(OWN_PROGRAMS):
        os.symlink(f"../.bin/{os.path.basename(path)}", BOX + path)
    for target, path in (_NEVER_THEIRS | path_of_target).items():
        if target in (BOX, "/old", "/usr", "/usr/local", *SYSTEM_FOLDERS):
            continue
        if os.path.islink(path) and not os.path.realpath(path).startswith("/usr/"):
            os.symlink(os.readlink(path), BOX + target)
        else:
            _bind_mount(path, BOX + target)
    if not _libraries_are_shown():
        syscalls.mount("/dev/null", BOX + _LINKER_CACHE, None, syscalls.MS_BIND)
    syscalls.restrict_mounts(f"{BOX}/proc", _READ_ONLY | syscalls.MS_NOEXEC)
    os.chdir(BOX)
    syscalls.pivot_root(".", ".")  # the old root is put over the new one
    syscalls.detach(".")


def _paths_in(folder: str) -> list[str]:
    """Return paths in a folder, without broken links: scripts could supply their targets."""
    names = os.listdir(folder) if os.access(folder, os.R_OK) else ()
    return [path for path in (os.path.join(folder, name) for name in names) if os.path.exists(path)]


def _filter_in_namespaces(shell: bool) -> Filter:
    return Filter(processes=shell, private=True, modes=None, truncate=True, only_itself=False)


def _bind_mount(path: str, target: str) -> None:
    """Make a target and mount a file or folder there; links are followed."""
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    syscalls.mount(path, target, None, syscalls.MS_BIND | syscalls.MS_REC)


def _mount_own_proc() -> bool:
    """Mount a ``/proc`` that shows this cell's processes and nothing of the machine; False where that is rejected.

    It is rejected by kernels before 5.8, and in containers that hide a part of their own ``/proc``.
    """
    syscalls.unshare(syscalls.CLONE_NEWNS)
    try:
        syscalls.mount("proc", "/proc", "proc", syscalls.MS_NOEXEC | _SAFE, "subset=pid,hidepid=invisible")
    except OSError:
        return False
    return True


def confine_in_folder(cell: CellSettings, folder: str, *, landlocked: bool) -> None:
    """Lock this child down without namespaces: a private folder and limits.

    Args:
        cell: settings of the child.
        folder: private folder of the child.
        landlocked: apply Landlock and seccomp too, and allow signals to itself only; else it can reach all that its
            user can.

    Raises:
        OSError: a step failed; the child must end.
    """
    os.setsid()
    own_user = _become_cell_user(cell, folder)
    os.chdir(folder)
    if landlocked and os.getuid() == 0:
        syscalls.drop_capabilities()
    _set_limits(cell, 0 if own_user else _tasks_of_user())
    # It ends with the server, and a script's processes with it, which have no such signal of their own: the process
    # that runs scripts ends its group. A change of user clears the signal.
    if cell.shell:
        signal.signal(signal.SIGTERM, lambda number, frame: os.killpg(0, signal.SIGKILL))
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGTERM if cell.shell else signal.SIGKILL)
    if landlocked:
        _close_file_system(cell, [folder])
        seccomp.install(_filter_by_landlock(cell.shell, own_user))


def _filter_by_landlock(shell: bool, own_user: bool) -> Filter:
    return Filter(
        processes=shell,
        private=False,
        # A child with its own user cannot change files of others. Else the call fails for programs, and does
        # nothing for scripts, in which it is common.
        modes=None if own_user else 0 if shell else errno.EPERM,
        truncate=landlock.version() >= 3,
        only_itself=not shell,
    )


def _close_file_system(cell: CellSettings, writable: Iterable[str]) -> None:
    programs = [*_program_folders(), *cell.folders]
    if cell.shell:
        landlock.restrict(read=_DEVICES, write=[*writable, "/dev/null"], execute=[*programs, *writable])
    else:
        landlock.restrict(read=[*programs, *_DEVICES], write=[*writable, "/dev/null"], execute=())


def _become_cell_user(cell: CellSettings, folder: str) -> bool:
    """Change from root to a user that no other child has; False where this process is no root or must stay root.

    It must where only root can read the interpreter and the child is to run Python, where there are no other users, and
    where root may not look into their processes, as the trainer counts the files that they hold open.
    """
    user = FIRST_CELL_USER + cell.number % 4096
    if os.getuid() != 0 or not syscalls.has_capability(syscalls.CAP_SYS_PTRACE):
        return False
    if not (cell.shell or _all_can_read(os.__file__)):
        return False
    try:
        os.chown(folder, user, user)
    except OSError:
        return False  # root of a container that has no other users
    syscalls.become_user(user)
    return True


def _all_can_read(path: str) -> bool:
    names = os.path.realpath(path).split("/")[1:]
    folders = ["/" + "/".join(names[:count]) for count in range(len(names))]
    return os.stat(path).st_mode & 0o004 != 0 and all(os.stat(folder).st_mode & 0o001 for folder in folders)


def _set_limits(cell: CellSettings, other_tasks: int = 0) -> None:
    """Set the limits of this process, whose user has ``other_tasks`` tasks."""
    memory = cell.memory_mb * MEBIBYTE
    for kind, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_DATA, memory),
        (resource.RLIMIT_STACK, 16 * MEBIBYTE),
        (resource.RLIMIT_FSIZE, cell.disk_mb * MEBIBYTE),
        (resource.RLIMIT_CPU, cell.cpu_seconds),
        (resource.RLIMIT_NPROC, other_tasks + (SHELL_TASKS if cell.shell else PYTHON_TASKS)),
        (resource.RLIMIT_NOFILE, SHELL_OPEN_FILES if cell.shell else OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_MEMLOCK, 0),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_SIGPENDING, 256),
    ):
        _, highest = resource.getrlimit(kind)
        bounded = value if highest == resource.RLIM_INFINITY else min(value, highest)
        resource.setrlimit(kind, (bounded, bounded))


def _tasks_of_user() -> int:
    """Return the number of this user's processes and threads, which count towards its limit."""
    count, user = 0, os.getuid()
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError):  # it ended meanwhile
                tasks = os.stat(f"/proc/{name}/task")  # its links: two, and one for each task
                if tasks.st_uid == user:
                    count += tasks.st_nlink - 2
    return count


def forget_former_places() -> None:
    """Make modules look up folders that they remember from the server."""
    here = os.getcwd()
    tempfile.tempdir = None
    os.environ.update(HOME=here, TMPDIR=here)
