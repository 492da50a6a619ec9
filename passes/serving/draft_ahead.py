"""draft-ahead: a step that verifies drafts also makes those of the next step, with the multi-token
prediction module of the model."""

from collections.abc import Collection, Sequence

from stagec.api import Builder, Expr, Module, Operation, Pass, Phase, Value, error, made_by, symbol
from stagec.ir.builder import RawAttr
from stagec.ir.clone import Copier
from stagec.ir.core import renumber
from stagec.ir.drafts import CHOSEN, DRAFTS, MOST_DRAFTS, concatenated, most_likely, state
from stagec.ir.expr import ONE
from stagec.ir.infer import infer_again
from stagec.ir.serving_step import PAST

_ROW = "(ao)b->aob"


class DraftAhead(Pass):
    """Make `count` drafts for the next step in a decode step that verifies the same number, with
    the multi-token prediction module of the model (arXiv 2412.19437, section 2.2).

    The module runs over all tokens of the step, after the step has chosen tokens: it fills its
    caches, and its head makes the first draft, for the last position. Each further draft is a step
    of one token: the module takes the previous draft and its own output for it. Engines repeat the
    single module of a model in this way.

    Before:
        stg.symbols[B, S = 2, D, V]
        stg.func @f(%t: i32[B, S], %n: i32[B, S], %w: bf16[V, D | frozen], %u: bf16[D, V | frozen])
            -> (bf16[B, S, V], bf16[B, S, V]) {
          %x = stg.embedding(%w, %t) : bf16[B, S, D]
          %z = stg.einsum["bsd,dv->bsv"](%x, %u) : bf16[B, S, V]
          %e = stg.embedding(%w, %n) : bf16[B, S, D]
          %y = stg.add(%e, %x) : bf16[B, S, D]
          %next = stg.einsum["bsd,dv->bsv"](%y, %u) : bf16[B, S, V]
          stg.return(%z, %next)
        }
    After (draft-ahead{count=1}):
        stg.symbols[B, S = 2, D, V]
        stg.func @f(%t: i32[B, S], %w: bf16[V, D | frozen], %u: bf16[D, V | frozen])
            -> (bf16[B, S, V], i32[B, 1]) {
          %x = stg.embedding(%w, %t) : bf16[B, S, D]
          %z = stg.einsum["bsd,dv->bsv"](%x, %u) : bf16[B, S, V]
          %chosen = stg.argmax(%z) : i32[B, S]
          %e = stg.embedding(%w, %chosen) : bf16[B, S, D]
          %y = stg.add(%e, %x) : bf16[B, S, D]
          %y_last = stg.take[at = S - 1](%y) : bf16[B, D]
          %y_row = stg.reshape["(ao)b->aob", factors = o, sizes = 1](%y_last) : bf16[B, 1, D]
          %ahead0/next = stg.einsum["bsd,dv->bsv"](%y_row, %u) : bf16[B, 1, V]
          %ahead0/draft = stg.argmax(%ahead0/next) : i32[B, 1]
          stg.return(%z, %ahead0/draft)
        }
    """

    needs = Phase.SHAPED

    count: int

    def run(self, module: Module) -> None:
        draft_ahead(module, self.count)


def draft_ahead(module: Module, count: int) -> None:
    """Make `count` drafts in the main function, in place; a remark reports a step without a module
    for drafts.

    Raises `DiagnosticError` for a module whose head differs from that of the model, for several
    modules, and for too many drafts.
    """
    if not 1 <= count <= MOST_DRAFTS:
        raise error(
            f"a step makes 1 to {MOST_DRAFTS} drafts, found {count}", remedy="give --speculative 1"
        )
    if len(module.main.body.terminator.operands) - len(state(module)) == 1:
        text = (
            "the drafts of the step cost nothing: the model has no module of multi-token "
            "prediction, as deepseek-v3-mtp has, and no --draft model is given"
        )
        module.diagnostics.remark(text, module.main.loc)
        return
    _Ahead(module, count).make()


class _Ahead:
    """The module of a step that predicts the token after the next one."""

    def __init__(self, module: Module, count: int) -> None:
        self._module, self._count, self._body = module, count, module.main.body
        returned, kept = self._body.terminator.operands, len(state(module))
        heads = returned[: len(returned) - kept]
        self._kept = returned[len(heads) :]
        if len(heads) != 2:
            raise module.main.error(
                f"the step has {len(heads)} heads, expected two: one for the next token, and one "
                "for the token after it",
                remedy="serve a model with one module of multi-token prediction",
            )
        self._logits, ahead = heads
        chooses = self._body.ancestors([self._logits])
        self._own = [op for op in self._body.ops[:-1] if op not in chooses]
        self._next = self._given(chooses)
        self._from, self._made = self._ends(ahead, set(chooses))
        needed = self._body.ancestors([ahead])
        self._head = [op for op in self._behind([self._made]) if op in needed]
        self._ahead = ahead

    def _given(self, chooses: Collection[Operation]) -> Value:
        """The argument with the next tokens, which only the module uses."""
        args = (a for a in self._body.args if not a.tensor.role and a.uses)
        ids = [a for a in args if not any(user in chooses for user, _ in a.uses)]
        if len(ids) != 1 or ids[0].tensor.dtype[0] not in "iu":
            raise self._unlike(f"takes {len(ids)} values that the model does not, expected one")
        return ids[0]

    def _ends(self, ahead: Value, chooses: set[Operation]) -> tuple[Value, Value]:
        """The rows of the model that its head takes, and those of the module; both heads are
        equal."""
        mine, theirs = ahead, self._logits
        used = {v for op in self._own for v in op.operands}
        while theirs not in used:
            ops = mine.producer, theirs.producer
            if ops[0] is None or ops[1] is None or ops[0].name != ops[1].name:
                raise self._unlike("ends in another head than the model")
            mine, theirs = ops[0].operands[0], ops[1].operands[0]
        if mine.producer is None or mine.producer in chooses:
            raise self._unlike("makes nothing of its own")
        return theirs, mine

    def _behind(self, values: Sequence[Value]) -> list[Operation]:
        """The ops of the module that depend on these values, in order."""
        reached, behind = set(values), list[Operation]()
        for op in self._own:
            if any(v in reached for v in op.reads()):
                behind.append(op)
                reached |= set(op.results)
        return behind

    def _unlike(self, what: str) -> Exception:
        return self._module.main.error(
            f"the module for multi-token prediction {what}",
            remedy="write it as 'stagec models deepseek-v3-mtp' prints it",
        )

    def make(self) -> None:
        """Make the drafts."""
        body, module = self._body, self._module
        size = self._next.tensor.shape[1]
        made = made_by(DraftAhead.name, self._ahead.loc)
        first = next(op for op in self._own if self._next in op.reads())
        at = module.before(first, loc=made)
        chosen = most_likely(at, self._logits, CHOSEN)
        self._next.replace_with(chosen)
        body.args.remove(self._next)
        renumber(body.args)
        lengthened = self._lengthen(size)
        b = module.before(body.terminator, loc=made)
        block = [op for op in self._behind([chosen, self._from]) if op not in self._head]
        row, kept = _last_row(b, self._made, size), dict(zip(self._kept, self._kept, strict=True))
        drafts = [self._choose(b, row, 0)]
        for number in range(1, self._count):
            taken = {chosen: drafts[-1], self._from: row}
            taken |= {arg: kept[end] for arg, end in lengthened.items()}
            copier = _copier(taken, number, size)
            for op in block:
                b.insert(copier.copy(op))
            kept = {end: copier.values.get(end, now) for end, now in kept.items()}
            row = copier.values[self._made]
            drafts.append(self._choose(b, row, number))
        sent = concatenated(b, drafts, DRAFTS)
        body.terminator.set_operands([self._logits, sent, *kept.values()])
        for op in reversed(self._head):
            op.erase()
        infer_again(module)
        body.returns = tuple(v.tensor for v in body.terminator.operands)

    def _lengthen(self, size: Expr) -> dict[Value, Value]:
        """Give the caches of the module rows for all drafts. Maps each cache to its updated
        value."""
        ends = dict(zip(state(self._module), self._kept, strict=True))
        lengthened = {
            a: end for a, end in ends.items() if any(user in self._own for user, _ in a.uses)
        }
        rows = dict.fromkeys(size.symbols, size + (self._count - 1))
        for arg in lengthened if self._count > 1 else ():
            arg.type = arg.tensor.substitute(rows)
        return lengthened

    def _choose(self, b: Builder, row: Value, number: int) -> Value:
        """The draft that the head makes from one row of each sequence."""
        copier = _copier({self._made: row}, number, self._next.tensor.shape[1])
        for op in self._head:
            b.insert(copier.copy(op))
        return most_likely(b, copier.values[self._ahead], copier.named("draft"))


def _copier(taken: dict[Value, Value], number: int, size: Expr) -> Copier:
    """Copies the module for one token of each sequence, the `number`-th after the step."""
    past = symbol(PAST) + size + (number - 1)
    sizes = {**dict.fromkeys(size.symbols, ONE), **({PAST: past} if number else {})}
    return Copier(taken, sizes, lambda name: f"ahead{number}/{name}", lambda loc: loc)


def _last_row(b: Builder, value: Value, size: Expr) -> Value:
    taken = b.value("stg.take", [value], {"at": size - 1}, hint=f"{value.name}_last")
    attrs: dict[str, RawAttr] = {"spec": _ROW, "factors": ("o",), "sizes": (ONE,)}
    return b.value("stg.reshape", [taken], attrs, hint=f"{value.name}_row")
