"""`gradilocks run`: runs an unmodified training script and records its optimizer steps."""

from gradilocks.run.script import Options, RunResult, run_script

__all__ = ["Options", "RunResult", "run_script"]
