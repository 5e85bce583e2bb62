#!/usr/bin/env bash
# Sets up what is missing, then trains from stored groups and expert traces, with no rollout worker.
set -u

usage() {
  cat <<'TEXT'
usage: bash launch/replay_offline.sh [PRESET] [key=value ...]

Sets up .venv where that is not done yet (launch/setup.sh), then runs `tandem offline` with the same
arguments: the learner alone, on an archive of stored groups and expert traces.

  PRESET       the name of a file in launch/configs, or the path of your own .yaml
  key=value    any setting; `tandem config` lists them with their meaning

Once set up, `.venv/bin/tandem offline --help` has every option. TANDEM_VENV names another virtual
environment, TANDEM_SKIP_SETUP=1 skips the set-up.
TEXT
}

for argument in "$@"; do
  case "$argument" in -h | --help) usage; exit 0 ;; esac
done
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)" || exit 1
bash "$root/launch/setup.sh" >&2 || exit $?
exec "${TANDEM_VENV:-$root/.venv}/bin/tandem" offline "$@"
