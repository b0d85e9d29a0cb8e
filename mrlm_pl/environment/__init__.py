"""Environments: the contract, their tasks, tools and rows. Imports no torch."""

from mrlm_pl.environment.contract import Environment, Outcome, SingleAgentEnvironment, ToolSchema
from mrlm_pl.environment.steps import Observations, Step
from mrlm_pl.environment.tasks import SPLITS, DatasetTasks, SeededTasks, TaskSource
from mrlm_pl.episode import Message, Task

__all__ = [
    "SPLITS",
    "DatasetTasks",
    "Environment",
    "Message",
    "Observations",
    "Outcome",
    "SeededTasks",
    "SingleAgentEnvironment",
    "Step",
    "Task",
    "TaskSource",
    "ToolSchema",
]
