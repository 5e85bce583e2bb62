"""The ways into a sandbox: what a process does to itself before it executes a program.

Each is called in a process that was forked for it, and never returns: it becomes the program, or
ends. :mod:`tandem.reward.sandbox.sandbox` says what the sandbox guarantees, and tests it.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import select
import shutil
import signal
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ...common.confinement import die_with
from .syscall_filter import program as refused_calls
from .syscall_filter import refuse_calls

MAX_PROCESSES = 8
"""Most processes of a program; its threads count too."""
MAX_FILES = 64
MAX_FILE_BYTES = 16 << 20
MEMORY_DISK = "64m"
HOME = "/boxed"
"""A program's working folder; no folder of a host's has this name."""
BOXED_USERS = range(61_184, 65_184)
"""User ids of the programs that root starts; they own no files. Each program gets its own id, since
processes are counted by user. The range is within the ids that a container has."""

_NEWNS, _NEWUTS, _NEWIPC, _NEWUSER, _NEWPID, _NEWNET = (
    *(0x20000, 0x4000000, 0x8000000),
    *(0x10000000, 0x20000000, 0x40000000),
)
_NOSUID, _NODEV, _BIND, _REC, _PRIVATE, _DETACH = 2, 4, 4096, 16384, 1 << 18, 2
_ATTR_RDONLY, _ATTR_NOSUID, _ATTR_NODEV, _AT_RECURSIVE, _AT_FDCWD = 1, 2, 4, 0x8000, -100
_MOUNT_SETATTR = 442
"""Number of the system call ``mount_setattr`` (Linux 5.12), the same on every architecture."""
_NO_NEW_PRIVS = 38

SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/lib32",
    "/etc/ld.so.cache",
    "/etc/alternatives",
)
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use up."""

    seconds: float = 5.0
    """Limit of wall time, and of CPU time."""
    memory_mb: int = 512
    """MiB of address space for each of its processes, and for all of them together with the files that
    they wrote."""


def _call(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    _call(
        "mount",
        source.encode(),
        target.encode(),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        data.encode() if data else None,
    )


def _namespaces(command: list[str], limits: Limits, *, root: bool) -> None:
    everything = _NEWNS | _NEWUTS | _NEWIPC | _NEWPID | _NEWNET
    user, group, runner = os.geteuid(), os.getegid(), os.getppid()
    _call("unshare", everything | (0 if root else _NEWUSER))
    if not root:
        Path("/proc/self/setgroups").write_text("deny")
        # Not root inside either, so that the exec drops every capability.
        Path("/proc/self/uid_map").write_text(f"1000 {user} 1")
        Path("/proc/self/gid_map").write_text(f"1000 {group} 1")
    # Only now, since a change of credentials clears it.
    die_with(runner)
    boxed = BOXED_USERS[os.getpid() % len(BOXED_USERS)]
    alive, held = os.pipe()
    first = os.fork()
    if first:
        os.closerange(0, 6)
        _end_as(first)
    os.close(held)
    _build_root()
    if root:
        os.setgroups([])
        os.setresgid(boxed, boxed, boxed)
        os.setresuid(boxed, boxed, boxed)
    # In the new process namespace its parent is process 0, whether it lives or not.
    die_with(0)
    if select.select([alive], [], [], 0)[0]:
        os._exit(0)  # The keeper has ended before that, and its end of the pipe with it.
    # A handler of Python's is the only one that a signal of the program's could reach.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    program = os.fork()
    if program:
        os.closerange(0, 6)
        _end_as(program)
    # Process 1 counts as one of this user's.
    _limit(limits, processes=MAX_PROCESSES + 1)
    os.execve(command[0], command, environment())


def _end_as(child: int) -> NoReturn:
    """Waits for a child, reaping all others, and ends with its status: 128 and its number for a signal."""
    ended = status = 0
    while ended != child:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _build_root() -> None:
    """Makes a root in memory with the system's folders bound into it read-only, and nothing else."""
    paths = {path: path for path in (*SYSTEM, *DEVICES) if os.path.lexists(path)} | _pythons()
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("box", "/tmp", "tmpfs", _NOSUID | _NODEV, f"size={MEMORY_DISK},mode=755")
    os.makedirs("/tmp/old")
    os.makedirs(f"/tmp/new{HOME}")
    _pivot()
    os.chdir("/")
    for path, place in paths.items():
        _bind(place, path)
    os.makedirs("/new/tmp", exist_ok=True)
    for folder in (f"/new{HOME}", "/new/tmp"):
        os.chmod(folder, 0o777)
    _call("umount2", b"/old", _DETACH)
    os.chroot("/new")
    os.chdir(HOME)


def _pivot() -> None:
    """Makes /tmp the root, under which the old one is /old."""
    numbers = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203, "s390x": 217}
    number = numbers.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root has no known number on {os.uname().machine}")
    _call("syscall", ctypes.c_long(number), b"/tmp", b"/tmp/old")


def _bind(place: str, path: str) -> None:
    source, target = f"/old{place}", f"/new{path}"
    if os.path.islink(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.lexists(target):
            os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        Path(target).touch()
    _mount(source, target, None, _BIND | _REC)
    # Includes all mounts below it; a plain remount would leave those writable.
    attributes = _ATTR_NOSUID | (_ATTR_RDONLY | _ATTR_NODEV if os.path.isdir(source) else 0)
    wanted = struct.pack("=QQQQ", attributes, 0, 0, 0)
    _call(
        "syscall",
        *(ctypes.c_long(_MOUNT_SETATTR), ctypes.c_int(_AT_FDCWD), target.encode()),
        *(ctypes.c_uint(_AT_RECURSIVE), wanted, ctypes.c_size_t(len(wanted))),
    )


def _pythons() -> dict[str, str]:
    """Folders of this interpreter, each with the place to which links on its way lead.

    Those inside another one, or inside the system's, are left out, and each place is one of the folders: a
    link inside another folder leads there.
    """
    folders = {sys.prefix, sys.base_prefix, sys.exec_prefix}
    folders |= {os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))}
    folders |= {os.path.realpath(folder) for folder in folders}
    folders = {folder for folder in folders - {"/", ""} if os.path.isdir(folder)}
    inside = tuple(f"{folder}/" for folder in (*SYSTEM, *folders))
    return {
        folder: os.path.realpath(folder)
        for folder in sorted(folders)
        if folder not in SYSTEM and not folder.startswith(inside)
    }


def environment() -> dict[str, str]:
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": HOME,
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        # More threads than the process limit allows would fail.
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


def _limit(limits: Limits, *, processes: int | None = MAX_PROCESSES, refuse: bool = True) -> None:
    memory = limits.memory_mb << 20
    seconds = math.ceil(limits.seconds) + 1
    for what, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
    ):
        resource.setrlimit(what, (most, most))
    if processes is not None:
        resource.setrlimit(resource.RLIMIT_NPROC, (processes, processes))
    if refuse:
        _call("prctl", _NO_NEW_PRIVS, 1, 0, 0, 0)
        refuse_calls()


def as_root(command: list[str], limits: Limits) -> None:
    if os.geteuid() != 0:
        raise OSError("not root")
    _namespaces(command, limits, root=True)


def as_user(command: list[str], limits: Limits) -> None:
    _namespaces(command, limits, root=False)


def bubblewrap(command: list[str], limits: Limits) -> None:
    program = shutil.which("bwrap")
    if program is None:
        raise OSError("bwrap isn't installed")
    arguments = [program, "--unshare-all", "--die-with-parent", "--new-session", "--clearenv"]
    # First, since the interpreter may be inside it.
    arguments += ["--tmpfs", "/tmp"]
    for path in SYSTEM:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        else:
            arguments += ["--ro-bind-try", path, path]
    for path, place in _pythons().items():
        arguments += ["--ro-bind", place, path]
    arguments += ["--dev", "/dev", "--tmpfs", HOME, "--chdir", HOME]
    arguments += ["--uid", "1000", "--gid", "1000"]
    for name, value in environment().items():
        arguments += ["--setenv", name, value]
    # bwrap applies the filter after building the box, which takes calls that the filter refuses. It gives up new
    # privileges first of all; where it is installed with the set-user-id bit, it couldn't start without them.
    filtered = os.memfd_create("calls", 0)
    os.write(filtered, refused_calls())
    os.lseek(filtered, 0, os.SEEK_SET)
    arguments += ["--seccomp", str(filtered)]
    _limit(limits, processes=None, refuse=False)
    # Set inside the box: outside, all processes of this user count.
    most = f"resource.setrlimit(resource.RLIMIT_NPROC, ({MAX_PROCESSES}, {MAX_PROCESSES}))"
    first = f"import os, resource, sys\n{most}\nos.execv(sys.argv[1], sys.argv[1:])"
    os.execve(program, [*arguments, command[0], "-I", "-S", "-c", first, *command], environment())


def unboxed(command: list[str], limits: Limits) -> None:
    os.chdir("/")
    _limit(limits)
    os.execve(command[0], command, environment())
