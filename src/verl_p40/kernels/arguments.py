"""The arguments of a launch, from the words of the catalog to tensors. Runs in the stack.

``float32[tokens, heads, D]`` is an uninitialised tensor (small index tensors hold zeros),
``int32[n] = 5`` one filled with a value, ``int32[n] = arange`` one that counts; sizes are sums
and products of numbers and of the variant's variables. ``torch.float16`` and ``tl.float32`` are
those dtypes, ``=D`` the value of a variable or an expression. Lists and mappings are built of
such words; anything else stands for itself.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Mapping
from typing import Any

_TENSOR = re.compile(r"(?P<dtype>[a-z]+\d+\w*|bool)\[(?P<shape>[^\]]*)\](?:\s*=\s*(?P<value>.+))?")
_DTYPE = re.compile(r"(torch|tl)\.(\w+)")
_OPERATORS: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}


def number(text: str, variables: Mapping[str, Any]) -> Any:
    """The value of an expression of numbers, variables, ``+ - * // **``.

    Raises:
        ValueError: anything else is in it.
    """

    def value(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in variables:
            return variables[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](value(node.left), value(node.right))
        raise ValueError(f"{text!r}: {ast.unparse(node)} is neither a number nor a variable")

    return value(ast.parse(text.strip(), mode="eval").body)


def build(words: Any, variables: Mapping[str, Any], module: Any = None) -> Any:
    """The value that ``words`` stand for; ``variables`` are the variant's."""
    if isinstance(words, Mapping):
        if "new" in words:  # an object of a class of the module: {new: Class, attribute: ...}
            made = getattr(module, words["new"])()
            for name, value in words.items():
                if name != "new":
                    setattr(made, name, build(value, variables, module))
            return made
        return {name: build(value, variables, module) for name, value in words.items()}
    if isinstance(words, list):
        return [build(item, variables, module) for item in words]
    if not isinstance(words, str):
        return words
    if words in variables and isinstance(variables[words], str):
        return build(variables[words], variables, module)
    if words.startswith("="):
        return number(words[1:], variables)
    if match := _DTYPE.fullmatch(words):
        return _dtype(match[1], match[2])
    for name, value in variables.items():  # dtype[...] where a variable names the dtype
        if isinstance(value, str) and words.startswith(f"{name}["):
            words = value.removeprefix("torch.") + words[len(name) :]
    if match := _TENSOR.fullmatch(words):
        return _tensor(match, variables)
    return words


def _dtype(where: str, name: str) -> Any:
    import torch
    import triton.language as tl

    return getattr(torch if where == "torch" else tl, name)


def _tensor(match: re.Match[str], variables: Mapping[str, Any]) -> Any:
    import torch

    dtype = getattr(torch, match["dtype"])
    shape = [int(number(part, variables)) for part in match["shape"].split(",") if part.strip()]
    value = match["value"]
    if value == "arange":
        count = 1
        for size in shape:
            count *= size
        made = torch.arange(count, dtype=dtype).reshape(shape)
    elif value is not None:
        made = torch.full(shape, number(value, variables), dtype=dtype)
    elif dtype.is_floating_point:
        made = torch.empty(shape, dtype=dtype)
    else:
        made = torch.zeros(shape, dtype=dtype)
    return made.as_subclass(_on_card())


def _on_card() -> Any:
    """A tensor class that says it is on a GPU: launchers assert that before anything else."""
    import torch

    class OnCard(torch.Tensor):  # type: ignore[misc]
        is_cuda = property(lambda self: True)

    return OnCard
