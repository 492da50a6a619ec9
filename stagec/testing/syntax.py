"""What a lit test says: its RUN lines, the substitutions, and the plain subset of shell.

A line of that subset (commands, pipes, `&&`, `<`, `>`, `>>`, `2>`, `2>&1`, a leading `not`) becomes
pipelines of stages; anything else raises UnsupportedSyntaxError and is left to a real shell.
"""

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stagec.testing import golden

SUFFIXES = (".stg", ".test")


class UnsupportedSyntaxError(Exception):
    """The line needs a real shell."""


# ------------------------------------------------------------------ finding tests and RUN lines

_RUN = re.compile(r"^\s*(?://|#)\s*RUN:\s?(.*)$")


def is_excluded(folder: Path) -> bool:
    """Folders that hold inputs or expected outputs, not tests; hidden ones and environments."""
    name = folder.name
    named = name in ("Inputs", "Output") or name.endswith(".golden") or name.startswith(".")
    return named or (folder / "pyvenv.cfg").is_file()


def find_tests(root: Path) -> Iterator[Path]:
    """Every file below a folder that may be a test, in a fixed order."""
    for path in sorted(root.iterdir()):
        if path.is_dir():
            yield from () if is_excluded(path) else find_tests(path)
        elif path.suffix in SUFFIXES:
            yield path


def read_test(path: Path) -> str:
    """The text of a test; what is not UTF-8 in it is left to the command that reads it."""
    return path.read_text(encoding="utf-8", errors="replace")


def run_lines(text: str) -> list[str]:
    """The RUN lines of a test; a trailing backslash joins a line with the next one."""
    lines: list[str] = []
    open_line = False
    for match in filter(None, map(_RUN.match, text.splitlines())):
        part = match.group(1).strip()
        if open_line:
            lines[-1] += part.removesuffix("\\")
        else:
            lines.append(part.removesuffix("\\"))
        open_line = part.endswith("\\")
    return [line.strip() for line in lines]


# ------------------------------------------------------------------ substitutions


def tool_substitutions() -> dict[str, str]:
    """`%name` -> shell command. Order matters to lit: a name goes before its prefixes."""
    python = shlex.quote(sys.executable)
    script = Path(sys.executable).with_name("stagec")
    return {
        "%filecheck": f"{python} -m filecheck",
        "%golden": f"{python} -m stagec.testing.golden %s",
        "%stagec": shlex.quote(str(script)) if script.exists() else f"{python} -m stagec",
    }


def environment() -> dict[str, str]:
    """What a test sees on top of the caller's environment."""
    env = {"NO_COLOR": "1", "COLUMNS": "120", "PYTHONUTF8": "1"}
    if golden.BLESS in os.environ:
        env[golden.BLESS] = os.environ[golden.BLESS]
    return env


def path_substitutions(test: Path, temp: Path) -> dict[str, str]:
    """`%s` the test, `%S` its directory, `%t` a path of its own, `%T` a directory of its own."""
    return {
        "%s": str(test),
        "%S": str(test.parent),
        "%t": str(temp / f"{test.name}.tmp"),
        "%T": str(temp),
    }


def substitute(text: str, table: Mapping[str, str]) -> str:
    """Replace every `%name` of the table; `%%` is a percent sign."""
    names = "|".join(re.escape(name) for name in sorted(table, key=len, reverse=True))
    return re.sub(
        rf"%%|(?:{names})(?![A-Za-z_])", lambda m: "%" if m[0] == "%%" else table[m[0]], text
    )


def as_shell(line: str, test: Path, temp: Path) -> str:
    """A RUN line as a shell command."""
    paths = path_substitutions(test, temp)
    tools = {name: substitute(text, paths) for name, text in tool_substitutions().items()}
    return substitute(line, {**paths, **tools})


# ------------------------------------------------------------------ parsing


@dataclass(frozen=True)
class Stage:
    """One command of a pipeline with its redirections (paths; "" means none)."""

    words: tuple[str, ...]
    negated: bool = False
    stdin: str = ""
    stdout: str = ""
    stderr: str = ""
    append: bool = False
    merge: bool = False  # 2>&1


_TOKEN = re.compile(
    r"""\s*(?: (?P<op> 2>&1 | 2>(?!>) | && | \|(?!\|) | >>(?!&) | >(?!&) | <(?!<) )
             | (?P<word> (?: [^\s"'\\|&;<>()] | "[^"]*" | '[^']*' | \\. )+ ) )""",
    re.VERBOSE,
)
_SINGLE_QUOTED = re.compile(r"'[^']*'")
_DOUBLE_QUOTED = re.compile(r'"[^"]*"')
_GLOB = re.compile(r"^[~#]|(?<!\\)[*?]")


def tokens(line: str) -> Iterator[tuple[str, str]]:
    """("op", text) and ("word", raw text). Raises UnsupportedSyntaxError on anything else."""
    position = 0
    end = len(line.rstrip())
    while position < end:
        match = _TOKEN.match(line, position)
        if match is None:
            raise UnsupportedSyntaxError(line[position:])
        kind = match.lastgroup or "word"
        yield kind, match[kind]
        position = match.end()


def word(raw: str) -> str:
    """A word with its quotes removed. Raises UnsupportedSyntaxError on expansions and globs, and on
    quotes in quotes that are escaped."""
    expandable = _SINGLE_QUOTED.sub("''", raw)
    bare = _DOUBLE_QUOTED.sub("''", expandable)
    if "$" in expandable or "`" in expandable or _GLOB.search(bare):
        raise UnsupportedSyntaxError(raw)
    try:
        return "".join(shlex.split(raw))
    except ValueError:
        raise UnsupportedSyntaxError(raw) from None


@dataclass
class _StageBuilder:
    words: list[str] = field(default_factory=list[str])
    files: dict[str, str] = field(default_factory=dict[str, str])
    pending: str = ""
    merge: bool = False

    def add(self, kind: str, text: str) -> None:
        if self.pending and kind == "op":
            raise UnsupportedSyntaxError(text)
        if kind == "word":
            if self.pending:
                self.files[self.pending] = word(text)
                self.pending = ""
            else:
                self.words.append(word(text))
        elif text == "2>&1":
            self.merge = True
        else:
            self.pending = text

    def finish(self) -> Stage:
        words = list(self.words)
        negated = False
        while words[:1] == ["not"]:
            negated = not negated
            words.pop(0)
        if not words or self.pending or re.match(r"[A-Za-z_]\w*=", words[0]):
            raise UnsupportedSyntaxError(" ".join(words))
        return Stage(
            words=tuple(words),
            negated=negated,
            stdin=self.files.get("<", ""),
            stdout=self.files.get(">", "") or self.files.get(">>", ""),
            stderr=self.files.get("2>", ""),
            append=">>" in self.files,
            merge=self.merge,
        )


def parse_line(line: str) -> list[list[Stage]]:
    """Pipelines joined by `&&`. Raises UnsupportedSyntaxError when the line needs a shell."""
    pipelines: list[list[Stage]] = [[]]
    builder = _StageBuilder()
    for kind, text in tokens(line):
        if kind == "op" and text in ("|", "&&"):
            pipelines[-1].append(builder.finish())
            builder = _StageBuilder()
            if text == "&&":
                pipelines.append([])
        else:
            builder.add(kind, text)
    pipelines[-1].append(builder.finish())
    return pipelines
