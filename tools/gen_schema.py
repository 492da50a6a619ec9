"""The JSON schema of `stagec machines --json`, from the types of machine texts."""

from __future__ import annotations

import json
from typing import Any

from stagec.machines import Machine


def machines_schema() -> str:
    """The schema: a list of machines, or one."""
    machine: dict[str, Any] = Machine.model_json_schema(by_alias=True, mode="serialization")
    types: dict[str, dict[str, Any]] = machine.pop("$defs")
    for each in (machine, *types.values()):
        each["required"] = list(each["properties"])  # defaults are written, too
    one = {"$ref": "#/$defs/Machine"}
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "stagec machines --json",
        "description": "The machines that are known, or the one that is asked for. Values are in "
        "bytes, bytes/s, FLOP/s, Hz and seconds.",
        "oneOf": [{"type": "array", "items": one}, one],
        "$defs": {**types, "Machine": machine},
    }
    return json.dumps(schema, indent=1) + "\n"
