from .checkpoint import DurableCheckpointIO as DurableCheckpointIO
from .checkpoint import LastCheckpoint as LastCheckpoint
from .metrics_file import MetricsFile as MetricsFile
from .progress import RunProgress as RunProgress
from .summary import PolicySummary as PolicySummary
from .summary import run_summary as run_summary
from .trainer import Trainer as Trainer
