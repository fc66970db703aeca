"""Audit of command lines, scripts and environments: settings that do nothing or are wrong."""

from verl_p40.audit.settings.engine import check_command, check_environment, problems
from verl_p40.audit.settings.model import KINDS, Kind, SettingFinding

__all__ = ["KINDS", "Kind", "SettingFinding", "check_command", "check_environment", "problems"]
