// A moment of a step has the same name on axes of different times: what computes then, and the share of
// that which is done, as in backward:0.25. `runs` are what computes, from when to when, in order.
const MOMENT_PHASES = { forward: "forward", backward: "backward", weights: "backward", recompute: "backward", gradient: "backward", optimizer: "optimizer" };

function phaseTimes(runs) {
  const sums = {};
  for (const [phase, start, end] of runs) sums[phase] = (sums[phase] || 0) + end - start;
  return sums;
}

function momentAt(runs, time) {
  const sums = phaseTimes(runs), done = {};
  let last = null;
  for (const [phase, start, end] of runs) {
    if (start >= time && last !== null) break;
    done[phase] = (done[phase] || 0) + Math.min(end, time) - start;
    last = phase;
  }
  return last === null ? null : `${last}:${(done[last] / Math.max(1, sums[last])).toFixed(4)}`;
}

// The time of a moment; null where nothing of that kind computes.
function timeOf(runs, moment) {
  const [wanted, share] = moment.split(":"), sums = phaseTimes(runs);
  let left = Number(share) * sums[wanted];
  for (const [phase, start, end] of runs) {
    if (phase !== wanted) continue;
    if (left <= end - start) return start + left;
    left -= end - start;
  }
  return null;
}

// A class of one page is that of another one, which may tell apart more of the ranks of a stage.
const isClass = (name, other) => other !== null && (name === other || name.startsWith(`${other}-`) || other.startsWith(`${name}-`));
