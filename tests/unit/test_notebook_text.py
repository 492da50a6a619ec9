"""What notebooks show of modules, strategies, machines and plots."""

from __future__ import annotations

import re
from html import unescape

import pytest

import stagec
from stagec.api import Source, load_plugins, parse_module
from stagec.ir.module import Module
from stagec.output.notebook import NotebookText
from stagec.output.tables import console, table
from stagec.text import ir_text
from stagec.text.ir_text import IRText

TEXT = """stg.module @m {
  stg.symbols[B, D]
  stg.func @f (%x: bf16[B, D]) {
    // a < comment {
    %y = stg.add(%x, %x)
    stg.return(%y)
  }
}
"""


def test_a_kernel_of_jupyter_gets_what_a_terminal_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    """There rich would send what is printed to the cell, and leave texts empty."""
    counts = stagec.job("llama3-8b", sizes={"L": 2, "B": 1}).analyze()
    terminal = str(counts), counts.as_markdown(), shown_in_a_notebook(counts)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert (str(counts), counts.as_markdown(), shown_in_a_notebook(counts)) == terminal
    assert all("all_reduce" in text or "parameters" in text for text in terminal)


def shown_in_a_notebook(value: object) -> str:
    show = getattr(value, "_repr_html_")  # noqa: B009
    return str(show())


def plain_text(html: str) -> str:
    """What a browser shows of lines that are all visible."""
    lines = re.sub("</summary>|</div>(?!$)", "\n", html)
    return unescape(re.sub("<[^>]*>", "", lines))


def test_a_text_of_the_ir_shows_every_line() -> None:
    shown = IRText(TEXT).html()
    assert plain_text(shown) == TEXT
    assert shown.count("<details open>") == shown.count("</details>") == 2


def test_a_long_region_is_folded_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ir_text, "FOLDED", 2)
    shown = IRText(TEXT).html()
    assert (shown.count("<details open>"), shown.count("<details>")) == (1, 1)
    assert "// 3 lines" in unescape(shown)


def test_a_text_that_is_cut_is_shown_as_it_is() -> None:
    cut = TEXT.partition("    stg.return")[0]
    shown = IRText(cut).html()
    assert plain_text(shown) == cut
    assert "<details" not in shown


def test_a_module_shows_its_text() -> None:
    module: Module = parse_module(Source("<text>", TEXT), load_plugins(()).registry)
    shown = plain_text(shown_in_a_notebook(module))
    assert "%y = stg.add(%x, %x)" in shown


def test_a_strategy_and_dumps_are_texts_with_colors() -> None:
    job = stagec.job("llama3-8b", tp=2, sizes={"L": 1})
    strategy = job.print_strategy()
    assert plain_text(strategy.html()) == strategy
    assert "--jp-mirror-editor-keyword-color" in job.dumps()["00-input"].html()


def test_an_answer_shows_tables_that_sort_by_their_values() -> None:
    text = NotebookText()
    shown = table("Memory", "class", "peak", "fits")
    shown.add_row("a < b", "900.00 MiB", "yes")
    shown.add_row("other", "1.50 GiB", "no")
    text.write("stage0: <peak>\n")
    console(text).print(shown)
    html = text.html()
    assert "<pre>stage0: &lt;peak&gt;</pre><table><caption>Memory</caption>" in html
    assert '<td class="text">a &lt; b</td><td class="number" data-value="943718400">' in html
    assert '<td class="number">yes</td></tr>' in html
    assert html.count("addSorting(table") == 2
    assert "│" not in html


def test_an_answer_without_tables_is_its_text() -> None:
    text = NotebookText()
    text.write("ok\n")
    assert text.html() == '<div class="stagec-answer"><pre>ok</pre></div>'


def test_a_machine_shows_figures_with_their_sources() -> None:
    shown = shown_in_a_notebook(stagec.machine("h100-sxm"))
    assert "<td>memory.bandwidth</td><td>3.35 TB/s</td><td>ai-dynamo" in shown
