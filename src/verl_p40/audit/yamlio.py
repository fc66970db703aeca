"""The one YAML loader of this room: safe, and libyaml's where PyYAML was built with it."""

from __future__ import annotations

from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from verl_p40.errors import UsageError

try:
    from yaml import CSafeLoader as SafeLoader
except ImportError:  # libyaml is optional in PyYAML's source builds
    from yaml import SafeLoader  # type: ignore[assignment]


Model = TypeVar("Model", bound=BaseModel)


def load(text: str | bytes) -> Any:
    """The one document of ``text``; raises ``yaml.YAMLError``."""
    return yaml.load(text, Loader=SafeLoader)


def compose_all(text: str) -> list[yaml.Node]:
    """The documents of ``text`` as nodes with their places; raises ``yaml.YAMLError``."""
    return [node for node in yaml.compose_all(text, Loader=SafeLoader) if node]


def parse(text: str, origin: str, model: type[Model]) -> Model:
    """The one document of ``text`` as a ``model``.

    Raises:
        UsageError: it is not one; names ``origin`` and the first thing that is wrong.
    """
    try:
        return model.model_validate(load(text))
    except yaml.YAMLError as error:
        raise UsageError(f"{origin}: not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(f"{origin}: {where}: {first['msg']}") from error
