"""What is wrong with this machine before a run starts: many checks, one line each."""

from verl_p40.doctor.engine import fast, run_checks, select
from verl_p40.doctor.model import Check, Outcome, Report, State

__all__ = ["Check", "Outcome", "Report", "State", "fast", "run_checks", "select"]
