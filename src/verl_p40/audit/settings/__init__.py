"""Audit of command lines, scripts and environments: settings that do nothing or are wrong."""
