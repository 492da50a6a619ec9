"""The texts of machines, and limits that name one."""

from __future__ import annotations

import pytest

from stagec.driver.limit import LimitType
from stagec.machines import find_machine, machines, read_machine
from stagec.support.diagnostics import DiagnosticError

GIB, MIB = 2**30, 2**20


def test_each_figure_has_a_source() -> None:
    for device in machines().values():
        reserve = device.memory.reserve
        figures = device.memory.capacity, reserve.driver, reserve.context, reserve.communicator
        known = [f for f in figures if f is not None]
        assert known
        assert all(len(f.source) > 10 for f in known), device.name
        assert 0 < device.left(8) <= device.memory.capacity.value


def test_capacities_as_published() -> None:
    """Those of the makers' tables, in the unit that the device has."""
    published = {
        "a100-80g": 80 * GIB,
        "h100-sxm": 80 * GIB,
        "h800": 80 * GIB,
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
    found = {n: m.memory.capacity.value for n, m in machines().items()}
    assert {n: found[n] for n in published} == published


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


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("title = 3", "title: Input should be a valid string"),
        ('[memory.capacity]\nvalue = "80 GBi"\nsource = "s"', "memory.capacity.value: "),
        ('[memory.capacity]\nvalue = "80 GiB"', "memory.capacity.source: is missing"),
        (
            '[memory]\nspeed = 3\n[memory.capacity]\nvalue = 1\nsource = "s"',
            "memory.speed: is not in the schema",
        ),
        ("[", "no TOML: "),
    ],
)
def test_what_is_no_device(text: str, told: str) -> None:
    with pytest.raises(DiagnosticError) as caught:
        read_machine("x", text)
    assert told in str(caught.value)


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
    """The unit of makers is that of machines; a remark says so wherever it is not spelled out."""
    limit = LimitType().convert(text, None, None)
    assert (limit.text, limit.room({"tp": 8})) == (text, size)
    remarks = [d.message for d in limit.remarks({})]
    doubtful = text[-1] in "KMGTB" and not text.endswith(("iB", "80B"))
    assert len(remarks) == doubtful
    assert all(f"{size:,} bytes" in told for told in remarks)


def test_a_device_has_room_for_a_job_of_its_mesh() -> None:
    """An axis of one rank needs no communicator."""
    limit = LimitType().convert("H100", None, None)
    h100 = machines()["h100-sxm"]
    assert limit.room({"dp": 4, "tp": 1}) == h100.left(1)
    (told,) = [d.message for d in limit.remarks({"dp": 4, "tp": 8})]
    assert told == (
        "h100-sxm has 80.00 GiB; 922.00 MiB (driver), 551.00 MiB (context), 2 x 392.00 MiB "
        "(communicator of each axis of the mesh) are not for the job: 77.80 GiB are left"
    )


def test_what_is_not_known_of_a_device_is_told() -> None:
    (told,) = LimitType().convert("mi300x", None, None).remarks({"tp": 8})
    assert told.message == (
        "mi300x has 191.98 GiB; not known, and not counted: driver, context, communicators"
    )
