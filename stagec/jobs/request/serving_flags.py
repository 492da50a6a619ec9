"""The option `--serve` and the options of its step, and the pipeline of a step of serving."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stagec.ir.drafts import DRAFT
from stagec.ir.expr import ZERO, Expr, const, symbol
from stagec.ir.module import BATCH, Module
from stagec.ir.serving_step import DECODE, MIXED, MODES, PAST, PREFILL
from stagec.ir.types import TensorType
from stagec.ir_spec.strategy.statement import Statement
from stagec.jobs.request.option import AnyText, CommandOption, OneOf, Whole, rare_option
from stagec.serving.step import Step, parse_step
from stagec.support.diagnostics import Diagnostic, error

if TYPE_CHECKING:
    from stagec.jobs.request.options import JobOptions

#: Element types of caches, by the names that servers use.
KV_TYPES = {"bf16": "bf16", "fp8": "f8e4m3", "int8": "i8"}
_COUNT = Whole(1)
#: The ways of sampling tokens, that of engines first.
SAMPLING = ("gather", "local", "none")
#: The options of a step of serving.
STEP = {
    "batch": CommandOption(
        "batch",
        _COUNT,
        "Sequences of the step, over all ranks; in a mixed step the decoding sequences of each "
        "group of ranks with requests of its own.",
    ),
    "prompt": CommandOption(
        "prompt",
        _COUNT,
        "New tokens of each sequence of prefill; in a mixed step the prompt whose last chunk it "
        "computes.",
    ),
    "context": CommandOption(
        "context", Whole(least=0), "Cached tokens of each sequence before the step."
    ),
    "chunk": CommandOption(
        "chunk",
        _COUNT,
        "With --serve prefill or mixed: tokens of the prompt per step (chunked prefill).",
    ),
    "speculative": CommandOption(
        "speculative", Whole(least=0), "With --serve decode: draft tokens per sequence and step."
    ),
    "step": rare_option(
        "step",
        AnyText(),
        "With --serve mixed: the sequences of the step, such as decode=64x4096,prefill=1x2048+0 "
        "(sequences x new tokens + cached ones; chunk= samples none, verify= all).",
        metavar="CLASSES",
    ),
}
#: Two pods, one of which prefills; see `stagec.jobs.pods`.
DISAGGREGATED = "disaggregated"
PODS = (PREFILL, DECODE)
#: The options of caches and results.
CACHES = {
    "page": rare_option(
        "page", _COUNT, "With --serve: caches have whole pages of this number of tokens.", 1
    ),
    "kv_dtype": CommandOption(
        "kv_dtype",
        OneOf(tuple(KV_TYPES)),
        "With --serve: the element type of cached keys and values (default: as computed).",
    ),
    "sampling": rare_option(
        "sampling",
        OneOf(SAMPLING),
        "With --serve and a split vocabulary: sample from gathered logits, as engines do "
        "(default), or from the maxima of the ranks (local); none returns logits.",
        SAMPLING[0],
    ),
}
OPTIONS = (
    CommandOption(
        "serve",
        OneOf((*MODES, DISAGGREGATED)),
        "Compile a step of serving instead of a training step.",
    ),
    *STEP.values(),
    *(
        CommandOption(
            mode,
            AnyText(),
            f"With --serve disaggregated: the strategy of the pod for {mode}, 'tp=4,sp'.",
            metavar="FLAGS",
        )
        for mode in PODS
    ),
    *CACHES.values(),
)
#: The modes that an option applies to, if not to all.
_OF = {
    "prompt": ("prefill", MIXED),
    "chunk": ("prefill", MIXED),
    "speculative": ("decode",),
    "draft": ("decode",),
    "step": (MIXED,),
    **dict.fromkeys(PODS, (DISAGGREGATED,)),
}


@dataclass(frozen=True)
class Serving:
    """A step of serving, in which each sequence has `new` tokens after `past` cached ones (None:
    open).

    `speculation` are the passes of a step that drafts, in `steps` steps of a token each, or that
    verifies the drafts of another pod. `sequence` is the dimension of tokens; `longest` is its size
    in the text, which is the number of rows of tables of positions (0: open). `positions` is the
    number of positions that the model was trained for (0: not known).
    """

    mode: str
    sequence: str
    new: int | None
    past: int | None
    batch: int | None
    longest: int
    positions: int = 0
    page: int = 1
    kv_dtype: str = ""
    sampling: str = SAMPLING[0]
    step: Step | None = None
    speculation: str = ""
    steps: int = 1

    @property
    def sizes(self) -> Mapping[str, int]:
        """The values of the symbols of sequences and tokens."""
        given = {self.sequence: self.new, BATCH: self.batch}
        return {name: n for name, n in given.items() if n is not None}

    @property
    def values(self) -> Mapping[str, int]:
        """The values of the further symbols with which the step is compiled."""
        if self.step is not None:
            return self.step.values(self.sequence)
        return {PAST: self.past} if self.past else {}

    @property
    def structure(self) -> str:
        """A key that steps share if they differ in sizes alone."""
        if self.step is None:
            return self.passes
        return f"{self.passes.replace(str(self.step), '')} {self.step.structure}"

    def declare(self, module: Module, *, split: bool = False) -> None:
        """Declare the symbol of cached tokens in a module, in a mixed step if the strategy does
        `split` those of its classes, and set the sizes of the step. Raises `DiagnosticError` if the
        model has such a symbol of its own."""
        if PAST in module.symbols:
            raise module.root.error(
                f"the model declares the symbol '{PAST}', which a step of serving uses for its "
                "cached tokens",
                remedy="rename the symbol in the model",
            )
        declared = module.ops("stg.symbols")[0].attrs
        if self.past != 0 or (split and self.step is not None):
            declared[PAST] = const(self.past) if self.past else True
        module.set_values(self.sizes)
        if self.step is not None:
            module.serving = self.mode  # tokens of a step are no longer those of a sequence

    @property
    def cached_tokens(self) -> Expr | None:
        """The cached tokens of each sequence, before a step of decode or after one of prefill; None
        for a mixed step, where they differ."""
        if self.step is not None:
            return None
        past = symbol(PAST) if self.past != 0 else ZERO
        return past if self.mode == "decode" else past + symbol(self.sequence)

    @property
    def passes(self) -> str:
        """The pipeline of the step."""
        given = {"mode": self.mode, "context": self.past, "longest": self.longest or None}
        if self.step is not None:
            given |= {"context": None, "classes": f'"({self.step})"'}
        given |= {"page": self.page} if self.page > 1 else {}
        given |= {"kv-dtype": self.kv_dtype} if self.kv_dtype else {}
        options = ",".join(f"{name}={value}" for name, value in given.items() if value is not None)
        few = 0  # queries of the classes that decode, or verify drafts
        if self.step is not None:
            few = max((c.new for c in self.step.classes if c.new == c.sampled), default=0)
        every = self.mode == "decode" and self.step is None
        absorb = "absorb-latent," if every else f"absorb-latent{{queries={few},selected=true}},"
        step = f"inline,infer-shapes,pad-vocabulary,to-serving{{{options}}},{absorb}"
        sample = "" if self.sampling == "none" else "sample-tokens,"
        local = "" if self.sampling == "gather" else ",-gather-logits"
        return f"{step}{self.speculation}{sample}serve-step{local}"


def read_serving(
    options: JobOptions, module: Module, positions: int | None = None, *, symbolic: bool = False
) -> Serving | None:
    """The step of serving of the options for a parsed model that was trained for `positions`
    positions (default: those that its text states); None without --serve. Raises
    `DiagnosticError`."""
    if not options.serve:
        given = [flag for flag, value in _given(options).items() if value]
        if given:
            modes = _OF.get(given[0], PODS)
            raise error(
                f"--{given[0]} needs a step of serving",
                remedy=f"add --serve {' or '.join(modes)}"
                + ("; training has --set B=N" if given[0] == "batch" else ""),
            )
        return None
    mode = options.serve
    sequence = sequence_of(module)
    _check(options, module, sequence, symbolic=symbolic)
    longest = module.symbols[sequence] or 0
    new = options.chunk or options.prompt or (longest or None)
    past: int | None = options.context or 0
    if mode == "decode":
        drafts = options.keep == DRAFT
        new, past = 1 + (0 if drafts else options.speculative or 0), options.context
    batch, step = options.batch, None
    if mode == MIXED:
        step = mixed_step(options)
        new, past, batch = step.tokens, 0, None
    dtype = KV_TYPES.get(options.kv_dtype or "", "")
    known = _positions(module, sequence) or positions or 0
    sizes, caches = (new, past, batch, longest, known), (options.page, dtype, options.sampling)
    steps = (options.speculative or 1) if options.keep == DRAFT else 1
    return Serving(mode, sequence, *sizes, *caches, step, _speculation(options), steps)


def _speculation(options: JobOptions) -> str:
    """The passes that compute drafts, in the pod of a draft model or in the model itself, or that
    verify the drafts of another pod."""
    if options.draft is None:
        drafts = options.speculative if options.serve == DECODE else None
        return f"draft-ahead{{count={drafts}}}," if drafts else ""
    drafts = options.keep == DRAFT
    return f"draft-tokens{{count={options.speculative}}}," if drafts else "verify-drafts,"


def _given(options: JobOptions) -> Mapping[str, bool]:
    """For each option that only steps of serving have, whether it is given."""
    given = {name: getattr(options, name) is not None for name in (*STEP, *PODS, "draft")}
    given |= {"page": options.page > 1, "kv-dtype": options.kv_dtype is not None}
    return given | {"sampling": options.sampling != SAMPLING[0]}


def _positions(module: Module, sequence: str) -> int | None:
    """The number of positions that a text states, as an attribute or by a parameter with a row for
    each of them."""
    stated = [op.result.type for op in module.walk() if op.definition.declares == "parameter"]
    types = [*stated, *(a.type for f in module.functions for a in f.body.args)]
    tables = [t for t in types if isinstance(t, TensorType) and (t.role or t in stated)]
    rows = any(symbol(sequence) in t.shape for t in tables)
    return module.positions or (module.symbols[sequence] if rows else None)


def _check(options: JobOptions, module: Module, sequence: str, *, symbolic: bool) -> None:
    """Raise `DiagnosticError` for options that are not a valid step."""
    mode = options.serve
    for name in (n for n, given in _given(options).items() if given):
        if mode not in _OF.get(name, MODES):
            raise error(
                f"--{name} needs --serve {_OF[name][0]}, found --serve {mode}",
                remedy="leave it out",
            )
    if sequence not in module.symbols:
        raise error(
            "--serve needs a model of token sequences, with labels [batch, tokens]",
            remedy="serve a language model",
        )
    if sequence in options.sizes or (BATCH in options.sizes and options.batch is not None):
        name = sequence if sequence in options.sizes else BATCH
        instead = "--batch" if name == BATCH else "--prompt, --chunk or --speculative"
        raise error(
            f"--set {name} cannot be used with --serve: both give the sizes of the step",
            remedy=f"use {instead} in place of --set",
        )
    if mode == "decode":
        _check_context(options, symbolic=symbolic)
    elif (options.chunk or 0) > (options.prompt or options.chunk or 0):
        raise error(
            f"--chunk {options.chunk} is larger than --prompt {options.prompt}",
            remedy=f"give a chunk of at most {options.prompt} tokens",
        )
    if mode == MIXED and options.cp > 1 and options.cp_mode != "all-gather":
        raise error(
            f"--cp-mode {options.cp_mode} splits the tokens of one sequence, but a mixed step has "
            "sequences of several kinds",
            remedy="give --cp-mode all-gather",
        )


def _check_context(options: JobOptions, *, symbolic: bool) -> None:
    if options.context is None and not symbolic:
        raise error(
            "--serve decode needs --context: the cached tokens of each sequence",
            remedy="give --context 4096",
        )
    if options.draft is not None:
        check_draft(options)
    if options.context == 0 and options.cp > 1:
        raise error(
            "--cp splits cached tokens, but --context 0 caches none",
            remedy="leave --cp out, or give --context 4096",
        )


def check_draft(options: JobOptions) -> None:
    """Raise `DiagnosticError` for a draft model without drafts, or without cached tokens."""
    if not options.speculative:
        raise error(
            "--draft needs --speculative: the drafts of each sequence that a step verifies",
            remedy="give --speculative 4",
        )
    if options.context == 0:
        raise error(
            "--draft continues cached tokens, but --context 0 caches none",
            remedy="give --context 4096",
        )


def sequence_of(module: Module) -> str:
    """The dimension of the tokens that a model predicts: that of its labels, which are the last
    argument of integers of the batch; empty if there is none. The tokens of an encoder are another
    dimension."""
    types = [a.type for a in module.main.body.args if isinstance(a.type, TensorType)]
    names = [t.shape[1].symbol_name or "" for t in types if t.dtype[0] in "iu" and t.rank == 2]
    return names[-1] if names else ""


def mixed_step(options: JobOptions) -> Step:
    """The sequences of a mixed step. Raises `DiagnosticError`."""
    batch, context, chunk = options.batch, options.context, options.chunk or options.prompt
    if options.step is not None:
        others = [n for n in STEP if n != "step" and getattr(options, n) is not None]
        if others:
            raise error(
                f"--step cannot be used with --{', --'.join(others)}: it gives all sequences of "
                "the step",
                remedy=f"leave out --{', --'.join(others)}",
            )
        return parse_step(options.step)
    if batch is None or context is None or chunk is None:
        raise error(
            "--serve mixed needs --batch and --context of the decoding sequences, and the --chunk "
            "of a prompt",
            remedy="give --batch 64 --context 4096 --chunk 2048, or --step "
            "decode=64x4096,prefill=1x2048+0",
        )
    prompt = options.prompt or chunk
    return parse_step(f"decode={batch}x{context},prefill=1x{chunk}+{prompt - chunk}")


def over_limit(serving: Serving) -> Diagnostic | None:
    """A warning if a step reaches positions that the model was not trained for."""
    last = (serving.past or 0) + (serving.new or 0) * serving.steps
    if serving.step is not None:
        last = max(c.cached + c.new for c in serving.step.classes)
    if not serving.positions or last <= serving.positions:
        return None
    text = f"the step reaches position {last:,}, beyond the {serving.positions:,} of the model"
    return Diagnostic(text, severity="warning")


def refuse_training(module: Module) -> None:
    """Raise `DiagnosticError` for a strategy with statements for training only."""
    for strategy in module.ops("stg.strategy"):
        for op in strategy.body.ops:
            reason = op.definition.training if isinstance(op.definition, Statement) else ""
            if reason:
                raise op.error(
                    f"'{op.name}' cannot be used in a step of serving: {reason}",
                    remedy="remove it from the strategy",
                )
