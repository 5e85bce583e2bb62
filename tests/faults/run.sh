#!/usr/bin/env bash
# One storm: a run of real processes under random SIGKILLs, then its audit. See storm.py.
set -u

usage() {
  cat <<'TEXT'
usage: bash tests/faults/run.sh [--seed N] [--kills K] [--staleness ETA] [--groups N] [--keep DIR]
                                [--environments] [KEY=VALUE …]

Starts a run (rollout workers with a scripted engine, reward pools with graders, the learner,
redis-server), kills K of its processes at instants that the seed settles, waits for its end, and
audits Redis, the journal and the checkpoint. With --environments groups are episodes with a tool,
and environment servers and the processes of episodes are killed too. KEY=VALUE overrides a setting of the run. Prints a
table; exits with 1 on any breach. Needs what `bash launch/setup.sh --dev` installs.
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)" || exit 1
venv="${TANDEM_VENV:-$root/.venv}"
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
here="$root/tests/faults"
export PYTHONPATH="$here:$root/.import${PYTHONPATH:+:$PYTHONPATH}"
export PATH="$venv/bin:$PATH"
exec "$venv/bin/python" "$here/storm.py" "$@" </dev/null
