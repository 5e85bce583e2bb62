#!/usr/bin/env bash
# Sets up what is missing, then starts one rollout worker that joins a run, on this host or another one.
set -u

usage() {
  cat <<'TEXT'
usage: bash launch/start_rollout.sh [ARGS ...]

Sets up .venv for the rollout role where that is not done yet (launch/setup.sh --role rollout), then
runs `tandem rollout` with the same arguments: one worker with one engine, which joins a run that is
under way, and may leave it at any time. On another host than the run's, copy the file that
`tandem join-file` writes there first.

Once set up, `.venv/bin/tandem rollout --help` has every option. TANDEM_VENV names another virtual
environment, TANDEM_SKIP_SETUP=1 skips the set-up.
TEXT
}

for argument in "$@"; do
  case "$argument" in -h | --help) usage; exit 0 ;; esac
done
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)" || exit 1
bash "$root/launch/setup.sh" --role rollout >&2 || exit $?
exec "${TANDEM_VENV:-$root/.venv}/bin/tandem" rollout "$@"
