#!/usr/bin/env bash
# Sets up what is missing, then runs lint, types and the tests; with arguments, only those tests.
set -u

usage() {
  cat <<'TEXT'
usage: bash tests/run.sh [--all] [--coverage] [--require STAGE]
       bash tests/run.sh PYTEST ARGS ...

Sets up .venv with the tests' own packages where that is not done yet (launch/setup.sh --dev), then
runs ruff, mypy, import-linter, shellcheck and the tests in stages, and checks that no process and no
file is left behind: the stage unit, with the README's own commands, in about ten minutes on two cores.
With --all also the long stages: slow (its slowest files, and the commands of docs/), updates (of a
learner, and of engines' weights), processes (commands, workers, pools and servers), e2e (whole runs,
some with kills), hosts (several of them, and redis-servers of others) and vllm, three quarters of an
hour in all on two slow cores; CI runs these. vLLM's tests run where vLLM is installed
(bash launch/setup.sh --dev --vllm), and are listed as not run where not; with --require vllm that is
a failure, and so is a single one of them that is skipped. With --coverage it tells at the end which
lines of which files no test ran (processes that are killed don't count).
With other arguments, pytest alone is run with them:

  bash tests/run.sh tests/replay -k lease

TANDEM_VENV names another virtual environment, TANDEM_SKIP_SETUP=1 skips the set-up.
TEXT
}

case "${1:-}" in -h | --help) usage; exit 0 ;; esac
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)" || exit 1
venv="${TANDEM_VENV:-$root/.venv}"
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
export TANDEM_VENV="$venv"
cd "$root" || exit 1
bash launch/setup.sh --dev --no-vllm || {
  code=$?
  echo "0 passed, 1 failed"
  exit "$code"
}
exec "$venv/bin/python" tests/stages.py "$@" </dev/null
