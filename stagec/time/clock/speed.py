"""Calls the loop of the clock: the compiled module for integers of 64 bits in arrays; the Python
source where it was not compiled, and for larger integers."""

from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from stagec.time.clock import loop

#: Whether there is a compiled loop.
COMPILED = not str(loop.__file__).endswith(".py")
_INTEGER = np.dtype(np.int64)


def looped(name: str, *given: Any) -> Any:
    """Call a function of `loop` by its name. It fills in some of the arrays among its arguments."""
    if COMPILED and not any(getattr(a, "dtype", _INTEGER).hasobject for a in given):
        return getattr(loop, name)(*given)
    lists = [a.tolist() if isinstance(a, np.ndarray) else a for a in given]
    result = getattr(in_python(), name)(*lists)
    for array, filled in zip(given, lists, strict=True):
        if isinstance(array, np.ndarray):
            array[:] = filled
    return result


@cache
def in_python() -> ModuleType:
    """The loop as a Python module, not compiled."""
    if not COMPILED:
        return loop
    source = Path(str(loop.__file__)).with_name("loop.py")
    spec = spec_from_file_location("stagec.time.clock.loop_in_python", source)
    if spec is None or spec.loader is None:
        raise ImportError(f"no module at {source}")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
