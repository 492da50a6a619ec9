"""stagec: a compiler from symbolic tensor graphs to execution traces of distributed LLM jobs.

    import stagec

    job = stagec.job("llama3-8b", tp=8, dp=8, sp=True, zero=3)
    print(job.time("h100-sxm"))

Names are imported when they are asked for. docs/python.md has an example of each; `stagec.api` is
for authors of passes and ops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from stagec.interface import Job, check_traces, import_config, job, machine, search, sweep
    from stagec.support.diagnostics import DiagnosticError

__all__ = [
    "DiagnosticError",
    "Job",
    "check_traces",
    "import_config",
    "job",
    "machine",
    "search",
    "sweep",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'stagec' has no attribute '{name}'")
    if name == "DiagnosticError":
        from stagec.support.diagnostics import DiagnosticError

        return DiagnosticError
    from stagec import interface as verbs

    return getattr(verbs, name)
