from .files.answers import AnswerDataModule as AnswerDataModule
from .files.demonstrations import TrajectoryDataModule as TrajectoryDataModule
from .files.joint_preferences import JointPreferenceDataModule as JointPreferenceDataModule
from .files.joint_preferences import joint_pairs as joint_pairs
from .files.preferences import PreferenceDataModule as PreferenceDataModule
from .rollout.module import RolloutDataModule as RolloutDataModule
