"""The page of a text of the IR: its lines are searched, its regions folded."""

from collections import Counter

from stagec.output.page import command, facts, page, part
from stagec.text.ir_text import IRText, op_names

#: Ops whose counts are shown.
_MOST_OPS = 6


def ir_page(title: str, text: str, said: str) -> str:
    """The page of a text of the IR that the command `said` prints."""
    counts = Counter(op_names(text)).most_common(_MOST_OPS)
    body = [
        command(said),
        facts((name, f"{count:,}") for name, count in counts),
        part("output/ir.html"),
        f'<div id="ir" tabindex="0" role="group" aria-label="module">{IRText(text).html()}</div>',
    ]
    return page(title, body, ["output/ir.js"])
