"""Steps of servers on pipeline stages: each is one microbatch, others are on the other stages."""

from __future__ import annotations

from stagec.jobs.pod_options import has_pods, options_of_pod
from stagec.jobs.request.flags import FLAGS
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving_flags import DISAGGREGATED, PODS


def of_a_stage(options: JobOptions) -> JobOptions:
    """The options of a step on pipeline stages: one microbatch, unless --microbatches has them or
    they take turns, with attention apart; of two pods those of each. Raises `DiagnosticError`."""
    if options.serve == DISAGGREGATED and not options.part:
        asked = options.changed(chunk=None)
        several = [pod for pod in PODS if _has_microbatches(options_of_pod(pod, asked))]
        texts = {pod: f"{getattr(options, pod) or ''} microbatches=1".strip() for pod in several}
        return options.changed(**texts)
    one = _has_microbatches(options) and not has_pods(options)
    return options.changed(microbatches=1) if one else options


def _has_microbatches(options: JobOptions) -> bool:
    """Whether a step on pipeline stages would have as many microbatches as these, which do not
    take turns with attention apart."""
    default = FLAGS["microbatches"].is_default(options.microbatches)
    return options.pp > 1 and default and not options.afd


def steps_in_flight(options: JobOptions) -> int:
    """The steps of other sequences at a time: one for each pipeline stage, where a step is one
    microbatch."""
    return options.pp if options.microbatches == 1 and not has_pods(options) else 1
