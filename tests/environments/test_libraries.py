from __future__ import annotations

import sys
from pathlib import Path

import pytest
from mrlm_environments.libraries import library
from mrlm_environments.sql.server import ServerDatabase
from mrlm_environments.toolbox.mcp import McpTools

from mrlm_pl.errors import ConfigurationError


def test_a_broken_install_is_named_with_its_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_library.py").write_text("raise ImportError('libfoo.so: cannot open shared object file')")
    (tmp_path / "needy_library.py").write_text("import no_such_part")
    fault = r"^broken_library cannot be loaded \(libfoo.so: cannot .*\); pip install 'mrlm\[webshop\]'$"
    with pytest.raises(ConfigurationError, match=fault):
        library("broken_library", "webshop")
    with pytest.raises(ConfigurationError, match=r"^no_such_part is not installed; pip install 'mrlm\[webshop\]'$"):
        library("needy_library", "webshop")


def test_the_setting_that_needs_a_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    with pytest.raises(
        ConfigurationError, match=r"^sql: database_url needs sqlalchemy, which is not installed; pip install"
    ):
        ServerDatabase("mysql+pymysql://host", (), 1.0)
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(ConfigurationError, match=r"^McpTools needs mcp, which is not installed; pip install"):
        McpTools("python")
