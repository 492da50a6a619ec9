"""Checks pages in a browser: screenshots of each at three widths, light and dark, messages of the
console, the time to open it, and the findings of axe-core.

`python -m tools.pages_check AXE FOLDER PAGE.html ...` writes `FOLDER/PAGE-WIDTH-SCHEME.png`; AXE is
`axe.min.js` of the npm package axe-core, or `-` to leave it out. Exit code 1 if a page writes to
the console, or axe-core finds a serious fault. CHROMIUM names another browser.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
from html import unescape
from pathlib import Path
from typing import Any

from tools.pictures import SCHEMES, browser, draw, run, window

#: Columns and rows of the windows.
SIZES = {360: 1600, 1400: 1800, 3840: 2160}
_SERIOUS = ("serious", "critical")
_HEAD = """<script>
const problems = [];
addEventListener("error", (event) => problems.push(event.message));
addEventListener("securitypolicyviolation", (event) => problems.push(event.violatedDirective));
for (const kind of ["error", "warn"]) console[kind] = (...words) => problems.push(words.join(" "));
</script></head>"""
_TAIL = """<script>
const opened = performance.now();
const report = (found) => {
  document.body.replaceChildren(JSON.stringify({ problems, opened, found }));
};
if (window.axe) {
  const facts = ({ impact, id, nodes: [node, ...more] }) =>
    [impact, id, more.length + 1, node.target.join(" "), node.failureSummary];
  axe.run(document).then((result) => report(result.violations.map(facts)),
    (e) => problems.push(String(e)));
} else { report([]); }
</script></body>"""


def look(page: Path, axe: Path | None, scheme: str, width: int) -> dict[str, Any]:
    """The results of a page: `problems` of its console, milliseconds until it was `opened`, and
    the findings of axe-core in `found`: impact, rule, count, first place and reason."""
    text = page.read_text("utf-8").replace("</head>", _HEAD, 1)
    script = f"<script>{axe.read_text('utf-8')}</script>" if axe is not None else ""
    with tempfile.TemporaryDirectory() as folder:
        probed = Path(folder) / "page.html"
        at = text.rindex("</body>")
        probed.write_text(f"{text[:at]}{script}{_TAIL}</html>\n", "utf-8")
        flags = [*window(scheme, width, SIZES[width]), "--virtual-time-budget=60000", "--dump-dom"]
        shown = run([*flags, probed.as_uri()]).decode()
    match = re.search(r"<body>(.*)</body>", shown, re.DOTALL)
    if match is None:
        return {"problems": [f"no answer: {shown[:200]}"], "opened": 0, "found": []}
    seen: dict[str, Any] = json.loads(unescape(match[1]))
    return seen


def main(axe: str, folder: str, *pages: str) -> int:
    """Check all pages."""
    if not browser():
        print("no Chromium here: install it, or set CHROMIUM to its path", file=sys.stderr)
        return 1
    faults = 0
    Path(folder).mkdir(parents=True, exist_ok=True)
    for page in map(Path, pages):
        for scheme in SCHEMES:
            for width, height in SIZES.items():
                picture = Path(folder) / f"{page.stem}-{width}-{scheme}.png"
                draw(page, picture, scheme, width, height)
                seen = look(page, None if axe == "-" else Path(axe), scheme, width)
                serious = [problem for problem in seen["found"] if problem[0] in _SERIOUS]
                faults += len(serious) + len(seen["problems"])
                size, opened = page.stat().st_size / 1e6, seen["opened"]
                print(f"{page.name}, {scheme}, {width} px: {size:.2f} MB, {opened:,.0f} ms")
                for problem in (*seen["problems"], *seen["found"]):
                    print(f"  {problem}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
