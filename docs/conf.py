"""Sphinx settings of the site: ``make docs`` builds it in ``build/site``."""

from __future__ import annotations

import operator
import os
import pkgutil
import re
import sys
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]  # the working tree before any installed copy
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # of this environment's `mrlm`
os.environ["PYTHONPATH"] = str(ROOT)  # of notebooks

project = "mrlm"
author = "The mrlm authors"
copyright = author
version = release = version_of("mrlm")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_llms_txt",
]
exclude_patterns = ["**/*.py"]
highlight_language = "none"  # indented blocks are equations
nitpicky = True

nb_execution_mode = "force"  # notebooks are short; a cache would show outputs of other code
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_timeout = 300
nb_output_stderr = "remove"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
maximum_signature_line_length = 100
napoleon_custom_sections = [("Class attributes", "Attributes")]
napoleon_use_rtype = False

html_theme = "furo"
html_title = "mrlm"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_sourcelink = False  # llms.txt links the sources
copybutton_exclude = ".linenos, .gp, .c1"  # comments behind commands are not copied
llms_txt_summary = "Train language models with reinforcement learning, alone or as teams, on PyTorch Lightning."


def named_in_code(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.TextElement
) -> nodes.TextElement | None:
    """Return the text of a reference to Python code that has no page, without a link, if the code exists.

    Docstrings use names without their modules, so a name of any module of ours is known. A misspelled name stays a
    broken reference.
    """
    target = node["reftarget"].removesuffix("()")
    if node.get("refdomain") != "py":
        return None
    places = [f"{node.get('py:module')}.{target}", f"{node.get('py:module')}.{node.get('py:class')}.{target}", target]
    return shown if any(map(_exists, places)) or _is_ours(target) else None


def _exists(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError):
        return False
    return True


def _is_ours(name: str) -> bool:
    for module in [module for path, module in sys.modules.items() if path.startswith("mrlm_")]:
        try:
            operator.attrgetter(name)(module)
        except AttributeError:
            continue
        return True
    return False


def with_readable_defaults(app: Sphinx, kind: str, name: str, thing: object, options: object, *text: str) -> Any:
    """Return the signature and the result, with ``...`` for defaults that a data class makes, and without ranges."""
    signature, result = text
    plain = signature and re.sub(r"~?typing\.Annotated\[(\w+), [^\]]*\]", r"\1", signature)
    return plain and plain.replace("<factory>", "..."), result


def write_episodes_of_environments(app: Sphinx, error: Exception | None) -> None:
    """Write the episodes that the catalog of environments links."""
    if error is None and app.builder.format == "html":
        from docs import catalog  # with torch: only where it is needed

        catalog.write_pages_of_episodes(Path(app.outdir) / "environments" / "episodes")


def setup(app: Sphinx) -> None:
    """Resolve references to code without a page, make signatures parse, and write the catalog's episodes."""
    app.connect("build-finished", write_episodes_of_environments)
    app.connect("missing-reference", named_in_code)
    app.connect("autodoc-process-signature", with_readable_defaults)
