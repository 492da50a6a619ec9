"""to-serving: turns the forward of training into a step of prefill or decode."""

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import partial

from stagec.api import (
    Builder,
    Expr,
    Module,
    Operation,
    Pass,
    Phase,
    Region,
    Relation,
    TensorType,
    Type,
    Value,
    axis_size,
    const,
    error,
    evaluate,
    letters,
    made_by,
    read_strategy,
    symbol,
)
from stagec.ir.builder import RawAttr
from stagec.ir.core import renumber
from stagec.ir.expr import ONE, ZERO
from stagec.ir.infer import same_shape
from stagec.ir.rewrite import erase_unused
from stagec.ir.serving_step import DECODE, MIXED, MODES, PAST
from stagec.ir.traits import Terminates
from stagec.ir_spec.strategy.split import SplitRule
from stagec.passes.serving.caches import CachingStep
from stagec.passes.serving.mixed import Mixed, parsed_classes
from stagec.support.suggest import did_you_mean


class ToServing(Pass):
    """Turn the forward of training into a step of serving: S new tokens of each of B sequences,
    after `past` cached tokens.

    The step returns logits instead of a loss: those of all its tokens in decode, those of the last
    one in prefill. Ops that mix tokens of a sequence, such as attention, get state: arguments with
    the role `cache`, updated in place, and returned after the logits. Parameters are frozen.

    Before:
        stg.symbols[B, S, D, H, K, V]
        stg.func @f(%x: bf16[B, S, H, K], %w: bf16[H, K, V | param], %y: i32[B, S]) -> f32[] {
          %a = stg.attention[causal](%x, %x, %x) : bf16[B, S, H, K]
          %z = stg.einsum["bshk,hkv->bsv"](%a, %w) : bf16[B, S, V]
          %l = stg.cross_entropy[mean = B*S](%z, %y) : f32[]
          stg.return(%l)
        }
    After:
        stg.symbols[B, S, D, H, K, V, past]
        stg.func @f(%x: bf16[B, S, H, K], %w: bf16[H, K, V | frozen],
            %x_cache: bf16[B, S + past, H, K | cache]) ->
            (bf16[B, S, V], bf16[B, S + past, H, K]) {
          %x_rows = stg.append[dim = 1, past = past](%x_cache, %x) : bf16[B, S + past, H, K]
          %a = stg.attention[causal, past = past](%x, %x_rows, %x_rows) : bf16[B, S, H, K]
          %z = stg.einsum["bshk,hkv->bsv"](%a, %w) : bf16[B, S, V]
          stg.return(%z, %x_rows)
        }
    """

    needs = Phase.SHAPED

    mode: str = field(default="decode", metadata={"help": "prefill, decode or mixed"})
    context: int = field(
        default=-1,
        metadata={"help": "tokens that are cached before the step (default: open, `past`)"},
    )
    kv_dtype: str = field(
        default="", metadata={"help": "the element type of caches (default: as they are made)"}
    )
    page: int = field(default=1, metadata={"help": "tokens of a page: caches have whole pages"})
    longest: int = field(
        default=0,
        metadata={"help": "positions that tables of S rows have (default: open, `positions`)"},
    )

    classes: tuple[str, ...] = field(
        default=(),
        metadata={"help": "of mixed: the classes of sequences, decode=64x4096, prefill=1x2048+0"},
    )

    def run(self, module: Module) -> None:
        to_serving(module, self)


def to_serving(module: Module, given: ToServing) -> None:
    """Rewrite the main function, in place.

    Raises `DiagnosticError` for an unknown mode, a model without logits, and ops without a form for
    serving.
    """
    mode = given.mode
    if mode not in MODES:
        raise error(
            f"unknown mode '{mode}' of serving",
            remedy=did_you_mean(mode, MODES) or f"choose among {', '.join(MODES)}",
        )
    if (mode == MIXED) != bool(given.classes):
        raise error(
            "classes of sequences need mode = mixed, and this mode needs classes",
            remedy='write to-serving{mode=mixed, classes=("decode=64x4096", "prefill=1x2048+0")}',
        )
    mixes = parsed_classes(given.classes) if given.classes else None
    only_decodes = mixes is not None and all(c.sampled == c.new for c in mixes.classes)
    module.serving = DECODE if only_decodes else mode  # engines capture decode steps as a graph
    plain = given.context == 0 or mode == MIXED
    past = ZERO if plain else _declare(module, PAST, given.context)
    body = module.main.body
    used = [a for a in body.args if a.uses]
    new = _return_logits(module, body)
    _erase(body, used)
    for arg in body.args:
        if arg.tensor.role == "param":
            arg.type = replace(arg.tensor, role="frozen")
    b = Builder(module.registry, body)
    splits = read_strategy(module).splits if module.ops("stg.strategy") else ()
    over = _parts(module, splits, new)
    parts = ONE if past == ZERO and mode != MIXED else over
    dtype, page = given.kv_dtype, given.page
    step = CachingStep(
        mode, new, past, b, body, module.env, dtype=dtype, page=page, parts=parts, over=over
    )
    mixed = Mixed.of(module, step, mixes) if mixes is not None else None
    _cut_tables(module, step, given.longest)
    _serve_region(step, body, mixed)
    logits, kept = body.terminator.operands, step.hand_out()
    body.terminator.set_operands([*logits, *kept])
    _erase(body, used)
    _check_split(splits, [a.tensor for a in body.args if a.tensor.role == "cache"])
    if mixed is not None:
        _limit_each(module, mixed)
        chosen = logits if mixed.samples else ()
        logits = tuple(_last(step, value, mixed.sampled) for value in chosen)
    elif mode == "prefill":
        last = partial(_last_row, step)
        logits = tuple(_last(step, value, last) for value in logits)
    body.terminator.set_operands([*logits, *kept])
    erase_unused(body)
    body.returns = tuple(v.tensor for v in body.terminator.operands)


def _limit_each(module: Module, mixed: Mixed) -> None:
    """Apply assumptions about the tokens of a sequence to each class instead, because S is the
    number of tokens of all sequences."""
    lengths = [dict.fromkeys(mixed.step.new.symbols, each.new) for each in mixed.classes]
    for op in module.declaring("relations"):
        kept: dict[Relation, None] = {}
        for relation in (r for r, at in module.relations if at is op):
            of_classes = (relation.substitute(new) for new in lengths)
            kept |= dict.fromkeys(of_classes if module.limits_length(relation) else (relation,))
        if kept:
            op.attrs["relations"] = tuple(kept)


def _parts(module: Module, splits: Sequence[SplitRule], new: Expr) -> Expr:
    """The number of ranks over which the strategy splits caches along tokens."""
    cached = [r for r in splits if {PAST, *new.symbols} & set(r.dims) and not r.rest]
    over = axis_size(dict.fromkeys(a for rule in cached for a in rule.over))
    return const(evaluate(over, module.env)) if over.symbols <= module.env.keys() else over


def _check_split(splits: Sequence[SplitRule], caches: Sequence[TensorType]) -> None:
    """Raise `DiagnosticError` for a split of cached tokens that applies to none of the caches: each
    has another dimension, of heads, that is split over these ranks, or there are no caches."""
    for rule in (r for r in splits if PAST in r.dims):
        firm = [r for r in splits if r is not rule and not r.soft]
        others = [r for r in firm if {*r.over} & {*rule.over}]
        taken = {name for r in others for name in r.dims}
        if others and all(taken & {d.size.symbol_name for d in c.dims} for c in caches):
            why = "each of these ranks has keys of heads of its own" if caches else "there are none"
            raise rule.error(
                f"no cached tokens can be split over {axis_size(rule.over)}: {why}",
                remedy="leave it out (--dcp), or split sequences with --dp",
            )


def _declare(module: Module, name: str, value: int) -> Expr:
    """Declare a symbol if it is not declared, with `value` if that is above 0."""
    declared = module.ops("stg.symbols")
    if not declared:
        raise module.root.error(
            f"@{module.name} declares no symbols, expected S among them",
            remedy="name the tokens of a sequence: stg.symbols[B, S]",
        )
    if value > 0 or name not in module.symbols:
        declared[0].attrs[name] = const(value) if value > 0 else True
    return symbol(name)


# -- what the step returns -------------------------------------------------------------------------


def _return_logits(module: Module, body: Region) -> Expr:
    """Make the function return the logits of losses instead of these. Returns the size of their
    dimension of tokens, a symbol (with an encoder, that of the decoder). Logits that depend on
    labels, such as those of multi-token prediction, are left out. Raises `DiagnosticError`."""
    losses = [op for op in body.walk() if op.definition.logits(op) is not None]
    labels = {v for op in losses for v in op.operands if v is not op.definition.logits(op)}
    judged = [v for op in losses if (v := op.definition.logits(op)) is not None]
    chosen = [v for v in judged if v.region is body and not _made_of(v, labels)]
    if not chosen:
        raise module.main.error(
            f"@{module.main.symbol} does not choose a next token: no loss reads logits",
            remedy="serve a language model whose loss is stg.cross_entropy",
        )
    body.terminator.set_operands(chosen)
    size = chosen[0].tensor.shape[1]
    if size.symbol_name is None:
        raise chosen[0].error(
            f"expected a symbol for the tokens of a sequence in %{chosen[0].name}, found {size}",
            remedy="declare a symbol for the tokens of a sequence, such as S",
        )
    return size


def _erase(body: Region, used: Sequence[Value]) -> None:
    """Erase unused operations, and arguments among `used` without further uses: labels, and in
    decode an encoder with its weights and inputs."""
    while erase_unused(body):
        pass
    body.args = [a for a in body.args if a.uses or a not in used]
    renumber(body.args)


def _made_of(value: Value, sources: set[Value]) -> bool:
    """Whether a value depends on one of these."""
    behind = value.region.ancestors([value])
    return value in sources or any(v in sources for op in behind for v in op.reads())


def _last(step: CachingStep, value: Value, choose: Callable[[Value, Builder], Value]) -> Value:
    """Choose rows of a value [B, S, ...]. The choice moves before ops that compute each token
    separately."""
    op = value.producer
    if op is not None and _runs_alone(step, op):
        operands = [_last(step, v, choose) if _has_tokens(step, v) else v for v in op.operands]
        b = Builder.after(step.b.registry, op, loc=op.loc)
        return b.value(op.name, operands, op.attrs, hint=value.name)
    return choose(value, Builder.behind(step.b.registry, value, made_by(ToServing.name, value.loc)))


def _last_row(step: CachingStep, value: Value, b: Builder) -> Value:
    row = letters(value.tensor.rank)
    at = {"at": step.new - 1}
    taken = b.value("stg.take", [value], at, hint=f"{value.name}_last")
    spec = f"({row[0]}o){row[2:]}->{row[0]}o{row[2:]}"
    attrs: dict[str, RawAttr] = {"spec": spec, "factors": ("o",), "sizes": (const(1),)}
    return b.value("stg.reshape", [taken], attrs, hint=f"{value.name}_row")


def _has_tokens(step: CachingStep, value: Value) -> bool:
    dims = value.tensor.dims
    return len(dims) > 1 and step.is_tokens(dims[1].size)


def _runs_alone(step: CachingStep, op: Operation) -> bool:
    """Whether an op computes a row of dimension 1 from the same rows of operands only,
    independently of their positions and number."""
    if op.region is not None or len(op.results) != 1 or "past" in op.definition.params_by_name:
        return False
    rule = op.definition.rule(op)
    if rule is None or not _has_tokens(step, op.result):
        return False
    sizes = any(isinstance(v, Expr) and step.new.symbols & v.symbols for v in op.attrs.values())
    factor = rule.results[0][1]
    if sizes or len(factor) != 1 or factor[0] in rule.whole | rule.special | rule.exchanged:
        return False
    places = list(rule.occurrences(factor[0]))
    tokens, shapes = step.new.symbols, [v.tensor.shape for v in op.operands]
    along = [i for i, shape in enumerate(shapes) if any(tokens & s.symbols for s in shape)]
    return [i for i, _ in places] == along and all(d == 1 for _, d in places)


# -- tables of positions ---------------------------------------------------------------------------


def _cut_tables(module: Module, step: CachingStep, longest: int) -> None:
    """Give parameters with one row per position all rows; `stg.slice` takes those of the new
    tokens."""
    for arg in list(step.body.args):
        dims = [d for d, size in enumerate(arg.tensor.shape) if step.is_tokens(size)]
        if not arg.tensor.role or not dims:
            continue
        rows = const(longest) if longest > 0 else _symbol_once(module, "positions")
        (dim,) = dims
        arg.type = arg.tensor.with_dim(dim, replace(arg.tensor.dims[dim], size=rows))
        b = Builder(module.registry, step.body, 0, loc=made_by(ToServing.name, arg.loc))
        attrs = {"dim": const(dim), "size": step.new}
        arg.replace_with(b.value("stg.slice", [arg], attrs, hint=f"{arg.name}_new"))


def _symbol_once(module: Module, name: str) -> Expr:
    return symbol(name) if name in module.symbols else _declare(module, name, 0)


# -- the walk --------------------------------------------------------------------------------------


def _serve_region(step: CachingStep, region: Region, mixed: Mixed | None) -> None:
    """Rewrite the ops of a region for serving, in order, and update their types."""
    for op in list(region.ops):
        if op.region is not None:
            _set_types(op.region.args, op.definition.region_args(op) or ())
            _serve_region(step, op.region, mixed)
            _set_types(op.results, op.definition.infer(op))
        elif not op.has(Terminates):
            _serve(step, op, mixed)


def _serve(step: CachingStep, op: Operation, mixed: Mixed | None) -> None:
    step.b = Builder.before(step.b.registry, op, loc=made_by(ToServing.name, op.loc))
    values = op.definition.serve(step, op) if mixed is None else mixed.serve(op)
    if values is None or list(values) == op.results:
        _set_types(op.results, op.definition.infer(op))
        return
    for old, new in zip(op.results, values, strict=False):
        old.replace_with(new)
    op.erase()


def _set_types(values: Sequence[Value], types: Sequence[Type]) -> None:
    """Set the types of values whose shapes change; other values keep their types."""
    for value, new in zip(values, types, strict=False):
        if isinstance(new, TensorType) and not same_shape(value.tensor.shape, new.shape):
            value.type = new.unplaced()
