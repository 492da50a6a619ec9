"""Draws the pictures of docs/gallery.md: runs its commands, and takes a screenshot of each page
that they write with a Chromium without a window.

`python -m tools.pictures`; CHROMIUM names another browser.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools.markup import ROOT

PAGE = ROOT / "docs" / "gallery.md"
FOLDER = ROOT / "docs" / "pictures"
#: Columns and rows of a picture; those of README's show the schedule and the streams.
SIZE, SIZES = (1200, 760), {"time": (1400, 720), "search": (1200, 1100), "sweep": (1200, 1000)}
_COMMAND = re.compile(r"^\$ (stagec .* --html (\w+)\.html)", re.M)
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> int:
    """Draw all of them. Exit code 1 without a browser."""
    if not browser():
        print("no Chromium here: install it, or set CHROMIUM to its path", file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for command, name in _COMMAND.findall(PAGE.read_text(encoding="utf-8")):
            subprocess.run(command, shell=True, check=True, cwd=folder, stdout=subprocess.DEVNULL)
            draw(Path(folder) / f"{name}.html", FOLDER / f"{name}.png")
            print(f"drew {name}.png")
    return 0


def draw(page: Path, picture: Path) -> None:
    """A screenshot of the top of a page."""
    width, height = SIZES.get(page.stem, SIZE)
    run([f"--window-size={width},{height}", f"--screenshot={picture}", page.as_uri()])


def browser() -> str:
    """The Chromium of this machine; empty if there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _BROWSERS)), "")


def run(flags: Sequence[str]) -> bytes:
    """What Chromium prints without a window."""
    command = [browser(), "--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"]
    ran = subprocess.run([*command, *flags], check=True, capture_output=True, timeout=300)
    return ran.stdout


if __name__ == "__main__":
    sys.exit(main())
