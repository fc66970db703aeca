"""What a queue patches: an installed package (verl), or a source tree from which one is built (vLLM).

A *tree* is always the folder that contains the package folder. The tree of a project with sources
beside its package exists in two forms: the *source* tree, unpacked from the sdist, and the
*installed* one, which has the package alone. The group ``build`` of such a queue changes files
outside the package and is left out where they are not; the other groups stay inside it, so that
they fit both forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

BUILD_GROUP = "build"


@dataclass(frozen=True)
class Project:
    """Facts about a patched project. ``name`` is its package, its queue's folder, its PyPI name."""

    name: str
    pin: str
    """The entry ``[release.<pin>]`` of ``pins.toml``: the file that the queue applies to."""
    beside: tuple[str, ...] = ()
    """Files and folders next to the package that a build reads; empty for a wheel."""
    built: tuple[str, ...] = ()
    """Patterns of files of the package that a build writes: no release is told by them."""
    unpackaged: tuple[str, ...] = ()
    """Patterns of files of the package that a wheel leaves out: an installed tree lacks them."""

    @property
    def roots(self) -> tuple[str, ...]:
        """The top-level names that belong to the release."""
        return (self.name, *self.beside)

    def is_built(self, path: str) -> bool:
        """Whether a build may have written the file at ``path``, relative to the tree."""
        return any(fnmatchcase(path, pattern) for pattern in self.built)

    def is_unpackaged(self, path: str) -> bool:
        """Whether a wheel leaves the file at ``path``, relative to the tree, out."""
        return any(fnmatchcase(path, pattern) for pattern in self.unpackaged)

    def inside(self, path: str) -> bool:
        """Whether ``path``, relative to the tree, lies in the package."""
        return path.startswith(f"{self.name}/")

    def is_source(self, tree: Path) -> bool:
        """Whether ``tree`` is the source form. A setup.py is what makes it one."""
        return bool(self.beside) and (tree / "setup.py").is_file()


_KNOWN = {
    project.name: project
    for project in (
        Project("verl", "verl"),
        Project(
            "vllm",
            "vllm-sdist",
            # What pip reads when it builds the wheel; tests, docs and examples stay away.
            beside=(
                "CMakeLists.txt",
                "LICENSE",
                "MANIFEST.in",
                "PKG-INFO",
                "README.md",
                "cmake",
                "csrc",
                "pyproject.toml",
                "requirements",
                "setup.py",
            ),
            # setuptools_scm's file, the extensions, and what the flash-attention build copies in.
            built=("vllm/_version.py", "vllm/*.so", "vllm/vllm_flash_attn/*"),
            unpackaged=("vllm/*/README", "vllm/*.md", "vllm/*.jpg"),
        ),
    )
}

NAMES = tuple(_KNOWN)


def find_project(name: str) -> Project:
    """The project of that name; an unknown one is a package alone, as other queues may have."""
    return _KNOWN.get(name, Project(name, name))
