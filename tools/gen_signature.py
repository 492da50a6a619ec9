"""stagec/jobs/request/signature.py: the flags of `stagec.job` with their types, from the records of
the options."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from stagec.jobs.request.option import CommandOption
from stagec.jobs.request.options import JOB, SHOWN

_HEAD = '''"""The flags of a job in Python calls; `make docs` writes this file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypedDict


class JobFlags(TypedDict, total=False):
    """What `stagec compile --help-all` describes; a flag that is None is not given."""
'''


def signature() -> str:
    """The text of the file."""
    given = (option for option in JOB if option.name not in SHOWN)
    return "\n".join([_HEAD, *(line for option in given for line in _field(option))]) + "\n"


def _field(option: CommandOption) -> Iterator[str]:
    about = textwrap.wrap(option.help, 93)
    yield from (f"    #: {line}" for line in about)
    kind = option.kind.annotation()
    several = f" | Sequence[{kind}]" if option.multiple and option.merge is None else ""
    line = f"    {option.name}: {kind}{several} | None"
    if len(line) <= 100:
        yield line
        return
    yield f"    {option.name}: ("
    yield from _broken(kind)
    yield "    )"


def _broken(kind: str) -> Iterator[str]:
    """A type that is too long for a line, as ruff breaks it."""
    inside = kind.removeprefix("Literal[").removesuffix("]")
    if len(kind) <= 92:
        yield f"        {kind}"
    else:
        yield "        Literal["
        line = " " * 12 + inside
        yield from [line] if len(line) <= 100 else (f"{' ' * 12}{n}," for n in inside.split(", "))
        yield "        ]"
    yield "        | None"
