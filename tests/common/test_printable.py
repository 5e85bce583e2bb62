"""No text of a model, a data set, a file or another host reaches a terminal as a command to it."""

from __future__ import annotations

import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TextIO, cast

import pytest
import yaml

from tandem.common.printable import PrintableStream, printable, raw
from tandem.common.telemetry import JsonLines

HOSTILE = "a\x1b[2J\x9b2J\u202eb\x07\x7f\u2066\r\u2028\x85\ufeff\U000e0041c"
SHOWN = (
    "a\\u001b[2J\\u009b2J\\u202eb\\u0007\\u007f\\u2066\\u000d\\u2028\\u0085\\ufeff\\udb40\\udc41c"
)


def is_clean(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


def test_what_cannot_be_seen_is_shown_as_its_escape() -> None:
    assert printable(HOSTILE) == SHOWN


def test_what_can_be_seen_stays_as_it_is() -> None:
    for text in ("", "a\tb\nc", "é 漢字 \u3000 ½ → 🎉 \u00a0", 'C:\\dir "x"'):
        assert printable(text) == text


def test_a_json_text_keeps_its_meaning() -> None:
    assert json.loads(printable(json.dumps(HOSTILE, ensure_ascii=False))) == HOSTILE


def test_a_guarded_stream_writes_no_control_character_but_line_breaks() -> None:
    stream = io.StringIO()
    guarded = PrintableStream(stream)
    print(HOSTILE, "b", file=cast(TextIO, guarded))
    guarded.writelines([HOSTILE, "\n"])
    assert stream.getvalue() == f"{SHOWN} b\n{SHOWN}\n"
    assert raw(cast(TextIO, guarded)) is stream


def test_records_are_read_back_as_they_were_and_are_safe_to_look_at(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "samples.jsonl")
    lines.write({"text": HOSTILE, HOSTILE: "\ud800"})
    lines.close()
    written = (tmp_path / "samples.jsonl").read_text("utf-8")
    assert is_clean(written)
    assert json.loads(written) == {"text": HOSTILE, HOSTILE: "\ud800"}


def _said(cwd: Path, *words: str) -> str:
    done = subprocess.run(
        words, cwd=cwd, capture_output=True, timeout=100, check=False, stdin=subprocess.DEVNULL
    )
    return (done.stdout + done.stderr).decode("utf-8")


@pytest.mark.parametrize("command", ["status", "rollout", "reward"])
def test_a_join_files_run_id_moves_no_cursor(
    command: str, tmp_path: Path, tandem_command: str
) -> None:
    join = {"run_id": HOSTILE, "host": HOSTILE, "port": 1, "password": "x"}
    (tmp_path / "join.json").write_text(json.dumps(join))
    said = _said(tmp_path, tandem_command, command, "--join", "join.json")
    assert said
    assert is_clean(said), said


COMMANDS = """
import json, sys
from tandem.launch.cli import main
from tandem.launch.run import job
job.EARLY = ()  # No role's process loads its libraries while the data are looked for.
for words in json.load(sys.stdin):
    print("\\n---", flush=True)
    main(words)
"""


def test_a_sources_name_moves_no_cursor(tmp_path: Path) -> None:
    preset = {"run": {"steps": 1}, "data": {"train": [{"path": "x.parquet", "name": HOSTILE}]}}
    (tmp_path / "evil.yaml").write_text(yaml.safe_dump(preset))
    commands = [
        ["start", "evil.yaml", "--dry-run"],
        ["start", "evil.yaml"],
        ["config", "evil.yaml"],
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-c", COMMANDS],
        input=json.dumps(commands).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=tmp_path,
        timeout=100,
        check=False,
    )
    _, *said = done.stdout.decode("utf-8").split("\n---\n")
    assert len(said) == 3, said
    for one in said:
        assert one
        assert is_clean(one), one
    assert yaml.safe_load(said[-1])["data"]["train"][0]["name"] == HOSTILE


def test_a_log_line_and_a_traceback_move_no_cursor(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from tandem.common.printable import guard_output\n"
        "from tandem.common.telemetry import start_log\n"
        "guard_output()\n"
        "start_log('x').warning(sys.argv[1])\n"
        "raise ValueError(sys.argv[1])\n"
    )
    said = _said(tmp_path, sys.executable, "-c", program, HOSTILE)
    assert said.count(SHOWN) == 2
    assert is_clean(said)


def test_nor_does_what_a_process_says_that_outlives_a_full_disk(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from tandem.common import disk\n"
        "from tandem.common.printable import guard_output\n"
        "guard_output()\n"
        "disk.keep_streams()\n"
        "print(sys.argv[1])\n"
        "raise ValueError(sys.argv[1])\n"
    )
    said = _said(tmp_path, sys.executable, "-c", program, HOSTILE)
    assert said.count(SHOWN) == 2
    assert is_clean(said)


@pytest.mark.parametrize("words", ["--help", "start no-such-preset"])
def test_a_command_without_standard_streams_ends_as_it_would_with_them(words: str) -> None:
    program = shlex.join([sys.executable, "-m", "tandem.launch.cli"])
    command = f"{program} {words} >&- 2>&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0 if words == "--help" else 2, b"", b"")
