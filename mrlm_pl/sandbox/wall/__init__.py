"""The confinement of a program: namespaces, Landlock, seccomp."""
