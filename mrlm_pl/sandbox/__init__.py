"""Runs untrusted code, bounded: Python, shells, and the grading of programs. See docs/environments/sandbox.md."""

from mrlm_pl.sandbox.grading import Grade, Tests, UnitTests, grade
from mrlm_pl.sandbox.host.cell import Cell
from mrlm_pl.sandbox.host.server_process import strongest
from mrlm_pl.sandbox.inside.grader import bound_names, unbound_names
from mrlm_pl.sandbox.sandbox import Execution, Sandbox, running
from mrlm_pl.sandbox.wall.confinement import MACHINE_PATH
from mrlm_pl.sandbox.wall.isolation import STRENGTH, IsolationName

__all__ = [
    "MACHINE_PATH",
    "STRENGTH",
    "Cell",
    "Execution",
    "Grade",
    "IsolationName",
    "Sandbox",
    "Tests",
    "UnitTests",
    "bound_names",
    "grade",
    "running",
    "strongest",
    "unbound_names",
]
