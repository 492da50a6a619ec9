"""The planner against brute force: the whole step replayed, operation by operation, iteration by
iteration, microbatch by microbatch; a buffer lives from the operation that makes it to the last one
that uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.analysis.footprint import timelines
from stagec.analysis.report import analysis
from stagec.ir.core import Operation, Region, Value
from stagec.ir.expr import evaluate
from stagec.ir.module import Module, is_parameter
from stagec.ir.recompute_window import replays
from stagec.ir.traits import EndsLifetime, Recalls, Repeats, Terminates, View
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.memory.arena import requests
from stagec.memory.lifetimes import lifetimes
from stagec.memory.liveness import Roots, classify
from stagec.schedule.action import steps
from stagec.schedule.attached import actions_of, regions_of, stages_of
from tests.layer_kinds import ORDERS, STRATEGIES, kinds_job, order_of
from tests.stacks import as_they_run, beside, layers_of
from tests.support import (
    GPT,
    LLAMA,
    MIXTRAL,
    compiled,
    crossed,
    examples,
    one_of_each_kind,
    operations,
    run_passes,
    tiny_options,
)
from tests.unit.test_placement import bound, checked

SPACE = "device"


class Replay:
    """Every buffer of one rank's step, by the numbers of the steps that make and use it."""

    def __init__(self, module: Module, func: Operation, stage: int, prefetch: int) -> None:
        self.module, self.func, self.stage, self.prefetch = module, func, stage, prefetch
        self.env: Mapping[str, int] = module.env
        self.sets = classify(func.body)
        self.refs: dict[Value, Any] = {}
        self.sizes: list[int] = []
        self.life: list[tuple[int, int]] = []  # first and last step
        self.counted: list[bool] = []
        self.pairs: list[tuple[int, int, int]] = []
        self.again = True
        self.left: dict[Any, list[Any]] = {}
        self.sums: dict[Value, int] = {}
        self.adds = False
        self.refs.update((a, None) for a in func.body.args)
        self.region(func.body)

    # -- what runs

    def step(self, counted: bool = True) -> int:
        self.counted.append(counted)
        return len(self.counted) - 1

    def touch(self, ref: Any, now: int) -> None:
        if isinstance(ref, list):
            for inner in ref:  # pyright: ignore[reportUnknownVariableType]
                self.touch(inner, now)
        elif ref is not None:
            self.life[ref] = self.life[ref][0], now

    def new(self, value: Value, now: int) -> int:
        here = value.tensor.memory == SPACE
        self.sizes.append(evaluate(value.tensor.local_bytes, self.env) if here else 0)
        self.life.append((now, now))
        return len(self.life) - 1

    def static(self, value: Value) -> bool:
        """Whether a value is written to where it stays: itself, or as what it is handed on as.
        Of several microbatches, what is communicated is added up by somebody else."""
        base, maker = Roots()(value), value.producer
        if base in self.sets.gradients or base in self.sets.static:
            return True
        if self.adds and maker is not None and "over" in maker.attrs:
            return False
        return any(self.static(v) for u, i in value.uses for v in self.same(u, i, value))

    def same(self, user: Operation, index: int, value: Value) -> Iterator[Value]:
        """What a value of the same bytes is called after this user."""
        owner = user.parent_op
        if user.has(Terminates) and owner is not None and owner.has(Repeats):
            yield from (
                owner.results[index : index + 1] if index >= owner.integer("carry", 1) else ()
            )
        for result in user.results:
            if user.has(View) or user.definition.reuses(user, result.index) == index:
                sizes = [evaluate(v.tensor.local_bytes, self.env) for v in (value, result)]
                yield from [result] if sizes[0] == sizes[1] else ()

    def region(self, region: Region, skip: Sequence[Operation] = ()) -> None:
        for op in (*as_they_run(region), region.terminator):
            if op in skip or (op.phase == "recompute" and not self.again):
                continue
            self.op(op)

    def op(self, op: Operation) -> None:
        if op.has(EndsLifetime) or op.has(Terminates):
            if op.name == "stg.return":
                now = self.step(False)
                for v in op.operands:
                    self.touch(self.refs[v], now)
        elif op.has(Recalls):
            self.refs[op.result] = self.refs[op.operands[0 if self.again else 1]]
        elif op.has(Repeats):
            self.repeat(op)
        elif op.region is not None:
            self.accumulate(op)
        elif op.has(View):
            for r in op.results:
                self.refs[r] = self.refs[op.operands[min(r.index, len(op.operands) - 1)]]
        else:
            self.compute(op)

    def compute(self, op: Operation) -> None:
        now = self.step()
        for v in op.operands:
            self.touch(self.refs[v], now)
        for r in op.results:
            slot = op.definition.reuses(op, r.index)
            if Roots()(r) in self.sums:
                self.refs[r] = self.sums[Roots()(r)]
            elif self.static(r):
                self.refs[r] = None
            elif slot is not None:
                self.refs[r] = self.refs[op.operands[slot]]
            else:
                self.refs[r] = self.new(r, now)

    def repeat(self, op: Operation) -> None:
        count, carry = evaluate(op.expr("count"), self.env), op.integer("carry", 1)
        numbers = list(range(count))[:: -1 if op.flag("reverse") else 1]
        order = layers_of(op) if "order" in op.attrs else [(op, i) for i in numbers]
        inputs = {o: [self.refs[v] for v in o.operands[carry:]] for o in beside(op)}
        early = {o: self.early(o.body) for o in inputs}
        carried, outer = [self.refs[v] for v in op.operands[:carry]], self.again
        ready: list[dict[Value, Any]] = []
        stacks: dict[Operation, list[list[Any]]] = {}
        for o in inputs:
            number = evaluate(o.expr("count"), self.env)
            stacks[o] = [[None] * number for _ in o.results[carry:]]
        for o, values in inputs.items():  # what is gathered early are slices of parameters
            args = zip(o.body.args[carry:], values, strict=True)
            self.refs.update((a, r) for a, r in args if not isinstance(r, list))
        for turn, (layer, i) in enumerate(order):
            sliced: list[Any] = [r[i] if isinstance(r, list) else r for r in inputs[layer]]
            self.refs.update(zip(layer.body.args, carried + sliced, strict=True))
            while len(ready) < min(turn + self.prefetch + 1, len(order)):
                later, _ = order[len(ready)]
                before = [o for o, _ in order[: len(ready)]].count(later)
                ready.append(self.gathered(early[later], len(ready), before))
            self.refs.update(ready[turn])
            self.again = replays(layer, i)
            self.forget(layer.body, early[layer])
            self.region(layer.body, early[layer])
            for o in early[layer]:
                for a, r in zip(o.operands, o.results, strict=True):
                    if len(order) - turn <= o.integer("keep", 0):
                        self.left.setdefault((self.source(a), str(r.type)), []).append(self.refs[r])
            yielded = [self.refs[v] for v in layer.body.terminator.operands]
            carried = yielded[:carry]
            for stack, ref in zip(stacks[layer], yielded[carry:], strict=True):
                stack[i] = ref
        self.again = outer
        for o, stacked in stacks.items():
            self.refs.update(zip(o.results, [*carried, *stacked], strict=True))

    def early(self, region: Region) -> list[Operation]:
        """What is gathered of parameters, layers early."""
        moves = [o for o in region.ops if o.operands and "over" in o.attrs]
        return [o for o in moves if all(map(is_parameter, o.operands))]

    def gathered(self, early: Sequence[Operation], turn: int, before: int) -> dict[Value, Any]:
        actual: dict[Value, Any] = {}
        for o in early:
            if turn < o.integer("kept", 0):
                for a, r in zip(o.operands, o.results, strict=True):
                    actual[r] = self.left[self.source(a), str(r.type)][-1 - before]
            else:
                self.compute(o)
                actual |= {r: self.refs[r] for r in o.results}
        return actual

    def forget(self, region: Region, early: Sequence[Operation]) -> None:
        """Nothing of what is to be computed again is there before."""
        again = [o for o in region.ops if o.phase == "recompute" and o not in early]
        self.refs.update(dict.fromkeys(r for o in again for r in o.results))

    def source(self, value: Value) -> Value:
        while isinstance(value.owner, Region) and value.owner.owner.name != "stg.func":
            value = value.owner.owner.operands[value.index]
        return value

    def accumulate(self, op: Operation) -> None:
        now = self.step(False)
        for r in op.results:
            self.refs[r] = None if self.static(r) else self.new(r, now)
            if self.refs[r] is not None:
                self.sums[r] = self.refs[r]
        bound = dict(zip(op.body.args, (self.refs[v] for v in op.operands), strict=True))
        self.refs.update(bound)
        self.adds = evaluate(op.expr("count"), self.env) > 1
        if "schedule" in op.attrs:
            self.schedule(op)
        else:
            for _ in range(evaluate(op.expr("count"), self.env)):
                self.refs.update(bound)
                self.region(op.body)
        self.adds = False
        end = self.step(False)
        for ref in self.sums.values():
            self.touch(ref, end)

    def schedule(self, op: Operation) -> None:
        inner = {(o.text("kind"), o.integer("chunk")): o for o in op.body.ops if o.region}
        mine: dict[int, dict[Value, Any]] = {}
        for pair in steps(actions_of(self.module, self.func, self.stage)):
            bounds = [len(self.counted)]
            for action in pair:
                kept = mine.setdefault(action.microbatch, {})
                self.refs.update(kept)
                for region in regions_of(action):
                    if (o := inner.get(region)) is not None:
                        self.region(o.body)
                        made = [self.refs[v] for v in o.body.terminator.operands]
                        kept.update(zip(o.results, made, strict=True))
                        self.refs.update(kept)
                bounds.append(len(self.counted))
            if len(pair) == 2:
                self.pairs.append((bounds[0], bounds[1], bounds[2]))

    # -- what is held

    def peak(self) -> int:
        change = [0] * (len(self.counted) + 1)
        for size, (first, last) in zip(self.sizes, self.life, strict=True):
            change[first] += size
            change[last + 1] -= size
        live, kept = list[int](), 0
        for delta in change:
            kept += delta
            live.append(kept)
        actual = [h for h, c in zip(live, self.counted, strict=False) if c]
        actual += [self.pair(change, live, *bounds) for bounds in self.pairs]
        body = self.func.body
        fixed = [
            *self.sets.gradients,
            *(a for a in body.args if a.tensor.role in ("param", "state")),
        ]
        return max(actual, default=0) + sum(
            evaluate(v.tensor.local_bytes, self.env) for v in fixed if v.tensor.memory == SPACE
        )

    def pair(self, change: list[int], live: list[int], a: int, b: int, c: int) -> int:
        """Each at its worst moment, on top of what was there before."""
        total = before = live[a - 1] + sum(
            -s for s, (_, last) in zip(self.sizes, self.life, strict=True) if last == a - 1
        )
        for start, end in ((a, b), (b, c)):
            base = live[start - 1] - sum(
                s for s, (_, last) in zip(self.sizes, self.life, strict=True) if last == start - 1
            )
            rise = [
                h - base for h, k in zip(live[start:end], self.counted[start:end], strict=True) if k
            ]
            total += max([0, *rise])
        return max(total, before)


def brute_force(module: Module, prefetch: int) -> Iterator[int]:
    """The peak of each class, in order of the stages."""
    actual: dict[int, int] = {}
    for func in module.functions:
        for stage in stages_of(func) or (0,):
            actual[stage] = Replay(module, func, stage, prefetch).peak()
    yield from (actual[stage] for stage in sorted(actual))


PLANNED = (
    "inline,infer-shapes,apply-strategy,differentiate,add-optimizer,eliminate-dead-code,"
    "partition,stages,units,plan"
)


def check(model: str, **options: Any) -> None:
    check_job(JobBuilder(tiny_options(model, **options)), **options)


def check_job(builder: JobBuilder, **options: Any) -> None:
    module = builder.lower("plan-memory")
    expected = list(brute_force(module, options.get("fsdp_prefetch", 1)))
    actual = analysis(run_passes(module, "lower-to-trace"), builder.model_name)
    assert [c["memory"]["peak"] for c in actual["classes"]] == expected


CASES: dict[str, dict[str, Any]] = {
    "one": {},
    "many layers": {"sizes": {"L": 12}},
    "microbatches": {"microbatches": 4},
    "tp": {"tp": 2, "sp": True},
    "zero 2": {"dp": 2, "zero": 2, "recompute": "full", "sizes": {"L": 12}},
    "zero 2 in parts": {"dp": 2, "zero": 2, "recompute": "full", "microbatches": 2},
    "zero 2 of replicas": {"dp_replicate": 2, "dp_shard": 2, "zero": 2, "sizes": {"L": 12}},
    "fsdp": {"dp": 2, "zero": 3, "sizes": {"L": 12}},
    "fsdp far ahead": {"dp": 2, "zero": 3, "fsdp_prefetch": 3, "sizes": {"L": 16}},
    "fsdp at once": {"dp": 2, "zero": 3, "fsdp_prefetch": 0, "sizes": {"L": 12}},
    "fsdp last kept": {"dp": 2, "zero": 3, "reshard_after_forward": "last", "sizes": {"L": 12}},
    "fsdp all kept": {"dp": 2, "zero": 3, "reshard_after_forward": "never", "sizes": {"L": 12}},
    "selective": {"recompute": "selective", "sizes": {"L": 12}},
    "full": {"recompute": "full", "sizes": {"L": 12}},
    "first recomputed": {"recompute": "full", "recompute_layers": 7, "sizes": {"L": 20}},
    "some recomputed": {"recompute": "full", "recompute_every": 3, "sizes": {"L": 32}},
    "offloaded": {"offload": "activations,optimizer", "sizes": {"L": 12}},
}
STAGED: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "gpipe": {"schedule": "gpipe"},
    "interleaved": {"schedule": "interleaved", "chunks": 2},
    "zb-h1": {"schedule": "zb-h1"},
    "zbv": {"schedule": "zbv"},
    "dualpipe": {"schedule": "dualpipe"},
    "dualpipev": {"schedule": "dualpipev"},
}


@crossed(model=(LLAMA, GPT), name=CASES)
def test_a_step(model: str, name: str) -> None:
    check(model, **CASES[name])


@pytest.mark.long
@crossed(one_of_each_kind, name=STAGED, more=({}, {"zero": 1, "dp": 2, "recompute": "selective"}))
def test_a_scheduled_step(name: str, more: dict[str, Any]) -> None:
    sizes = {"L": 16, "B": 16, "S": 8}
    check(GPT, pp=2, microbatches=8, tp=2, sp=True, sizes=sizes, **STAGED[name], **more)


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb-h1", "dualpipe"])
def test_offloaded_stages(name: str) -> None:
    sizes = {"L": 16, "B": 16, "S": 8}
    check(LLAMA, pp=2, microbatches=8, sizes=sizes, offload="activations", **STAGED[name])


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zbv"])
def test_kept_parameters_of_stages(name: str) -> None:
    sizes = {"L": 16, "B": 16, "S": 8}
    kept = {"dp": 2, "zero": 3, "reshard_after_forward": "never"}
    check(LLAMA, pp=2, microbatches=8, sizes=sizes, **STAGED[name], **kept)


@pytest.mark.parametrize("name", ["zb-h1", "zbv"])
@pytest.mark.parametrize("some", ["recompute_layers", "recompute_every"])
def test_split_backward_of_some_layers_that_recompute(name: str, some: str) -> None:
    """What a layer computes again is handed on to its weight gradients; others hand on nothing."""
    more: dict[str, Any] = {some: 3, "recompute": "full", "sizes": {"L": 16, "B": 16, "S": 8}}
    check(LLAMA, pp=2, microbatches=4, **STAGED[name], **more)


def test_experts() -> None:
    check(MIXTRAL, dp=2, ep=2, sizes={"L": 9})


@crossed(order=ORDERS, strategy=STRATEGIES)
def test_layers_of_several_kinds(order: str, strategy: str, tmp_path: Path) -> None:
    check_kinds(tmp_path, order, **STRATEGIES[strategy])


@st.composite
def orders(draw: st.DrawFn) -> str:
    """Irregular, or with parts that come often."""
    runs = st.tuples(st.integers(1, 4), st.sampled_from(("attn", "ffn", "mix")))
    parts: list[str] = []
    for _ in range(draw(st.integers(1, 2))):
        inside = ", ".join(
            f"{n}*{kind}" for n, kind in draw(st.lists(runs, min_size=1, max_size=3))
        )
        times = draw(st.sampled_from((1, 2, 3, 9)))
        parts.append(f"({inside}, mix)*{times}" if times > 1 else inside)
    return ", ".join(parts)


@pytest.mark.long
@examples(20)
@given(st.data())
def test_random_orders_of_layers(data: st.DataObject) -> None:
    """Sizes are drawn too, so that kinds leave and take more or less than others."""
    order = data.draw(orders())
    sizes = {n: v * data.draw(st.sampled_from((1, 2, 8))) for n, v in SHAPE.items()}
    options = data.draw(st.sampled_from(sorted(ON_ONE_STAGE)))
    with TemporaryDirectory() as folder:
        check_kinds(Path(folder), order, sizes=sizes, **ON_ONE_STAGE[options])


SHAPE = {"B": 8, "S": 4, "D": 8, "F": 16, "V": 16}
ON_ONE_STAGE: dict[str, dict[str, Any]] = {
    name: options for name, options in STRATEGIES.items() if "pp" not in options
}


def check_kinds(folder: Path, order: str, **options: Any) -> None:
    """The peak, planned and with every iteration by itself."""
    assert len(order_of(order).layers) < 1000
    check_job(kinds_job(folder / "kinds.stg", order, **options), **options)


@examples(6)
@given(st.data())
def test_random_schedules_and_shapes(data: st.DataObject) -> None:
    """Sizes are drawn too, so that another buffer is the largest each time."""
    name = data.draw(st.sampled_from(sorted(STAGED)))
    scale = {n: data.draw(st.sampled_from((1, 2, 8))) for n in "BSDFV"}
    sizes = {"B": 16, "S": 4, "D": 8, "F": 16, "V": 16, "H": 4, "K": 2}
    check(
        data.draw(st.sampled_from((LLAMA, GPT))),
        pp=2,
        microbatches=data.draw(st.sampled_from((4, 8))),
        recompute=data.draw(st.sampled_from(("none", "selective", "full"))),
        sizes={**{n: v * scale.get(n, 1) for n, v in sizes.items()}, "L": 32},
        **STAGED[name],
    )


# -- repeats inside of repeats ---------------------------------------------------------------------


def nest(depth: int, count: int) -> str:
    """Repeats so many deep; each hands a stack on, which another one takes from its end."""
    body = "%a0 = stg.gelu(%h0)\n%b0 = stg.mul(%a0, %h0)\nstg.yield(%b0, %a0)\n"
    for d in range(1, depth):
        body = f"""%y{d}, %s{d} = stg.repeat[count = L, carry = 1] (%h{d - 1} = %h{d}) {{
{body}}}
%z{d} = stg.repeat[count = L, carry = 1, reverse] (%k{d} = %y{d}, %t{d} = %s{d}) {{
  %u{d} = stg.mul(%k{d}, %t{d})
  stg.yield(%u{d})
}}
stg.yield(%z{d}, %y{d})
"""
    return f"""stg.module @m {{
  stg.symbols[B = 4, D = 8, L = {count}]
  stg.func @f(%x: f32[B, D]) {{
    %y, %s = stg.repeat[count = L, carry = 1] (%h{depth - 1} = %x) {{
{body}}}
    stg.return(%y, %s)
  }}
}}
"""


PLACED = "infer-shapes,propagate-sharding,insert-collectives"


def planned_nest(depth: int, count: int) -> Module:
    return compiled(nest(depth, count), f"{PLACED},plan-memory")


@pytest.mark.parametrize(("depth", "count"), [(2, 12), (3, 10), (4, 4), (5, 3), (8, 2)])
def test_repeats_inside_of_repeats(depth: int, count: int) -> None:
    module = planned_nest(depth, count)
    (plan,) = operations(module, "stg.memory")
    assert evaluate(plan.expr("peak"), module.env) == Replay(module, module.main, 0, 1).peak()


@pytest.mark.long
@pytest.mark.parametrize(("depth", "count"), [(5, 4), (6, 3), (9, 2), (10, 2)])
def test_deeper_ones_are_planned_from_above(depth: int, count: int) -> None:
    """Bodies that would run more than 343 times run once for all iterations."""
    module = planned_nest(depth, count)
    (plan,) = operations(module, "stg.memory")
    exact = Replay(module, module.main, 0, 1).peak()
    assert exact <= evaluate(plan.expr("peak"), module.env) <= 1.25 * exact


def test_the_plan_grows_with_the_depth_of_repeats_only_linearly() -> None:
    modules = [compiled(nest(depth, 1000), PLACED) for depth in (4, 5, 6)]
    steps = [len(lifetimes(m.main.body, m.env).steps) for m in modules]
    assert steps[2] - steps[1] == steps[1] - steps[0]


# -- random programs -------------------------------------------------------------------------------

_SIZES = {"B": 16, "S": 4, "D": 8, "F": 16, "V": 16}


@st.composite
def blocks(draw: st.DrawFn) -> str:
    """A model whose layers are drawn: any use of what was made before, with weights or without;
    what is not used goes into the result."""
    made = {"h": "D"}
    lines: list[str] = []
    weights: dict[str, str] = {}
    unused: dict[str, None] = {}

    def add(text: str, dim: str, *operands: str) -> str:
        name = f"t{len(lines)}"
        lines.append(f"      %{name} = {text}")
        made[name] = dim
        unused[name] = None
        for operand in operands:
            unused.pop(operand, None)
        return name

    def product(source: str, out: str) -> str:
        weight, dim = f"w{len(weights)}", made[source]
        weights[weight] = f"{dim}, {out}"
        a, b = dim.lower(), out.lower() if out != dim else "g"
        return add(f'stg.einsum["bs{a},{a}{b}->bs{b}"](%{source}, %{weight})', out, source)

    product("h", draw(st.sampled_from("DF")))
    for _ in range(draw(st.integers(0, 5))):
        source = draw(st.sampled_from(sorted(made)))
        match draw(st.sampled_from(("product", "alone", "sum"))):
            case "product":
                product(source, draw(st.sampled_from("DF")))
            case "alone":
                kind = draw(st.sampled_from(("gelu", "silu", "softmax")))
                add(f"stg.{kind}(%{source})", made[source], source)
            case _:
                other = draw(st.sampled_from(sorted(n for n in made if made[n] == made[source])))
                add(f"stg.add(%{source}, %{other})", made[source], source, other)
    last = "h"
    for name in list(unused):
        term = name if made[name] == "D" else product(name, "D")
        last = add(f"stg.add(%{last}, %{term})", "D", last, term)
    args = "".join(f", %{n.upper()}: bf16[L, {dims} | param]" for n, dims in weights.items())
    bound = "".join(f", %{n} = %{n.upper()}" for n in weights)
    body = "\n".join(lines)
    return f"""stg.module @drawn {{
  stg.symbols[B, S = 4, D = 8, F = 16, V = 16, L = 8]
  stg.func @train (%tokens: i32[B, S], %labels: i32[B, S], %E: bf16[V, D | param]{args}) -> f32[] {{
    %x = stg.embedding(%E, %tokens)
    %y = stg.repeat[count = L, carry = 1] (%h = %x{bound}) {{
{body}
      stg.yield(%{last})
    }}
    %logits = stg.einsum["bsd,vd->bsv"](%y, %E)
    %wide = stg.cast[f32](%logits)
    %loss = stg.cross_entropy[mean = B*S](%wide, %labels)
    stg.return(%loss)
  }}
}}
"""


@pytest.mark.long
@examples(40)
@given(blocks(), st.data())
def test_random_programs_and_schedules(text: str, data: st.DataObject) -> None:
    """Planner and brute force find the same peak; no buffer lies on another, in either model."""
    schedule = data.draw(st.sampled_from([None, *sorted(STAGED)]))
    options: dict[str, Any] = {
        "sizes": {n: v * data.draw(st.sampled_from((1, 2, 8))) for n, v in _SIZES.items()},
        "dp": data.draw(st.sampled_from((1, 2))),
        "zero": data.draw(st.integers(0, 3)),
        "microbatches": data.draw(st.sampled_from((4, 8))),
    }
    if schedule is not None:
        options |= {"pp": 2, **STAGED[schedule]}
    options["sizes"]["L"] = 8
    with TemporaryDirectory() as folder:
        model = Path(folder) / "drawn.stg"
        model.write_text(text)
        module = run_passes(JobBuilder(JobOptions(str(model), **options)).module, PLANNED)
    expected = list(brute_force(module, 1))
    for (_, _, timeline), peak in zip(timelines(module), expected, strict=True):
        assert timeline.peak().total == peak
        asked = list(requests(timeline))
        fit, cached = (checked(asked, name) for name in ("best-fit", "caching"))
        assert fit.bound == cached.bound == bound(asked)
        if schedule not in ("dualpipe", "dualpipev"):  # those bound what overlaps
            assert fit.bound == peak
        assert fit.bound <= peak
