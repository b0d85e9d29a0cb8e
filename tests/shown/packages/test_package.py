"""The wheel and the source distribution: complete, equal, and enough for a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.documents import ROOT

pytestmark = pytest.mark.slow


def done(command: Sequence[str | Path], folder: Path) -> str:
    """Return the output of a command in a folder, without this process's own packages on its path."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=folder, env=variables, check=False)
    assert found.returncode == 0, found.stderr[-3000:]
    return found.stdout


def wheel_of(source: Path, output: Path) -> Path:
    done([sys.executable, "-m", "hatchling", "build", "--directory", output], source)
    (wheel,) = output.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of the working tree, beside the source distribution."""
    return wheel_of(ROOT, tmp_path_factory.mktemp("dist"))


def test_the_source_distribution_gives_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    (source,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python has it from 3.11.4 on
        archive.extractall(tmp_path)
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    again = wheel_of(unpacked, tmp_path / "again")
    assert zipfile.ZipFile(again).namelist() == zipfile.ZipFile(wheel).namelist()


def test_a_run_of_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    """The environment has the dependencies and the wheel, and no way to the working tree."""
    home = tmp_path / "environment"
    venv.create(home, with_pip=False, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
    zipfile.ZipFile(wheel).extractall(packages)
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(dependencies))
    python = home / "bin" / "python"
    assert done([python, "-c", "import mrlm_pl; print(mrlm_pl.__file__)"], tmp_path).startswith(str(packages))
    mrlm = [python, "-m", "mrlm_pl.cli.main"]
    assert "GRPO" in done([*mrlm, "info"], tmp_path)
    assert "checks passed" in done([*mrlm, "check-env", "math"], tmp_path)
    shutil.copy(ROOT / "configs" / "quickstart.yaml", tmp_path)
    small = ["--data.iterations", "1", "--data.groups", "2", "--trainer.callbacks.init_args.episodes", "8"]
    done([*mrlm, "fit", "--config", "quickstart.yaml", *small, "--trainer.accelerator", "cpu"], tmp_path)
    assert (tmp_path / "runs/quickstart/policies/main/config.json").is_file()
    assert done([*mrlm, "view", "runs/quickstart", "--text"], tmp_path)
    done([*mrlm, "view", "runs/quickstart", "--export", "page.html"], tmp_path)
