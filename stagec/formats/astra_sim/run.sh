#!/bin/sh
# Runs ASTRA-sim on this job: sh run.sh BINARY [FURTHER OPTIONS]
# BINARY is AstraSim_Analytical_Congestion_Unaware. Exits with 1 if a rank does not end.
set -u
binary=${1:-${ASTRA_SIM:-}}
if [ -z "$binary" ]; then
  echo "usage: sh run.sh BINARY, or ASTRA_SIM=BINARY sh run.sh" >&2
  exit 2
fi
[ $# -gt 0 ] && shift
here=$(cd "$(dirname "$0")" && pwd)
ranks=@RANKS@
# one open file a rank, and some more
ulimit -n $((ranks + 256)) 2>/dev/null || [ "$(ulimit -n)" = unlimited ] \
  || [ "$(ulimit -n)" -ge $((ranks + 256)) ] \
  || echo "warning: $ranks ranks need $((ranks + 256)) open files: raise ulimit -n" >&2
"$binary" \
  --workload-configuration="$here/@NAME@" \
  --comm-group-configuration="$here/@NAME@.json" \
  --system-configuration="$here/system.json" \
  --network-configuration="$here/network.yml" \
  --remote-memory-configuration="$here/memory.json" \
@MORE@  "$@" >"${LOG:=astra-sim.log}" 2>&1
status=$?
ended=$(grep -c 'sys\[[0-9]*\] finished' "$LOG")
last=$(sed -n 's/.*finished, \([0-9]*\) cycles.*/\1/p' "$LOG" | sort -n | tail -n 1)
echo "$ended of $ranks ranks ended, the last after ${last:-0} ns (log: $LOG)"
if [ "$ended" -ne "$ranks" ]; then
  echo "error: $((ranks - ended)) ranks did not end; ASTRA-sim's exit code was $status" >&2
  exit 1
fi
