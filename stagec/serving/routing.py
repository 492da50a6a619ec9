"""Routing policies: which replica of a server gets a request."""

from collections.abc import Callable, Mapping, Sequence

from stagec.serving.replica import Replica
from stagec.serving.served import ServedRequest

#: Constants of SGLang's router (sgl-router, `cache_aware`): the difference of loads above which the
#: least loaded replica gets a request, and the share of a prompt that has to match.
_UNBALANCED, _MATCH = 64, 0.5

Router = Callable[[ServedRequest, Sequence[Replica]], Replica]


def _least_loaded(job: ServedRequest, replicas: Sequence[Replica]) -> Replica:
    return min(replicas, key=lambda r: (r.load, r.number))


def _round_robin(job: ServedRequest, replicas: Sequence[Replica]) -> Replica:
    return replicas[(job.number - 1) % len(replicas)]


def _prefix_aware(job: ServedRequest, replicas: Sequence[Replica]) -> Replica:
    loads = [replica.load for replica in replicas]
    if max(loads) - min(loads) <= _UNBALANCED:
        best = max(replicas, key=lambda r: (_matched(job, r), -r.load, -r.number))
        if _matched(job, best) > _MATCH * job.request.prompt:
            return best
    return _least_loaded(job, replicas)


def _matched(job: ServedRequest, replica: Replica) -> int:
    """The tokens of a prompt that a replica has cached."""
    prefix = job.request.prefix
    if replica.prefixes is None or not prefix:
        return 0
    return replica.prefixes.match(prefix, len(prefix)) * replica.prefix_block


#: The policies by name; docs/requests.md describes them.
ROUTERS: Mapping[str, Router] = {
    "round-robin": _round_robin,
    "least-loaded": _least_loaded,
    "prefix-aware": _prefix_aware,
}
