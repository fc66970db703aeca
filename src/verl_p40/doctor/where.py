"""Whether a machine is a container."""

from __future__ import annotations

from verl_p40.doctor.machine import Machine


def in_container(machine: Machine) -> bool:
    """Docker's and Podman's marks, and Kubernetes' variable."""
    if machine.variable("KUBERNETES_SERVICE_HOST") or machine.variable("container"):
        return True
    return any(machine.text(mark) is not None for mark in ("/.dockerenv", "/run/.containerenv"))
