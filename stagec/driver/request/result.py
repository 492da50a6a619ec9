"""Files that a command writes at its end, looked at before it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from stagec.support.files import check_new_file


class ResultFile(click.ParamType[Path]):
    """A file to write, or `-` for stdout.

    A command that works for minutes says at once that there is no such folder.
    """

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        """The path. Raises `OSError` where no file can be written."""
        if str(value) != "-":
            check_new_file(Path(value))
        return Path(value)


RESULT = ResultFile()
