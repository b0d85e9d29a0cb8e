"""Programs that connect. Each defines ``attack()``: True if and only if something outside was reached.

``@PORT@`` is a TCP and UDP port on 127.0.0.1 that answers; ``@OUTSIDE@/socket`` and the abstract name ``@TOKEN@`` are
listening UNIX sockets.
"""

from __future__ import annotations

NETWORK = {
    "tcp_to_the_host": """
        import socket
        def attack():
            with socket.create_connection(("127.0.0.1", @PORT@), 2) as end: return end.getpeername()[1] == @PORT@
    """,
    "tcp_to_the_host_over_ipv6_and_wildcards": """
        import socket
        def attack():
            for host in ("::1", "0.0.0.0", "localhost", "::ffff:127.0.0.1", "127.1.2.3", socket.gethostname()):
                try:
                    with socket.create_connection((host, @PORT@), 1): return True
                except OSError: continue
            return False
    """,
    "tcp_to_the_internet": """
        import socket
        def attack():
            with socket.create_connection(("8.8.8.8", 53), 2): return True
    """,
    "tcp_fast_open": """
        import socket
        def attack():
            return socket.socket().sendto(b"hello", socket.MSG_FASTOPEN, ("127.0.0.1", @PORT@)) > 0
    """,
    "tcp_by_raw_system_calls": """
        import ctypes, socket, struct
        def attack():
            libc = ctypes.CDLL(None, use_errno=True)
            number = libc.syscall(41, 2, 1, 0)
            address = struct.pack("=H", 2) + struct.pack("!H4s8x", @PORT@, socket.inet_aton("127.0.0.1"))
            return number >= 0 and libc.syscall(42, number, address, len(address)) == 0
    """,
    "tcp_from_a_forked_child": """
        import os, socket
        def attack():
            child = os.fork()
            if child == 0:
                try: socket.create_connection(("127.0.0.1", @PORT@), 2)
                except BaseException: os._exit(1)
                os._exit(0)
            return os.waitpid(child, 0)[1] == 0
    """,
    "tcp_from_another_interpreter": """
        import subprocess, sys
        def attack():
            code = "import socket; socket.create_connection(('127.0.0.1', @PORT@), 2); print('through')"
            return b"through" in subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=5).stdout
    """,
    "tcp_from_a_shell": """
        import subprocess
        def attack():
            command = ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/@PORT@ && echo through"]
            return b"through" in subprocess.run(command, capture_output=True, timeout=5).stdout
    """,
    "http_request": """
        import urllib.request
        def attack(): return urllib.request.urlopen("http://127.0.0.1:@PORT@/", timeout=2).status == 200
    """,
    "udp_to_the_host": """
        import socket
        def attack():
            end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            end.settimeout(1)
            end.sendto(b"hello", ("127.0.0.1", @PORT@))
            return bool(end.recv(64))
    """,
    "udp_to_the_internet": """
        import socket
        def attack():
            return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"hello", ("8.8.8.8", 53)) == 5
    """,
    "multicast_and_broadcast": """
        import socket
        def attack():
            end = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
            for host in ("224.0.0.251", "255.255.255.255"):
                try: return end.sendto(b"hello", (host, 5353)) == 5
                except OSError: continue
            return False
    """,
    "name_service": """
        import socket
        def attack(): return bool(socket.getaddrinfo("example.com", 80))
    """,
    "unix_socket_of_the_host": """
        import socket
        def attack():
            end = socket.socket(socket.AF_UNIX)
            end.settimeout(2)
            end.connect("@OUTSIDE@/socket")
            return True
    """,
    "unix_datagram_to_the_system_log": """
        import socket
        def attack():
            end = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            for path in ("/dev/log", "/run/systemd/journal/socket", "/run/systemd/notify"):
                try: return end.sendto(b"hello", path) > 0
                except OSError: continue
            return False
    """,
    "service_sockets_of_the_host": """
        import socket
        def attack():
            for path in ("/run/docker.sock", "/var/run/docker.sock", "/run/containerd/containerd.sock",
                         "/run/dbus/system_bus_socket", "/tmp/.X11-unix/X0", "/run/nscd/socket"):
                end = socket.socket(socket.AF_UNIX)
                try: end.connect(path)
                except OSError: continue
                return True
            return False
    """,
    "unix_socket_bound_outside": """
        import socket
        def attack():
            socket.socket(socket.AF_UNIX).bind("@OUTSIDE@/bound")
            return True
    """,
    "abstract_socket_of_the_host": """
        import socket
        def attack():
            end = socket.socket(socket.AF_UNIX)
            end.settimeout(2)
            end.connect("\\0@TOKEN@")
            return True
    """,
    "virtual_machine_sockets": """
        import socket
        def attack():
            for port in (22, 1024, 9999):
                end = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)
                end.settimeout(0.5)
                try: end.connect((2, port))
                except TimeoutError: return True
                except OSError: continue
                return True
            return False
    """,
    "raw_packets_on_a_real_interface": """
        import socket
        def attack():
            for name in ("eth0", "ens3", "ens5", "enp1s0", "docker0", "wlan0"):
                try:
                    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
                    end.bind((name, 0))
                    return end.send(bytes(60)) == 60
                except OSError: continue
            return False
    """,
    "io_uring": """
        import ctypes
        def attack():
            return ctypes.CDLL(None, use_errno=True).syscall(425, 4, ctypes.create_string_buffer(120)) >= 0
    """,
    "a_socket_pair_shared_with_a_daemon_that_connects": """
        import os, socket
        def attack():
            here, there = socket.socketpair()
            if os.fork() == 0:
                os.setsid()
                if os.fork() == 0:
                    try:
                        socket.create_connection(("127.0.0.1", @PORT@), 2)
                        there.send(b"through")
                    finally: os._exit(0)
                os._exit(0)
            os.wait()
            there.close()
            here.settimeout(3)
            return here.recv(16) == b"through"
    """,
}
