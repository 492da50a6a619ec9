"""`--serve`: the options that say what a step of serving holds, and the passes that make it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from stagec.ir.serving import MODES
from stagec.support.diagnostics import Diagnostic, error

if TYPE_CHECKING:
    from stagec.driver.options import JobOptions

SEQUENCE, BATCH = "S", "B"
_COUNT = click.IntRange(min=1)
#: Options of a step, which `--serve` gives a meaning.
STEP = {
    "batch": click.option(
        "--batch", type=_COUNT, metavar="N", help="Sequences of the step, of all ranks together."
    ),
    "prompt": click.option(
        "--prompt", type=_COUNT, metavar="N", help="Of prefill: new tokens of each sequence."
    ),
    "context": click.option(
        "--context",
        type=click.IntRange(min=0),
        metavar="N",
        help="Tokens of each sequence that are cached before the step.",
    ),
    "chunk": click.option(
        "--chunk", type=_COUNT, metavar="N", help="Of prefill: so many tokens of the prompt a step."
    ),
    "speculative": click.option(
        "--speculative",
        type=click.IntRange(min=0),
        metavar="N",
        help="Of decode: so many more tokens of each sequence, which are drafts.",
    ),
}
OPTIONS = (
    click.option(
        "--serve",
        type=click.Choice(MODES),
        help="Compile a step of serving instead of a training step.",
    ),
    *STEP.values(),
)
_OF = {"prompt": "prefill", "chunk": "prefill", "speculative": "decode"}


@dataclass(frozen=True)
class Serving:
    """A step of serving: `new` tokens of each sequence behind `past` ones, which are open if None.
    `longest` are the positions that the model was trained for, 0 if they are not known."""

    mode: str
    new: int | None
    past: int | None
    batch: int | None
    longest: int

    @property
    def sizes(self) -> Mapping[str, int]:
        """The values of the symbols."""
        given = {SEQUENCE: self.new, BATCH: self.batch}
        return {name: n for name, n in given.items() if n is not None}

    @property
    def passes(self) -> str:
        """The pipeline of the step."""
        past = "" if self.past is None else f",context={self.past}"
        longest = f",longest={self.longest}" if self.longest else ""
        absorb = "absorb-latent," if self.mode == "decode" else ""
        serve = f"to-serving{{mode={self.mode}{past}{longest}}}"
        return f"inline,infer-shapes,{serve},{absorb}serve-step"


def read_serving(
    options: JobOptions, symbols: Mapping[str, int | None], *, symbolic: bool = False
) -> Serving | None:
    """What options ask for, of a model with these symbols; None without --serve. Raises
    `DiagnosticError`."""
    given = [name for name in STEP if getattr(options, name) is not None]
    if not options.serve:
        if given:
            raise error(
                f"--{given[0]} is about a step of serving",
                remedy="add --serve prefill or --serve decode",
            )
        return None
    mode = options.serve
    for name in given:
        if _OF.get(name, mode) != mode:
            raise error(f"--{name} is for --serve {_OF[name]}", remedy="leave it out")
    if SEQUENCE not in symbols:
        raise error(
            f"--serve: the model has no sequence of tokens (no dimension {SEQUENCE})",
            remedy="serve a language model",
        )
    if SEQUENCE in options.sizes or (BATCH in options.sizes and options.batch is not None):
        name = SEQUENCE if SEQUENCE in options.sizes else BATCH
        instead = "--batch" if name == BATCH else "--prompt, --chunk or --speculative"
        raise error(
            f"--set {name} and --serve both give the sizes of the step",
            remedy=f"give {instead} instead",
        )
    if mode == "decode" and options.context is None and not symbolic:
        raise error(
            "--serve decode expects --context: the tokens of each sequence that are cached",
            remedy="give --context 4096",
        )
    longest = symbols[SEQUENCE] or 0
    if mode == "decode":
        new = 1 + (options.speculative or 0)
        return Serving(mode, new, options.context, options.batch, longest)
    new = options.chunk or options.prompt or (longest or None)
    return Serving(mode, new, options.context or 0, options.batch, longest)


def beyond(serving: Serving) -> Diagnostic | None:
    """A warning for positions that the model was not trained for."""
    last = (serving.past or 0) + (serving.new or 0)
    if not serving.longest or last <= serving.longest:
        return None
    text = f"the step reaches position {last:,}, beyond the {serving.longest:,} of the model"
    return Diagnostic(text, severity="warning")
