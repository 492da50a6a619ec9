"""What holds for all tests."""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import HealthCheck, settings

# Modules are graphs of many objects, and what a worker remembers grows with its tests: to go
# through all of that at every turn takes a fifth of the time.
gc.set_threshold(50_000, 50, 50)

# Tests take sizes in turns, and what sympy keeps by default is gone when the same come again.
os.environ.setdefault("SYMPY_CACHE_SIZE", "20000")  # read on import; processes inherit it

# The same examples in every run, so that a run is red for what was changed since the one before;
# `pytest --hypothesis-profile=random` looks for new ones. `make test` tries a third of them.
# No clock decides: machines differ, and are shared.
PLAIN = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", PLAIN, derandomize=True)
settings.register_profile("quick", PLAIN, derandomize=True, max_examples=33)
settings.register_profile("random", PLAIN)
settings.load_profile("fixed")


@pytest.fixture(autouse=True)
def verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a quick run modules are not verified after each pass. Lit tests have them verified, by a
    fixture of this name of their own."""
    if settings.get_current_profile_name() == "quick":
        from tests.support import VerifiedOnce  # not before sympy has its cache

        monkeypatch.setattr("stagec.pipeline.manager.Verification", VerifiedOnce)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """The end of a process goes through all objects several times more, for no test."""
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options that choose among cases: CONTRIBUTING.md says which run uses which."""
    parser.addoption(
        "--most",
        type=int,
        default=0,
        help="so many cases of a test at most, spread evenly; those that are 'distinct' stay",
    )
    parser.addoption(
        "--share", type=int, default=1, help="only one in so many of the exhaustive cases"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what the options say; a test that has a case keeps one."""
    most = int(config.getoption("--most") or 0)
    share = int(config.getoption("--share") or 1)
    rare = [item for item in items if item.get_closest_marker("exhaustive")]
    gone = {id(item) for item in rare} - {id(item) for item in rare[::share]}
    by_test: dict[str, list[pytest.Item]] = {}
    for item in items:
        if not any(map(item.get_closest_marker, ("exhaustive", "distinct"))):
            by_test.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in by_test.values() if most else ():
        chosen = {len(cases) * i // most for i in range(most)}
        gone |= {id(c) for i, c in enumerate(cases) if len(cases) > most and i not in chosen}
    if gone:
        config.hook.pytest_deselected(items=[item for item in items if id(item) in gone])
        items[:] = [item for item in items if id(item) not in gone]
