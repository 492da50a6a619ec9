"""Unrolling: repeats and accumulations of a lowered module become nodes whose order and
dependencies are those of running the module's text by hand.
"""

from __future__ import annotations

from functools import cache

import pytest

from stagec.ir.module import Module
from stagec.jobs.builder import JobBuilder
from stagec.program.classes import rank_classes
from stagec.program.groups import GroupAxes
from stagec.program.nodes import Node, Program
from stagec.program.stamp import front_of
from stagec.support.diagnostics import DiagnosticError
from tests.support import LLAMA, LONG, only_program, parse, run_passes, tiny_options

HEAD = "stg.module @m[phase = lowered] {\n  stg.symbols[N = 3]\n  stg.mesh @p[dp = 2]\n"


def lowered(body: str, args: str = "%x: node", symbols: str = "N = 3") -> Module:
    """A module around the operations of an et.graph."""
    head = HEAD.replace("N = 3", symbols)
    return parse(f"{head}  et.graph @f[ranks = dp] ({args}) -> node {{\n{body}\n  }}\n}}\n")


def comp(result: str, *deps: str, flops: int = 8) -> str:
    """A computation."""
    given = ", ".join(f"%{d}" for d in deps)
    return f"%{result} = et.comp[add, flops = {flops}, bytes = 4, out = 4]({given}) : node\n"


def coll(result: str, *deps: str, more: str = "") -> str:
    """A collective over dp."""
    given = ", ".join(f"%{d}" for d in deps)
    kind = "all_gather" if "ahead" in more else "all_reduce"
    return (
        f"%{result} = et.coll[{kind}, group = dp, bytes = 8, dtype = f32{more}]({given}) : node\n"
    )


def named(program: Program) -> dict[str, Node]:
    return {node.name.removeprefix("forward/"): node for node in program.nodes}


def deps(program: Program) -> dict[str, list[str]]:
    """The names of what each node takes data from."""
    return {
        name: [d.name.removeprefix("forward/") for d in node.deps]
        for name, node in named(program).items()
    }


def test_a_straight_graph() -> None:
    body = comp("a", "x") + comp("b", "a") + coll("c", "a", "b") + comp("d", "c", "x")
    program = only_program(lowered(body + "et.return(%d)"))
    assert deps(program) == {"a": [], "b": ["a"], "c": ["a", "b"], "d": ["c"]}
    assert [n.id for n in program.nodes] == [1, 2, 3, 4]
    assert program.groups == [GroupAxes(("dp",))]
    assert named(program)["c"].is_collective
    assert named(program)["a"].flops == 8


def test_streams_are_chained_in_order() -> None:
    """Each computation follows the one before, each collective too; data edges are not repeated."""
    body = comp("a", "x") + coll("p", "a") + comp("b", "a") + coll("q", "x") + comp("c", "p")
    program = only_program(lowered(body + "et.return(%c)"))
    after = {
        n.name.removeprefix("forward/"): [a.name.removeprefix("forward/") for a in n.after]
        for n in program.nodes
    }
    assert after == {"a": [], "p": [], "b": [], "q": ["p"], "c": ["b"]}


REPEAT = (
    comp("w", "x")
    + "%y, %s = et.repeat[count = N, carry = 1] (%h: node = %w, %k: node = %x) {\n"
    + comp("a", "h", "k")
    + comp("o", "a")
    + "et.yield(%o, %a)\n} : (node, node)\n"
)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_repeat_carries_and_stacks(count: int) -> None:
    body = REPEAT + comp("z", "y", "s") + "et.return(%z)"
    program = only_program(lowered(body, symbols=f"N = {count}"))
    expected: dict[str, list[str]] = {"w": []}
    for i in range(count):
        expected[f"L{i}/a"] = ["w" if i == 0 else f"L{i - 1}/o"]
        expected[f"L{i}/o"] = [f"L{i}/a"]
    expected["z"] = [f"L{count - 1}/o", f"L{count - 1}/a"]
    assert deps(program) == expected
    assert list(named(program)) == list(expected)


def test_a_reversed_repeat_takes_each_slice_of_a_stack() -> None:
    body = REPEAT + (
        "%g = et.repeat[reverse, count = N, carry = 1] (%d: node = %y, %t: node = %s) {\n"
        + comp("b", "d", "t")
        + "et.yield(%b)\n} : node\net.return(%g)"
    )
    program = only_program(lowered(body))
    actual = deps(program)
    assert actual["L2/b"] == ["L2/o", "L2/a"]
    assert actual["L1/b"] == ["L2/b", "L1/a"]
    assert actual["L0/b"] == ["L1/b", "L0/a"]
    order = [n for n in named(program) if n.endswith("/b")]
    assert order == ["L2/b", "L1/b", "L0/b"]


def test_nested_repeats() -> None:
    body = (
        "%y = et.repeat[count = 2, carry = 1] (%h: node = %x) {\n"
        "%u = et.repeat[count = 2, carry = 1] (%i: node = %h) {\n"
        + comp("a", "i")
        + "et.yield(%a)\n} : node\n"
        + comp("b", "u")
        + "et.yield(%b)\n} : node\net.return(%y)"
    )
    assert deps(only_program(lowered(body))) == {
        "L0/L0/a": [],
        "L0/L1/a": ["L0/L0/a"],
        "L0/b": ["L0/L1/a"],
        "L1/L0/a": ["L0/b"],
        "L1/L1/a": ["L1/L0/a"],
        "L1/b": ["L1/L1/a"],
    }


def test_an_accumulation_runs_once_for_each_microbatch() -> None:
    body = (
        comp("w", "x")
        + "%y = et.accumulate[count = 3] (%h: node = %w) {\n"
        + comp("a", "h")
        + coll("r", "a")
        + "et.yield(%r)\n} : node\n"
        + comp("z", "y")
        + "et.return(%z)"
    )
    program = only_program(lowered(body))
    actual = deps(program)
    for i in range(3):
        assert actual[f"mb{i}/a"] == ["w"]
        assert actual[f"mb{i}/r"] == [f"mb{i}/a"]
    before: set[Node] = set()
    waiting = list(named(program)["z"].deps)
    while waiting:
        node = waiting.pop()
        before.add(node)
        waiting += [n for n in (*node.deps, *node.after) if n not in before]
    assert {f"mb{i}/r" for i in range(3)} <= {n.name.removeprefix("forward/") for n in before}


def test_gathers_ahead_are_issued_one_iteration_early() -> None:
    body = (
        "%y = et.repeat[count = N, carry = 1] (%h: node = %x, %w: node = %x) {\n"
        + coll("g", "w", more=", ahead = 1")
        + comp("a", "h", "g")
        + "et.yield(%a)\n} : node\net.return(%y)"
    )
    program = only_program(lowered(body, symbols="N = 4"))
    names = [n.name.removeprefix("forward/") for n in program.nodes]
    assert names == ["L0/g", "L1/g", "L0/a", "L2/g", "L1/a", "L3/g", "L2/a", "L3/a"]
    nodes = named(program)
    assert nodes["L0/a"] in nodes["L2/g"].after
    assert nodes["L1/a"] in nodes["L3/g"].after
    assert nodes["L0/a"] not in nodes["L1/g"].after
    assert all(nodes[f"L{i}/g"] in nodes[f"L{i}/a"].deps for i in range(4))


def bucketed(bucket: int) -> Program:
    """Two gradients over three layers (4 bytes each of %s and 6 of %t, last layer first), and one
    of 5 bytes."""
    body = (
        "%y, %s, %t = et.repeat[reverse, count = N, carry = 1] (%h: node = %x) {\n"
        + comp("a", "h")
        + comp("b", "a")
        + "et.yield(%b, %a, %b)\n} : (node, node, node)\n"
        + comp("w", "y")
        + "%r = et.coll[all_reduce, group = dp, bytes = 35, dtype = f32, "
        + f"bucket = {bucket}, parts = (12, 18, 5)](%s, %t, %w) : node\n"
        + comp("z", "r")
        + "et.return(%z)"
    )
    return only_program(lowered(body))


#: Gradients in the order in which they are complete: what they are called, what makes them, bytes.
READY = [
    *((f"L{i}/{of}", f"L{i}/{by}", size) for i in (2, 1, 0) for of, by, size in ("sa4", "tb6")),
    ("w", "w", "5"),
]


@pytest.mark.parametrize(
    ("bucket", "names"),
    [
        (1, ["L2/s", "L2/t", "L1/s", "L1/t", "L0/s", "L0/t", "w"]),
        (5, ["L2/s..t", "L1/s..t", "L0/s..t", "w"]),
        (10, ["L2/s..t", "L1/s..t", "L0/s..t", "w"]),
        (11, ["L2..L1/s..s", "L1..L0/t..t", "w"]),
        (30, ["L2..L0/s..t", "w"]),
        (31, ["L2/s..w"]),
        (100, ["L2/s..w"]),
    ],
)
def test_buckets_are_filled_and_issued_as_gradients_are_complete(
    bucket: int, names: list[str]
) -> None:
    """The gradient with which a bucket reaches its size closes it, and none is cut; its call comes
    right after the node that completes that gradient, and waits for all of them."""
    program = bucketed(bucket)
    calls = [n for n in program.nodes if n.is_collective]
    assert [n.name for n in calls] == [f"forward/{name}.reduce" for name in names]
    waiting = iter(READY)
    for call in calls:
        inside = [next(waiting)]
        while sum(int(size) for _, _, size in inside) < bucket:
            more = next(waiting, None)
            inside += [more] if more else []
            if more is None:
                break
        assert call.size == sum(int(size) for _, _, size in inside)
        assert {d.name.removeprefix("forward/") for d in call.deps} == {by for _, by, _ in inside}
        assert program.nodes[call.id - 2] is named(program)[inside[-1][1]]
    assert next(waiting, None) is None
    final = next(n for n in program.nodes if n.name.endswith("/z"))
    assert {f"{name}.reduce" for name in names} <= reachable(final)


def reachable(node: Node) -> set[str]:
    """Names of all nodes that are done before a node starts."""
    seen: set[Node] = set()
    waiting = [*node.deps, *node.after]
    while waiting:
        before = waiting.pop()
        if before not in seen:
            seen.add(before)
            waiting += [*before.deps, *before.after]
    return {n.name.removeprefix("forward/") for n in seen}


def test_what_cannot_be_unrolled_is_reported() -> None:
    with pytest.raises(DiagnosticError, match="no value for N"):
        only_program(lowered(REPEAT + "et.return(%y)", symbols="N"))
    with pytest.raises(DiagnosticError, match="no nodes"):
        only_program(lowered("et.return(%x)"))
    with pytest.raises(DiagnosticError, match=r"no et\.graph"):
        only_program(parse("stg.module @m {\n}"))


@LONG
def test_nodes_grow_linearly_in_layers_and_microbatches() -> None:
    @cache
    def count(layers: int, microbatches: int) -> int:
        options = tiny_options(
            LLAMA, dp=2, zero=3, microbatches=microbatches, sizes={"L": layers, "B": 12}
        )
        return len(only_program(JobBuilder(options).lower()).nodes)

    per_layer = count(3, 2) - count(2, 2)
    assert count(7, 2) == count(2, 2) + 5 * per_layer
    per_microbatch = count(2, 3) - count(2, 2)
    assert count(2, 6) == count(2, 2) + 4 * per_microbatch


def test_iterations_without_nodes_are_counted_too() -> None:
    """A repeat of nothing is work for whoever unrolls it."""
    inner = "%b = et.repeat[count = N, carry = 1] (%k: node = %h) {\n  et.yield(%k)\n} : node\n"
    outer = (
        f"%y = et.repeat[count = N, carry = 1] (%h: node = %a) {{\n{inner}et.yield(%b)\n}} : node\n"
    )
    body = comp("a", "x") + outer + "et.return(%y)"
    assert len(only_program(lowered(body))) == 1
    with pytest.raises(DiagnosticError, match="run 2,000,002,000,000 iterations"):
        only_program(lowered(body, symbols="N = 1000000"))


def test_steps_share_a_template_whatever_is_before_the_last_product() -> None:
    """Of the computations before a step the last product counts, and which one is before it."""
    later, products = [(4, False), (3, False), (2, True)], [(1, True), (0, True)]
    assert front_of(iter([*later, *products])) == ([(1, False), (2, True), (4, False)], True)
    assert front_of(iter(later)) == ([(2, True), (4, False)], False)
    assert front_of(iter(products)) == ([(0, False), (1, True)], True)


def test_receives_that_are_posted_refer_to_no_computation() -> None:
    """The same template stands for those of all microbatches, whatever has been computed before."""
    options = tiny_options("llama3-8b", pp=2, microbatches=4, sizes={"L": 4})
    classes = rank_classes(run_passes(JobBuilder(options).module, "train"))
    assert all(each.program() for each in classes)
    templates = classes[0].templates.values()
    posted = [t.outside for t in templates if {n.kind for n in t.nodes} == {"recv"}]
    assert posted == [0] * len(classes)
