"""Writes docs/reference from the definitions: a page for each op, each pass, each command, and each
part of the API, all flags, and all families. It also writes the signature of Python jobs and the
schema of machines.

`python -m tools.gen_docs` rewrites the pages; with `--check` it compares them with the definitions,
prints the difference and the command that accepts it, and exits with 1.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

from stagec.ir import traits
from stagec.ir.opdef import OpDef
from stagec.ir.param import Arity, Param
from stagec.ir.traits import Trait
from stagec.ir_spec.strategy.statement import Statement
from stagec.pipeline.passes import Pass, option_text, options_of, reads_its_own_options
from stagec.pipeline.plugins import Loaded, load_plugins
from tools.gen_api import api_pages
from tools.gen_commands import command_pages
from tools.gen_families import families_page
from tools.gen_flags import flags_page
from tools.gen_schema import machines_schema
from tools.gen_signature import signature
from tools.markup import ACCEPT, ROOT, anchor, markdown, page, paragraphs

#: module of an op -> (heading, where its ops stand)
ROOMS: Mapping[str, tuple[str, str]] = {
    "structure": (
        "Structure",
        "Declarations stay in all phases, functions end with `lower-to-trace`.",
    ),
    "strategy": (
        "Statements of a strategy",
        "In the region of a `stg.strategy`. [Flags](../flags.md) has the flags that write them.",
    ),
    "contraction": ("Contractions, sums, scaling", "In functions."),
    "extremes": (
        "Extremes",
        "In functions. `insert-collectives` makes `stg.chosen` where the dimension is split.",
    ),
    "convolution": ("Convolutions", "In functions."),
    "scan": ("Running sums", "In functions."),
    "causal_conv": (
        "Causal convolutions and shifts",
        "In functions. `insert-collectives` makes the last two where the sequence is split.",
    ),
    "state_space": (
        "State-space layers",
        "In functions. `insert-collectives` makes the ops of states where the sequence is split.",
    ),
    "linear_attention": ("Linear attention and delta rules", "In functions."),
    "rwkv": ("RWKV", "In functions."),
    "sequence_parts": ("States between parts of a sequence", "`insert-collectives` makes them."),
    "selection": ("Slices and positions", "In functions."),
    "activation": ("Activations and dropout", "In functions."),
    "gated": ("Gated activations", "In functions."),
    "norm": ("Norms", "In functions."),
    "softmax": ("Softmax", "In functions."),
    "attention": ("Attention and positions", "In functions."),
    "moe": (
        "Mixture of experts",
        "In functions. The products of the experts are `stg.einsum` with an expert factor.",
    ),
    "vocabulary": (
        "Vocabulary",
        "In functions. `stg.max` and the last three replace `stg.cross_entropy` over a split one.",
    ),
    "losses": ("Further losses, and time steps", "In functions."),
    "recommend": ("Recommendation", "In functions."),
    "layout": ("Views, placement, gradients", "In functions."),
    "comm": (
        "Collectives",
        "In functions, from partitioned on, on placed values; `insert-collectives` makes them.",
    ),
    "optimizer": ("Optimizer", "In functions, from differentiated on; `add-optimizer` makes them."),
    "trace": (
        "Memory and lowered form",
        "`stg.free` and `stg.memory` from planned on; the others in lowered modules only.",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the pages, or compare them with `--check`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    check = parser.parse_args(argv).check
    stale = ""
    for path, text in pages().items():
        if check:
            stale += difference(path, text)
        elif difference(path, text):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}")
    for path in left_over():
        stale += f"{path.relative_to(ROOT)} is generated from nothing\n" if check else ""
        if not check:
            path.unlink()
    if stale:
        print(f"{stale}\nout of date; to accept: {ACCEPT}")
    return int(bool(stale))


@cache
def pages() -> Mapping[Path, str]:
    """The text of each generated page."""
    loaded = load_plugins(())
    docs = ROOT / "docs"
    folders = {
        "ops": op_pages(loaded),
        "passes": pass_pages(loaded),
        "api": api_pages(docs / "examples" / "api.py"),
        "commands": command_pages(),
    }
    return {
        **{
            docs / "reference" / folder / f"{name}.md": text
            for folder, texts in folders.items()
            for name, text in texts.items()
        },
        docs / "reference" / "flags.md": flags_page(),
        docs / "reference" / "families.md": families_page(),
        ROOT / "stagec" / "jobs" / "request" / "signature.py": signature(),
        ROOT / "stagec" / "answers" / "machines.schema.json": machines_schema(),
    }


def left_over() -> list[Path]:
    """Pages of the reference that are no longer generated."""
    return sorted({*(ROOT / "docs" / "reference").glob("**/*.md")} - {*pages()})


def difference(path: Path, text: str) -> str:
    """The unified difference between a page and what it should say, "" if there is none."""
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    name = str(path.relative_to(ROOT))
    lines = (old.splitlines(), text.splitlines())
    return "\n".join(difflib.unified_diff(*lines, f"{name} (on disk)", name, lineterm=""))


# -- ops -------------------------------------------------------------------------------------------

_OPS_INTRO = (
    "Every built-in op: what it means and costs, its operands, results and parameters, and one "
    "example. `stagec ops NAME` prints an entry; the language is described in "
    "[stg.md](../../../ir_spec/stg.md). Every op also takes `phase`, the part of the training step "
    "that it belongs to (forward, the default, backward, recompute, gradient or optimizer)."
)
_TRAITS_INTRO = (
    "What ops state of themselves: `stagec/ir/traits.py`. [Ops](index.md) name their traits."
)
_SMALL_GROUP = 12


def op_pages(loaded: Loaded) -> dict[str, str]:
    """The index, a page for each op, and one of traits."""
    by_room: dict[str, list[OpDef]] = {}
    for op in loaded.registry:
        by_room.setdefault(_room(op), []).append(op)
    return {
        "index": page("Ops", _OPS_INTRO, _ops_index(by_room)),
        **{
            op.name: page(f"`{op.name}`", _beside(room, op, ops), _op(op))
            for room, ops in by_room.items()
            for op in ops
        },
        "traits": page("Traits", _TRAITS_INTRO, _traits()),
    }


def _beside(room: str, op: OpDef, ops: Sequence[OpDef]) -> str:
    """The group of an op, and the other ops of a small one."""
    heading = _heading(room)[0]
    others = ", ".join(f"[`{o.name}`]({o.name}.md)" for o in ops if o is not op)
    group = f"[{heading}](index.md#{anchor(heading)})"
    return f"{group}, with {others}." if 1 < len(ops) <= _SMALL_GROUP else f"{group}."


def _room(op: OpDef) -> str:
    """The file of an op; statements of a strategy, a file each, are one room."""
    package, _, name = type(op).__module__.rpartition(".")
    return "strategy" if package.endswith(".strategy") and name != "space" else name


def _ops_index(by_room: Mapping[str, Sequence[OpDef]]) -> Iterator[str]:
    yield from ("[Traits](traits.md) state what holds of an op.", "")
    for room, ops in by_room.items():
        heading, where = _heading(room)
        yield from (f"## {heading}", "", where, "", "| op | |", "|---|---|")
        for op in ops:
            first = " ".join(next(paragraphs(inspect.getdoc(op) or op.name)))
            yield f"| [`{op.name}`]({op.name}.md) | {first.replace('|', chr(92) + '|')} |"
        yield ""


def _heading(room: str) -> tuple[str, str]:
    return ROOMS.get(room, (room.replace("_", " ").capitalize(), "In functions."))


def _op(op: OpDef) -> Iterator[str]:
    yield from (*markdown(inspect.getdoc(op) or ""), "")
    yield f"- operands: {_names(op.takes)}"
    yield f"- results: {_names(op.gives)}"
    if op.traits:
        yield f"- traits: {', '.join(_trait(t) for t in op.traits)}"
    if op.parents:
        yield f"- stands in: {', '.join(f'`{name}`' for name in op.parents)}"
    if isinstance(op, Statement) and op.flags:
        flags = ", ".join(f"`{flag.option}`" for flag in op.flags)
        yield f"- [flags](../flags.md): {flags}"
    if op.params:
        yield from ("", "| parameter | kind | meaning |", "|---|---|---|")
        yield from (_param(p) for p in op.params)
    if op.example:
        yield from ("", "```text", op.example, "```")
    yield ""


def _trait(trait: Trait) -> str:
    return f"[`{trait}`](traits.md#{type(trait).__name__.lower()})"


def _traits() -> Iterator[str]:
    """The meaning of each trait, with the bases that it refines."""
    for kind in vars(traits).values():
        if isinstance(kind, type) and issubclass(kind, Trait) and kind is not Trait:
            yield from (f"## `{kind.__name__}`", "")
            refined = [f"`{base.__name__}`" for base in kind.__bases__ if base is not Trait]
            yield from (f"Refines {' and '.join(refined)}.", "") if refined else ()
            yield from (*markdown(inspect.getdoc(kind) or ""), "")


def _names(arity: Arity) -> str:
    """The names, with marks for optional and repeated ones."""
    optional = [""] * arity.least + [" (optional)"] * len(arity.names)
    shown = [f"`{n}`{mark}" for n, mark in zip(arity.names, optional, strict=False)]
    if arity.most is None:
        shown[-1] = f"`{arity.names[-1]}`, ... (any number)"
    return ", ".join(shown) or "none"


def _param(param: Param) -> str:
    name = f"`{param.name}`" + (" (first, unnamed)" if param.positional else "")
    kind = param.kind + (", required" if param.required else "")
    said = all(choice in param.doc for choice in param.choices)
    doc = param.doc + ("" if said else f" ({', '.join(param.choices)})")
    return f"| {name} | {kind} | {doc.replace('|', chr(92) + '|')} |"


# -- passes ----------------------------------------------------------------------------------------

_PASSES_INTRO = (
    "Every built-in pass: the phases in which it may run, the phase that it gives, its options, "
    "and what it does to a small text. `stagec passes NAME` prints an entry; "
    "[writing-a-pass.md](../../writing-a-pass.md) says how to add one."
)


def pass_pages(loaded: Loaded) -> dict[str, str]:
    """The index, and a page for each pass."""
    passes = {
        name: page(f"`{name}`", f"Runs in: {_runs_in(pass_type)}.", _pass(pass_type))
        for name, pass_type in loaded.passes.items()
    }
    return {"index": page("Passes", _PASSES_INTRO, _passes_index(loaded)), **passes}


def _passes_index(loaded: Loaded) -> Iterator[str]:
    yield from ("| pass | may run in | gives | |", "|---|---|---|---|")
    for name, pass_type in loaded.passes.items():
        gives = pass_type.gives.label if pass_type.gives else "the same phase"
        first = " ".join(next(paragraphs(inspect.getdoc(pass_type) or name)))
        yield f"| [`{name}`]({name}.md) | {_needs(pass_type)} | {gives} | {first} |"
    yield from ("", "Named pipelines stand like a pass:", "", "| pipeline | passes |", "|---|---|")
    for name, text in loaded.pipelines.items():
        links = (f"[`{p}`]({p}.md)" if p in loaded.passes else f"`{p}`" for p in text.split(","))
        yield f"| `{name}` | {', '.join(links)} |"


def _runs_in(pass_type: type[Pass]) -> str:
    return _needs(pass_type) + (f"; gives {pass_type.gives.label}" if pass_type.gives else "")


def _needs(pass_type: type[Pass]) -> str:
    until = pass_type.until or pass_type.needs
    return pass_type.needs.label + (f" to {until.label}" if until is not pass_type.needs else "")


def _pass(pass_type: type[Pass]) -> Iterator[str]:
    yield from (*markdown(inspect.getdoc(pass_type) or ""), "")
    if reads_its_own_options(pass_type):
        yield from ("It reads its own options, see above.", "")
    options = options_of(pass_type)
    if options:
        yield from ("| option | kind | default | meaning |", "|---|---|---|---|")
        for option in options.values():
            default = "required" if option.required else f"`{option_text(option.default)}`"
            yield f"| `{option.name}` | {option.kind} | {default} | {option.help} |"
        yield ""


if __name__ == "__main__":
    sys.exit(main())
