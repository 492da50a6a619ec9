"""The page of a text of the IR: its lines are searched, its regions folded."""

from collections import Counter

from stagec.output.page import command, facts, page
from stagec.text.ir_text import IRText, op_names

#: Ops whose counts are shown.
_MOST_OPS = 6
_BODY = """<div class="bar">
<input type="search" id="find" placeholder="search for an op" aria-label="search for an op">
<button type="button" id="previous">previous</button>
<button type="button" id="next">next</button>
<span id="count" role="status"></span>
<button type="button" id="fold">fold all</button>
<button type="button" id="unfold">unfold all</button>
</div>
<p class="quiet">Click a line with a triangle to fold its region. Keys: / searches, Enter or n and p
go to the next and the previous line, f and u fold and unfold all regions.</p>"""


def ir_page(title: str, text: str, said: str) -> str:
    """The page of a text of the IR that the command `said` prints."""
    counts = Counter(op_names(text)).most_common(_MOST_OPS)
    body = [
        command(said),
        facts((name, f"{count:,}") for name, count in counts),
        _BODY,
        f'<div id="ir" tabindex="0" role="group" aria-label="module">{IRText(text).html()}</div>',
    ]
    return page(title, body, ["output/ir.js"])
