"""verl-p40: verl (PPO, GRPO) on a Tesla P40 and other pre-Ampere NVIDIA cards."""

__version__ = "0.1.0"
