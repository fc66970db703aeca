"""Whether training, or the monitor, gets on: what a container's health check runs.

The standard library alone, and little of it: it is started every half minute.
"""

from verl_p40.health.check import CHECKS, Health, LimitError, monitor, train

__all__ = ["CHECKS", "Health", "LimitError", "monitor", "train"]
