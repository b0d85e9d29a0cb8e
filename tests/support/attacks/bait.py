"""The targets of attacks, and the proof of harm as it is seen from outside the sandbox."""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path

from tests.support.servers.ports import free_port

REPOSITORY = Path(__file__).parents[3]
SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")


class Bait:
    """A folder with a secret, listening sockets, and a process with a secret; a context manager.

    ``program`` fills an attack's source with where all this is. ``harm`` lists an attack's effects on it: writes into
    the folder, connections, the process's death, processes that live on. ``folder`` is made, and must not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.token = "mrlm" + secrets.token_hex(4)
        self.outside = folder / "outside"
        self.connections: list[str] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Bait:
        self.outside.mkdir(parents=True)
        (self.outside / "secret.txt").write_text("the secret of the bait\n")
        (self.outside / "kept.txt").write_text("to be kept\n")
        for path in (*self.outside.parents[:1], self.outside):
            path.chmod(0o777)
        self._before = self._state()
        self._stack.callback(self._sweep)
        for folder in SHARED_FOLDERS:
            if os.access(folder, os.W_OK):
                Path(folder, f"beacon-{self.token}").touch()
        self.port = free_port()
        self._listen(socket.AF_INET, ("127.0.0.1", self.port))
        self._listen(socket.AF_UNIX, str(self.outside / "socket"))
        self._listen(socket.AF_UNIX, "\0" + self.token)
        with contextlib.suppress(OSError):  # the file system may lack attributes
            os.setxattr(self.outside / "secret.txt", "user.secret", b"hush")
        datagrams = self._stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        datagrams.bind(str(self.outside / "datagram"))
        os.chmod(self.outside / "datagram", 0o777)
        threading.Thread(target=self._answer_datagrams, args=(datagrams,), daemon=True).start()
        self._share()
        udp = self._stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", self.port))
        threading.Thread(target=self._answer_datagrams, args=(udp,), daemon=True).start()
        secret = {"MRLM_TEST_SECRET": "hidden"}
        self.process = subprocess.Popen([self.token, "600"], executable=shutil.which("sleep"), env=secret)
        return self

    def __exit__(self, *problem: object) -> None:
        self.process.kill()
        self.process.wait()
        self._stack.close()

    def program(self, source: str) -> str:
        """Return ``source`` with its placeholders replaced."""
        values = {"OUTSIDE": str(self.outside), "PORT": str(self.port), "TOKEN": self.token}
        values |= {"NEKOT": self.token[::-1], "REPOSITORY": str(REPOSITORY)}
        values |= {"MEMORY": str(self.memory), "QUEUE": str(self.queue)}
        for name, value in values.items():
            source = source.replace(f"@{name}@", value)
        return source

    def harm(self) -> list[str]:
        """Return one line for every harm; empty if there is none."""
        found = [f"connection to {name}" for name in self.connections]
        changes = set(self._state().items()) ^ set(self._before.items())
        found += [f"changed or made or removed: {name}" for name in sorted({name for name, _ in changes})]
        if self.process.poll() is not None:
            found.append("the process of the bait was killed")
        elif self._status(self.process.pid) == "T":
            found.append("the process of the bait was stopped")
        found += [f"process {number} lives on" for number in self.survivors()]
        places = [*SHARED_FOLDERS, str(REPOSITORY), "/etc", "/usr/bin"]
        found += [f"written to {place}" for place in places if self._left_in(place)]
        return found

    def survivors(self) -> list[int]:
        """Return the ids of processes on this host with the token's name, without the bait's own process."""
        token, found = self.token.encode(), []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in (self.process.pid, os.getpid()):
                continue
            try:
                named = (entry / "comm").read_bytes().strip() == token
                named = named or (entry / "cmdline").read_bytes().startswith(token)
            except OSError:  # the process has ended
                continue
            if named and self._status(int(entry.name)) != "Z":
                found.append(int(entry.name))
        return found

    def _share(self) -> None:
        """Create shared memory with the token, and a message queue."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.shmat.restype = ctypes.c_void_p
        self.memory = libc.shmget(0, 4096, 0o1666)
        self._stack.callback(libc.shmctl, self.memory, 0, None)
        place = libc.shmat(self.memory, None, 0)
        ctypes.memmove(place, self.token.encode(), len(self.token))
        self._stack.callback(libc.shmdt, ctypes.c_void_p(place))
        self.queue = libc.msgget(0, 0o1666)
        self._stack.callback(libc.msgctl, self.queue, 0, None)

    def _left_in(self, place: str) -> list[Path]:
        return [path for name in ("written", "left") for path in Path(place).glob(f"{name}*{self.token}*")]

    def _state(self) -> dict[str, tuple[int, str]]:
        """Return mode and content of every entry of the folder but the socket."""
        state = {}
        for path in sorted(self.outside.iterdir()):
            if path.name not in ("socket", "datagram"):
                regular = path.is_file() and not path.is_symlink()
                state[path.name] = (path.lstat().st_mode, path.read_text(errors="replace") if regular else "")
        return state

    @staticmethod
    def _status(process: int) -> str:
        try:
            return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return "Z"

    def _listen(self, family: int, address: str | tuple[str, int]) -> socket.socket:
        listener = self._stack.enter_context(socket.socket(family))
        listener.bind(address)
        listener.listen(64)
        if isinstance(address, str) and not address.startswith("\0"):
            os.chmod(address, 0o777)
        threading.Thread(target=self._answer, args=(listener, str(address)), daemon=True).start()
        return listener

    def _answer(self, listener: socket.socket, name: str) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed at the end
                return
            self.connections.append(name)
            with connection, contextlib.suppress(OSError):
                connection.settimeout(0.2)
                connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello")
                connection.recv(4096)

    def _answer_datagrams(self, udp: socket.socket) -> None:
        while True:
            try:
                data, sender = udp.recvfrom(4096)
                self.connections.append("the datagram socket")
                if sender:
                    udp.sendto(data, sender)
            except OSError:  # closed at the end
                return

    def _sweep(self) -> None:
        """Kill the processes and remove the files with the token's name."""
        for number in self.survivors():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        end = time.monotonic() + 60
        while self.survivors() and time.monotonic() < end:  # a killed process takes a moment to end
            time.sleep(0.02)
        for place in (*SHARED_FOLDERS, str(REPOSITORY)):
            for path in (*Path(place).glob(f"beacon-{self.token}"), *self._left_in(place)):
                path.unlink()
