"""One file per recipe: a config and a class, each a `torch_dcl.experiments.protocol.Recipe`.

The file's name is the recipe's, with ``_`` for ``-``; the first line of its docstring says what it runs.
"""

import importlib
from typing import Any

from torch_dcl.experiments.protocol import Recipe

__all__ = ["find_recipe_type"]


def find_recipe_type(name: str) -> type[Recipe[Any]]:
    """The class of a recipe, by the recipe's name."""
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    kinds = [value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Recipe)]
    return next(kind for kind in kinds if kind.__module__ == module.__name__)
