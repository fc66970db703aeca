"""The one YAML loader of this room: safe, and libyaml's where PyYAML was built with it."""

from __future__ import annotations

from typing import Any

import yaml

try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # libyaml is optional in PyYAML's source builds
    from yaml import SafeLoader  # type: ignore[assignment]


def load(text: str | bytes) -> Any:
    """The one document of ``text``; raises ``yaml.YAMLError``."""
    return yaml.load(text, Loader=SafeLoader)


def compose_all(text: str) -> list[yaml.Node]:
    """The documents of ``text`` as nodes with their places; raises ``yaml.YAMLError``."""
    return [node for node in yaml.compose_all(text, Loader=SafeLoader) if node]
