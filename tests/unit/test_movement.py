"""What moves for single ops: results that are pinned, pinned partial sums, split last dimensions,
casts."""

from __future__ import annotations

from fractions import Fraction
from math import prod

import pytest

from stagec.ir.expr import evaluate
from stagec.ir.module import Module
from stagec.ir_spec.ops.comm import Collective, ring_rounds
from stagec.support.diagnostics import DiagnosticError
from tests.support import analyse, compiled

PLACE = "infer-shapes,propagate-sharding,insert-collectives"


def placed(args: str, body: str, returned: str = "%y", mesh: str = "x = 2, y = 4") -> Module:
    """A function after the insertion of collectives."""
    return compiled(
        f"stg.module @m {{\n  stg.mesh @p[{mesh}]\n  stg.func @f({args}) {{\n{body}\n"
        f"    stg.return({returned})\n  }}\n}}\n",
        PLACE,
    )


def moved(module: Module) -> list[tuple[str, int]]:
    """Each collective, with the bytes that a rank sends on a ring."""
    actual: list[tuple[str, int]] = []
    for op in module.main.body.walk():
        if isinstance(op.definition, Collective):
            n = prod(module.env[a] for a in op.names("over"))
            size = evaluate(op.definition.buffer(op), module.env)
            name = op.name.removeprefix("stg.")
            actual.append((name, int(Fraction(ring_rounds(name) * (n - 1), n) * size)))
    return actual


@pytest.mark.parametrize(
    "body",
    [
        (
            '    %d = stg.einsum["mk,mn->kn"](%a, %g)\n'
            "    %y = stg.sharding_constraint(%d) : f32[128@y, 256]"
        ),
        '    %y = stg.einsum["mk,mn->kn"](%a, %g) : f32[128@y, 256]',
    ],
)
def test_a_pinned_result_is_weighed(body: str) -> None:
    """An exchange of %a and a reduce_scatter of %y would send 104,448 B."""
    module = placed("%a: f32[64, 128@y], %g: f32[64@y, 256]", body)
    assert moved(module) == [("all_gather", 49152)]


def test_a_pinned_result_is_computed_otherwise_if_less_moves() -> None:
    """To gather both operands, as the pin has no split, takes 786,432 B."""
    args = "%a: f32[16, 4096@y], %w: f32[4096@y, 16]"
    module = placed(args, '    %y = stg.einsum["ab,bc->ac"](%a, %w) : f32[16, 16 | rep]')
    assert moved(module) == [("all_reduce", 1536)]


def test_a_dimension_that_an_op_needs_whole_may_be_pinned_split() -> None:
    args, op = "%a: f32[8, 8@x]", "stg.softmax[causal](%a)"
    module = placed(args, f"    %y = {op} : f32[8, 8@x]")
    assert [name for name, _ in moved(module)] == ["all_gather"]
    assert [op.name for op in module.main.body.ops][-3:] == [
        "stg.all_slice",
        "stg.sharding_constraint",
        "stg.return",
    ]


# -- partial sums


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "%b = stg.sharding_constraint(%a) : f32[8, 8 | sum(x)]",
            "'stg.sharding_constraint' gives %b whole, not unreduced",
        ),
        ("%b = stg.gelu(%a) : f32[8, 8 | sum(x)]", "'stg.gelu' gives %b whole, not unreduced"),
        (
            '%b = stg.einsum["ab,bc->ac"](%a, %a2) : f32[8, 8 | sum(x)]',
            "'stg.einsum' gives %b whole, not unreduced",
        ),
        ("%b = stg.add(%a, %p) : f32[8, 8 | sum(x)]", "'stg.add' gives %b whole, not unreduced"),
        ('%b = stg.max["ab->a"](%s) : f32[8 | sum(x)]', "'stg.max' gives %b unreduced by max"),
    ],
)
def test_a_whole_value_is_not_taken_for_parts_of_a_sum(body: str, message: str) -> None:
    """Its sum would count it once for each rank."""
    args = "%a: f32[8, 8 | rep], %a2: f32[8, 8 | rep], %p: f32[8, 8 | sum(x)], %s: f32[8, 8@x]"
    with pytest.raises(DiagnosticError, match=message) as caught:
        placed(args, f"    {body}\n    %y = stg.gelu(%b)")
    assert "drop the clause, or let an op make the parts" in (
        caught.value.diagnostics[0].remedy or ""
    )


def test_parts_in_a_text_are_verified() -> None:
    text = (
        "stg.module @m[phase = partitioned] {\n  stg.mesh @p[x = 2]\n"
        "  stg.func @f(%a: f32[8 | rep]) {\n"
        "    %b = stg.sharding_constraint(%a) : f32[8 | sum(x)]\n"
        "    %c = stg.all_reduce[over = x](%b) : f32[8 | rep]\n    stg.return(%c)\n  }\n}\n"
    )
    with pytest.raises(DiagnosticError, match="gives %b whole, not unreduced over x"):
        compiled(text, "verify")


def test_pinned_parts_are_not_gathered() -> None:
    args = "%a: f32[8@x, 8], %w: f32[8@x, 8]"
    body = '    %b = stg.einsum["ab,bc->ac"](%a, %w) : f32[8, 8 | sum(x)]\n    %y = stg.gelu(%b)'
    assert [name for name, _ in moved(placed(args, body))] == ["all_to_all", "all_reduce"]


# -- a last dimension that is split


@pytest.mark.parametrize(
    ("body", "returned", "reductions"),
    [
        ("%y = stg.rmsnorm(%a, %w)", "%y", 1),
        ("%y = stg.layernorm(%a, %w, %w)", "%y", 1),
        ("%y = stg.softmax(%a)", "%y", 2),
        ("%y = stg.softmax_grad(%a, %b)", "%y", 1),
        ("%y, %z = stg.rmsnorm_grad(%b, %a, %w)", "%y, %z", 1),
        ("%y, %z, %u = stg.layernorm_grad(%b, %a, %w)", "%y, %z, %u", 1),
    ],
)
def test_statistics_are_reduced_and_no_row_is_gathered(
    body: str, returned: str, reductions: int
) -> None:
    args = "%a: bf16[64, 512@y], %b: bf16[64, 512@y], %w: bf16[512]"
    actual = moved(placed(args, f"    {body}", returned))
    assert [name for name, _ in actual] == ["all_reduce"] * reductions
    assert sum(sent for _, sent in actual) <= 4 * 64 * 4 * 3 // 2  # at most 4 numbers of a row


@pytest.mark.parametrize(
    ("body", "returned"),
    [("%y = stg.concat(%a, %b)", "%y"), ("%y, %z = stg.cut[sizes = (8, 24)](%a)", "%y, %z")],
)
def test_a_split_last_dimension_is_exchanged_to_join_or_cut_it(body: str, returned: str) -> None:
    actual = moved(placed("%a: f32[16, 32@x], %b: f32[16, 32@x]", f"    {body}", returned))
    assert {name for name, _ in actual} == {"all_to_all"}
    assert {sent for _, sent in actual} == {16 * 16 * 4 // 2}


def test_gathered_logits_are_sent_in_the_type_of_the_product() -> None:
    """One all_gather of [b, s, V] in two bytes an element, not in four."""
    sizes = {"L": 1, "B": 1, "S": 1024}
    (job,) = analyse("llama3-8b", tp=8, no_vocab_parallel=True, sizes=sizes)["classes"]
    gathers = [c for c in job["collectives"] if c["op"] == "all_gather"]
    assert [(c["bytes"], c["count"]) for c in gathers] == [(1024 * 128256 * 2, 1)]
