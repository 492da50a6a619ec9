"""`python -m stagec` is `stagec`."""

from __future__ import annotations

import sys


def entry() -> None:
    """The console script. An interrupt while modules are imported ends it without a traceback, as
    one during the work does."""
    try:
        from stagec.driver.cli import entry as run

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    entry()
