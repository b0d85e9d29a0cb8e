from .model_summary import PolicySummary as PolicySummary
from .progress import RunProgress as RunProgress
from .summary import BatchCount as BatchCount
from .summary import run_summary as run_summary
