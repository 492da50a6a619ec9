"""Activations, norms, slices, convolutions, bags and losses over split dimensions: all ranks
together compute what one device computes, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.support import compiled, inputs_of, operations, run_numeric, run_one_device

MESH = "stg.mesh @pod[dp = 2, tp = 2]"


@dataclass(frozen=True)
class Case:
    """Arguments with `{}` where a placement stands, lines that compute `%y`, the letters of `%y`,
    and placements: what stands in each `{}`."""

    args: str
    lines: str
    letters: str
    placements: tuple[tuple[str, ...], ...]

    def text(self, placement: tuple[str, ...]) -> str:
        squared = f'%loss = stg.einsum["{self.letters},{self.letters}->"](%y, %y)'
        return (
            "stg.module @m {\n  stg.symbols[B = 4, S = 8, D = 4, F = 8, N = 4, V = 8, P = 2]\n"
            f"  {MESH}\n  stg.func @f({self.args.format(*placement)}) {{\n"
            f"    {self.lines}\n    {squared}\n    stg.return(%loss)\n  }}\n}}\n"
        )


ROWS = (("", "", ""), ("@dp", "", "@tp"), ("", "@tp", "@dp"), ("", "", "@(dp, tp)"))
X = "%x: f32[B{}, S{}, D{} | param]"
IMAGE = "%x: f32[B{}, 3, 6, 4 | param], %w: f32[3, 3, 2, D{} | param]"
SEQUENCE = "%x: f32[B{}, S{}, D{} | param], %w: f32[3, D, F{} | param]"
CONV = (("@dp", "", "", "@tp"), ("", "@tp", "", "@dp"), ("", "", "@tp", ""), ("@tp", "@dp", "", ""))
CASES = {
    **{
        f"gelu-{form}": Case(X, f"%y = stg.gelu[form = {form}](%x)", "bsd", ROWS)
        for form in ("tanh", "erf", "quick")
    },
    "soft-cap": Case(X, "%a = stg.tanh(%x)\n    %y = stg.scale[by = 5](%a)", "bsd", ROWS),
    "relu-squared": Case(X, "%a = stg.relu(%x)\n    %y = stg.mul(%a, %a)", "bsd", ROWS),
    "power": Case(X, "%a = stg.exp(%x)\n    %y = stg.power[exponent = -1/2](%a)", "bsd", ROWS),
    "sigmoid": Case(X, "%a = stg.exp(%x)\n    %y = stg.sigmoid(%a)", "bsd", ROWS),
    "swiglu": Case(
        "%x: f32[B{}, 2, S{}, F{} | param]",
        "%y = stg.swiglu[slope = 851/500, limit = 1/2, shift = 1](%x)",
        "bsf",
        ROWS,
    ),
    "geglu": Case("%x: f32[B{}, 2, S{}, F{} | param]", "%y = stg.geglu(%x)", "bsf", ROWS),
    "rmsnorm-zero-centered": Case(
        f"{X}, %g: f32[D | param]", "%y = stg.rmsnorm[zero_centered](%x, %g)", "bsd", ROWS
    ),
    "rmsnorm-without-scale": Case(X, "%y = stg.rmsnorm[affine = none](%x)", "bsd", ROWS),
    "rmsnorm-over-heads": Case(
        "%x: f32[B{}, S{}, N{}, D | param], %g: f32[N*D | param]",
        '%a = stg.reshape["bsnd->bs(nd)"](%x)\n    %n = stg.rmsnorm(%a, %g)\n'
        '    %y = stg.reshape["bs(nd)->bsnd", factors = d, sizes = D](%n)',
        "bsnd",
        ROWS,
    ),
    "rmsnorm-gated": Case(
        f"{X}, %z: f32[B, S, D | param], %g: f32[D | param]",
        "%a = stg.silu(%z)\n    %b = stg.mul(%x, %a)\n    %y = stg.rmsnorm(%b, %g)",
        "bsd",
        ROWS,
    ),
    "layernorm-without-bias": Case(
        f"{X}, %g: f32[D | param]", "%y = stg.layernorm[affine = scale](%x, %g)", "bsd", ROWS
    ),
    "layernorm-scaled-by-head": Case(
        "%x: f32[B{}, S{}, N{}, D | param], %g: f32[N, D | param]",
        "%y = stg.layernorm[affine = scale](%x, %g)",
        "bsnd",
        ROWS,
    ),
    "layernorm-without-scale": Case(X, "%y = stg.layernorm[affine = none](%x)", "bsd", ROWS),
    "modulated": Case(
        f"{X}, %t: f32[B, D | param], %w: f32[D, 2, D | param]",
        "%n = stg.layernorm[affine = none](%x)\n    %a = stg.silu(%t)\n"
        '    %m = stg.einsum["bd,dze->bze"](%a, %w)\n'
        "    %shift, %scale = stg.unbind[dim = 1, count = 2](%m)\n"
        '    %s = stg.einsum["bsd,bd->bsd"](%n, %scale)\n'
        '    %y = stg.add["bsd,bsd,bd->bsd"](%n, %s, %shift)',
        "bsd",
        ROWS,
    ),
    "slice": Case(X, "%y = stg.slice[dim = 1, start = 1, size = 4](%x)", "bsd", ROWS),
    "pad": Case(X, "%y = stg.pad[dim = 2, start = 3, size = 8](%x)", "bsd", ROWS),
    "learned-positions": Case(
        f"{X}, %p: f32[2*S, D | param]",
        '%s = stg.slice[start = 2, size = S](%p)\n    %y = stg.add["bsd,sd->bsd"](%x, %s)',
        "bsd",
        ROWS,
    ),
    "class-token": Case(
        f"{X}, %c: f32[D | param]",
        '%t = stg.broadcast["d->bsd", sizes = (B, 1)](%c)\n    %y = stg.concat[dim = 1](%t, %x)',
        "bsd",
        ROWS,
    ),
    "two-streams": Case(
        f"{X}, %c: f32[B, P, D | param]",
        "%j = stg.concat[dim = 1](%c, %x)\n    %a = stg.silu(%j)\n"
        "    %p, %q = stg.cut[dim = 1, sizes = (P, S)](%a)\n"
        '    %y = stg.einsum["bpd,bsd->bps"](%p, %q)',
        "bps",
        ROWS,
    ),
    "mean-pooling": Case(
        X, '%s = stg.sum["bsd->bd"](%x)\n    %y = stg.scale[by = 1/S](%s)', "bd", ROWS
    ),
    "take": Case(X, "%y = stg.take[at = 5](%x)", "bd", ROWS),
    "take-last": Case(X, "%y = stg.take[dim = 2, at = 3](%x)", "bs", ROWS),
    "take-where": Case(f"{X}, %t: i32[B]", "%y = stg.take(%x, %t)", "bd", ROWS),
    "patches": Case(
        IMAGE,
        '%p = stg.reshape["bc(hp)(wq)->bchpwq", factors = (p, q), sizes = (3, 2)](%x)\n'
        '    %y = stg.einsum["bchpwq,cpqd->bhwd"](%p, %w)',
        "bhwd",
        (("", ""), ("@dp", "@tp"), ("", "@(dp, tp)")),
    ),
    "conv1d": Case(SEQUENCE, "%y = stg.conv1d[pad = 1](%x, %w)", "bsf", CONV),
    "conv1d-strided": Case(SEQUENCE, "%y = stg.conv1d[stride = 2, pad = 1](%x, %w)", "bsf", CONV),
    "conv1d-within": Case(SEQUENCE, "%y = stg.conv1d(%x, %w)", "bsf", CONV),
    "conv2d-groups": Case(
        "%x: f32[B{}, S{}, 4, N{}, P | param], %w: f32[3, 3, N, P, F{} | param]",
        "%y = stg.conv2d[stride = 2, pad = 1](%x, %w)",
        "bszgf",
        (("@dp", "", "", "@tp"), ("", "@tp", "@dp", ""), ("", "", "@(dp, tp)", "")),
    ),
    "mse": Case(f"{X}, %z: f32[B, S, D]", "%y = stg.mse[mean = B*S*D](%x, %z)", "", ROWS),
    "sinusoid": Case(
        "%t: f32[B{}], %w: f32[F{}, D | param]",
        '%e = stg.sinusoid[size = F](%t)\n    %y = stg.einsum["bf,fd->bd"](%e, %w)',
        "bd",
        (("", ""), ("@dp", "@tp"), ("", "@(dp, tp)")),
    ),
    "contrastive": Case(
        "%x: f32[B{}, D{} | param], %z: f32[B{}, D | param], %s: f32[| param], %t: i32[B]",
        "%u = stg.rmsnorm[affine = none](%x)\n    %v = stg.rmsnorm[affine = none](%z)\n"
        '    %d = stg.einsum["id,jd->ij"](%u, %v)\n    %n = stg.scale[by = 1/D](%d)\n'
        '    %e = stg.exp(%s)\n    %l = stg.einsum["ij,->ij"](%n, %e)\n'
        '    %m = stg.permute["ij->ji"](%l)\n'
        "    %p = stg.cross_entropy[mean = B](%l, %t)\n"
        "    %q = stg.cross_entropy[mean = B](%m, %t)\n    %y = stg.add(%p, %q)",
        "",
        (("", "", ""), ("@dp", "", "@dp"), ("@(dp, tp)", "", "@(dp, tp)"), ("@dp", "@tp", "@dp")),
    ),
    "bag": Case(
        "%x: f32[V{}, D{} | param], %t: i32[B{}, P]",
        "%y = stg.embedding_bag(%x, %t)",
        "bd",
        (
            ("", "", "@dp"),
            ("@tp", "", "@dp"),
            ("", "@tp", ""),
            ("@dp", "@tp", ""),
            ("@dp", "", "@dp"),
        ),
    ),
    "bag-of-each-table": Case(
        "%x: f32[N{}, V{}, D{} | param], %t: i32[B, N, P]",
        "%y = stg.embedding_bag(%x, %t)",
        "bnd",
        (("@tp", "", ""), ("@(dp, tp)", "", ""), ("", "@tp", "@dp"), ("@dp", "@tp", "")),
    ),
    "bags-of-several-sizes": Case(
        "%x: f32[V{}, D{} | param], %t: i32[B{}, 6]",
        "%y = stg.embedding_bag[bags = (1, 3, 2)](%x, %t)",
        "bnd",
        (("", "", "@dp"), ("@tp", "", "@dp"), ("", "@tp", "")),
    ),
    "triangle": Case(
        "%x: f32[B{}, N{}, D{} | param]",
        '%g = stg.einsum["bnd,bmd->bnm"](%x, %x)\n    %y = stg.triangle(%g)',
        "bt",
        ROWS,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_forward_and_backward(name: str) -> None:
    case = CASES[name]
    for placement in case.placements:
        text, passes = case.text(placement), "infer-shapes,differentiate"
        sharded = compiled(text, f"{passes},propagate-sharding,insert-collectives")
        inputs = inputs_of(sharded, 5)
        expected = run_one_device(compiled(text, passes), inputs)
        for a, b in zip(run_numeric(sharded, inputs), expected, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-11, rtol=1e-10, err_msg=str(placement))


def test_a_split_sequence_is_not_gathered_for_one_position() -> None:
    """What is taken is reduced: B*D elements instead of B*S*D."""
    text = CASES["take"].text(("", "@tp", ""))
    module = compiled(text, "infer-shapes,propagate-sharding,insert-collectives")
    (reduced,) = operations(module, "stg.all_reduce")
    assert str(reduced.operands[0].tensor.elements) == "B*D"
    assert not operations(module, "stg.all_gather")


@pytest.mark.parametrize(
    ("placement", "result"),
    [
        (("@tp", "", ""), "f32[B, N@tp, D]"),
        (("", "@tp", ""), "f32[B, N, D | sum(tp)]"),
        (("", "", "@tp"), "f32[B, N, D@tp]"),
    ],
)
def test_tables_are_split_by_table_row_or_column(placement: tuple[str, ...], result: str) -> None:
    """Only row-wise bags are to be summed up over ranks; no table is gathered."""
    text = CASES["bag-of-each-table"].text(placement)
    module = compiled(text, "infer-shapes,propagate-sharding,insert-collectives")
    (bag,) = operations(module, "stg.embedding_bag")
    assert str(bag.result.type) == result
    assert not operations(module, "stg.all_gather")
