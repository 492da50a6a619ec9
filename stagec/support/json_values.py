"""Kinds of values that were read from JSON or TOML."""

import json
from pathlib import Path
from typing import Any, TypeGuard


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether a value is a JSON object, or a TOML table."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether a value is a JSON list, or a TOML array."""
    return isinstance(value, list)


def object_in(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if the file has none or cannot be read."""
    try:
        value: object = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if is_object(value) else {}
