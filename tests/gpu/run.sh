#!/usr/bin/env bash
# Runs the GPU kit: in the repository's environment where it has all, else in a temporary one of carried wheels.
set -u

usage() {
  cat <<'TEXT'
usage: bash tests/gpu/run.sh [--minutes N] [--out DIR] [--wheels DIR] [--python PYTHON]
                             [--device cuda|cpu] [--sizes gpu|tiny] [--only PART ...]

Shows within N minutes (default 10) what one GPU can show of Tandem, and writes gpu.json and gpu.md into DIR
(default: $OUT, or gpu-results). Needs no network. docs/gpu.md says what it runs.

The environment is .venv of the repository if that has all of it, with a torch that sees the GPU (with --device
cpu: any torch). Else one is made in a temporary folder, of what PYTHON (default: python3) has, which must be torch,
transformers, peft, tensorboard and pyarrow for Python 3.12, and of the wheels in --wheels (default: .gpu-wheels), which
`python tests/gpu/wheels.py --out .gpu-wheels` has fetched on a machine with a network.
Ends with status 1 if a part failed, 2 if there is no environment.
TEXT
}

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)" || exit 2
wheels="$root/.gpu-wheels"
outside=python3
device=cuda
words=()
while [ $# -gt 0 ]; do
  case "$1" in
    -h | --help) usage; exit 0 ;;
    --wheels) shift; wheels="${1:-}" ;;
    --python) shift; outside="${1:-}" ;;
    --device) shift; device="${1:-}" ;;
    *) words+=("$1") ;;
  esac
  shift
done
case "$wheels" in /*) ;; *) wheels="$PWD/$wheels" ;; esac

say() { echo "gpu kit: $*" >&2; }
stop() { printf 'gpu kit: %s\n' "$@" >&2; exit 2; }

# torch last: importing it takes seconds.
complete='import importlib.util as u, sys
names = "zmq msgspec msgpack redis xxhash pydantic rich psutil yaml pyarrow aiohttp hypothesis transformers peft tensorboard deepspeed math_verify re2 pytest pytest_timeout tandem torch".split()
missing = [n for n in names if u.find_spec(n) is None]
if missing:
    sys.exit("lacks " + ", ".join(missing))
import torch
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit("its torch " + torch.__version__ + " sees no GPU")'

venv="${TANDEM_VENV:-$root/.venv}"
temporary=""
remove() { [ -n "$temporary" ] && rm -rf "$temporary"; }
trap remove EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

why="isn't there"
lacking() { # sets why to what Python $1 lacks, or to nothing; whatever an import warns of doesn't count
  if why="$("$1" -W ignore -c "$complete" "$device" 2>&1)"; then why=""; else why="$(tail -n 1 <<<"$why")"; fi
}
[ -x "$venv/bin/python" ] && lacking "$venv/bin/python"
if [ -x "$venv/bin/python" ] && [ -z "$why" ]; then
  python="$venv/bin/python"
else
  say "$venv $why; making an environment of $outside and $wheels"
  ls "$wheels"/*.whl >/dev/null 2>&1 ||
    stop "$wheels holds no wheels: on a machine with a network run" \
      "  .venv/bin/python tests/gpu/wheels.py --out .gpu-wheels" \
      "and carry the folder here, or name it: --wheels DIR"
  "$outside" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' ||
    stop "$outside isn't a Python 3.12, for which the wheels are: name one, --python /path/to/python3.12"
  temporary="$(mktemp -d "${TMPDIR:-/tmp}/tandem-gpu-XXXXXX")" || exit 2
  venv="$temporary/venv"
  # Without pip, which some systems' Python can't install: the outside one's is used.
  "$outside" -m venv --without-pip "$venv" || stop "$outside can't make an environment"
  python="$venv/bin/python"
  # The folders of packages that the outside Python itself sees. --system-site-packages wouldn't do: of a Python that is
  # in an environment of its own it gives those of the Python below it.
  site="$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || exit 2
  "$outside" -c 'import sys, site
folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
print("\n".join(f for f in sys.path if f in folders or f.endswith(("site-packages", "dist-packages"))))' \
    >"$site/outside.pth" || exit 2
  for what in "$wheels"/*.whl "-e $root"; do
    # shellcheck disable=SC2086 # the last one is two words
    set -- "$@" $what
  done
  "$outside" -m pip --python "$python" install -q --no-index --no-deps --no-cache-dir \
    --disable-pip-version-check --find-links "$wheels" "$@" || stop "pip couldn't install the wheels"
  # Tandem's tests and processes are started by this name, too.
  lacking "$python"
  [ -z "$why" ] || stop "the environment $why" \
    "carry what $outside lacks: python tests/gpu/wheels.py --out .gpu-wheels --carry ..."
fi

PATH="$(dirname "$python"):$PATH"
export PATH
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false WANDB_MODE=offline
"$python" "$root/tests/gpu/kit.py" --device "$device" ${words[@]+"${words[@]}"}
