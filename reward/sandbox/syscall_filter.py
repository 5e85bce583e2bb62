"""The system calls that a boxed program is refused, as a seccomp filter (Linux's own, classic BPF).

They are the ones that allocate memory which belongs to no process, so that no limit of a process counts
it (System V segments and queues, memory files, rings, keys), and the ones that make namespaces and
mounts, where a file system in memory could have any size. Those with which one process takes over
another are refused too, or a program could go on as process 1 of its namespace, which ends it with its
keeper. A refused call fails with EPERM.
"""

from __future__ import annotations

import ctypes
import os
import struct

_NEW_NAMESPACES = 0x7E020080
"""Every CLONE_NEW… flag of ``clone``."""
_X32 = 0x40000000
_ALLOW, _REFUSE, _MISSING, _KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
"""Return values of the filter: allow, EPERM, ENOSYS, kill the process."""
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06

_GENERIC = (
    *(180, 186, 190, 194),  # mq_open, msgget, semget, shmget
    *(217, 218, 219),  # add_key, request_key, keyctl
    *(97, 268, 40, 41, 39),  # unshare, setns, mount, pivot_root, umount2
    *(279, 280, 282, 241),  # memfd_create, bpf, userfaultfd, perf_event_open
    *(117, 270, 271),  # ptrace, process_vm_readv, process_vm_writev
)
_X86_64 = (
    *(240, 68, 64, 29),
    *(248, 249, 250),
    *(272, 308, 165, 155, 166),
    *(319, 321, 323, 298),
    *(101, 310, 311),
)
_EVERYWHERE = (
    *(425, 426, 427),  # io_uring_setup, io_uring_enter, io_uring_register
    *(
        428,
        429,
        430,
        431,
        432,
        442,
    ),  # open_tree, move_mount, fsopen, fsconfig, fsmount, mount_setattr
    447,  # memfd_secret
)
_CLONE3 = 435
_MACHINES = {
    # The kernel's name of the architecture, refused calls, clone.
    "x86_64": (0xC000003E, _X86_64, 56),
    "aarch64": (0xC00000B7, _GENERIC, 220),
    "riscv64": (0xC00000F3, _GENERIC, 220),
}


def program() -> bytes:
    """The filter for this machine.

    Raises:
        OSError: the numbers of its system calls aren't known here.
    """
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(f"the numbers of system calls on {machine} aren't known")
    architecture, refused, clone = _MACHINES[machine]
    steps = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]
    if machine == "x86_64":
        steps += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _REFUSE)]
    for number in (*refused, *_EVERYWHERE):
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE)]
    # Its flags are in memory, where a filter can't look; the C library then uses clone.
    steps += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _MISSING)]
    steps += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, 16),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, _REFUSE),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("steps", ctypes.c_char_p)]


def refuse_calls() -> None:
    """Applies the filter to this process and all that it starts; it can't be removed again.

    Raises:
        OSError: the kernel has no such filters.
    """
    steps = program()
    libc = ctypes.CDLL(None, use_errno=True)
    given = _Program(len(steps) // 8, steps)
    set_seccomp, filter_mode = 22, 2
    if libc.prctl(set_seccomp, filter_mode, ctypes.byref(given), 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"seccomp: {os.strerror(number)}")
