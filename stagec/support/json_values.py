"""What a value is that was read from JSON or TOML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether it is an object of JSON, or a table of TOML."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether it is a list of JSON, or an array of TOML."""
    return isinstance(value, list)


def object_in(path: Path) -> dict[str, Any]:
    """The object of JSON in a file; an empty one where none can be read."""
    try:
        value: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if is_object(value) else {}
