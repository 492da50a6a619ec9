# The types with which loop.py is compiled.
cimport cython

ctypedef long long picoseconds


@cython.locals(i=cython.int, j=cython.int, k=cython.int, why=cython.int, ready=picoseconds)
cpdef run(
    const int[::1] order,
    const int[::1] begins,
    const int[::1] before,
    const picoseconds[::1] span,
    picoseconds[::1] start,
    picoseconds[::1] end,
    int[::1] cause,
    const picoseconds[::1] gap,
    const int[::1] past,
    const int[::1] owner,
    const int[::1] beside,
    int[::1] low,
    picoseconds rate,
)


@cython.locals(
    j=cython.int, k=cython.int, left=picoseconds, slow=picoseconds, free=picoseconds,
    speed=picoseconds, until=picoseconds,
)
cdef picoseconds slowed_end(
    picoseconds now,
    picoseconds work,
    const int[::1] beside,
    int first,
    int last,
    const picoseconds[::1] start,
    const picoseconds[::1] end,
    picoseconds rate,
)


@cython.locals(i=cython.int, of=cython.int, count=cython.int, now=picoseconds)
cpdef int spend(
    const int[::1] computing,
    const picoseconds[::1] begun,
    const picoseconds[::1] ended,
    const picoseconds[::1] took,
    const int[::1] cause,
    const unsigned char[::1] call,
    int last,
    int[::1] node,
    picoseconds[::1] since,
    picoseconds[::1] until,
)


@cython.locals(start=picoseconds)
cdef int trace_back(
    int of,
    picoseconds first,
    picoseconds last,
    const picoseconds[::1] took,
    const int[::1] cause,
    int[::1] node,
    picoseconds[::1] since,
    picoseconds[::1] until,
    int count,
)


@cython.locals(i=cython.int, j=cython.int, k=cython.int)
cpdef turn_round(
    const int[::1] begins,
    const int[::1] before,
    const int[::1] later,
    const int[::1] earlier,
    int[::1] waiting,
    int[::1] after_begins,
    int[::1] after,
)


@cython.locals(i=cython.int, j=cython.int, k=cython.int, at=cython.int, done=cython.int)
cpdef int put_in_order(
    int[::1] waiting, const int[::1] after_begins, const int[::1] after, int[::1] order,
)
