"""
The inside of the sandbox: a program of its own, run as `python -I -S cell.py`, with a JSON object on its first line of
input and the code to run after it. It needs only the standard library, and imports nothing of Bloomery.

    outer     new namespaces of mounts, processes, network, IPC and names; a root of its own that holds Python and
              nothing else, read-only, and an empty folder in memory to work in
    inner     process 1 of those namespaces. It starts the code and ends with it, and then the kernel ends all the rest.
              How the cell ends is what it says: no exit of the code itself is taken for a word of the cell's
    code      a user without rights, limits on processor, memory, files and processes, and a filter of system calls

What cannot be had is an exit with REFUSED and the reason, and no line of the code has run; with `weaker`, the list of
what is missing may be longer, and the code runs.
"""

import ctypes
import errno
import json
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable
from typing import Any, NoReturn

REFUSED, PASSED = 96, 97
"""Codes of exit of the cell, not of the code in it."""
READY = b"+"
"""Said by the code's process when its walls stand: from here on it cannot be refused."""
NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1,
    2,
    4,
    8,
    32,
    4096,
    16384,
    1 << 18,
)
DETACH = 2
SET_DUMPABLE, SET_SECCOMP, SET_NO_NEW_PRIVS, SET_PDEATHSIG, CAPBSET_DROP = 4, 22, 38, 1, 24
FIRST_USER = 1_000_000_000
SYSTEM = ("/usr", "/lib", "/lib64", "/lib32", "/bin", "/sbin", "/etc/alternatives", "/etc/ld.so.cache")
"""Where programs and libraries lie. Nothing of it is a secret; no home, no /etc, /run, /var or /tmp."""
DEVICES = ("null", "zero", "full", "random", "urandom")

FORBIDDEN = {
    "x86_64": (0xC000003E, 56, 435, {
        "socket": 41, "socketpair": 53, "ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
        "unshare": 272, "setns": 308, "bpf": 321, "keyctl": 250, "add_key": 248, "request_key": 249, "swapon": 167,
        "perf_event_open": 298, "io_uring_setup": 425, "userfaultfd": 323, "kexec_load": 246, "init_module": 175,
        "finit_module": 313, "process_vm_readv": 310, "process_vm_writev": 311, "open_by_handle_at": 304,
        "memfd_create": 319, "memfd_secret": 447, "fsopen": 430, "move_mount": 429, "open_tree": 428,
        "shmget": 29, "semget": 64, "msgget": 68,
    }),
    "aarch64": (0xC00000B7, 220, 435, {
        "socket": 198, "socketpair": 199, "ptrace": 117, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51,
        "unshare": 97, "setns": 268, "bpf": 280, "keyctl": 219, "add_key": 217, "request_key": 218, "swapon": 224,
        "perf_event_open": 241, "io_uring_setup": 425, "userfaultfd": 282, "kexec_load": 104, "init_module": 105,
        "finit_module": 273, "process_vm_readv": 270, "process_vm_writev": 271, "open_by_handle_at": 265,
        "memfd_create": 279, "memfd_secret": 447, "fsopen": 430, "move_mount": 429, "open_tree": 428,
        "shmget": 194, "semget": 190, "msgget": 186,
    }),
}  # fmt: skip
"""
By machine: its audit number, clone, clone3, and the calls that no solution of a task needs. What shmget, semget and
msgget make is the kernel's memory: RLIMIT_AS does not count it.
"""

libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


class MissingError(Exception):
    """A wall that this kernel or this user cannot have."""


def call(what: str, code: int) -> None:
    if code != 0:
        number = ctypes.get_errno()
        raise MissingError(f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [word.encode() if word is not None else None for word in (source, target, kind, options)]
    call(f"mounting {target}", libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]))


def namespaces() -> int:
    """
    By root as it is; by others, and by a root that lacks the right, in a user namespace of their own.

    Returns the user to become: one whom nothing belongs to. 0 stands for one that is nobody outside already.
    """
    wanted = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    if os.geteuid() == 0 and libc.unshare(wanted) == 0:
        return FIRST_USER + os.getpid()
    if os.geteuid() == 0:  # limits on processes are not for the user 0, whatever its namespace calls it
        os.setgroups([])
        os.setresgid(FIRST_USER, FIRST_USER, FIRST_USER)
        os.setresuid(*[FIRST_USER + os.getpid()] * 3)
        libc.prctl(SET_DUMPABLE, 1, 0, 0, 0)  # or its own /proc would be root's
    user, group = os.geteuid(), os.getegid()
    call("namespaces", libc.unshare(wanted | NEWUSER))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return 0


def own_root(home: str, python: list[str], num_bytes: int) -> None:
    """A file system of Python alone, with `home` as the only place to write, in memory."""
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("tmpfs", home, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=0755")
    for folder in dict.fromkeys([*SYSTEM, *python]):
        if os.path.islink(folder):
            os.symlink(os.readlink(folder), home + folder)
        elif os.path.exists(folder) and not any(os.path.ismount(home + above) for above in above_of(folder)):
            bind(folder, home + folder)
    for name in ("dev", "proc", "work"):
        os.mkdir(f"{home}/{name}")
    for device in DEVICES:
        open(f"{home}/dev/{device}", "w").close()
        mount(f"/dev/{device}", f"{home}/dev/{device}", None, MS_BIND)
    mount("tmpfs", f"{home}/work", "tmpfs", MS_NOSUID | MS_NODEV, f"size={num_bytes},nr_inodes=4096,mode=0777")


def above_of(folder: str) -> list[str]:
    parts = folder.split("/")[1:]
    return ["/" + "/".join(parts[:count]) for count in range(1, len(parts))]


def bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "w").close()
    mount(source, target, None, MS_BIND | MS_REC)
    mount("none", target, None, MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def enter(home: str) -> None:
    """Make `home` the root, and let go of the old one. As process 1, so that /proc shows nobody else."""
    mount("proc", f"{home}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir(home)
    call("a root of its own", libc.pivot_root(b".", b"."))
    call("leaving the old root", libc.umount2(b".", DETACH))
    os.chdir("/")
    mount("none", "/", None, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV)


def drop(user: int) -> None:
    """Become a user whom nothing belongs to, without a way back."""
    for capability in range(64):
        libc.prctl(CAPBSET_DROP, capability, 0, 0, 0)
    if user:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header, nothing = struct.pack("Ii", 0x20080522, 0), bytes(24)
    call("giving up capabilities", libc.capset(header, nothing))


def limit(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (value, value))


def filter_calls() -> None:
    """
    seccomp: what is forbidden fails with EPERM, clone3 with ENOSYS (libraries then take clone), clone into a new user
    namespace with EPERM, and calls of another machine's numbering end the process.
    """
    if platform.machine() not in FORBIDDEN:
        raise MissingError(f"a filter of system calls for {platform.machine()}")
    audit, clone, clone3, forbidden = FORBIDDEN[platform.machine()]
    load, jump_if, jump_set, give = 0x20, 0x15, 0x45, 0x06
    allow, kill, fail = 0x7FFF0000, 0x80000000, 0x00050000
    program = [(load, 0, 0, 4), (jump_if, 1, 0, audit), (give, 0, 0, kill), (load, 0, 0, 0)]
    if audit == 0xC000003E:  # x32: the same machine under other numbers
        program += [(0x35, 0, 1, 0x40000000), (give, 0, 0, kill)]
    for number, code in [*((one, errno.EPERM) for one in forbidden.values()), (clone3, errno.ENOSYS)]:
        program += [(jump_if, 0, 1, number), (give, 0, 0, fail | code)]
    program += [(jump_if, 0, 3, clone), (load, 0, 0, 16), (jump_set, 0, 1, NEWUSER), (give, 0, 0, fail | errno.EPERM)]
    program += [(give, 0, 0, allow)]
    held = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    given = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(held)))
    call("no new rights", libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    call("a filter of system calls", libc.prctl(SET_SECCOMP, 2, ctypes.addressof(given), 0, 0))


def wait_for(child: int) -> int:
    """As process 1: reap whatever ends, until the code itself does."""
    while True:
        process, status = os.wait()
        if process == child:
            return os.waitstatus_to_exitcode(status)


def verdict(child: int, heard: int, word: bytes) -> int:
    """As process 1: the cell's code of exit. The code passed where its process said `word` at its end."""
    ready = os.read(heard, len(READY)) == READY
    ended = wait_for(child)
    if ended < 0:
        return 128 - ended
    if not ready:
        return REFUSED if ended == REFUSED else 1
    os.set_blocking(heard, False)  # a process that the code has left may hold the other end
    try:
        said = os.read(heard, len(word) + 1)
    except BlockingIOError:
        said = b""
    return PASSED if ended == 0 and said == word else 1


def run_code(code: str, asked: dict[str, Any], missing: list[str], user: int, tell: int, word: bytes) -> None:
    guarded(missing, asked, lambda: limit(asked["limits"]))
    if "namespaces" not in missing:
        guarded(missing, asked, lambda: drop(user))
    libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    guarded(missing, asked, filter_calls)
    os.environ.clear()
    os.environ.update({"PATH": "/usr/bin:/bin", "HOME": os.getcwd(), "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"})
    sys.argv = ["solution.py"]
    space: dict[str, Any] = {"__name__": "__main__"}
    write, leave, process, own = os.write, os._exit, os.getpid, os.getpid()  # tests may take them out of os
    write(tell, READY)
    exec(compile(code, "solution.py", "exec"), space)  # the sandbox's one purpose
    sys.stdout.flush()
    if process() == own:  # and not a fork of it
        write(tell, word)
    leave(0)


def guarded(missing: list[str], asked: dict[str, Any], wall: Callable[[], None]) -> None:
    """Raise a wall; where it cannot be had, refuse, or note it where weaker ones were allowed."""
    try:
        wall()
    except (MissingError, OSError, ValueError) as error:
        missing.append(str(error))
        if not asked["weaker"]:
            refuse(str(error))


def refuse(why: str) -> NoReturn:
    os.write(2, f"refused: {why}\n".encode())
    os._exit(REFUSED)


def main() -> None:
    asked = json.loads(sys.stdin.buffer.readline())
    code = sys.stdin.buffer.read().decode()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    missing: list[str] = []
    home: str = asked["home"]
    try:
        with open("/proc/self/oom_score_adj", "w") as file:  # whoever runs out of memory here goes first
            file.write("1000")
        user = namespaces()
        own_root(home, asked["python"], asked["folder_bytes"])
    except (MissingError, OSError) as error:
        if not asked["weaker"]:
            refuse(str(error))
        missing.append("namespaces")
        os.chdir(home)
        user = 0
    inner = os.fork()
    if inner:
        _, status = os.waitpid(inner, 0)
        code_ = os.waitstatus_to_exitcode(status)
        os._exit(code_ if code_ >= 0 else 128 - code_)
    libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if "namespaces" not in missing:
        try:
            enter(home)
        except (MissingError, OSError) as error:
            refuse(str(error))
        os.chdir("/work")
    (heard, tell), word = os.pipe(), os.urandom(16)
    child = os.fork()
    if child:
        os.close(tell)
        os._exit(verdict(child, heard, word))
    os.close(heard)
    run_code(code, asked, missing, user, tell, word)


if __name__ == "__main__":
    main()
