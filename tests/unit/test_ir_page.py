"""The page of a module: `stagec opt --html`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import stagec
from tests.unit.test_charts import seen_in_a_browser
from tests.unit.test_memory_page import BROWSER

TEXT = """stg.module @m {
  stg.symbols[B, D]
  stg.func @f (%x: bf16[B, D]) {
    %y = stg.add(%x, %x)
    %z = stg.add(%y, %x)
    stg.return(%z)
  }
}
"""
_PROBE = """<script>
const seen = { problems, first: [find.value, byId("count").textContent] };
const key = (name) => document.body.dispatchEvent(
  new KeyboardEvent("keydown", { key: name, bubbles: true }));
key("f");
seen.folded = regions.map((region) => region.open);
key("n");
seen.unfolded = regions.map((region) => region.open);
seen.here = [all(".here").map((line) => line.textContent.trim()), byId("count").textContent];
find.value = "stg.return";
find.dispatchEvent(new Event("input"));
seen.hits = all(".hit").map((line) => line.textContent.trim());
seen.state = state.toString();
document.body.replaceChildren(JSON.stringify(seen));
</script></body>"""


@pytest.fixture
def page(tmp_path: Path) -> str:
    (tmp_path / "m.stg").write_text(TEXT)
    ran = stagec("opt", tmp_path / "m.stg", "-p", "infer-shapes", "--html", tmp_path / "m.html")
    assert (ran.code, ran.err) == (0, "")
    assert "stg.add" in ran.out
    return (tmp_path / "m.html").read_text("utf-8")


def test_a_page_has_the_text_the_command_and_counts_of_ops(page: str) -> None:
    assert "<title>m.stg</title>" in page
    assert "m.stg -p infer-shapes</code>" in page
    assert "<dt>stg.add</dt><dd>2</dd>" in page
    assert page.count("<details open>") == 2


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_module_in_a_browser(page: str, tmp_path: Path) -> None:
    """The search of the address is shown, its first line too; keys fold all and go to the next
    line, whose regions unfold."""
    seen = seen_in_a_browser(tmp_path, page.replace("</body>", _PROBE, 1), "#find=stg.add")
    assert seen["problems"] == []
    assert seen["first"] == ["stg.add", "1 of 2"]
    assert seen["folded"] == [True, False]
    assert seen["unfolded"] == [True, True]
    assert seen["here"][0][0].startswith("%z = stg.add(%y, %x)")
    assert seen["here"][1] == "2 of 2"
    assert len(seen["hits"]) == 1
    assert seen["state"] == "find=stg.return"
