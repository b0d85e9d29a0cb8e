"""What a run shows and leaves, for the command and for scripts."""

from mrlm_pl.runs.model_summary import PolicySummary
from mrlm_pl.runs.progress import RunProgress
from mrlm_pl.runs.summary import BatchCount, run_summary

__all__ = ["BatchCount", "PolicySummary", "RunProgress", "run_summary"]
