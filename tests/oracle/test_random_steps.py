"""Random programs as training steps: loss, gradients and updates on a mesh equal those on one
device, whatever the operations, the pins and the ZeRO stage.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stagec.text.printer import print_module
from tests.support import PLACE, STEP, compiled, examples, inputs_of, parse, run_numeric
from tests.unit.test_propagate import Drawn, programs

PLAIN = "x = 1, y = 1"
STRATEGY = """  stg.strategy @s[mesh = @p] {
    stg.split[A, over = x]
    stg.shard_params[over = y, zero = ZERO]
    stg.dtypes[param = f32, grad = f32, reduce = f32, master = f32]
  }
"""


def step_text(program: Drawn, zero: int) -> str:
    """The program with a loss, the sum of the squares of all values; arguments are parameters."""
    text = program.text
    squares = [f"%sq_{name}" for name, _ in ranks(text)]
    loss = "".join(
        f'    %sq_{name} = stg.einsum["{"ab"[:rank]},{"ab"[:rank]}->"](%{name}, %{name})\n'
        for name, rank in ranks(text)
    )
    loss += f"    %loss = stg.add({', '.join(squares)})\n    stg.return(%loss)\n  }}\n}}\n"
    lines = (text[: text.index("    stg.return(")] + loss).splitlines(keepends=True)
    head = next(i for i, line in enumerate(lines) if "stg.func" in line)
    lines[head] = as_parameters(lines[head])
    if zero:
        lines.insert(head, STRATEGY.replace("ZERO", str(zero)))
    return "".join(lines)


def as_parameters(line: str) -> str:
    """The arguments of a function as parameters that nothing is said of."""
    for axes in ("@(x, y)", "@(y, x)", "@x", "@y"):
        for priority in ("!1", "!2", ""):
            marked = axes.replace("x", f"x{priority}").replace("y", f"y{priority}")
            line = line.replace(marked, "")
    return line.replace(" | rep]", "]").replace("]", " | param]")


def ranks(text: str) -> list[tuple[str, int]]:
    """The values of a program with their ranks."""
    module = compiled(text, "infer-shapes")
    values = [*module.main.body.args, *(r for op in module.main.body.ops for r in op.results)]
    return [(v.name, v.tensor.rank) for v in values]


@examples(50)
@given(programs(), st.integers(0, 3))
def test_a_random_step_on_a_mesh_equals_that_on_one_device(program: Drawn, zero: int) -> None:
    text = step_text(program, zero)
    start = compiled(text, STEP)
    inputs = inputs_of(start, seed=1)
    single = parse(print_module(start).replace("x = 2, y = 2", PLAIN))
    expected = run_numeric(single, inputs)
    module = compiled(text, f"{STEP},{PLACE}")
    actual = run_numeric(module, inputs)
    for value, x, y in zip(module.main.body.terminator.operands, expected, actual, strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-8, atol=1e-8, err_msg=value.name)
