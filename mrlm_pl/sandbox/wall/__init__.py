"""What keeps a program in: namespaces, Landlock, seccomp."""
