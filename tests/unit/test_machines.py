"""The texts of machines, and limits that name one."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagec.jobs.request.limit import LimitType
from stagec.machines import figure_text, find_machine, load_machine, machines, read_machine
from stagec.machines.figures import KINDS, listed, quantity
from stagec.support.diagnostics import DiagnosticError, render
from stagec.support.json_values import is_object
from tests.support import LONG, examples, stagec

ROOT = Path(__file__).resolve().parents[2]

GIB, MIB = 2**30, 2**20


def test_each_figure_has_a_source() -> None:
    for machine in machines().values():
        known = dict(machine.figures())
        assert {"compute.clock", "memory.bandwidth", "host.latency"} <= known.keys()
        assert all(len(f.source) > 10 for f in known.values()), machine.name
        assert 0 < machine.left(8) <= machine.memory.capacity.value


def test_capacities_as_published() -> None:
    """Those of the makers' tables, in the unit that the device has."""
    published = {
        "a100-80g": 80 * GIB,
        "h100-sxm": 80 * GIB,
        "h800": 80 * GIB,
        "h20": 96 * GIB,
        "h200": 141 * GIB,
        "b200": 180 * GIB,
        "b300": 275_040 * MIB,
        "gb200-nvl72": 189_471 * MIB,
        "gb300-nvl72": 284_208 * MIB,
        "mi300x": 196_592 * MIB,
        "tpu-v4": 32 * GIB,
        "tpu-v5e": 16 * GIB,
        "tpu-v5p": 96 * GIB,
        "tpu-v6e": 32 * GIB,
    }
    actual = {n: m.memory.capacity.value for n, m in machines().items()}
    assert {n: actual[n] for n in published} == published


def test_names_are_one_to_one() -> None:
    names = [n for m in machines().values() for n in (m.name, *m.aliases)]
    assert len(names) == len(set(names))
    assert all(n == n.lower() for n in names)
    for name in names:
        device = find_machine(name.upper())
        assert device is not None
        assert name in (device.name, *device.aliases)
    assert find_machine("h") is None


def test_what_is_left_of_a_device() -> None:
    """Its capacity less the driver's part, a context and so many communicators."""
    h100 = find_machine("h100")
    assert h100 is not None
    assert h100.left(0) == 80 * GIB - 922 * MIB - 551 * MIB
    assert h100.left(2) == h100.left(0) - 2 * 392 * MIB


TEXT = (ROOT / "stagec/machines/h100-sxm.toml").read_text("utf-8")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("[compute]", "[", "not TOML"),
        ("title = ", "name = ", "title: is missing"),
        ("80 GiB", "80 GBi", "memory.capacity.value: expects a unit among B, "),
        ("3.35 TB/s", "3.35", "expects a text such as '3.35 TB/s', found '3.35'"),
        ("3.35 TB/s", "-1 TB/s", "expects a text such as"),
        ("3.35 TB/s", "0 TB/s", "expects more than zero, such as '3.35 TB/s'"),
        ("3.35 TB/s", "inf TB/s", "expects a text such as"),
        ("3.35 TB/s", "3.35 TFLOP/s", "expects a unit among B/s, "),
        ("value = 132", "value = true", "expects a number such as 132, found True"),
        ("value = 132", "value = 0", "expects a number such as 132, found 0"),
        ("value = 132", "value = nan", "expects a number such as 132, found nan"),
        ("processors = ", "procesors = ", "compute.procesors: is not in the schema"),
        ("bf16 = ", "bf61 = ", "compute.matrix.bf61"),
        ("rate = { bf16", "rate = { bf61", "efficiency.matmul.rate.bf61"),
        ('kind = "switch"', 'kind = "bus"', "network.0.kind"),
        ("ranks = 8", "ranks = 8.5", "network.0.ranks"),
        ("ranks = 8", "ranks = 1", "network.0.ranks"),
        ("ranks = 8", "", "level 'nvlink' has no 'ranks', so it must be the last"),
        ('name = "infiniband"', 'name = "nvlink"', "two levels have the same name"),
        ("network.nvlink]", "network.nvlnk]", "has no level 'nvlnk'"),
        ("hops = 0,", "hops = -1,", "multicast.hops"),
        (
            'value = "50 GB/s", source = ',
            'value = "50 GB/s", s = ',
            "bandwidth.s: is not in the schema",
        ),
    ],
)
def test_a_mistake_is_reported_with_its_line(old: str, new: str, expected: str) -> None:
    """Where the text has no such line, the table that lacks it or the whole text is named."""
    before, _, after = TEXT.partition(old)
    assert after
    with pytest.raises(DiagnosticError) as caught:
        read_machine("x", f"{before}{new}{after}", "dir/x.toml")
    said = [render(d, {}) for d in caught.value.diagnostics]
    line = before.count("\n") + 1
    actual = [s for s in said if expected in s]
    assert actual, said
    whole = "is missing" in expected or expected.startswith(("level", "two"))
    assert actual[0].startswith("dir/x.toml:1:1: " if whole else f"dir/x.toml:{line}:"), said


@pytest.mark.parametrize(
    ("text", "place", "expected"),
    [
        ("efficiency = 3", "dir/x.toml:2:1: ", "efficiency: "),
        ('[efficiency.matmul.kernels.foo]\nfew = 3\nsource = "me"', "dir/x.toml:1:1: ", "foo_few"),
    ],
)
def test_constants_in_another_form_are_reported(text: str, place: str, expected: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        read_machine("x", f'base = "h100-sxm"\n{text}\n', "dir/x.toml")
    said = render(caught.value.diagnostics[0], {})
    assert said.startswith(place), said
    assert expected in said


def test_a_text_without_base_says_which_tables_it_needs() -> None:
    with pytest.raises(DiagnosticError) as caught:
        read_machine("x", 'title = "x"')
    said = {d.message: d.remedy or "" for d in caught.value.diagnostics}
    missing = {f"{table}: is missing" for table in ("compute", "memory", "network", "host")}
    assert set(said) == missing  # constants of efficiency have defaults
    assert said["host: is missing"].startswith("write [host] with bandwidth, latency, or take it")
    assert said["network: is missing"].startswith("write [[network]] with name, kind, ")


def test_a_name_that_is_nearly_right_is_suggested() -> None:
    with pytest.raises(DiagnosticError) as caught:
        read_machine("x", TEXT.replace("bandwidth = ", "bandwith = "))
    (first, *_) = [d.remedy for d in caught.value.diagnostics if "not in the schema" in d.message]
    assert first == "did you mean 'bandwidth'?"


@LONG
@given(st.data())
@examples(60)
def test_hostile_texts_are_errors(data: st.DataObject) -> None:
    """Lines that are dropped, doubled or spoiled end in a machine or in an error."""
    lines = TEXT.splitlines()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(lines) - 1))
        spoiled = data.draw(
            st.sampled_from(["", "[efficiency]\nnetwork = 3", "base = 3", "network = 1", "[[x]]"])
            | st.text(max_size=8)
            | st.just(lines[at] * 2)
            | st.just("[" * 5000)
            | st.just("x = " + "9" * 5000)
        )
        lines[at] = spoiled
    with suppress(DiagnosticError):
        read_machine("x", "\n".join(lines))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "title: is missing"),
        (b"\xff", "byte 0xff is not UTF-8"),
        (b"#" * (1 << 21), "longer than 1,048,576 bytes"),
        (b'base = "m.toml"', "makes a cycle, or a chain"),
        (b'base = "h10"', "no machine 'h10'"),
        (b"base = 3", "'base' expects a name or a file"),
        (b'base = "nothing.toml"', "No such file"),
    ],
)
def test_files_that_are_none(tmp_path: Path, content: bytes, expected: str) -> None:
    file = tmp_path / "m.toml"
    file.write_bytes(content)
    ran = stagec("machines", str(file))
    assert (ran.code, expected in ran.err, "Traceback" in ran.err) == (1, True, False), ran.err
    assert not content.startswith(b"base") or f"{file}:1:1: error: " in ran.err
    assert stagec("machines", str(tmp_path / "none.toml")).code == 1
    assert stagec("machines", f"{tmp_path}/").code == 1


def test_a_text_on_a_base_changes_single_figures(tmp_path: Path) -> None:
    base, file = tmp_path / "base.toml", tmp_path / "mine.toml"
    base.write_text('base = "h100"\n[memory]\nbandwidth = { value = "2 TB/s", source = "me" }\n')
    file.write_text(
        'base = "base.toml"\ntitle = "mine"\n[[network]]\nname = "infiniband"\n'
        'bandwidth = { value = "25 GB/s", source = "me" }\n'
    )
    mine, h100 = load_machine(str(file)), machines()["h100-sxm"]
    expected = {p: (f.source, f.value) for p, f in mine.figures()}
    known = {p: (f.source, f.value) for p, f in h100.figures()}
    differ = {p: expected[p] for p in expected if expected[p] != known[p]}
    assert differ == {
        "memory.bandwidth": ("me", 2e12),
        "network.infiniband.bandwidth": ("me", 25e9),
    }
    assert (mine.name, mine.title, mine.aliases) == ("mine", "mine", ())
    assert mine.efficiency == h100.efficiency


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        ('name = "infiniband"\nkind = "bus"\n', "x.toml:4:1: error: network.1.kind"),
        ("name = []\n", "x.toml:3:1: error: network.0.name: Input should be a valid string"),
    ],
)
def test_a_mistake_in_a_level_of_a_base_is_reported_with_its_line(
    level: str, expected: str
) -> None:
    with pytest.raises(DiagnosticError) as caught:
        read_machine("x", f'base = "h100-sxm"\n[[network]]\n{level}')
    reported = [render(d, {}).splitlines()[0] for d in caught.value.diagnostics]
    assert any(line.startswith(expected) for line in reported), reported


def test_levels_replaced_by_a_text_take_their_constants_along() -> None:
    llama, h100 = machines()["h100-llama3"], machines()["h100-sxm"]
    assert [level.name for level in llama.network] == ["nvlink", "pod", "spine"]
    assert list(llama.efficiency.network) == ["nvlink", "pod", "spine"]
    assert llama.efficiency.network["nvlink"] == h100.efficiency.network["nvlink"]


_DERIVED = {f"efficiency.{c}" for c in ("matmul.tile", "attention.tile", "attention.exponentials")}


@LONG
def test_every_figure_has_a_path_that_changes_it_alone() -> None:
    """Of every machine, against a dump of all of it; by a factor that the schema lets pass. What
    follows from the size of a processor changes with it."""
    for machine in machines().values():
        before = _flat(machine.model_dump(by_alias=True))
        for path in machine.paths():
            halved = path.startswith("efficiency.") and not re.search("interference|padding", path)
            factor = 0.5 if halved else 2
            after = _flat(machine.scaled(path, factor).model_dump(by_alias=True))
            own = {path, f"{path}.value"} & before.keys()
            assert own
            derived = _DERIVED if path.startswith("compute.") else set[str]()
            changed = {p for p in before if before[p] != after[p]}
            assert changed <= {*own, *derived, f"{path}.source"}
            assert {p: after[p] for p in own} == {p: before[p] * factor for p in own}
        assert _flat(machine.model_dump(by_alias=True)) == before


def _flat(node: Any, way: str = "") -> dict[str, Any]:
    """Every leaf of a dump, by its path; levels by their names."""
    levels = [part for part in listed(node) if is_object(part)]
    parts = {str(part["name"]): part for part in levels} if levels else node
    if not is_object(parts):
        return {way: node}
    inner = [_flat(part, f"{way}.{name}" if way else name) for name, part in parts.items()]
    return {path: leaf for actual in inner for path, leaf in actual.items()}


def test_changes() -> None:
    h100 = machines()["h100-sxm"]
    assert h100.changed({"memory.bandwidth": "2 TB/s"}).memory.bandwidth.value == 2e12
    fast = h100.scaled("compute.matrix", 2).compute
    assert {n: r.value / h100.compute.matrix[n].value for n, r in fast.matrix.items()} == (
        dict.fromkeys(fast.matrix, 2)
    )
    still = h100.changed(
        {"network.latency": 0, "compute.launch": "0 us", "network.nvlink.ranks": 4}
    )
    assert [level.latency.value for level in still.network] == [0, 0]
    assert (still.compute.launch.value, still.network[0].ranks) == (0, 4)
    assert h100.changed({"network.bandwidth": inf}).network[1].bandwidth.value == inf
    assert type(h100.scaled("memory.capacity", 0.5).memory.capacity.value) is int


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("memory.bandwith", 1, "has no figure 'memory.bandwith'"),
        ("memory", 1, "has no figure 'memory'"),
        ("", 1, "has no figure ''"),
        ("title", 1, "has no figure 'title'"),
        ("network.kind", 1, "has no figure 'network.kind'"),
        ("memory.bandwidth.value", 1, "has no figure"),
        ("memory.bandwidth", -1, "cannot be -1"),
        ("memory.bandwidth", 0, "cannot be 0"),
        ("memory.bandwidth", nan, "cannot be nan"),
        ("memory.bandwidth", "2 TB", "expects a unit among"),
        ("memory.capacity", inf, "cannot be inf"),
        ("network.nvlink.ranks", 0, "cannot be 0"),
        ("network.nvlink.oversubscription", "x", "expects a number, found 'x'"),
        ("network.nvlink.oversubscription", 0.5, "expects greater than or equal to 1"),
        ("network.nvlink.ranks", "7.5", "cannot be 7.5"),
        ("network.latency", inf, "cannot be inf"),
        ("compute.processors", 1e20, "cannot be 1e+20"),
        ("efficiency.sustained.products", 0, "expects greater than 0"),
        ("efficiency.sustained.power", 0, "expects greater than 0"),
        ("efficiency.matmul.rate", 1.5, "expects less than or equal to 1"),
        ("efficiency.matmul.start", "2.5", "expects a text such as '3 us'"),
        ("efficiency.interference.computations", 1, "expects less than 1"),
        ("efficiency.interference.collectives", 0.9, "expects greater than or equal to 1"),
        ("efficiency.network.nvlink.protocols.ll.hops", inf, "expects a finite number"),
    ],
)
def test_changes_that_are_none(path: str, value: float | str, expected: str) -> None:
    with pytest.raises(DiagnosticError, match=re.escape(expected)):
        machines()["h100-sxm"].changed({path: value})


@pytest.mark.parametrize("factor", ["x2", None, True, -1])
def test_factors_that_are_not_positive_numbers(factor: Any) -> None:
    with pytest.raises(DiagnosticError, match=r"'memory\.bandwidth' cannot be "):
        machines()["h100-sxm"].scaled("memory.bandwidth", factor)


@pytest.mark.parametrize(
    "text", ["[network]\nranks = 4", "[network.nvlink]\nranks = 4", "network = []", "network = [1]"]
)
def test_a_network_that_is_no_list_of_levels(tmp_path: Path, text: str) -> None:
    """What would change nothing is reported."""
    file = tmp_path / "mine.toml"
    file.write_text(f'base = "h100-sxm"\n{text}\n')
    ran = stagec("machines", file)
    assert ran.code == 1
    assert f"{file}:2:" in ran.err
    assert "network: expects levels" in ran.err
    assert ran.err.count("error") == 1


def test_brackets_in_a_text_are_printed_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "[b]mine.toml"
    figure = 'bandwidth = { value = "1 TB/s", source = "[/x] of [1]" }'
    record = '[efficiency.memory]\nfitted = "[/y] of [2]"'
    file.write_text(f'base = "h100-sxm"\ntitle = "[/z] of [3]"\n[memory]\n{figure}\n{record}\n')
    ran = stagec("machines", file)
    assert (ran.code, ran.err) == (0, "")
    assert all(text in ran.out for text in ("[/x] of [1]", "[/y] of [2]", "[b]mine: [/z] of [3]"))
    job = ("time", "llama3-8b", "--set", "L=1", "--sweep", f"machine={file}")
    assert "[b]" in stagec(*job, "--jobs", "1").out


def test_constants_change_as_a_text_has_them() -> None:
    h100 = machines()["h100-sxm"]
    actual = h100.changed(
        {"efficiency.matmul.start": "3 us", "efficiency.interference.collectives": "1.5"}
    ).efficiency
    assert (actual.matmul.start, actual.interference.collectives) == (3e-6, 1.5)
    copied = h100.changed({"efficiency.network.nvlink.protocols.ll.copy": 0.5}).efficiency
    assert copied.network["nvlink"].protocols["ll"].copy_ == 0.5


def test_changed_levels_are_checked_together() -> None:
    llama = machines()["h100-llama3"]
    with pytest.raises(DiagnosticError, match="level 'pod' joins 3072 ranks; expected a multiple"):
        llama.changed({"network.nvlink.ranks": 7})
    both = llama.changed({"network.nvlink.ranks": 7, "network.pod.ranks": 21})
    assert [level.ranks for level in both.network] == [7, 21, None]


def test_figures_as_published() -> None:
    """BF16 TFLOP/s, TB/s, GB/s of the inner network, processors."""
    published = {
        "a100-80g": (312, 2.039, 300, 108),
        "h100-sxm": (989, 3.35, 450, 132),
        "h100-500w": (989, 2.4, 450, 132),
        "h100-p5": (989, 3.35, 450, 132),
        "h200": (989, 4.8, 450, 132),
        "b200": (2250, 7.7, 900, 148),
        "b300": (2250, 7.75, 900, 148),
        "gb200-nvl72": (2500, 8, 900, 148),
        "gb300-nvl72": (2500, 8, 900, 148),
        "l40s": (362.05, 0.864, 32, 142),
        "rtx-4090": (165.2, 1.008, 32, 128),
        "a10g": (70, 0.6, 32, 80),
        "mi300x": (1307, 5.3, 448, 304),
        "mi355x": (2500, 8, 535.5, 256),
        "tpu-v4": (275, 1.2, 90, 8),
        "tpu-v5p": (459, 2.8, 180, 8),
        "h100-pcie": (756, 2, 300, 114),
        "h100-nvl": (835.5, 3.9, 300, 132),
        "gh200": (989, 4, 450, 132),
        "a100-pcie": (312, 1.935, 300, 108),
        "rtx-3090": (71, 0.936, 32, 82),
        "rtx-5090": (209.5, 1.792, 64, 170),
        "rtx-pro-6000": (503.8, 1.792, 64, 188),
        "a6000": (154.8, 0.768, 56.25, 84),
        "gaudi3": (1835, 3.67, 525, 8),
        "trainium2": (667, 2.9, 256, 8),
        "tpu-v7": (2307, 7.38, 200, 8),
        "vr200-nvl72": (4000, 22, 1800, 224),
    }
    for name, figures in published.items():
        m = machines()[name]
        rate, bandwidth = m.compute.matrix["bf16"].value, m.memory.bandwidth.value
        inner = m.network[0].bandwidth.value
        actual = rate / 1e12, bandwidth / 1e12, inner / 1e9, m.compute.processors.value
        assert actual == pytest.approx(figures), name


@pytest.mark.parametrize("name", machines())
def test_texts_of_quantities_are_what_they_say(name: str) -> None:
    """`figure_text` and reading are inverse, up to six digits."""
    for path, figure in machines()[name].figures():
        text, value = figure_text(figure), figure.value
        if type(figure) in KINDS:
            assert float(quantity(KINDS[type(figure)], text)) == pytest.approx(value, 1e-5), path


@pytest.mark.parametrize(
    ("bits", "text"), [("400 Gb/s", "50 GB/s"), ("1.6Tb/s", "0.2TB/s"), ("100 Mb/s", "12.5 MB/s")]
)
def test_links_state_bits_as_data_sheets_do(bits: str, text: str) -> None:
    assert quantity("bandwidth", bits) == quantity("bandwidth", text)
    with pytest.raises(ValueError, match="expects a unit among B, "):
        quantity("bytes", bits.removesuffix("/s"))


def test_the_command() -> None:
    listed = stagec("machines").out
    assert all(name in listed for name in machines())
    one = stagec("machines", "H100").out
    assert "memory.bandwidth" in one
    assert "3.35 TB/s" in one
    dumped = json.loads(stagec("machines", "mi300x", "--json").out)
    assert dumped["network"][0]["bandwidth"]["value"] == 448e9
    assert [m["name"] for m in json.loads(stagec("machines", "--json").out)] == list(machines())
    ran = stagec("machines", "h100s")
    assert (ran.code, ran.err) == (1, "error: no machine 'h100s'\n  help: did you mean 'h100'?\n")


def test_what_each_constant_was_fitted_on_is_printed() -> None:
    efficiency = load_machine("h100").model_dump()["efficiency"]
    parts = {n: part for n, part in efficiency.items() if n != "network" and is_object(part)}
    expected = [line for line in stagec("machines", "h100").out.splitlines() if ": " in line]
    for name, part in {**parts, **efficiency["network"]}.items():
        (line,) = [line for line in expected if line.startswith(f"efficiency of {name}: ")]
        assert part["fitted"] in line
        assert part["fitted"] or "not fitted" in line


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80", 80),
        ("80B", 80),
        ("80GiB", 80 * GIB),
        ("80 GiB", 80 * GIB),
        ("80GB", 80 * GIB),
        ("80G", 80 * GIB),
        ("1.5TB", 3 * 2**39),
        ("0.5K", 512),
    ],
)
def test_sizes(text: str, size: int) -> None:
    """The unit of makers is that of machines; a remark says so wherever it is not spelled out, and
    that a small number without a unit is bytes."""
    limit = LimitType().read(text)
    assert (limit.text, limit.room({"tp": 8})) == (text, size)
    remarks = [d.message for d in limit.remarks({})]
    doubtful = text not in ("80B", "80GiB", "80 GiB")
    assert len(remarks) == doubtful
    assert all(f"{size:,} bytes" in r or r.endswith("write 80GiB") for r in remarks)


def test_a_device_has_room_for_a_job_of_its_mesh() -> None:
    """An axis of one rank needs no communicator."""
    limit = LimitType().read("H100")
    h100 = machines()["h100-sxm"]
    assert limit.room({"dp": 4, "tp": 1}) == h100.left(1)
    (expected,) = [d.message for d in limit.remarks({"dp": 4, "tp": 8})]
    assert expected == (
        "h100-sxm has 80.00 GiB; 922.00 MiB (driver), 551.00 MiB (context), 2 x 392.00 MiB "
        "(communicator of each axis of the mesh) are reserved: 77.80 GiB are left"
    )


def test_what_is_not_known_of_a_device_is_reported() -> None:
    (expected,) = LimitType().read("mi300x").remarks({"tp": 8})
    assert expected.message == (
        "mi300x has 191.98 GiB; not known, and not counted: driver, context, communicators"
    )


def test_texts_of_the_page_are_machines() -> None:
    page = (ROOT / "docs/machines.md").read_text("utf-8")
    ours, simulator = (
        read_machine("x", text) for text in re.findall(r"```toml\n(.*?)```", page, re.S)
    )
    assert [(m.ranks, m.oversubscription) for m in ours.network] == [(8, 1), (256, 1), (None, 2)]
    assert simulator.efficiency.collectives == ("ring",)
    assert {p.start for e in simulator.efficiency.network.values() for p in e.pairs.values()} == {0}


def test_pages_of_machines_have_all_of_them_and_all_figures(tmp_path: Path) -> None:
    compared, one = tmp_path / "machines.html", tmp_path / "h100.html"
    assert stagec("machines", "--html", str(compared)).code == 0
    text = compared.read_text("utf-8")
    for name in machines():
        assert f'data-opens="stagec machines {name} --html {name}.html"' in text
    assert stagec("machines", "h100", "--html", str(one)).code == 0
    text = one.read_text("utf-8")
    assert all(f"<td>{path}</td>" in text for path, _ in machines()["h100-sxm"].figures())
    rows = stagec("machines", "--format", "csv").out.splitlines()
    assert rows[0] == "name,title,bf16,fp8,memory,bandwidth,network"
    assert len(rows) == 1 + len(machines())
