"""Takes away from the current process what a stranger's program has no need of.  Linux only, standard library only.

Runs in the child, before any of the program's code; must not import anything of Greenroom's.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import struct
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)

_NEWUSER, _NEWPID, _NEWNET, _NEWIPC = 0x10000000, 0x20000000, 0x40000000, 0x08000000
_PR_SET_PDEATHSIG, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS = 1, 8, 38
_CAP_DAC_READ_SEARCH = 2
_SIGKILL = 9

_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_FS_ALL = (1 << 13) - 1  # the rights of the first Landlock version: execute, write, read, make, remove
_FS_READ = 0b1101  # execute, read file, read folder


def own_namespaces() -> bool:
    """Leave the machine's processes, network and shared memory; the next fork is process 1 of a world of its own.

    Everything in that world dies with its process 1, and there is no network in it, not even loopback.  Returns whether
    the kernel allowed it.
    """
    spaces = _NEWPID | _NEWNET | _NEWIPC
    return _LIBC.unshare(spaces) == 0 or _LIBC.unshare(spaces | _NEWUSER) == 0


def die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)


def block_sockets() -> None:
    """Where there is no network namespace: Python code, at least, gets no socket."""

    def refused(*_: object, **__: object) -> None:
        raise PermissionError("programs under test have no network")

    for name in ("socket", "create_connection", "socketpair", "fromfd", "create_server"):
        setattr(socket, name, refused)


def only_files_in(folder: str) -> bool:
    """Writing is allowed below `folder` alone, reading there and in Python's and the system's own folders.

    Uses Landlock, which needs no rights; returns whether the kernel has it.
    """
    if _LIBC.syscall(_LANDLOCK_CREATE, None, 0, 1) < 1:
        return False
    attributes = struct.pack("Q", _FS_ALL)
    ruleset = _LIBC.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    readable = {sys.prefix, sys.base_prefix, "/usr", "/lib", "/lib64", "/bin", "/dev/urandom", "/proc"}
    for path in readable:
        _allow(ruleset, path, _FS_READ)
    _allow(ruleset, "/dev/null", 0b111)
    _allow(ruleset, folder, _FS_ALL)
    _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    restricted = _LIBC.syscall(_LANDLOCK_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return restricted


def _allow(ruleset: int, path: str, rights: int) -> None:
    if not os.path.exists(path):
        return
    if not os.path.isdir(path):
        rights &= 0b111  # rights of folders make no sense on a file and are refused
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _LIBC.syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, handle), 0)
    finally:
        os.close(handle)


def drop_root(uid: int) -> None:
    """Become a user that owns nothing; root alone would not be bound by the limit on processes.

    The right to read what others may not is kept, because Python itself may lie in such a place; which files that are
    is settled by `only_files_in`.
    """
    if os.geteuid() != 0:
        return
    _LIBC.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    header = struct.pack("Ii", 0x20080522, 0)
    keep = 1 << _CAP_DAC_READ_SEARCH
    _LIBC.capset(header, struct.pack("IIIIII", keep, keep, 0, 0, 0, 0))


def limit(*, cpu_s: int, memory_mib: int, file_kib: int, processes: int) -> None:
    """Hard limits of this process and all that it starts."""
    for what, amount in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_mib * 2**20),
        (resource.RLIMIT_FSIZE, file_kib * 2**10),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (amount, amount))
