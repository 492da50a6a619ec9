"""A replica whose steps a policy of a plug-in plans (`stagec.serving.policy`)."""

from collections.abc import Sequence
from typing import Any, cast

from stagec.serving.pipelined import PipelinedReplica
from stagec.serving.policy import BatchingPolicy, LiveRequest, ServerState, StepPlan
from stagec.serving.served import ServedRequest
from stagec.support.diagnostics import DiagnosticError, error


class PlannedReplica(PipelinedReplica):
    """A replica whose steps a `policy` plans. Sequences that decode are chunks of a token, of which
    a step may leave some out."""

    _batched = False

    def __init__(self, policy: BatchingPolicy, *about: Any, **more: Any) -> None:
        super().__init__(*about, **more)
        self._policy = policy
        self._done_jobs: list[ServedRequest] = []

    def _chosen(self) -> tuple[list[tuple[ServedRequest, int]], int, int]:
        """Carry out a plan of the policy. Raises `DiagnosticError` for an invalid one."""
        free = None if self.limits.blocks is None else self.free
        server = ServerState([*self._partial], self.waiting, self.limits, free)
        plan = cast("object", self._policy.plan(server))
        if not isinstance(plan, StepPlan):
            raise error(
                f"the batching policy '{self._policy.name}' gives a {type(plan).__name__} as a "
                "step",
                remedy="return a stagec.api.StepPlan from 'plan'",
            )
        for job in cast("Sequence[ServedRequest]", plan.preempted):
            if job not in self._partial:
                raise self._wrong(job, "gives up the cache of", "which does not run")
            self._preempt(job)  # a token that is under way is lost
        self._check(plan.work)
        chunks: list[tuple[ServedRequest, int]] = []
        for job, tokens in cast("Sequence[tuple[ServedRequest, int]]", plan.work):
            if job not in self._partial:
                self.waiting.remove(job)
                self._begin(job, ())
            self._take(job, tokens, chunks)
        return chunks, 0, 1

    def _check(self, work: Sequence[tuple[LiveRequest, int]]) -> None:
        seen: set[LiveRequest] = set()
        for job, tokens in work:
            if job in seen or not (job in self._partial or job in self.waiting):
                raise self._wrong(job, "asks for", "twice in a step, or before or after its time")
            if not 1 <= tokens <= job.left:
                what = f"adds {tokens} tokens to"
                raise self._wrong(job, what, f"which can add {job.left}")
            seen.add(job)
        used = (
            (sum(tokens for _, tokens in work), self.limits.tokens, "tokens"),
            (len(seen.union(self._partial)), self.limits.sequences, "sequences"),
            (sum(self._grown(*each) for each in work), self.free, "blocks of the cache"),
        )
        for count, bound, what in used:
            if count > bound:
                step = self.tally.steps + len(self._under) + 1
                raise error(
                    f"the batching policy '{self._policy.name}' fills step {step:,} with "
                    f"{count:,} {what}, and there is room for {bound:,}",
                    remedy="let 'plan' keep to 'limits' and 'free' of its state",
                )

    def _wrong(self, job: LiveRequest, does: str, why: str) -> DiagnosticError:
        return error(
            f"the batching policy '{self._policy.name}' {does} request {job.number}, {why}",
            job.request.loc,
            remedy="let 'plan' choose among 'running' and 'waiting' of its state, each once",
        )

    def _decode(self, job: ServedRequest) -> None:
        if job.generated == job.request.output:
            self._done_jobs.append(job)

    def _ended(self, now: int) -> list[ServedRequest]:
        done, self._done_jobs = self._done_jobs, []
        for job in done:
            job.last = now
            self._stop(job)
        return done
