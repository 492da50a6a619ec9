"""Mutated inputs: what was found once stays repaired, and a short run of each family finds nothing.

`make fuzz` tries more; docs/reliability.md has the figures.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support import tries
from tools import fuzz
from tools.fuzzing.families import FAMILIES, Family, FaultError

CORPUS = sorted(p for p in fuzz.CORPUS.rglob("*") if p.is_file())
#: Inputs of each family: as many as take a second or two; `make test` tries a part of them.
SHORT = {
    "parser": 1500,
    "verifier": 1500,
    "pipelines": 700,
    "dumps": 60,
    "command-lines": 60,
    "archives": 150,
    "folders": 100,
    "traces": 40,
    "records": 600,
    "time": 15,
    "search": 20,
    "serve": 20,
    "import": 150,
    "fit": 15,
    "measure": 30,
    "simulate": 40,
    "convert": 40,
}


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_what_was_found_is_repaired(path: Path, tmp_path: Path) -> None:
    FAMILIES[path.parent.name].run(path.read_bytes(), tmp_path)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_short_run(name: str, tmp_path: Path) -> None:
    actual: Counter[str] = Counter()
    for number in range(tries(SHORT[name])):
        data = fuzz.made(FAMILIES[name], 0, number)
        actual[fuzz.fault_of(FAMILIES[name], data, tmp_path, 0)] += 1
    assert not +Counter({fault: n for fault, n in actual.items() if fault}), "see tools/fuzz.py"


# -- the fuzzer itself


def planted(word: bytes) -> Family:
    """A family that fails for a word."""

    def run(data: bytes, _: Path) -> None:
        if word in data:
            raise FaultError("planted")
        FAMILIES["parser"].run(data, Path())

    return replace(FAMILIES["parser"], run=run)


def test_an_input_is_reported_by_its_number() -> None:
    for family in FAMILIES.values():
        assert fuzz.made(family, 3, 7) == fuzz.made(family, 3, 7)
        inputs = {fuzz.made(family, 3, n) for n in range(8)}
        assert len(inputs) > 4, "inputs differ"


def test_a_planted_fault_is_found_and_made_small(tmp_path: Path) -> None:
    family = planted(b"stg.repeat")
    numbers = (
        n for n in range(2000) if fuzz.fault_of(family, fuzz.made(family, 0, n), tmp_path, 0)
    )
    data = fuzz.made(family, 0, next(numbers))
    assert fuzz.minimized(family, data, tmp_path, 0) == b"stg.repeat"


def test_an_input_that_does_not_end_is_a_fault(tmp_path: Path) -> None:
    def run(_: bytes, __: Path) -> None:
        while True:
            pass

    family = replace(FAMILIES["parser"], run=run)
    assert fuzz.fault_of(family, b"", tmp_path, 0.05) == "parser: takes more than 0.05 s"


def test_a_campaign_keeps_one_input_for_each_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    campaign = fuzz.Campaign(tmp_path / "found", 0, tmp_path)
    for number in range(300):
        campaign.try_one(planted(b"stg.func"), 0, number)
    assert campaign.tried == {"parser": 300}
    assert campaign.faults["parser: planted"] > 100
    (kept,) = (tmp_path / "found" / "parser").iterdir()
    assert b"stg.func" in kept.read_bytes()
    assert capsys.readouterr().out.count("fault: ") == 1
