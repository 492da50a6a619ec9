"""Limits of texts, which are checked before parsing, so that hostile texts only cost an error
message."""

import re

from stagec.support.diagnostics import error
from stagec.support.limits import MAX_BYTES, MAX_DEPTH, MAX_OPERATIONS
from stagec.support.source import FileLoc, Source

_OPERATION = re.compile(r"(?<=\w)\.[a-z_]")  # the dot in `stg.add`


def check_limits(source: Source) -> None:
    """Raise `DiagnosticError` for a text that is empty, too long, or nested too deep."""
    start = FileLoc(source.name, 1, 1)
    if len(source.text) > MAX_BYTES:
        raise error(
            f"the text is {len(source.text):,} characters long, expected at most {MAX_BYTES:,}",
            start,
            remedy="state repeated layers once, in a stg.repeat",
        )
    if not source.text.strip():
        raise error(
            "the text is empty, expected a 'stg.module'",
            start,
            remedy="'stagec models' lists models to start from",
        )
    count = sum(1 for _ in _OPERATION.finditer(source.text))
    if count > MAX_OPERATIONS:
        raise error(
            f"the text has {count:,} operations, expected at most {MAX_OPERATIONS:,}",
            start,
            remedy="state repeated layers once, in a stg.repeat",
        )
    depth, line = 0, 1
    for char in source.text:
        if char in "([{":
            depth += 1
            if depth > MAX_DEPTH:
                raise error(
                    f"brackets are nested more than {MAX_DEPTH} deep",
                    FileLoc(source.name, line, 1),
                    remedy="flatten the expression or the regions",
                )
        elif char in ")]}":
            depth -= 1
        elif char == "\n":
            line += 1
