"""`tools/words.py`: words with a standard term are found in prose, and in nothing else."""

from __future__ import annotations

from pathlib import Path

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
    actual = list(words.findings(Path("page.md"), PAGE, {"[Tt]old": "reported", "mended": "fixed"}))
    assert [(f.line, f.word) for f in actual] == [(3, "told"), (10, "Told"), (10, "mended")]
    assert str(actual[0]) == "page.md:3: 'told': write reported"


def test_generated_schemas_are_left_out() -> None:
    names = {path.name for path in words.files()}
    assert {"README.md", "interface.py", "loop.py"} <= names
    assert "et_def_pb2.py" not in names


CODE = '''"""What is told.

It quotes `told`, and told = 1.
"""

told = "told"
message = f"it was {told} and told"
'''


def test_words_are_found_in_strings_of_code() -> None:
    actual = list(words.findings(Path("code.py"), CODE, {"told": "reported"}))
    assert [f.line for f in actual] == [1, 3, 7]


LABELS = """columns = ["a rank", "per rank", "time of a step"]
text = f"{tokens} a rank, {share} of a rank, {rate}"
f"a {rank} a second"
"""


def test_labels_are_whole_strings_and_units_behind_a_value() -> None:
    labels = {"an? (?:rank|second)": "per rank", "time of a step": "step time"}
    actual = list(words.label_findings(Path("code.py"), LABELS, labels))
    shown = [(1, "a rank"), (1, "time of a step"), (2, "a rank"), (3, "a second")]
    assert sorted((f.line, f.word) for f in actual) == shown


def test_the_mean_sentence_of_a_page() -> None:
    page = "# A heading of a page\n\n| a | table of cells |\n\n" + "It has `a b c` words. " * 9
    assert words.mean_sentence(page) == 0
    assert words.mean_sentence(page + "One that has six words, (too).") == 4.2
