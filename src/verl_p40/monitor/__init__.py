"""What machine and GPUs do while a run trains: sampled, written into its folder, and shown."""

from verl_p40.monitor.heartbeat import freshness

__all__ = ["freshness"]
