"""Man pages say what help says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stagec.driver.cli import COMMANDS


def test_man_pages_have_all_of_the_help(tmp_path: Path) -> None:
    """No line of it is taken for a request of the formatter, such as `.stg`."""
    pytest.importorskip("click_man")
    command = [sys.executable, "-m", "tools.man", str(tmp_path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    for name, (_, line) in COMMANDS.items():
        text = (tmp_path / f"stagec-{name}.1").read_text("utf-8")
        assert rf"stagec\-{name} \- {line}" in text
        requests = {row.split()[0] for row in text.splitlines() if row.startswith((".", "'"))}
        assert requests <= {".TH", ".SH", ".B", ".PP", ".TP"}
        assert rf"See \fBstagec-{name}(1)\fP" in (tmp_path / "stagec.1").read_text("utf-8")
