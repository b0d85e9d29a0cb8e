"""Shell scripts that print SUCCEEDED if and only if the attack worked.

The word is written in two parts, since shells repeat lines with errors.
"""

from __future__ import annotations

SHELL = {
    # Users of this machine, which are missing in the sandbox's own passwd.
    "shell_reads_passwd": ("reading", "grep -qE '^(games|sync|messagebus):' /etc/passwd && echo SUCC''EEDED"),
    "shell_reads_shadow": ("reading", "test -n \"$(cat /etc/shadow)\" && echo SUCC''EEDED"),
    "shell_reads_outside": ("reading", "test -n \"$(cat @OUTSIDE@/secret.txt)\" && echo SUCC''EEDED"),
    "shell_reads_through_a_link": (
        "reading",
        "ln -s @OUTSIDE@ way; ln -s /etc etc; (cat way/secret.txt || cat etc/shadow) | grep -q . && echo SUCC''EEDED",
    ),
    "shell_reads_environment_of_process_one": ("reading", "grep -qa HOME= /proc/1/environ && echo SUCC''EEDED"),
    "shell_reads_secrets_in_the_environment": (
        "reading",
        "(env; cat /proc/*/environ | tr '\\0' '\\n') | grep -qa '^MRLM_TEST_SECRE[T]=' && echo SUCC''EEDED",
    ),
    "shell_reads_the_folder_of_the_trainer": (
        "reading",
        """
        for place in /proc/[0-9]*/cwd/pyproject.toml ../pyproject.toml @REPOSITORY@/pyproject.toml; do
          grep -q mrlm "$place" && echo SUCC''EEDED && exit
        done
        """,
    ),
    "shell_reads_its_parent": (
        "reading",
        'test -n "$(cat /proc/$PPID/maps)" -o -n "$(ls /proc/$PPID/fd)" && echo SUCC\'\'EEDED',
    ),
    "shell_reads_settings_of_the_kernel": (
        "reading",
        "cat /proc/sys/kernel/random/boot_id /proc/cmdline /proc/cpuinfo | grep -q . && echo SUCC''EEDED",
    ),
    "shell_sees_other_processes": (
        "reading",
        """
        token=$(echo @NEKOT@ | rev || echo none)
        for file in /proc/[0-9]*/cmdline; do
          case $file in /proc/$$/*) continue;; esac
          tr '\\0' ' ' < "$file" | grep -q "^$token" && echo SUCC''EEDED && exit
        done
        """,
    ),
    "shell_writes_etc": ("writing", "echo x > /etc/written-@TOKEN@ && rm /etc/written-@TOKEN@ && echo SUCC''EEDED"),
    "shell_writes_usr": (
        "writing",
        "for place in /usr/bin /usr/lib /usr/local/lib /usr/share /bin /lib; do"
        " touch $place/written-@TOKEN@ && rm $place/written-@TOKEN@ && echo SUCC''EEDED; done",
    ),
    "shell_sets_times_of_devices": (
        "writing",
        """
        before=$(stat -c %y /dev/null /dev/zero); sleep 0.05
        touch /dev/null /dev/zero
        test "$(stat -c %y /dev/null /dev/zero)" != "$before" && echo SUCC''EEDED
        """,
    ),
    "shell_uncovers_and_moves_folders_of_the_machine": (
        "writing",
        """
        for place in /usr/bin /bin /lib /etc /dev /proc; do
          umount -l $place || mount -o remount,bind,rw $place || mount --bind . $place || continue
          echo SUCC''EEDED
        done
        python3 -c '
        import ctypes
        calls = ctypes.CDLL(None)
        for place in (b"/usr/bin", b"/bin", b"/lib", b"/etc", b"/dev", b"/usr"):
            if calls.renameat2(-100, place, -100, b"moved", 0) == 0:
                calls.renameat2(-100, b"moved", -100, place, 0)
                print("SUCC" + "EEDED")
        '
        """.replace("\n        ", "\n"),
    ),
    "shell_writes_outside": ("writing", "echo x > @OUTSIDE@/from-bash && echo SUCC''EEDED"),
    "shell_writes_through_a_link": (
        "writing",
        "ln -s @OUTSIDE@ way && cp /proc/self/status way/through-a-link && echo SUCC''EEDED",
    ),
    "shell_copies_to_the_temporary_folder_of_the_host": (
        "writing",
        "echo x > /tmp/written-@TOKEN@ && test -e /tmp/beacon-@TOKEN@ && echo SUCC''EEDED",
    ),
    "shell_dd_of_a_disk": (
        "writing",
        """
        for number in $(seq 192); do
          dd if=/dev/zero of=bomb$number bs=16M count=1 status=none || { rm -f bomb*; exit 1; }
        done
        rm -f bomb*
        echo SUCC''EEDED
        """,
    ),
    "shell_yes_to_a_file": (
        "writing",
        """
        yes | head -c 3G > bomb
        size=$(stat -c %s bomb); rm -f bomb
        test "$size" -ge 3000000000 && echo SUCC''EEDED
        """,
    ),
    "shell_dev_tcp": ("network", "exec 3<>/dev/tcp/127.0.0.1/@PORT@ && echo SUCC''EEDED"),
    "shell_dev_udp": (
        "network",
        "exec 3<>/dev/udp/127.0.0.1/@PORT@ && echo x >&3 && read -t 2 -r -n 1 -u 3 && echo SUCC''EEDED",
    ),
    "shell_curl": ("network", "curl -s -m 3 http://127.0.0.1:@PORT@/ && echo SUCC''EEDED"),
    "shell_wget_and_netcat": (
        "network",
        "(wget -q -T 2 -O - http://127.0.0.1:@PORT@/ || nc -w 2 127.0.0.1 @PORT@ < /dev/null) && echo SUCC''EEDED",
    ),
    "shell_name_service": ("network", "getent ahosts example.com && echo SUCC''EEDED"),
    "shell_python_connects": (
        "network",
        "python3 -c \"import socket; socket.create_connection(('127.0.0.1', @PORT@), 2)\" && echo SUCC''EEDED",
    ),
    "shell_daemon_by_nohup": (
        "processes",
        "nohup bash -c 'exec -a @TOKEN@ sleep 20' > /dev/null 2>&1 < /dev/null & disown -a; exit 0",
    ),
    "shell_daemon_by_setsid": (
        "processes",
        "setsid -f bash -c 'trap \"\" TERM; (sleep 3; touch @OUTSIDE@/daemon) & exec -a @TOKEN@ sleep 20'; exit 0",
    ),
    "shell_daemon_holds_the_pipes": ("processes", "(trap '' TERM HUP INT; exec -a @TOKEN@ sleep 20) & exit 0"),
    "shell_daemon_before_a_loop": ("processes", "(setsid bash -c 'exec -a @TOKEN@ sleep 20' &) ; while :; do :; done"),
    "shell_kills_everything": ("processes", "kill -9 -1"),
    "shell_kills_its_parent": (
        "processes",
        """
        parent=$PPID
        test "$parent" -gt 1 || exit 1
        kill -9 "$parent" && sleep 0.3 && test "$(awk '{print $4}' /proc/$$/stat)" != "$parent" && echo SUCC''EEDED
        """,
    ),
    "shell_stops_its_parent": ("processes", "test $PPID -gt 1 && kill -STOP $PPID && echo SUCC''EEDED"),
    "shell_writes_to_its_parents_descriptors": (
        "processes",
        "for end in /proc/$PPID/fd/[0-9]*; do echo '{\"ok\": 0}' > $end && echo SUCC''EEDED; done",
    ),
    "shell_loosens_its_own_process": (
        "processes",
        "(echo -1000 > /proc/self/oom_score_adj || echo 1 > /proc/self/timerslack_ns) && echo SUCC''EEDED",
    ),
    "shell_mounts": ("processes", "mkdir point && mount -t tmpfs none point && umount point && echo SUCC''EEDED"),
    "shell_changes_its_root": (
        "processes",
        "chroot /proc/1/root /bin/cat /etc/shadow | grep -q : && echo SUCC''EEDED",
    ),
    "shell_unshares": ("processes", "unshare -Ur true && echo SUCC''EEDED"),
    "shell_becomes_another_user": (
        "processes",
        """
        before=$(id -u)
        for command in "su -c id nobody" "su nobody -s /bin/sh -c id" "sudo -n id" "setpriv --reuid 65534 id"; do
          case $($command < /dev/null) in *uid=*) ;; *) continue;; esac
          $command < /dev/null | grep -qE "uid=$before( |[(])" || { echo SUCC''EEDED; exit; }
        done
        """,
    ),
    "shell_raises_its_limits": (
        "processes",
        """
        test "$(ulimit -v)" != unlimited || exit 1
        ulimit -v unlimited && test "$(ulimit -v)" = unlimited && echo SUCC''EEDED
        """,
    ),
    "shell_fork_bomb_without_end": ("resources", ":(){ :|:& };:"),
    # Bounded: about 300 processes that sleep for five seconds.
    "shell_fork_bomb": (
        "resources",
        """
        bomb() { if [ "$1" -gt 0 ]; then bomb $(($1 - 1)) | bomb $(($1 - 1)) & fi; sleep 5; }
        bomb 6 2> errors
        test -e errors && ! grep -q fork errors && echo SUCC''EEDED
        """,
    ),
    "shell_memory_bomb": (
        "resources",
        "head -c 4G /dev/zero | tail -n 1 | wc -c | grep -q ^4294967296 && echo SUCC''EEDED",
    ),
    "shell_output_for_ever": ("resources", "yes"),
    "shell_waits_for_ever": ("resources", "trap '' TERM INT HUP ALRM XCPU; while :; do read -r line; sleep 1; done"),
}
