"""A Redis with a password, and who may read it: words of processes, and files."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from processes import Run

from tandem.common.run_folder import JoinInfo
from tandem.launch.host import redis_server

MARKER = "pass:word@marker"
QUOTED = "pass%3Aword%40marker"


@contextmanager
def server_with_password(place: Path) -> Iterator[str]:
    """A redis-server; gives its URL, with the password in it."""
    port = redis_server.choose_port("127.0.0.1", None)
    conf = place / "redis.conf"
    conf.write_text(
        f'port {port}\nbind 127.0.0.1\nrequirepass "{MARKER}"\ndir {place}\nappendonly yes\nappendfsync no\n'
    )
    with open(place / "log", "wb") as log:
        process = subprocess.Popen([str(redis_server.find().path), str(conf)], stdout=log)
    join = JoinInfo(run_id="", host="127.0.0.1", port=port, password=MARKER)
    try:
        redis_server.wait_ready(join, deadline=20, alive=lambda: process.poll() is None)
        yield f"redis://:{QUOTED}@127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def words_until_the_end(run: Run) -> set[str]:
    """The words of all processes that a command has started, while it is up."""
    seen: set[str] = set()
    try:
        while run.process.poll() is None:
            for child in run.tree.children(recursive=True):
                try:
                    seen.update(child.cmdline())
                except psutil.Error:
                    continue
            try:
                run.process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
    finally:
        run.end()
    return seen


def holding(folder: Path) -> set[str]:
    """Names of the files below a folder that hold the password."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {
        path.name
        for path in files
        if any(form.encode() in path.read_bytes() for form in (MARKER, QUOTED))
    }
