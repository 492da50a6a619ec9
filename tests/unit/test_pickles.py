"""Answers go from process to process: a pickle of each gives the same figures, text and page."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count
from multiprocessing import get_context

import pytest

import stagec
from stagec.output.report import Report
from stagec.support.rebuilt import Rebuilt
from tests.support import LONG
from tests.unit.test_python import DECODE, MACHINE, PODS, SIZES, made

ANSWERS: dict[str, Callable[[], Report]] = {
    "analysis": lambda: made(tp=2).analyze(),
    "memory": lambda: made(pp=2, dp=2, zero=1).memory(limit="h100"),
    "placed memory": lambda: made(tp=2).memory(fit="caching"),
    "memory of pods": lambda: made(**PODS).memory(),
    "time": lambda: made(pp=2, microbatches=4).time(MACHINE, levers=True),
    "time of decode": lambda: made(**DECODE).time(MACHINE),
    "time of pods": lambda: made(**PODS).time(MACHINE),
    "sweep": lambda: made(tp=2).sweep({"dp": [1, 2, 3]}, machine=MACHINE, limit="h100", jobs=1),
    "counted sweep": lambda: made(tp=2).sweep({"dp": [1, 2]}, jobs=1),
    "server": lambda: made(tp=2, prompt=64).serve(MACHINE, batches=[1, 4], output_tokens=4),
    "requests": lambda: made(prompt=64).serve_requests(MACHINE, rate=4, count=5, output_tokens=4),
    "search": lambda: stagec.search(
        "llama3-8b", machine=MACHINE, sizes=SIZES, ranks=2, pp=1, cp=1, zero=1, jobs=1, cache=False
    ),
    "compile": lambda: made(tp=2).compile(),
}


@LONG
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_from_a_pickle_is_the_same(name: str) -> None:
    answer = ANSWERS[name]()
    data = pickle.dumps(answer)
    read: Report = pickle.loads(data)
    assert len(data) < 100_000  # figures, not programs
    assert read == answer
    assert read.as_json() == answer.as_json()
    assert str(read) == str(answer)
    assert read.rows() == answer.rows()
    assert read.page() == answer.page()
    assert pickle.loads(pickle.dumps(read)) == answer


def seconds(job: stagec.Job) -> Report:
    return job.time(MACHINE)


@pytest.mark.long
def test_jobs_are_timed_by_processes() -> None:
    jobs = [made(tp=2), made(dp=2)]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert list(pool.map(seconds, jobs)) == [job.time(MACHINE) for job in jobs]


def test_a_value_is_built_once_in_each_process() -> None:
    value = Rebuilt(partial(next, count(1)))
    assert (value(), value()) == (1, 1)
    given = Rebuilt(list[int], [1])
    assert given() == [1]
    assert pickle.loads(pickle.dumps(given))() == []
