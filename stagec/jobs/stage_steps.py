"""Steps of servers on pipeline stages: a step is one microbatch, while other steps are on other
stages."""

from stagec.jobs.pod_options import has_pods, options_of_pod
from stagec.jobs.request.flags import FLAGS
from stagec.jobs.request.options import JobOptions
from stagec.jobs.request.serving_flags import DISAGGREGATED, PODS


def of_a_stage(options: JobOptions) -> JobOptions:
    """The options of a step on pipeline stages, with one microbatch unless --microbatches is given
    or microbatches alternate (`--afd`); with two pods, for each of them. Parts have the
    microbatches of the job. Raises `DiagnosticError`."""
    if options.serve == DISAGGREGATED and not options.part:
        asked = options.changed(chunk=None)
        several = [pod for pod in PODS if _has_microbatches(options_of_pod(pod, asked))]
        texts = {pod: f"{getattr(options, pod) or ''} microbatches=1".strip() for pod in several}
        return options.changed(**texts)
    one = _has_microbatches(options) and not options.part
    return options.changed(microbatches=1) if one else options


def _has_microbatches(options: JobOptions) -> bool:
    """Whether a step on pipeline stages would by default have several microbatches, which do not
    alternate (`--afd`)."""
    default = FLAGS["microbatches"].is_default(options.microbatches)
    return options.pp > 1 and default and not options.afd


def steps_in_flight(options: JobOptions) -> int:
    """The number of steps in flight: one for each pipeline stage, if a step is one microbatch."""
    return options.pp if options.microbatches == 1 and not has_pods(options) else 1
