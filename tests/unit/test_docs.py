"""The pages: every block of STG parses, every command prints what is shown, code runs.

STAGEC_BLESS=1 rewrites the output shown in ```console blocks. What stands before a block says how
it is read (see "The blocks on this page" in ir_spec/stg.md).
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from stagec.api import PassManager, Source, parse_module
from stagec.ir.opdef import OpDef
from stagec.ir.types import DTYPE_BYTES
from stagec.pipeline.plugins import load_plugins
from stagec.support.diagnostics import DiagnosticError
from stagec.testing import golden
from stagec.testing.runner import guarded, stagec_command
from stagec.text.build import parse_op
from tests.support import DISTINCT, LONG
from tools import gen_docs, markup

pytestmark = DISTINCT

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "ir_spec/stg.md")),
    ROOT / "validation" / "README.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
]
LOADED = load_plugins(())
README = ROOT / "README.md"
NAME = "<page>"  # one name for all texts: the parser is built once for each name

# -- pages and their blocks ------------------------------------------------------------------------

_BLOCK = re.compile(
    r"(?:^<!-- (?P<how>[^\n]*) -->\n)?^```(?P<kind>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.M
)


@dataclass(frozen=True)
class Block:
    """A fenced block, with the comment right before it."""

    page: Path
    line: int
    kind: str
    text: str
    how: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *kinds: str) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in _BLOCK.finditer(text):
        if match["kind"] in kinds:
            line = text.count("\n", 0, match.start("text")) + 1
            yield Block(page, line, match["kind"], match["text"], match["how"] or "")


STG = [block for page in PAGES for block in blocks(page, "stg")]

# -- STG -------------------------------------------------------------------------------------------

_HEAD = """stg.module @page[phase = {phase}] {{
  stg.symbols[B, S, L, D, H, G, K, F, V, theta, E, T, M]
  stg.mesh @pod[pp, dp, cp, ep, tp]
"""
_HOW = re.compile(
    r"stg: (?P<where>module|types|lone|(?P<region>func|graph)\((?P<args>.*)\)|whole)"
    r"(?: phase (?P<phase>\w+))?(?: run (?P<run>\S+))?(?: error (?P<error>.+))?"
)


@dataclass(frozen=True)
class Example:
    """A block as a module, the passes to run on it, and the error that it should give."""

    text: str
    run: str = ""
    error: str = ""


def example(block: Block) -> Example:
    """Put around a block what its comment says; whole modules stand for themselves."""
    saved = block.how.startswith("file: ")
    how = _HOW.fullmatch("stg: whole" if saved or not block.how else block.how)
    assert how is not None, f"{block}: the comment before the block is not understood: {block.how}"
    run, problem = how["run"] or "", how["error"] or ""
    head = _HEAD.format(phase=how["phase"] or "parsed")
    if how["where"] in ("whole", "lone"):
        return Example(block.text, run, problem)
    if how["where"] == "module":
        return Example(f"{head}{block.text}}}", run, problem)
    if how["where"] == "types":
        types = [line.partition("//")[0].strip() for line in block.text.splitlines()]
        args = ", ".join(f"%v{i}: {t}" for i, t in enumerate(filter(None, types)))
        return Example(f"{head}stg.func @f ({args}) {{ stg.return() }} }}", run, problem)
    op, end = ("stg.func", "stg") if how["region"] == "func" else ("et.graph", "et")
    extra = "" if op == "stg.func" else "[ranks = 1]"
    last = "" if f"{end}.return" in block.text else f"{end}.return()"
    body = f"{op} @f{extra} ({how['args']}) {{\n{block.text}{last} }}"
    return Example(f"{head}{body}\n}}", run, problem)


@pytest.mark.parametrize("block", STG, ids=str)
def test_stg_block(block: Block) -> None:
    given = example(block)
    source = Source(NAME, given.text)
    if block.how == "stg: lone":
        parse_op(source, LOADED.registry)
    elif given.error:
        with pytest.raises(DiagnosticError, match=re.escape(given.error)):
            process(source, given.run)
    else:
        process(source, given.run)


def process(source: Source, passes: str) -> None:
    module = parse_module(source, LOADED.registry)
    if passes:
        PassManager(LOADED.pipeline(passes), known=LOADED.passes.values()).run(module)


def test_the_language_lists_all_element_types() -> None:
    lines = (ROOT / "ir_spec" / "stg.md").read_text("utf-8").splitlines()
    (types,) = (line for line in lines if line.startswith("Element types:"))
    named = {name for code in re.findall(r"`([^`]*)`", types) for name in code.split()}
    assert named == set(DTYPE_BYTES)


def test_there_are_blocks_of_every_kind() -> None:
    assert len(STG) > 12
    assert {kind for page in PAGES for kind in _kinds(page)} <= {
        "stg",
        "console",
        "text",
        "python",
        "json",
        "toml",
        "sh",
    }


def _kinds(page: Path) -> Iterator[str]:
    yield from (m["kind"] for m in _BLOCK.finditer(page.read_text(encoding="utf-8")))


def test_fences_are_closed_and_have_a_kind() -> None:
    for page in PAGES:
        fences = re.findall(r"^```.*$", page.read_text(encoding="utf-8"), re.M)
        assert [f == "```" for f in fences] == [False, True] * (len(fences) // 2), name_of(page)


# -- commands and code -----------------------------------------------------------------------------

_SECONDS = re.compile(r"\d+\.\d+ s\b")
SESSIONS = [page for page in PAGES if any(blocks(page, "console"))]
#: The commands that tests/unit/test_validate.py runs, which has compiled what they need.
VALIDATES = "stagec validate"


#: Pages of many commands, or of large jobs, on what other pages show too.
LARGE = [
    f"docs/{name}.md"
    for name in (
        *("commands", "consumers", "cookbook", "gallery", "memory", "models", "requests", "scale"),
        *("search", "server-search", "serving", "serving-steps", "strategies", "studies"),
    )
]


def is_large(page: str) -> bool:
    """Whether a page takes more than a second; those of the commands do so together."""
    return page in LARGE or page.startswith("docs/reference/commands/")


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=LONG if is_large(name_of(p)) else ()) for p in SESSIONS],
    ids=name_of,
)
def test_commands_print_what_is_shown(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_commands(page, tmp_path, monkeypatch, lambda command: not command.startswith(VALIDATES))


def check_commands(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: Callable[[str], bool]
) -> None:
    """The chosen commands of a page in one folder, in order, with its files written as they
    come."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    blessing = golden.blessing()
    monkeypatch.delenv(
        golden.BLESS, raising=False
    )  # it is meant for the page, not for its commands
    text = page.read_text(encoding="utf-8")
    stale: list[str] = []
    for block in blocks(page, "console", "python", "stg", "text", "toml"):
        if block.how.startswith("file: "):
            (tmp_path / block.how.removeprefix("file: ")).write_text(block.text, encoding="utf-8")
        elif block.kind == "console":
            now = session(block, tmp_path, chosen)
            if _SECONDS.sub("", now) != _SECONDS.sub("", block.text):
                stale.append(difference(block, now))
                text = text.replace(f"```console\n{block.text}```", f"```console\n{now}```")
    for drawn in sorted(tmp_path.glob("*.svg")):  # a page shows plots that its commands draw
        shown, now = page.with_suffix("") / drawn.name, drawn.read_text(encoding="utf-8")
        if blessing:
            shown.write_text(now, encoding="utf-8")
        elif not shown.exists() or shown.read_text(encoding="utf-8") != now:
            stale.append(f"{name_of(shown)} is not what the command draws")
    if stale and blessing:
        page.write_text(text, encoding="utf-8")
    elif stale:
        pytest.fail("\n".join([*stale, f"to accept: STAGEC_BLESS=1 pytest {__file__}"]))


def difference(block: Block, now: str) -> str:
    import difflib

    lines = (block.text.splitlines(), now.splitlines())
    return "\n".join(difflib.unified_diff(*lines, str(block), "printed now", lineterm=""))


def session(block: Block, folder: Path, chosen: Callable[[str], bool]) -> str:
    """The block with the output that its chosen commands print now."""
    shown: list[str] = []
    for command, printed in commands(block.text):
        now = run(command.replace("\\\n", ""), folder) if chosen(command) else printed
        shown += [f"$ {command}", *now]
    return "\n".join(shown) + "\n"


def commands(text: str) -> list[tuple[str, list[str]]]:
    """What stands after each `$ `, lines that a backslash continues too, and the lines that it is
    said to print."""
    parts = re.split(r"^\$ ((?:[^\n]*\\\n)*[^\n]*)\n", text, flags=re.M)
    return [(c, shown.splitlines()) for c, shown in zip(parts[1::2], parts[2::2], strict=True)]


def run(command: str, folder: Path) -> list[str]:
    """What a command prints, stdout first. `stagec` runs in this process, filters in bash."""
    first, pipe, rest = command.partition(" | ")
    if not first.startswith("stagec "):
        first, pipe, rest = "", "", command
    out, err = (io.StringIO(), io.StringIO())
    if first:
        with redirected(folder, out, err):
            guarded(stagec_command, shlex.split(first)[1:])
    printed = out.getvalue()
    if pipe or not first:
        done = subprocess.run(
            ["bash", "-c", rest],
            input=printed,
            capture_output=True,
            text=True,
            cwd=folder,
            check=False,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        )
        printed = done.stdout + done.stderr
    return [line.rstrip() for line in (printed + err.getvalue()).rstrip().splitlines()]


@contextlib.contextmanager
def redirected(folder: Path, out: io.StringIO, err: io.StringIO) -> Generator[None]:
    """Work in a folder, with what is printed caught."""
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


@pytest.mark.long
def test_questions_of_the_readme_can_be_asked(tmp_path: Path) -> None:
    """The commands of its table, but those that need files of a user. The search is that of the
    gallery, which keeps its answer."""
    rows = re.findall(r"^\| [^|]*\? \| `stagec ([^`]*)` \|", README.read_text("utf-8"), re.M)
    assert len(rows) == 7
    asked = [row for row in rows if "my.py" not in row]
    out, err = io.StringIO(), io.StringIO()
    with redirected(tmp_path, out, err):
        codes = {row: guarded(stagec_command, shlex.split(row)) for row in asked}
    # The first one asks whether a job fits that does not, which is a failure.
    assert [row for row, code in codes.items() if code] == [r for r in asked if "--limit" in r]


# -- generated pages, links, words -----------------------------------------------------------------


def test_generated_pages_are_up_to_date() -> None:
    stale = [gen_docs.difference(page, text) for page, text in gen_docs.pages().items()]
    assert not any(stale), f"{''.join(stale)}\nto accept: {markup.ACCEPT}"


_CODE = re.compile(r"```.*?```|`[^`\n]*`|^    [^\n]*$", re.DOTALL | re.M)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, heading = target.partition("#")
        if "://" in target:
            continue
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)}: {target}"
        if heading:
            assert heading in anchors(there), f"{name_of(page)}: {target}"


def anchors(page: Path) -> set[str]:
    """What a link to a page may name: its headings, and the anchors that it states."""
    text = page.read_text(encoding="utf-8")
    return {
        *map(markup.anchor, re.findall(r"^#+ (.*)$", text, re.M)),
        *re.findall(r'^<a id="([^"]+)"></a>$', text, re.M),
    }


DECISIONS = ROOT / "docs" / "decisions"


def test_every_decision_is_in_the_index() -> None:
    """Sections of the topic pages stand in the index; a record of its own has a free number."""
    index = (DECISIONS / "README.md").read_text(encoding="utf-8")
    sections = [
        f"{page.name}#{anchor}"
        for page in sorted(DECISIONS.glob("[a-z]*.md"))
        for anchor in re.findall(r'^<a id="(\d{3}[^"]*)"></a>$', page.read_text("utf-8"), re.M)
    ]
    assert sorted(re.findall(r"\(([a-z-]+\.md#[^)]+)\)", index)) == sorted(sections)
    folded = {section.partition("#")[2] for section in sections}
    assert not [p.name for p in DECISIONS.glob("[0-9]*.md") if p.name[:3] in folded]


def test_decisions_that_code_names_are_there() -> None:
    """Docstrings, comments and texts name a decision by its page and section."""
    rooms = ("ir_spec", "passes", "stagec", "tests", "tools", "validation")
    files = [f for room in rooms for f in (ROOT / room).rglob("*.*") if f.suffix in SOURCES]
    named = [
        (f, *match)
        for f in files
        for match in re.findall(
            r"docs/decisions/([\w-]+\.md)(?:#(\d{3}))?", f.read_text("utf-8", "replace")
        )
    ]
    assert named
    for file, page, section in named:
        there = DECISIONS / page
        assert there.exists(), f"{name_of(file)}: {page}"
        assert not section or section in anchors(there), f"{name_of(file)}: {page}#{section}"


SOURCES = (".py", ".toml", ".stg", ".js", ".pxd")


_FILE = re.compile(r"`((?:stagec|passes|ir_spec|tests|tools|docs|validation)/[\w./-]+)`")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = set(_FILE.findall(page.read_text(encoding="utf-8")))
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_names_a_machine(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"(?<![\w.])/(?:work|root|home|tmp|usr)\b[^\s)]*", text)


# -- examples of ops -------------------------------------------------------------------------------

#: Types of what the examples of ops use, where the type does not follow from the name alone.
TYPES: Mapping[str, str] = {
    "bf16[B, S, D]": "x h dn de o",
    "bf16[D]": "g b n1",
    "bf16[B, S, H, K]": "q a da",
    "bf16[B, S, G, K]": "k v",
    "f32[B, H, S]": "lse",
    "bf16[B, 2, S, F]": "gu",
    "bf16[B, S, F]": "dm",
    "i32[B, S]": "tokens labels",
    "bf16[V, D]": "table",
    "bf16[B, S, V]": "logits",
    "f32[]": "one clip",
    "f32[B, S]": "m s t",
    "bf16[D, H, K]": "w",
    "bf16[L, D]": "W",
    "f32[D, F]": "dw",
    "bf16[B, H, S, S]": "scores dp p",
    "bf16[B, 3, S, H, K]": "qkv",
    "bf16[B]": "dy y",
    "i32[B, S, T]": "experts i places",
    "f32[B, S, T]": "weights",
    "bf16[E, B, S*T/E, D]": "ys dys",
    "u8[B]": "mask",
    "i32[B, S, 4*T]": "candidates",
}
NAMES = {name: type_ for type_, names in TYPES.items() for name in names.split()}
_SEQUENCE = {"x": "bf16[B, S, F]", "dy": "bf16[B, S, F]", "dt": "bf16[B, S, F]"}
_STREAM = {"x": "bf16[B, S, D]", "n": "bf16[D]", "q": "bf16[D]"}
_SELECTIVE = {
    **_SEQUENCE,
    **dict.fromkeys(("b", "c"), "bf16[B, S, K]"),
    **dict.fromkeys(("skip", "dt_bias"), "f32[F]"),
    "A_log": "f32[F, K]",
}
_SSD = {
    **dict.fromkeys(("x", "dy"), "bf16[B, S, H, K]"),
    **dict.fromkeys(("b", "c"), "bf16[B, S, F]"),
    **dict.fromkeys(("A_log", "skip", "dt_bias"), "f32[H]"),
    "dt": "bf16[B, S, H]",
}
_LINEAR = {**dict.fromkeys("qkv", "bf16[B, S, H, K]"), "decay": "f32[H]"}
_DELTA = {
    **dict.fromkeys("qk", "bf16[B, S, G, K]"),
    **dict.fromkeys(("v", "dy"), "bf16[B, S, H, K]"),
    **dict.fromkeys(("gate", "beta"), "bf16[B, S, H]"),
    **dict.fromkeys(("A_log", "dt_bias"), "f32[H]"),
}
_WKV: Mapping[str, str] = dict.fromkeys(
    ("q", "w", "k", "v", "kappa", "a", "dy"), "bf16[B, S, H, K]"
)
_FAMILIES: Mapping[str, Mapping[str, str]] = {
    "stg.selective_scan": _SELECTIVE,
    "stg.ssd": _SSD,
    "stg.linear_attention": _LINEAR,
    "stg.gated_delta_rule": _DELTA,
    "stg.wkv6": {**_WKV, "now": "bf16[H, K]"},
    "stg.wkv7": _WKV,
    "stg.rg_lru": {**dict.fromkeys(("x", "r", "i", "dy"), "bf16[B, S, H, K]"), "a": "f32[H, K]"},
}


def _in_parts(types: Mapping[str, str]) -> dict[str, str]:
    """The operands with the sequence in four parts."""
    cut = {n: t.replace("[B, S", "[B, 4, S/4") for n, t in types.items()}
    return {"da": "bf16[B, 4, S/4, H, K]", **cut}


OPERANDS: Mapping[str, Mapping[str, str]] = {
    **_FAMILIES,
    **{f"{n}_grad": t for n, t in _FAMILIES.items()},
    **{f"{n}_state": _in_parts(t) for n, t in _FAMILIES.items()},
    **{f"{n}_state_grad": _in_parts(t) for n, t in _FAMILIES.items()},
    "stg.lora_buffer": {"adapter": "i32[B, S]"},
    "stg.lora_shrink": {"a": "bf16[4, D, 16]", "adapter": "i32[B, S]"},
    "stg.lora_expand": {"low": "f32[B, S, 16]", "b": "bf16[4, 16, H, K]", "adapter": "i32[B, S]"},
    "stg.carry_states": {"hs": "f32[B, 4, H, K, K]", "keeps": "f32[B, 4, H]"},
    "stg.causal_conv": {"w": "bf16[D, K]"},
    "stg.causal_conv_grad": {"dy": "bf16[B, S, D]", "w": "bf16[D, K]"},
    "stg.roll_parts": {"x": "bf16[B, 4, 3, D]"},
    "stg.conv_halo": {"x": "bf16[B, 4, S/4, D]"},
    "stg.route": {"logits": "f32[B, S, E]"},
    "stg.route_grad": {"dw": "f32[B, S, T]", "logits": "f32[B, S, E]"},
    "stg.combine_weights_grad": {"do": "bf16[B, S, D]"},
    "stg.dispatch_weights_grad": {"dws": "f32[E, B, S*T/E]"},
    "stg.expert_bias": {"b": "bf16[E, D]"},
    "stg.sum": {"dy": "bf16[B, S, F]"},
    "stg.broadcast": {"x": "bf16[F]", "y": "bf16[B, S, F]"},
    "stg.mul": {"x": "bf16[B]"},
    "stg.scale": {"x": "bf16[B]"},
    "stg.cast": {"x": "bf16[B]"},
    "stg.gelu": {"x": "bf16[B]"},
    "stg.gelu_grad": {"x": "bf16[B]"},
    "stg.clamp": {"x": "bf16[B]"},
    "stg.clamp_grad": {"x": "bf16[B]"},
    "stg.silu": {"x": "bf16[B]"},
    "stg.silu_grad": {"x": "bf16[B]"},
    **{
        f"stg.{name}{grad}": {"x": "bf16[B]"}
        for name in ("relu", "sigmoid", "tanh", "exp", "softplus", "dropout")
        for grad in ("", "_grad")
    },
    "stg.power": {"x": "bf16[B]"},
    "stg.scaled_einsum": {"w_int4": "i4[D, F]", "scales": "bf16[D/128, F]"},
    "stg.sum_parts": {"p": "f32[4, B, S, H, K]", "w": "f32[B, H, S, 4]"},
    "stg.take_over": {"k": "bf16[B, S, G, K]"},
    "stg.slice": {"table": "bf16[V, D]"},
    "stg.relative_bias": {"table": "bf16[32, H]"},
    "stg.relative_bias_grad": {"db": "bf16[H, S, S]"},
    "stg.by_distance": {"near": "bf16[B, S, H, 64]"},
    "stg.by_distance_grad": {"ds": "bf16[B, H, S, S]"},
    "stg.index_scores": {"k": "bf16[B, S, K]", "weights": "bf16[B, S, H]"},
    "stg.index_scores_grad": {
        "ds": "f32[B, S, S]",
        "q": "bf16[B, S, H, K]",
        "k": "bf16[B, S, K]",
        "w": "bf16[B, S, H]",
    },
    "stg.compress": {"b": "f32[4, D]"},
    "stg.compress_grad": {"dc": "bf16[B, S/4, D]", "b": "f32[4, D]"},
    "stg.compressed_attention": {"k": "bf16[B, S, K]", "s": "f32[H]"},
    "stg.compressed_attention_grad": {
        "da": "bf16[B, S, H, K]",
        "lse": "f32[B, H, S]",
        "k": "bf16[B, S, K]",
        "s": "f32[H]",
    },
    "stg.stream_weights": {"l": "f32[B, S, 4]", "s": "f32[1]", "b": "f32[4]"},
    "stg.stream_weights_grad": {
        "dr": "f32[B, S, 4]",
        "l": "f32[B, S, 4]",
        "s": "f32[1]",
        "b": "f32[4]",
    },
    "stg.attend_depth": {**_STREAM, "e": "bf16[B, S, D]"},
    "stg.attend_depth_grad": {**_STREAM, "dy": "bf16[B, S, D]", "e": "bf16[B, S, D]"},
    "stg.zero_weights_grad": {"dw0": "f32[B, S]"},
    "stg.put": {"dc": "bf16[B, D]"},
    **{
        f"stg.{name}": {
            **dict.fromkeys(("q", "da", "a"), "bf16[B, 4, S/4, H, K]"),
            **dict.fromkeys("kv", "bf16[B, 4, S/4, G, K]"),
            "lse": "f32[B, H, 4, S/4]",
        }
        for name in ("attention_edge", "attention_edge_grad", "add_edge")
    },
    "stg.conv1d": {"kernel": "bf16[3, D, F]"},
    "stg.conv1d_dx": {"kernel": "bf16[3, D, F]", "du": "bf16[B, S/2, F]"},
    "stg.conv1d_dw": {"du": "bf16[B, S/2, F]"},
    **{
        f"stg.conv2d{which}": {
            "square": "bf16[3, 3, D, F]",
            "pixels": "bf16[B, 8, 8, D]",
            "dp": "bf16[B, 8, 8, F]",
        }
        for which in ("", "_dx", "_dw")
    },
    "stg.sinusoid": {"time": "f32[B]"},
    "stg.embedding_bag_grad": {"dc": "bf16[B, D]"},
    "stg.triangle_grad": {"dz": "bf16[B, H, S*(S - 1)/2]"},
    "stg.cross_entropy_grad": {"lse": "f32[B, S]"},
    **{
        f"stg.{name}": {"logits": "f32[B, S, V]", "logp": "f32[B, S, V]", "dlogp": "f32[B, S, V]"}
        for name in ("log_softmax", "log_softmax_grad", "nll_loss", "nll_loss_grad")
    },
    "stg.sink_softmax": {"sinks": "bf16[H]"},
    "stg.saved_cross_entropy_grad": {"logp": "f32[B, S, V]"},
    "stg.linear_cross_entropy": {"x": "bf16[B, S, D]", "w": "bf16[D, V]"},
    "stg.log_probability": {"m": "f32[B, S]", "s": "f32[B, S]"},
    "stg.reshape": {"x": "bf16[B, S, H, K]"},
    "stg.pack": {"k": "bf16[B, S, H, K]", "v": "bf16[B, S, H, K]"},
    "stg.recall": {"n_again": "bf16[B, S, D]", "n_stashed": "bf16[B, S, D]"},
    "stg.sharding_constraint": {"x": "bf16[B, S, V]"},
    "stg.all_reduce": {"x": "bf16[B@dp, S, D | sum(tp)]"},
    "stg.reduce_scatter": {"x": "bf16[B@dp, S, D | sum(tp)]"},
    "stg.all_gather": {"x": "bf16[B@dp, S@tp, D]"},
    "stg.all_to_all": {"x": "bf16[B, S@cp, H, K]"},
    "stg.collective_permute": {"k": "bf16[B, S@cp, G, K]", "v": "bf16[B, S@cp, G, K]"},
    "stg.merge_attention": {
        "t": "f32[B, S@cp, H, K]",
        "l": "f32[B, H, S@cp]",
        "y": "bf16[B, S@cp, H, K]",
        "m": "f32[B, H, S@cp]",
    },
    "stg.all_slice": {"x": "bf16[B@dp, S, D]"},
    "stg.keep_part": {"x": "bf16[B@dp, S, D]"},
    "stg.adamw": {"w": "f32[D]", "g": "f32[D]", "m": "f32[D]", "v": "f32[D]"},
    **{
        f"stg.{name}": dict.fromkeys(("w", "g", "m", "v", "r", "d", "u"), "f32[D]")
        for name in ("sgd", "lion", "adam_root", "adam_denominator", "adam_apply", "apply_update")
    },
    "stg.adam_moments": dict.fromkeys("gmv", "f32[D]"),
    "stg.adam8bit": {
        **dict.fromkeys("wg", "f32[D]"),
        **dict.fromkeys("mv", "u8[D]"),
        **dict.fromkeys("ab", "f32[D/256]"),
    },
    "stg.decayed_mean": dict.fromkeys("rs", "f32[D]"),
    **{
        f"stg.{name}": {
            **dict.fromkeys("gum", "bf16[D, F]"),
            "r": "f32[D]",
            "c": "f32[F]",
            "t": "f32[]",
            "s": "f32[]",
        }
        for name in (
            *("adafactor_square", "adafactor_update"),
            *("muon_momentum", "muon_update", "newton_schulz"),
        )
    },
    "stg.adafactor_clip": {"u": "f32[D, F]", "s": "f32[]"},
    "stg.max_ties": {"top": "bf16[B, D]"},
    "stg.max_grad": {"dtop": "bf16[B, D]", "top": "bf16[B, D]", "n": "i32[B, D]"},
    "stg.topk_grad": {"dv": "bf16[B, S, T]"},
    "stg.squared_norm": {"g": "f32[D]"},
    "stg.clip_factor": {"s": "f32[]"},
}
IN_MODULE = {
    "stg.symbols",
    "stg.assume",
    "stg.mesh",
    "stg.func",
    "stg.strategy",
    "stg.memory",
    "stg.arena",
    "stg.order",
    "stg.space",
}
HOLDERS = {"stg.strategy", "stg.space"}
#: What is parsed alone: statements, and stacks.
IN_STRATEGY = {op.name for op in LOADED.registry if HOLDERS & {*(op.parents or ())}} | {"stg.stack"}


def op_example(op: OpDef) -> str:
    """The example of an op with what it needs around it."""
    head = _HEAD.format(phase="parsed").replace("theta,", "theta, P,")
    head += "  stg.assume[B % dp == 0, S % tp == 0, S % cp == 0, H % cp == 0, H % G == 0]\n"
    head += "  stg.assume[D % dp == 0, F % tp == 0]\n"
    if op.name == "stg.module" or op.name in IN_STRATEGY:
        return op.example
    if op.name == "et.graph":
        return f"{head}{op.example}\n}}"
    if op.name == "stg.buffer":
        arena = 'stg.arena @f_device[space = device, model = "best-fit"]'
        return f"{head}{arena} {{\n{op.example}\n}}\n}}"
    if op.name in ("stg.symbols", "stg.mesh"):
        return f"{head.splitlines()[0]}\n{op.example}\n}}"
    if op.name in IN_MODULE:
        return f"{head}{op.example}\n}}"
    if op.name in ("stg.option", "stg.statics", "stg.when"):
        block = f"stg.option @bias[no, yes]\n{op.example}\nstg.return(%x)"
        called = "%y = stg.call @f[bias](%x)\nstg.return(%y)"
        main = f"stg.func @main (%x: {NAMES['x']}) {{\n{called}\n}}"
        return f"{head}stg.func @f[private] (%x) {{\n{block}\n}}\n{main}\n}}"
    if op.name == "stg.call":
        head += '  stg.import["blocks/swiglu.stg"]\n'
    inside = op.name.partition(".")[0] == "et"
    used = dict.fromkeys(re.findall(r"%(\w+)", op.example.replace("%h: node", "")))
    defined = re.findall(r"%(\w+)", _left(op.example))
    defined += re.findall(r"%(\w+)(?:: \w+)? =", op.example)
    own = {**NAMES, **OPERANDS.get(op.name, {})}
    args = ", ".join(f"%{n}: {'node' if inside else own[n]}" for n in used if n not in defined)
    end = "" if ".return" in op.example else f"\n{'et' if inside else 'stg'}.return()"
    region = "et.graph @f[ranks = 1]" if inside else "stg.func @f"
    return f"{head}{region} ({args}) {{\n{op.example}{end}\n}}\n}}"


def _left(text: str) -> str:
    """The results of the one statement of an example."""
    left, equals, _ = text.partition(" = ")
    return left if equals and left.startswith("%") and "(" not in left else ""


@pytest.mark.parametrize("op", list(LOADED.registry), ids=lambda op: op.name)
def test_example_of_op(op: OpDef) -> None:
    """It parses, and the types that it states are those that are inferred."""
    assert op.example, f"{op.name} has no example"
    source = Source(NAME, op_example(op))
    if op.name in IN_STRATEGY:
        parse_op(source, LOADED.registry)
        return
    module = parse_module(source, LOADED.registry)
    if not op.name.startswith("et.") and ".yield" not in op.name and op.name != "stg.import":
        PassManager(LOADED.pipeline("inline,infer-shapes"), known=LOADED.passes.values()).run(
            module
        )
