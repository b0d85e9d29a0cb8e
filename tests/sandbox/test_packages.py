"""Packages that programs may import, at every level, and what else they find equal from run to run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mrlm_pl.errors import ConfigurationError
from mrlm_pl.sandbox import IsolationName, Sandbox, Tests, UnitTests, grade

PROGRAM = "import numpy as np\ndef f(x): return float(np.linalg.norm(np.array(x)))"
TESTS = Tests(("import numpy as np\nassert np.allclose(f([3.0, 4.0]), 5.0)", "assert f([0.0, 2.0]) == 2.0"))


def test_a_package_that_is_let_in_serves_programs_and_tests(level: IsolationName) -> None:
    sandbox = Sandbox(level=level, packages=("numpy",))
    found = grade(sandbox, PROGRAM, TESTS)
    assert (found.solved, found.isolation) == (True, level)
    code = "import numpy, unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f([5.0]), 5.0)"
    assert grade(sandbox, PROGRAM, UnitTests(code, ("f",))).solved
    lazily = "import numpy.polynomial.legendre, numpy.random\nnumpy.random.default_rng(0).integers(10, size=3).shape"
    assert sandbox.run(lazily).output == "(3,)\n", "parts of it that are imported late are there as well"


def test_packages_are_absent_unless_they_are_let_in(level: IsolationName) -> None:
    found = grade(Sandbox(level=level), PROGRAM, TESTS)
    assert not found.loaded
    assert found.fault == "ModuleNotFoundError: No module named 'numpy'"
    told = Sandbox(level=level, packages=("numpy",)).run("import yaml").error
    assert told == "ModuleNotFoundError: No module named 'yaml'", "nor what lies beside them"


def test_a_package_starts_no_threads_that_a_fork_would_lose() -> None:
    counted = "import os, threading\nprint(threading.active_count(), sorted(os.sched_getaffinity(0)) != [])"
    assert Sandbox(packages=("numpy",)).run(counted).output == "1 True\n"


@pytest.mark.parametrize("name", ["no_such_package_of_anyone", "../numpy", "sys", ""])
def test_a_package_that_is_not_installed_is_named_at_the_start(name: str) -> None:
    with pytest.raises(ConfigurationError, match=r"sandbox\.packages: there is no package"):
        _ = Sandbox(packages=(name,)).isolation


def test_equal_programs_see_sets_in_equal_order(level: IsolationName) -> None:
    """Over servers too: a second one of the same level is started for the package."""
    program = "print([hash(word) for word in ('a', 'bc', b'd')], {'x', 'y', 'zz', 'w'})"
    seen = {Sandbox(level=level, packages=packages).run(program).output for packages in ((), (), ("yaml",))}
    assert len(seen) == 1
    environment = {"PYTHONHASHSEED": "0", "PATH": os.environ.get("PATH", "")}
    alone = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert seen == {alone.stdout}
