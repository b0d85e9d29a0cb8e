"""Data: task sources, data files and the data modules. Heavy imports wait until a name is used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mrlm_pl.data.answer_module import AnswerDataModule
    from mrlm_pl.data.episode_files import read_episodes, write_episodes
    from mrlm_pl.data.joint_preference_module import JointPreferenceDataModule, joint_pairs
    from mrlm_pl.data.preference_module import PreferenceDataModule, preference_pairs
    from mrlm_pl.data.rollout_module import RolloutDataModule
    from mrlm_pl.data.rows import read_rows
    from mrlm_pl.data.trajectory_module import TrajectoryDataModule

__all__ = [
    "AnswerDataModule",
    "JointPreferenceDataModule",
    "PreferenceDataModule",
    "RolloutDataModule",
    "TrajectoryDataModule",
    "joint_pairs",
    "preference_pairs",
    "read_episodes",
    "read_rows",
    "write_episodes",
]

_HOME = {
    "AnswerDataModule": "answer_module",
    "JointPreferenceDataModule": "joint_preference_module",
    "PreferenceDataModule": "preference_module",
    "joint_pairs": "joint_preference_module",
    "preference_pairs": "preference_module",
    "RolloutDataModule": "rollout_module",
    "TrajectoryDataModule": "trajectory_module",
    "read_episodes": "episode_files",
    "read_rows": "rows",
    "write_episodes": "episode_files",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__
