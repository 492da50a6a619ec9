"""What the verifier finds in modules that passes have broken in memory; text is tested in lit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from stagec.ir.core import Operation, Quoted
from stagec.ir.expr import const, symbol
from stagec.ir.facts import Facts, divisible
from stagec.ir.module import Module
from stagec.ir.opdef import OpDef, Registry
from stagec.ir.signature import check_signature
from stagec.ir.traits import HasRegion
from stagec.ir.types import TensorType, Type
from stagec.ir.verified import VerifiedCache
from stagec.ir.verify import verify_module
from stagec.ir_spec.builtin import BUILTIN
from stagec.pipeline import verify as phases
from stagec.support.diagnostics import DiagnosticError, DiagnosticList
from stagec.support.source import Source
from stagec.text.build import parse_module
from tests.support import LLAMA, STEP, operations, parse, tiny_module

TEXT = """stg.module @m[phase = shaped] {
  stg.symbols[B, D, L]
  stg.func @f(%x: f32[B, D], %w: f32[L, D]) {
    %y = stg.repeat[count = L, carry = 1] (%h: f32[B, D] = %x, %g: f32[D] = %w) {
      %n = stg.rmsnorm(%h, %g) : f32[B, D]
      stg.yield(%n)
    } : f32[B, D]
    %z = stg.scale[by = 2](%y) : f32[B, D]
    stg.return(%z)
  }
}
"""


@pytest.fixture
def module() -> Module:
    return parse(TEXT)


def messages(module: Module) -> list[str]:
    """All errors of the module; they are the same after the sound one was verified."""
    sound = VerifiedCache()
    phases.verify_module(parse(TEXT), sound)
    fresh, again = actual(module, VerifiedCache()), actual(module, sound)
    assert fresh == again
    return fresh


def actual(module: Module, sound: VerifiedCache) -> list[str]:
    try:
        phases.verify_module(module, sound)
    except DiagnosticError as e:
        return [d.message for d in e.diagnostics]
    return []


def test_what_a_pass_has_not_changed_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a module whose collectives are explicit, one operation after the other changes."""
    steps = f"{STEP},propagate-sharding,insert-collectives"
    module = tiny_module(LLAMA, steps, dp=2, tp=2, sp=True, zero=3)
    asked: list[str] = []

    def counted(op: Operation, problems: DiagnosticList) -> bool:
        asked.append(op.name)
        return check_signature(op, problems)

    monkeypatch.setattr("stagec.ir.verify.check_signature", counted)
    sound = VerifiedCache()
    assert actual(module, sound) == []
    inside = [op for op in module.walk() if op.region is None and op.results]
    regions = [op.name for op in module.walk() if op.region is not None]
    assert len(asked) > 100
    for op in inside[:: len(inside) // 10]:
        asked.clear()
        kept = op.results[0].type
        op.results[0].type = TensorType("i8", op.results[0].tensor.dims[1:])
        assert actual(module, VerifiedCache()) == actual(module, sound) != []
        op.results[0].type = kept
        asked.clear()
        assert actual(module, sound) == []
        assert set(asked) <= {"stg.module", "stg.symbols", "stg.mesh", *regions}
    asked.clear()
    assert actual(module, sound) == asked == []
    (symbols,) = module.ops("stg.symbols")
    symbols.attrs["B"] = const(3)
    assert actual(module, VerifiedCache()) == actual(module, sound) != []


class FirstOut(OpDef):
    """Its region yields its argument: a definition that reads what is inside."""

    name = "t.first_out"
    operands = ("x",)
    traits = (HasRegion(),)

    def region_args(self, op: Operation) -> Sequence[Type]:
        return [op.operands[0].tensor]

    def infer(self, op: Operation) -> list[Type]:
        return [op.operands[0].tensor]

    def verify(self, op: Operation) -> Iterator[str]:
        if op.body.terminator.operands[0] is not op.body.args[0]:
            yield "yields another value"


NESTED = """stg.module @m[phase = shaped] {
  stg.symbols[B]
  stg.func @f(%x: f32[B]) {
    %o = stg.scale[by = 2](%x) : f32[B]
    %y = t.first_out (%h: f32[B] = %x) {
      %n = stg.add(%h, %o) : f32[B]
      stg.yield(%h)
    } : f32[B]
    stg.return(%y)
  }
}
"""


def _yields_another(region: Operation) -> None:
    region.body.terminator.set_operand(0, region.body.ops[0].result)


def _moves_before_a_value_used_inside(region: Operation) -> None:
    ops = region.parent_op.body.ops if region.parent_op else []
    ops.insert(0, ops.pop(1))


def _is_reversed(region: Operation) -> None:
    region.body.ops.reverse()


def _states_a_size_for_a_name(region: Operation) -> None:
    region.body.ops[0].attrs["phase"] = const(1)


@pytest.mark.parametrize(
    "change",
    [_yields_another, _moves_before_a_value_used_inside, _is_reversed, _states_a_size_for_a_name],
)
def test_a_change_inside_or_around_a_region_is_found(change: Callable[[Operation], None]) -> None:
    """What was sound is asked again if anything that its definition may read has changed."""
    module = parse_module(Source("test.stg", NESTED), Registry([*BUILTIN, FirstOut()]))
    sound = VerifiedCache()
    assert actual(module, sound) == []
    change(only(module, "t.first_out"))
    assert actual(module, VerifiedCache()) == actual(module, sound) != []


def test_a_flag_is_no_size() -> None:
    """Both are 1 in Python; an op with the one is not like an op with the other."""
    module = parse(TEXT)
    repeat = only(module, "stg.repeat")
    repeat.attrs["reverse"] = True
    sound = VerifiedCache()
    assert actual(module, sound) == []
    repeat.attrs["reverse"] = const(1)
    assert actual(module, VerifiedCache()) == actual(module, sound) != []


ALIKE = """stg.module @m[phase = partitioned] {
  stg.symbols[B]
  stg.mesh @pod[dp = 2]
  stg.assume[B % dp == 0]
  stg.func @f(%x: f32[B@dp], %y: f32[B@dp]) {
    %a = stg.add(%x, %y) : f32[B@dp]
    %b = stg.add(%x, %y) : f32[B@dp]
    stg.return(%a)
  }
}
"""


def _names_an_unknown_parameter(op: Operation) -> None:
    op.attrs["bye"] = const(1)


def _has_a_result_of_another_rank(op: Operation) -> None:
    op.result.type = op.result.tensor.stacked(symbol("B"))


def _needs_a_gather(op: Operation) -> None:
    op.result.type = op.result.tensor.with_splits([()])


def _is_not_placed(op: Operation) -> None:
    op.result.type = op.result.tensor.unplaced()


@pytest.mark.parametrize(
    "change",
    [_names_an_unknown_parameter, _has_a_result_of_another_rank, _needs_a_gather, _is_not_placed],
)
def test_of_operations_that_are_alike_each_wrong_one_is_reported(
    change: Callable[[Operation], None],
) -> None:
    module = parse(ALIKE)
    assert actual(module, VerifiedCache()) == []
    first, second = (op for op in module.walk() if op.name == "stg.add")
    change(first)
    once = len(actual(module, VerifiedCache()))
    assert once > 0
    change(second)
    assert len(actual(module, VerifiedCache())) == 2 * once


def test_values_without_types_are_not_alike() -> None:
    """Each has its own reason: the op that makes it is wrong, or the op that uses it."""
    text = """stg.module @m[phase = shaped] {
      stg.symbols[B]
      stg.func @f(%x: f32[B]) {
        %a = stg.scale[by = 2](%x)
        %b = stg.scale[by = 2](%a) : f32[B]
        %u = t.unknown(%x)
        %c = stg.scale[by = 2](%u) : f32[B]
        stg.return(%x)
      }
    }
    """
    module = parse_module(Source("test.stg", text), Registry(BUILTIN), allow_unregistered=True)
    assert actual(module, VerifiedCache()) == [
        "%a has no type, but the module is shaped",
        "'stg.scale' works on tensors, but %u is not a tensor",
    ]


def only(module: Module, name: str) -> Operation:
    (op,) = operations(module, name)
    return op


def test_sound_module(module: Module) -> None:
    verify_module(module, typed=True)
    assert messages(module) == []


def test_value_from_an_inner_region(module: Module) -> None:
    inner = only(module, "stg.rmsnorm").result
    only(module, "stg.scale").set_operand(0, inner)
    assert messages(module) == ["'stg.scale' uses %n, which is not visible here"]


def test_value_used_before_its_definition(module: Module) -> None:
    body = module.main.body
    body.ops.insert(0, body.ops.pop(1))
    assert messages(module) == ["'stg.scale' uses %y, which is not visible here"]


def test_inner_regions_see_outer_values(module: Module) -> None:
    only(module, "stg.rmsnorm").set_operand(0, module.main.body.args[0])
    assert messages(module) == []


def test_signature(module: Module) -> None:
    scale = only(module, "stg.scale")
    scale.drop_operands()
    del scale.attrs["by"]
    scale.attrs["bye"] = const(1)
    actual = messages(module)
    assert "'stg.scale' expects 1 operand, found 0" in actual
    assert "'stg.scale' has no parameter 'bye'" in actual
    assert not any("expects parameter 'by'" in m for m in actual)  # it may be 'bye' misspelt
    del only(module, "stg.repeat").attrs["count"]
    assert any(m.startswith("'stg.repeat' expects parameter 'count'") for m in messages(module))


def test_parameter_of_the_wrong_kind(module: Module) -> None:
    only(module, "stg.scale").attrs["by"] = Quoted("2")
    assert messages(module) == ["'by' expects a fraction such as 1/10, found \"2\""]


def test_region_bindings(module: Module) -> None:
    repeat = only(module, "stg.repeat")
    repeat.set_operands(repeat.operands[:1])
    assert "'stg.repeat' binds 1 values to 2 arguments" in messages(module)


def test_missing_region(module: Module) -> None:
    repeat = only(module, "stg.repeat")
    only(module, "stg.rmsnorm").drop_operands()
    repeat.region = None
    assert "'stg.repeat' expects a region" in messages(module)


def test_types_that_do_not_follow(module: Module) -> None:
    only(module, "stg.scale").result.type = TensorType("f32", ())
    (message,) = messages(module)
    assert message.startswith("'stg.scale' gives %z: f32[B, D], but it is written as f32[]")


def test_missing_types(module: Module) -> None:
    only(module, "stg.scale").result.type = None
    assert messages(module) == ["%z has no type, but the module is shaped"]
    module.phase = "parsed"
    assert messages(module) == []


def test_all_errors_come_at_once(module: Module) -> None:
    module.phase = "unheard"
    only(module, "stg.scale").result.type = TensorType("f32", ())
    only(module, "stg.symbols").attrs.pop("D")
    actual = messages(module)
    assert actual[0] == "unknown phase 'unheard'"
    assert sum("'D' is neither" in m for m in actual) > 1


def test_each_place_is_reported_once() -> None:
    problems = DiagnosticList()
    for _ in range(2):
        problems.error("twice")
    assert len(problems.items) == 1


# -- facts with values -----------------------------------------------------------------------------

B, D, DP, TP = (symbol(n) for n in ("B", "D", "dp", "tp"))


@pytest.mark.parametrize(
    ("relations", "env", "divides"),
    [
        ([], {}, False),
        ([divisible(B, DP)], {}, True),
        ([], {"B": 8, "dp": 4}, True),
        ([], {"B": 6, "dp": 4}, False),
        ([divisible(B, const(4))], {"dp": 4}, True),
        ([divisible(B, const(8))], {"dp": 4}, True),
        ([divisible(B, const(6))], {"dp": 4}, False),
        ([divisible(const(64), DP)], {"B": 64}, True),
        ([], {"dp": 1}, True),
    ],
)
def test_facts_use_known_values(
    relations: list[object], env: dict[str, int], divides: bool
) -> None:
    assert Facts(relations, env).divides(DP, B) is divides  # type: ignore[arg-type]


def test_facts_survive_divisions_by_zero() -> None:
    facts = Facts([divisible(const(0), DP), divisible(B / (D - 4), DP)], {"D": 4, "dp": 2})
    assert not facts.divides(TP, B / (D - 4))
