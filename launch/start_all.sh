#!/usr/bin/env bash
# Sets up what is missing, then starts a whole run on this host: ledger, reward pool, workers, learner.
set -u

usage() {
  cat <<'TEXT'
usage: bash launch/start_all.sh [PRESET] [key=value ...] [--dry-run]

Sets up .venv where that is not done yet (launch/setup.sh), then runs `tandem start` with the same
arguments. Without arguments: the miniature, a whole run on a CPU.

  PRESET       the name of a file in launch/configs, or the path of your own .yaml
  key=value    any setting, e.g. run.steps=20; `tandem config` lists them with their meaning
  --dry-run    print every process with its GPUs, command and memory, and what this machine lacks;
               start nothing (where .venv is missing, a small one without torch is set up first)

Once set up, `.venv/bin/tandem start --help` has every option, and `.venv/bin/tandem --help` the
other commands. TANDEM_VENV names another virtual environment, TANDEM_SKIP_SETUP=1 skips the set-up.
TEXT
}

role=all
for argument in "$@"; do
  case "$argument" in
    -h | --help) usage; exit 0 ;;
    --dry-run) role=core ;; # a plan needs no torch
  esac
done
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)" || exit 1
bash "$root/launch/setup.sh" --role "$role" >&2 || exit $?
exec "${TANDEM_VENV:-$root/.venv}/bin/tandem" start "$@"
