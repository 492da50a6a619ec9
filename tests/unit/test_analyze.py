"""What `stagec analyze` counts: FLOPs and parameters against closed forms, expressions against
numbers, tables against JSON, and everything against the traces that `compile` writes.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from stagec.analysis.report import analysis
from stagec.formats.chakra.nodes import CollKind, NodeKind, TraceNode
from stagec.formats.chakra.record_files import read_trace
from stagec.importers.library import model_source
from stagec.ir.expr import const, evaluate, fraction, substitute
from stagec.jobs.builder import JobBuilder
from stagec.jobs.request.options import JobOptions
from stagec.models import library
from stagec.text.printer import print_module
from stagec.traces.emit import make_job
from stagec.traces.writer import write_source
from tests.support import (
    EXHAUSTIVE,
    GPT,
    LLAMA,
    analyse,
    only_program,
    parse,
    parse_expr,
    run_passes,
    stagec,
)

STRATEGIES: dict[str, dict[str, Any]] = {
    "one": {},
    "dp": {"dp": 4},
    "tp": {"tp": 8},
    "sp": {"tp": 4, "sp": True},
    "fsdp": {"dp": 8, "zero": 3},
    "zero1": {"dp": 4, "tp": 2, "zero": 1},
    "zero2-accumulated": {"dp": 2, "tp": 2, "zero": 2, "microbatches": 4},
    "all": {"dp": 4, "tp": 4, "sp": True, "zero": 3, "microbatches": 2},
    "gathered": {"dp": 2, "tp": 4, "sp": True, "no_vocab_parallel": True},
    "kept": {"tp": 4, "sp": True, "tp_inputs": "save-gathered"},
}
BATCH = 16
LLAMA_ATTENTION = {"forward": 4, "backward": 10}
GPT_ATTENTION = {"forward": 4, "backward": 8}


def sizes_of(model: str) -> Mapping[str, int]:
    return library()[model].values


def matmul_parameters(model: str, layers: int) -> int:
    """Parameters that stand in matrix products, the head included."""
    n = sizes_of(model)
    d, h, k, f, v = (n[s] for s in "DHKFV")
    if model == GPT:
        return layers * (4 * d * h * k + 2 * d * f) + v * d
    return layers * (2 * d * h * k + 2 * d * n["G"] * k + 3 * d * f) + d * v


def parameters(model: str, layers: int) -> int:
    """All trainable parameters."""
    n = sizes_of(model)
    d, h, k, f, v, s = (n[x] for x in "DHKFVS")
    total = matmul_parameters(model, layers)
    if model == GPT:
        biases = 3 * h * k + d + f + d
        return total + s * d + layers * (4 * d + biases) + 2 * d
    return total + v * d + layers * 2 * d + d


def attention(model: str, layers: int) -> int:
    """B S² H K L: one product over the full score matrix, a multiply-add as one."""
    n = sizes_of(model)
    return BATCH * n["S"] ** 2 * n["H"] * n["K"] * layers


def seen(model: str, layers: int) -> int:
    """B S(S+1) H K L: twice one product over the pairs that a causal mask leaves."""
    n = sizes_of(model)
    return attention(model, layers) // n["S"] * (n["S"] + 1)


@pytest.mark.parametrize(
    ("model", "strategy"),
    [*((LLAMA, s) for s in STRATEGIES), (GPT, "one"), (GPT, "all"), (GPT, "zero2-accumulated")],
)
def test_matmul_flops_are_two_per_parameter_and_token_and_attention(
    model: str, strategy: str
) -> None:
    layers = 3
    options = STRATEGIES[strategy]
    result = analyse(model, sizes={"L": layers, "B": BATCH}, **options)
    ranks = options.get("dp", 1) * options.get("tp", 1)
    tokens = BATCH * sizes_of(model)["S"]
    products = LLAMA_ATTENTION if model == LLAMA else GPT_ATTENTION
    for phase, passes in (("forward", 1), ("backward", 2)):
        whole = passes * 2 * matmul_parameters(model, layers) * tokens
        whole += products[phase] * attention(model, layers)
        assert whole % ranks == 0
        assert result["classes"][0]["matmul_flops"][phase] == whole // ranks
    assert result["classes"][0]["matmul_flops"]["recompute"] == 0
    assert result["ranks"] == result["classes"][0]["count"] == ranks


@pytest.mark.parametrize("model", ["llama3-70b", "gpt-145.6b"])
def test_matmul_flops_of_other_models(model: str) -> None:
    result = analyse(model, sizes={"B": BATCH}, tp=4)
    n = sizes_of(model)
    if model.startswith("gpt"):
        block = 4 * n["D"] * n["H"] * n["K"] + 2 * n["D"] * n["F"]
    else:
        block = 2 * n["D"] * (n["H"] + n["G"]) * n["K"] + 3 * n["D"] * n["F"]
    dense = 2 * (n["L"] * block + n["V"] * n["D"]) * BATCH * n["S"]
    scores = 4 * BATCH * n["S"] ** 2 * n["H"] * n["K"] * n["L"]
    assert 4 * result["classes"][0]["matmul_flops"]["forward"] == dense + scores


def test_all_flops_of_llama_on_one_device() -> None:
    """Element-wise work too: what each op says it costs, summed by hand."""
    layers, n = 2, sizes_of(LLAMA)
    d, h, g, k, f, v = (n[s] for s in "DHGKFV")
    tokens = BATCH * n["S"]
    result = analyse(LLAMA, sizes={"L": layers, "B": BATCH})
    flops = result["classes"][0]["flops"]
    core = seen(LLAMA, layers)
    block = 2 * 4 * d + 3 * (h * k + g * k) + 4 * f + 2 * d
    dense = matmul_parameters(LLAMA, layers) * tokens
    assert flops["forward"] == 2 * dense + 2 * core + tokens * (layers * block + 4 * d + 5 * v)
    adds = 2 * d + 2 * d  # three gradients meet at the first norm, two at each residual
    back = 2 * 11 * d + 3 * (h * k + g * k) + 10 * f + adds
    assert flops["backward"] == 4 * dense + 5 * core + tokens * (layers * back + 11 * d + 4 * v + d)
    tensors = 11
    assert flops["optimizer"] == 18 * parameters(LLAMA, layers) + tensors - 1 + 3


def test_causal_attention_executes_half_in_the_fused_kernel_only(tmp_path: Path) -> None:
    """The count with masks ignored stays; the unfused softmax computes all scores."""
    for model, fused in ((LLAMA, True), (GPT, False)):
        source = model_source(library()[model])
        text = print_module(run_passes(parse(source.text, source.name), "inline"))
        sizes = {**sizes_of(model), "L": 2, "B": BATCH}
        results: list[dict[str, Any]] = []
        for name, content in (
            ("causal", text),
            ("full", text.replace("[causal]", "").replace("[causal, ", "[")),
        ):
            file = tmp_path / f"{name}.stg"
            file.write_text(content)
            results.append(analyse(str(file), sizes=sizes)["classes"][0])
        causal, full = results
        assert causal["matmul_flops"] == full["matmul_flops"]
        saved = {p: full["flops"][p] - causal["flops"][p] for p in ("forward", "backward")}
        core = 2 * attention(model, 2) - seen(model, 2) if fused else 0
        assert saved == {"forward": 2 * core, "backward": 5 * core}


@pytest.mark.parametrize(
    ("model", "count"),
    [
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama2-7b", 6_738_415_616),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_parameters_of_published_models(model: str, count: int) -> None:
    assert analyse(model)["parameters"] == count


@pytest.mark.parametrize("model", [LLAMA, GPT])
@pytest.mark.parametrize(("layers", "strategy"), [(1, "one"), (2, "all"), (7, "zero1")])
def test_set_overrides_a_size(model: str, layers: int, strategy: str) -> None:
    result = analyse(model, sizes={"L": layers, "B": BATCH}, **STRATEGIES[strategy])
    assert result["parameters"] == parameters(model, layers)


def test_set_overrides_through_the_command_line() -> None:
    ran = stagec("analyze", LLAMA, "--json", "--set", "L=1,V=1_000,S=512", "--set", "L=2,V=1000")
    assert ran.code == 0
    result = json.loads(ran.out)
    n = sizes_of(LLAMA)
    delta = 2 * n["D"] * (n["V"] - 1000)
    assert result["parameters"] == parameters(LLAMA, 2) - delta


# -- expressions


Json = dict[str, "Json"] | list["Json"] | str | int


def leaves(value: Json, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str | int]]:
    """All scalars of nested data, with where they are."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from leaves(item, (*path, name))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from leaves(item, (*path, str(number)))
    else:
        yield path, value


NAMES = {"op", "dtype", "phase", "name", "model", "schema", "example_rank"}


@pytest.mark.parametrize(
    ("model", "strategy"),
    [
        (LLAMA, "one"),
        pytest.param(LLAMA, "zero1", marks=EXHAUSTIVE),
        (LLAMA, "all"),
        (GPT, "zero2-accumulated"),
        pytest.param(GPT, "gathered", marks=EXHAUSTIVE),
    ],
)
def test_expressions_give_the_numbers(model: str, strategy: str) -> None:
    """Mesh and all sizes open, against a mesh and sizes that are known from the start."""
    options = dict(STRATEGIES[strategy])
    mesh: dict[str, int] = {a: options.pop(a) for a in ("dp", "tp") if a in options}
    sizes = {**sizes_of(model), "L": 3, "B": BATCH}
    numbers = analyse(model, sizes=sizes, mesh=mesh, **options)
    opened: dict[str, None] = dict.fromkeys(mesh)
    symbolic = analyse(model, mesh=opened, symbolic=True, **options)
    env = {**sizes, **mesh}
    texts, known = dict(leaves(symbolic)), dict(leaves(numbers))
    assert texts.keys() == known.keys()
    for path, number in known.items():
        if path[-1] in NAMES or "over" in path:
            assert texts[path] == number
        elif isinstance(number, int):
            assert ceiling(texts[path], env) == number, path


def ceiling(text: str | int, env: Mapping[str, int]) -> int:
    """The value of an expression, rounded up (bytes that a ring sends need not be whole)."""
    value = parse_expr(str(text))
    if value.value is not None:
        return value.value
    if "max" in str(text) or "ceildiv" in str(text):
        return evaluate(value, env)
    number = fraction(substitute(value, {n: const(v) for n, v in env.items()}))
    return -(-number.numerator // number.denominator)


def test_symbolic_analysis_leaves_everything_open() -> None:
    ran = stagec("analyze", LLAMA, "--symbolic", "--json", "--mesh", "dp,tp", "--zero", "3")
    assert ran.code == 0
    result = json.loads(ran.out)
    assert result["ranks"] == "dp*tp"
    assert result["mesh"] == {"dp": "dp", "tp": "tp"}
    symbols = parse_expr(result["classes"][0]["matmul_flops"]["forward"]).symbols
    assert {"B", "S", "L", "D", "H", "G", "K", "F", "V", "dp", "tp"} <= symbols


# -- the table and the traces


@pytest.mark.parametrize("strategy", ["one", "all", "zero1"])
def test_the_table_shows_what_json_holds(strategy: str) -> None:
    options = [
        f"--{n.replace('_', '-')}{'' if v is True else f'={v}'}"
        for n, v in STRATEGIES[strategy].items()
    ]
    arguments = ["analyze", LLAMA, "--set", f"L=2,B={BATCH}", *options]
    data = json.loads(stagec(*arguments, "--json").out)
    table = stagec(*arguments).out
    entry = data["classes"][0]
    assert f"{data['parameters']:,} parameters" in table
    rows = [line.split() for line in table.splitlines()]
    shown = {n: v for n, v in entry["memory"].items() if v or n != "host"}  # only if offloaded
    for name, value in shown.items():
        assert any(row[:1] == [name] and row[-1] == f"{value:,}" for row in rows)
    for row in entry["collectives"]:
        head = [row["op"], *" x ".join(row["over"]).split(), f"({row['group_size']})"]
        head += [row["phase"], row["dtype"], f"{row['count']:,}"]
        assert head in [line[: len(head)] for line in rows], head
    assert f"Nodes: {entry['nodes']['comp']} computations, {entry['nodes']['coll']} coll" in table


SMALL = {"L": 2, "B": BATCH, "S": 8, "D": 512, "H": 4, "G": 4, "K": 8, "F": 16, "V": 64}
TRACED: dict[str, dict[str, Any]] = {
    **STRATEGIES,
    "buckets": {"dp": 4, "ddp_bucket": 400_000_000},
    "buckets-sp": {"dp": 2, "tp": 2, "sp": True, "ddp_bucket": 2000, "sizes": SMALL},
    "buckets-zero1-sp": {
        "dp": 2,
        "tp": 2,
        "sp": True,
        "zero": 1,
        "ddp_bucket": 2000,
        "sizes": SMALL,
    },
    "buckets-zero3-sp": {
        "dp": 2,
        "tp": 2,
        "sp": True,
        "zero": 3,
        "ddp_bucket": 2000,
        "sizes": SMALL,
    },
}


def axes_of(members: list[int], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which the ranks of a group differ."""
    names = list(mesh)
    coords: list[tuple[int, ...]] = []
    for rank in members:
        rest, place = rank, list[int]()
        for name in reversed(names):
            rest, index = divmod(rest, mesh[name])
            place.insert(0, index)
        coords.append(tuple(place))
    return tuple(n for i, n in enumerate(names) if len({c[i] for c in coords}) > 1)


def totals(
    nodes: list[TraceNode], groups: Mapping[str, list[int]], mesh: Mapping[str, int]
) -> tuple[Counter[Any], Counter[Any]]:
    """Calls and bytes of the full buffer by collective, axes and phase."""
    calls: Counter[Any] = Counter()
    size: Counter[Any] = Counter()
    for node in nodes:
        if node.kind != NodeKind.COLL:
            continue
        members = groups[str(node.attrs["pg_name"])]
        kind = CollKind(int(str(node.attrs["comm_type"])))
        key = (kind.label, axes_of(members, mesh), node.name.partition("/")[0])
        calls[key] += 1
        factor = len(members) if kind is CollKind.ALL_GATHER else 1
        size[key] += int(str(node.attrs["comm_size"])) * factor
    return calls, size


@pytest.mark.parametrize(
    ("model", "strategy"), [*((LLAMA, s) for s in TRACED), (GPT, "one"), (GPT, "all")]
)
def test_the_traces_hold_what_the_analysis_says(model: str, strategy: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"sizes": {"L": 2, "B": BATCH}, **TRACED[strategy]}
    module = JobBuilder(JobOptions(model, **options)).lower()
    entry = analysis(module, model)["classes"][0]
    written = write_source(make_job(module, "job"), tmp_path / "out", {})
    groups = json.loads((written.directory / "job.json").read_text())
    mesh = {a: n or 1 for a, n in module.mesh.sizes.items()} if module.mesh else {}
    program = only_program(module)
    for rank in {0, entry["count"] - 1}:
        nodes = list(read_trace(written.directory / f"job.{rank}.et"))
        kinds = Counter(n.kind for n in nodes)
        assert kinds[NodeKind.COMP] == entry["nodes"]["comp"]
        assert kinds[NodeKind.COLL] == entry["nodes"]["coll"]
        assert len(nodes) == sum(entry["nodes"].values()) == len(program.nodes)
        calls, size = totals(nodes, groups, mesh)
        for table, column in ((calls, "count"), (size, "bytes")):
            expected: Counter[Any] = Counter()
            for row in entry["collectives"]:
                expected[row["op"], tuple(row["over"]), row["phase"]] += row[column]
            assert table == expected
        flops = [int(str(n.attrs["num_ops"])) for n in nodes if n.kind == NodeKind.COMP]
        exact = [n.flops for n in program.nodes if not n.is_collective]
        assert flops == [max(1, f) for f in exact]
        assert sum(exact) == sum(entry["flops"].values())


def test_a_ring_may_send_a_fraction_of_a_byte() -> None:
    """Symbolically it stays a fraction; as a number it is rounded up."""
    result = analyse(LLAMA, dp=8, zero=3, sizes={"L": 1, "B": 8})
    row = next(r for r in result["classes"][0]["collectives"] if r["bytes"] == 4)
    assert row["wire_bytes"] == 7
    assert Fraction(4 * 2 * 7, 8) == 7


@pytest.mark.parametrize(
    ("model", "sequence", "low", "high"),
    [
        ("llama3-405b", 8192, "2521", "2525"),
        ("llama3-70b", 8192, "448.97", "449.48"),
        ("qwen3-30b-a3b", 4096, "22.99", "23.10"),
        ("deepseek-v3-mtp", 4096, "260.64", "260.65"),
    ],
)
def test_model_flops_are_those_of_papers(model: str, sequence: int, low: str, high: str) -> None:
    """NVIDIA's TFLOP/s over tokens/s; of DeepSeek-V3 with the products of the routers, which are
    0.24% of the 260.02 published."""
    flops = counted(model, "--set", f"S={sequence},B=1")["model_flops"]
    assert Fraction(low) <= Fraction(flops, sequence * 10**9) <= Fraction(high)


@pytest.mark.parametrize(
    "strategy",
    [
        "--dp 2 --zero 3 --microbatches 2 --recompute full",
        "--tp 4 --dp 2 --sp --fusion epilogue",
        "--cp 2 --cp-mode ring --pp 4 --schedule zb-h1",
        "--cp 2 --cp-mode all-gather --dp 4",
    ],
)
def test_model_flops_do_not_depend_on_the_strategy(strategy: str) -> None:
    sizes = ("--set", "L=4,B=16")
    alone = counted(LLAMA, *sizes)["model_flops"]
    assert counted(LLAMA, *sizes, *strategy.split())["model_flops"] == alone


def test_model_flops_of_inference_are_those_of_forward(tmp_path: Path) -> None:
    path = tmp_path / "m.stg"
    path.write_text(
        "stg.module @m {\n  stg.symbols[B, D = 4]\n"
        "  stg.func @f(%x: bf16[B, D], %w: bf16[D, D]) {\n"
        '    %y = stg.einsum["bd,de->be"](%x, %w)\n    stg.return(%y)\n  }\n}\n'
    )
    assert counted(str(path), "--set", "B=3")["model_flops"] == 2 * 3 * 4 * 4


def test_model_flops_leave_out_the_gradients_of_frozen_matrices() -> None:
    """So MFU is no more than HFU. Adapters do not count."""
    job = ("llama3-8b", "--set", "B=1,S=4096,L=2")
    every = "wq,wk,wv,wo,w_gate_up,w_down,head"
    whole, actual = counted(*job), counted(*job, "--lora", every)
    embedding, scales = 128_256 * 4096, 5 * 4096
    matrices = int(whole["parameters"]) - embedding - scales
    assert whole["model_flops"] - actual["model_flops"] == 2 * matrices * 4096


@pytest.mark.parametrize("flags", ["--freeze *,!head", "--lora head --freeze !head"])
def test_model_flops_know_what_is_frozen(flags: str) -> None:
    """The head alone is trained: backward has the gradient of its weight."""
    job = ("llama3-8b", "--set", "B=1,S=4096,L=2")
    forward = int(counted(*job)["model_flops"]) // 3
    backward = 2 * 128_256 * 4096 * 4096
    assert counted(*job, *flags.split())["model_flops"] == forward + backward


@pytest.mark.parametrize(("roles", "products"), [("param param", 6), ("frozen param", 3)])
def test_model_flops_of_what_nothing_trained_stands_before(
    roles: str, products: int, tmp_path: Path
) -> None:
    """A frozen matrix before all that is trained has no gradient, nor has what it is applied to."""
    one, two = roles.split()
    path = tmp_path / "m.stg"
    path.write_text(
        "stg.module @m {\n  stg.symbols[B = 3, D = 4]\n"
        f"  stg.func @f(%x: bf16[B, D], %v: bf16[D, D | {one}], %w: bf16[D, D | {two}],\n"
        "      %t: bf16[B, D]) -> f32 {\n"
        '    %y = stg.einsum["bd,de->be"](%x, %v)\n'
        '    %z = stg.einsum["bd,de->be"](%y, %w)\n'
        "    %loss = stg.mse[mean = B*D](%z, %t)\n    stg.return(%loss)\n  }\n}\n"
    )
    assert counted(str(path))["model_flops"] == products * 2 * 3 * 4 * 4


@pytest.mark.parametrize("flags", ["--pp 1", "--pp 2 --microbatches 2"])
def test_padding_of_shards_is_no_parameter(flags: str) -> None:
    job = ("llama3-8b", "--set", "L=2,S=64", "--dp", "3", *flags.split())
    padded = counted(*job, "--zero", "3", "--shard-padding", "dim0")
    assert padded["parameters"] == counted(*job)["parameters"]


def test_shards_of_what_nothing_uses_have_little_padding(tmp_path: Path) -> None:
    """Its first dimension may be layers."""
    path = tmp_path / "m.stg"
    path.write_text(
        "stg.module @m {\n  stg.symbols[B = 6, D = 9, L = 2]\n"
        "  stg.func @f(%x: bf16[B, D], %w: bf16[D, D | param], %idle: bf16[L, D, D | frozen],\n"
        "      %t: bf16[B, D]) -> f32 {\n"
        '    %y = stg.einsum["bd,de->be"](%x, %w)\n'
        "    %loss = stg.mse[mean = B*D](%y, %t)\n    stg.return(%loss)\n  }\n}\n"
    )
    actual = counted(str(path), "--dp", "6", "--zero", "3", "--shard-padding", "dim0")
    (entry,) = actual["classes"]
    assert entry["memory"]["parameters"] == 2 * (12 * 9 + 162) // 6


def counted(*words: str) -> dict[str, Any]:
    """What `stagec analyze --json` prints."""
    ran = stagec("analyze", *words, "--json")
    assert ran.code == 0, ran.err
    actual: dict[str, Any] = json.loads(ran.out)
    return actual


@pytest.mark.parametrize("fusion", ["none", "pointwise", "elementwise", "epilogue"])
@pytest.mark.parametrize("model", [LLAMA, GPT])
def test_bytes_by_kind_are_those_of_the_nodes(model: str, fusion: str) -> None:
    options = {"tp": 2, "sp": True, "fusion": fusion, "sizes": {"L": 2, "B": 2}}
    (entry,) = analyse(model, **options)["classes"]
    actual: Counter[str] = Counter(dict.fromkeys(entry["bytes_touched"], 0))
    for node in only_program(JobBuilder(JobOptions(model, **options)).lower()).nodes:
        if node.kernel is not None:
            actual[node.kernel.kind] += node.kernel.bytes
    assert entry["bytes_touched"] == actual


def test_the_page_has_each_class_and_its_command(tmp_path: Path) -> None:
    """Numbers are drawn; expressions, which have no length, are a text."""
    page, words = tmp_path / "page.html", ["analyze", "llama3-8b", "--pp", "2", "--set", "L=2,B=4"]
    assert stagec(*words, "--html", str(page)).code == 0
    text = page.read_text("utf-8")
    assert f"<code>stagec {' '.join(words)}</code>" in text
    for title in ("FLOPs by phase", "Peak memory by category", "Bytes sent by axis of the mesh"):
        assert f"<h2>{title}</h2>" in text
    assert 'data-key="class1"><td>stage1</td><td>all_reduce</td>' in text
    assert stagec(*words, "--symbolic", "--html", str(page)).code == 0
    assert "<pre" in page.read_text("utf-8")


def test_the_page_of_pods_has_what_goes_between_them(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    words = "--serve disaggregated --prefill tp=2 --decode dp=2 --prompt 64 --batch 2 --set L=1"
    ran = stagec("analyze", "llama3-8b", *words.split(), "--html", str(page))
    text = page.read_text("utf-8")
    assert f'<p class="quiet">{ran.out.splitlines()[-1]}</p>' in text
    assert "prefill/stage0" in text
    assert "decode/stage0" in text
