"""The families of inputs, by name.

An input is bytes, so that a corpus is a folder of files. Whatever the bytes are, a run ends in a
result or in diagnostics that can be shown: everything else is a fault, a `FaultError` or another
exception.
"""

from __future__ import annotations

from tools.fuzzing.answers import ANSWERS
from tools.fuzzing.base import Family, FaultError
from tools.fuzzing.jobs import JOBS
from tools.fuzzing.lines import LINES
from tools.fuzzing.records import RECORDS
from tools.fuzzing.texts import TEXTS

__all__ = ["FAMILIES", "Family", "FaultError"]

FAMILIES = {family.name: family for family in (*TEXTS, *LINES, *JOBS, *RECORDS, *ANSWERS)}
