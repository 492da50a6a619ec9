"""Draws the pictures of docs/gallery.md: runs its commands, and takes screenshots of their pages
with a headless Chromium: at the width of a screen in light colors, `NAME.png`, and at that of a
phone in dark ones, `NAME-phone.png`.

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
PHONE = (360, 800)
#: The values of Chromium's setting `preferredColorScheme`.
SCHEMES = {"dark": 0, "light": 1}
_COMMAND = re.compile(r"^\$ (stagec .* --html (\w+)\.html)", re.M)
_BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def main() -> int:
    """Draw all pictures. Exit code 1 without a browser."""
    if not browser():
        print("no Chromium here: install it, or set CHROMIUM to its path", file=sys.stderr)
        return 1
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for command, name in _COMMAND.findall(PAGE.read_text(encoding="utf-8")):
            subprocess.run(command, shell=True, check=True, cwd=folder, stdout=subprocess.DEVNULL)
            page = Path(folder) / f"{name}.html"
            draw(page, FOLDER / f"{name}.png", "light", *SIZES.get(name, SIZE))
            draw(page, FOLDER / f"{name}-phone.png", "dark", *PHONE)
            print(f"drew {name}")
    return 0


def draw(page: Path, picture: Path, scheme: str, width: int, height: int) -> None:
    """A screenshot of the top of a page."""
    run([*window(scheme, width, height), f"--screenshot={picture}", page.resolve().as_uri()])


def window(scheme: str, width: int, height: int) -> list[str]:
    """The flags of a window of this many columns and rows, dark or light."""
    setting = f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}"
    return [f"--window-size={width},{height}", setting]


def browser() -> str:
    """The Chromium of this machine; empty if there is none."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _BROWSERS)), "")


def run(flags: Sequence[str]) -> bytes:
    """The output of a headless Chromium."""
    command = [browser(), "--headless", "--no-sandbox", "--hide-scrollbars", "--disable-gpu"]
    ran = subprocess.run([*command, *flags], check=True, capture_output=True, timeout=300)
    return ran.stdout


if __name__ == "__main__":
    sys.exit(main())
