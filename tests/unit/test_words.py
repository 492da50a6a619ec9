"""`tools/words.py`: words with a standard term are found in prose, and in nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import words

PAGE = """# A title

It is told in `told` words, see [a page](told.md).

```console
$ stagec told
```

    an example of what is told
Told again, and mended.
"""


def test_words_are_found_in_prose_alone() -> None:
    found = list(words.findings(Path("page.md"), PAGE, {"[Tt]old": "reported", "mended": "fixed"}))
    assert [(f.line, f.word) for f in found] == [(3, "told"), (10, "Told"), (10, "mended")]
    assert str(found[0]) == "page.md:3: 'told': write reported"


def test_pages_to_be_edited_later_are_left_out() -> None:
    names = {path.name for path in words.pages(["docs/reference/", "docs/flags.md"])}
    assert "README.md" in names
    assert not {"flags.md", "insert-collectives.md"} & names
    with pytest.raises(ValueError, match="names no pages: docs/gone"):
        words.pages(["docs/gone"])
