"""What a value is that was read from JSON or TOML."""

from __future__ import annotations

from typing import Any, TypeGuard


def is_object(value: object) -> TypeGuard[dict[str, Any]]:
    """Whether it is an object of JSON, or a table of TOML."""
    return isinstance(value, dict)


def is_list(value: object) -> TypeGuard[list[Any]]:
    """Whether it is a list of JSON, or an array of TOML."""
    return isinstance(value, list)
