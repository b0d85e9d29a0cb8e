"""The public names of ``mrlm_pl``, and an import without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mrlm_pl

PUBLIC = {
    *(
        "Algorithm",
        "CISPO",
        "DPO",
        "GRPO",
        "GSPO",
        "IPPO",
        "MAGRPO",
        "MAPPO",
        "MAPoRL",
        "PPO",
        "REINFORCE",
        "RLOO",
        "SFT",
    ),
    *("PreferenceDataModule", "RolloutDataModule", "TrajectoryDataModule"),
    *("LoRA", "Policy"),
    *("Clip", "Correction", "Entropy", "KL", "Optimization", "TaskSettings"),
    *("PolicyBatch", "PolicyGradient", "Returns"),
    *("Engine", "InProcessEngine", "OpenAICompatible", "RayPool", "Sampling"),
    *(
        "DatasetTasks",
        "Environment",
        "Outcome",
        "SeededTasks",
        "SingleAgentEnvironment",
        "Step",
        "Task",
        "check_environment",
    ),
    *("Tool", "ToolSchema", "RemoteEnvironment"),
    *("Episode", "Message", "Trajectory", "Turn", "read_episodes"),
    *("LastCheckpoint", "Trainer", "collect", "evaluate", "recredit", "replay", "rescore", "whatif"),
    *("ConfigurationError", "MRLMError"),
}
"""The frozen list: a change of it is a change of the interface and belongs in the changelog."""


def test_the_public_names_are_these_and_exist() -> None:
    assert set(mrlm_pl.__all__) == PUBLIC
    for name in PUBLIC:
        found = getattr(mrlm_pl, name)
        assert found.__name__ == name
        assert found.__doc__, name


def test_the_import_and_the_names_for_environments_import_no_torch() -> None:
    heavy = {"torch", "transformers", "lightning", "grpc", "ray"}
    code = f"import sys, mrlm_pl; mrlm_pl.Environment, mrlm_pl.read_episodes; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_modules_are_attributes_of_the_package_and_imported_when_they_are_used() -> None:
    code = (
        "import sys, mrlm_pl; mrlm_pl.runs.export, mrlm_pl.algorithms.COMA, mrlm_pl.errors.RemoteTimeoutError;"
        "print(hasattr(mrlm_pl, 'nothing'), 'mrlm_pl.viewer' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout == "False False\n", result.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("COMA", "it is mrlm_pl.algorithms.COMA"),
        ("GRPOTrainer", "did you mean 'GRPO'"),
        ("Polcy", "did you mean 'Policy'"),
        ("rums", "did you mean 'runs'"),
        ("xyz", "mrlm_pl has no 'xyz'$"),
        ("nothing.there", r"mrlm_pl has no 'nothing\.there'$"),
    ],
)
def test_a_name_that_the_package_lacks_is_answered(name: str, message: str) -> None:
    with pytest.raises(AttributeError, match=message):
        getattr(mrlm_pl, name)
