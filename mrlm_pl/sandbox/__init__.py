"""Runs untrusted code, bounded: Python, shells, and the grading of programs. See docs/sandbox.md."""

from mrlm_pl.sandbox.grading import Grade as Grade
from mrlm_pl.sandbox.grading import Tests as Tests
from mrlm_pl.sandbox.grading import UnitTests as UnitTests
from mrlm_pl.sandbox.grading import grade as grade
from mrlm_pl.sandbox.host.cell import Cell as Cell
from mrlm_pl.sandbox.host.cell import CellEndedError as CellEndedError
from mrlm_pl.sandbox.host.server_process import strongest as strongest
from mrlm_pl.sandbox.inside.grader import bound_names as bound_names
from mrlm_pl.sandbox.inside.grader import unbound_names as unbound_names
from mrlm_pl.sandbox.sandbox import Execution as Execution
from mrlm_pl.sandbox.sandbox import Sandbox as Sandbox
from mrlm_pl.sandbox.sandbox import running as running
from mrlm_pl.sandbox.wall.confinement import MACHINE_PATH as MACHINE_PATH
from mrlm_pl.sandbox.wall.isolation import STRENGTH as STRENGTH
from mrlm_pl.sandbox.wall.isolation import IsolationName as IsolationName
