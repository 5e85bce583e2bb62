#!/usr/bin/env bash
# Gets a redis-server that speaks TLS for the tests beside it: Debian's, unpacked into the virtual environment.
# Nothing is installed, so that runs start the same redis-server as before.
set -eu
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
place="${TANDEM_VENV:-$root/.venv}/redis-tls"
[ -x "$place/usr/bin/redis-server" ] && exit 0
if ! command -v apt-get >/dev/null; then
  echo "there is no apt-get here: put a redis-server built with TLS on PATH" >&2
  exit 1
fi
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
mkdir "$work/partial"
download() {
  apt-get install -y -q --download-only -o Dir::Cache::archives="$work" redis-server
}
{ download || { apt-get update -q && download; }; } >"$work/log" 2>&1 || {
  tail -n 5 "$work/log" >&2
  exit 1
}
for package in "$work"/*.deb; do
  [ -e "$package" ] || continue # all of it is installed
  dpkg-deb -x "$package" "$work/unpacked"
done
if [ -d "$work/unpacked" ]; then
  rm -rf "$place"
  mv "$work/unpacked" "$place"
fi
