"""Compute capabilities: what code a card of one can run, and what a kernel may use on it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from verl_p40.errors import UsageError

TEGRA = frozenset({(3, 2), (5, 3), (6, 2), (7, 2), (8, 7), (10, 1), (11, 0)})
"""Integrated (Jetson, Drive) parts. NVIDIA promises binary compatibility for desktop parts only,
and none between desktop and Tegra (CUDA C++ Programming Guide, "Binary Compatibility")."""


@dataclass(frozen=True, order=True)
class Capability:
    """A compute capability, such as 6.1."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"

    @property
    def sm(self) -> int:
        """The number of ``sm_61`` and ``compute_61``."""
        return self.major * 10 + self.minor

    @classmethod
    def from_sm(cls, sm: int) -> Capability:
        """61 -> 6.1, 100 -> 10.0."""
        return cls(*divmod(sm, 10))

    @classmethod
    def parse(cls, text: str) -> Capability:
        """``6.1``, ``61``, ``sm_61`` or ``compute_61``.

        Raises:
            UsageError: none of these.
        """
        match = re.fullmatch(r"(?:sm_|compute_)?(\d{1,2})\.?(\d)[af]?", text.strip().lower())
        if not match:
            raise UsageError(
                f"{text!r} is not a compute capability", fix="such as --cc 6.1 (a P40) or 8.0"
            )
        return cls(int(match[1]), int(match[2]))

    def runs_cubin(self, sm: int, specific: bool = False) -> bool:
        """Whether native code for ``sm`` runs here.

        Same major version and no newer minor one; architecture-specific code (``sm_90a``) on
        exactly its own capability; desktop and Tegra code never on each other. Source: CUDA C++
        Programming Guide, "Binary Compatibility".
        """
        code = Capability.from_sm(sm)
        if specific or code == self:
            return code == self
        tegra = (self.major, self.minor) in TEGRA or (code.major, code.minor) in TEGRA
        return not tegra and code.major == self.major and code.minor <= self.minor

    def runs_ptx(self, sm: int, specific: bool = False) -> bool:
        """Whether the driver can compile PTX for ``compute_<sm>`` for this card.

        Any capability from that of the PTX on (CUDA C++ Programming Guide, "PTX
        Compatibility"), if the driver knows its PTX version; ``compute_90a`` on 9.0 alone.
        """
        code = Capability.from_sm(sm)
        return code == self if specific else code <= self


@dataclass(frozen=True)
class Limits:
    """What one thread block may use. Bytes, registers, threads."""

    shared_static: int
    """Shared memory without asking: ``cudaDevAttrMaxSharedMemoryPerBlock``."""
    shared_optin: int
    """The most a kernel can ask for: ``cudaDevAttrMaxSharedMemoryPerBlockOptin``."""
    registers_per_thread: int = 255
    threads: int = 1024
    warps: int = 32


_KIB = 1024
_OPTIN_KIB: dict[tuple[int, int], int] = {
    **{(5, minor): 48 for minor in (0, 2, 3)},
    **{(6, minor): 48 for minor in (0, 1, 2)},
    (7, 0): 96,
    (7, 2): 96,
    (7, 5): 64,
    (8, 0): 163,
    (8, 6): 99,
    (8, 7): 163,
    (8, 9): 99,
    (9, 0): 227,
    (10, 0): 227,
    (12, 0): 99,
}
"""Maximum shared memory per thread block, KiB. Source: CUDA C++ Programming Guide, "Technical
Specifications per Compute Capability". 5.x and 6.x have more on the multiprocessor (96 KiB on a
P40), but no block can have more than 48 of it, opt-in or not."""


def limits(capability: Capability) -> Limits:
    """The limits of a card of ``capability``.

    Raises:
        UsageError: not one of the capabilities in the table.
    """
    optin = _OPTIN_KIB.get((capability.major, capability.minor))
    if optin is None:
        known = ", ".join(f"{major}.{minor}" for major, minor in sorted(_OPTIN_KIB))
        raise UsageError(
            f"the limits of compute capability {capability} are not known here",
            fix=f"one of {known}",
        )
    return Limits(shared_static=48 * _KIB, shared_optin=optin * _KIB)
