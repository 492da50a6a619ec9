"""What a command says of a path that is no trace."""

from pathlib import Path

from stagec.support.diagnostics import error


def check_is_trace(path: Path) -> None:
    """Raise `DiagnosticError` with a remedy for what is not the file of a trace: a folder, an
    archive, or nothing. What is in the file is not looked at."""
    from stagec.check.findings import CheckReport
    from stagec.check.trace_files import discover
    from stagec.traces.archive import is_archive

    if path.is_dir():
        traces = discover(path, CheckReport())[1].values()
        first = next((f"one of its traces: {trace}" for trace in traces), "a file NAME.RANK.et")
        raise error(f"'{path}' is a folder, expected the trace of a rank", remedy=f"give {first}")
    if not path.exists():
        raise error(
            f"no file or folder '{path}', expected a trace",
            remedy="give an output of 'stagec compile', or a trace of another tool",
        )
    if is_archive(path):
        raise error(
            f"'{path}' is an archive, expected the trace of a rank",
            remedy=f"write its traces first: stagec materialize {path} -o DIR --only-ranks 0",
        )
