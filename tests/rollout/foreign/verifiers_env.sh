#!/usr/bin/env bash
# Makes a virtual environment with verifiers and textarena, whose episodes then need no network.
set -eu

folder="${1:?usage: bash tests/rollout/foreign/verifiers_env.sh FOLDER}"
python3 -m venv "$folder"
folder="$(cd "$folder" && pwd -P)"
"$folder/bin/pip" install -q verifiers==0.4.0 textarena==0.7.4 nltk uv

# The harnesses `null` and `bash` run a script in an environment that uv makes for it in the first episode of
# each server, and would ask the index each time: a lock beside the script keeps it from that. Tandem starts
# verifiers with this folder as its home, so that it finds both.
mkdir -p "$folder/home"
chmod 700 "$folder/home"
export HOME="$folder/home" PATH="$folder/bin:$PATH"
python - <<'PYTHON'
import hashlib
from pathlib import Path
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE
from verifiers.v1.runtimes.subprocess import SubprocessRuntime

source = CHAT_PROGRAM_SOURCE.encode()
script = Path(SubprocessRuntime.scripts_dir) / f"{hashlib.sha256(source).hexdigest()}.py"
script.parent.mkdir(parents=True, exist_ok=True)
script.write_bytes(source)
PYTHON
for script in "$HOME"/.cache/verifiers/runtimes/scripts/*.py; do
  uv lock --script "$script" -q --no-config
  uv sync --script "$script" -q --no-config
done
echo "verifiers is ready: TANDEM_VERIFIERS=$folder/bin/python"
