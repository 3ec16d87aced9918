"""
Run model-written code and its tests in isolation: the program inside the sandbox.

It is a program of its own, run as `python -I -S sandbox_child.py`. Its input is three frames: settings as JSON, the
solution, and the tests. It is one file because it needs the standard library alone, outside of any package.

    outer     new namespaces of mounts, processes, network, IPC and names; a root of its own that holds Python and
              nothing else, read-only, and an empty folder in memory to work in
    tests     process 1 of those namespaces: a user without rights, limits on CPU, memory, files and processes, and a
              filter of system calls. It runs the tests, and its exit code is the result
    solution  its child, behind the same limits and filter. It runs the code that the model wrote, and answers calls

The two processes share two pipes, stdout, stderr and the folder in memory. The solution is forked before the tests
are read, so their text is not in its memory. Only builtin values cross, as JSON. Every other object stays where it
is, and a reference crosses. So the solution can give wrong answers, but no byte that it writes ends the tests.

If isolation is not available, the exit code is REFUSED, with the reason, and no line of the code has run. With
`weaker`, the code runs without full isolation.
"""

import builtins
import ctypes
import errno
import importlib
import json
import operator
import os
import platform
import resource
import signal
import struct
import sys
from _thread import RLock
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

REFUSED, PASSED, FAILED = 96, 97, 1
"""Exit codes of the process that runs the tests."""
MAX_TEXT_BYTES = 2**32 - 1
MAX_MESSAGE_BYTES = 8 * 2**20
"""Of a call or an answer, as JSON."""
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
    "x86_64": (0xC000003E, 56, 435, 302, {
        "socket": 41, "socketpair": 53, "ptrace": 101, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161,
        "unshare": 272, "setns": 308, "bpf": 321, "keyctl": 250, "add_key": 248, "request_key": 249, "swapon": 167,
        "perf_event_open": 298, "io_uring_setup": 425, "userfaultfd": 323, "kexec_load": 246, "init_module": 175,
        "finit_module": 313, "process_vm_readv": 310, "process_vm_writev": 311, "open_by_handle_at": 304,
        "memfd_create": 319, "memfd_secret": 447, "fsopen": 430, "move_mount": 429, "open_tree": 428,
        "shmget": 29, "semget": 64, "msgget": 68,
    }),
    "aarch64": (0xC00000B7, 220, 435, 261, {
        "socket": 198, "socketpair": 199, "ptrace": 117, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51,
        "unshare": 97, "setns": 268, "bpf": 280, "keyctl": 219, "add_key": 217, "request_key": 218, "swapon": 224,
        "perf_event_open": 241, "io_uring_setup": 425, "userfaultfd": 282, "kexec_load": 104, "init_module": 105,
        "finit_module": 273, "process_vm_readv": 270, "process_vm_writev": 271, "open_by_handle_at": 265,
        "memfd_create": 279, "memfd_secret": 447, "fsopen": 430, "move_mount": 429, "open_tree": 428,
        "shmget": 194, "semget": 190, "msgget": 186,
    }),
}  # fmt: skip
"""
By machine: its audit number, clone, clone3, prlimit64, and the calls that no solution of a task needs. What shmget,
semget and msgget make is the kernel's memory: RLIMIT_AS does not count it.
"""

libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = (ctypes.c_int, *[ctypes.c_ulong] * 4)


class MissingError(Exception):
    """Isolation that this kernel or this user cannot have."""


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
    flags = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
    if os.geteuid() == 0 and libc.unshare(flags) == 0:
        return FIRST_USER + os.getpid()
    if os.geteuid() == 0:  # limits on processes are not for the user 0, whatever its namespace calls it
        os.setgroups([])
        os.setresgid(FIRST_USER, FIRST_USER, FIRST_USER)
        os.setresuid(*[FIRST_USER + os.getpid()] * 3)
        libc.prctl(SET_DUMPABLE, 1, 0, 0, 0)  # or its own /proc would be root's
    user, group = os.geteuid(), os.getegid()
    call("namespaces", libc.unshare(flags | NEWUSER))
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return 0


def own_root(home: str, python: list[str], num_bytes: int) -> None:
    """A file system of Python alone, where only `home` can be written to, in memory."""
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
    Forbid system calls by seccomp. Forbidden calls fail with EPERM, and clone3 with ENOSYS (libraries then take clone).
    clone into a new user namespace and prlimit64 of another process fail with EPERM. Calls of another machine's
    numbering end the process.
    """
    if platform.machine() not in FORBIDDEN:
        raise MissingError(f"a filter of system calls for {platform.machine()}")
    audit, clone, clone3, prlimit64, forbidden = FORBIDDEN[platform.machine()]
    load, jump_if, jump_set, give = 0x20, 0x15, 0x45, 0x06
    allow, kill, fail = 0x7FFF0000, 0x80000000, 0x00050000
    program = [(load, 0, 0, 4), (jump_if, 1, 0, audit), (give, 0, 0, kill), (load, 0, 0, 0)]
    if audit == 0xC000003E:  # x32: the same machine under other numbers
        program += [(0x35, 0, 1, 0x40000000), (give, 0, 0, kill)]
    for number, code in [*((one, errno.EPERM) for one in forbidden.values()), (clone3, errno.ENOSYS)]:
        program += [(jump_if, 0, 1, number), (give, 0, 0, fail | code)]
    program += [(jump_if, 0, 4, prlimit64), (load, 0, 0, 16), (jump_if, 0, 1, 0), (give, 0, 0, allow)]
    program += [(give, 0, 0, fail | errno.EPERM)]
    program += [(jump_if, 0, 3, clone), (load, 0, 0, 16), (jump_set, 0, 1, NEWUSER), (give, 0, 0, fail | errno.EPERM)]
    program += [(give, 0, 0, allow)]
    held = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    filter_program = ctypes.create_string_buffer(struct.pack("HP", len(program), ctypes.addressof(held)))
    call("no new rights", libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    call("a filter of system calls", libc.prctl(SET_SECCOMP, 2, ctypes.addressof(filter_program), 0, 0))


def guarded(missing: list[str], asked: dict[str, Any], wall: Callable[[], None]) -> None:
    """Set up one kind of isolation. If that fails, refuse, or note it where less isolation is allowed."""
    try:
        wall()
    except (MissingError, OSError, ValueError) as error:
        missing.append(str(error))
        if not asked["weaker"]:
            refuse(str(error))


def refuse(why: str) -> NoReturn:
    os.write(2, f"refused: {why}\n".encode())
    os._exit(REFUSED)


# --- messages ------------------------------------------------------------------------------------------------------

ITEMS: dict[str, type] = {"list": list, "dict": dict, "set": set, "bytearray": bytearray}
"""Containers that can change: a call sends back the new contents of each that it got."""
VALUES: dict[str, type] = {"tuple": tuple, "frozenset": frozenset, "bytes": bytes}
CLASSES = {cls.__name__: cls for cls in (*ITEMS.values(), *VALUES.values(), bool, int, float, complex, str, object)}
"""Classes that cross by name. Not `type`, nor functions: the tests may call what they receive."""
MODULES = {
    "bisect", "collections", "copy", "functools", "heapq", "itertools", "math", "operator", "random", "re", "string",
    "typing",
}  # fmt: skip
"""Modules that the tests may use because the solution imported them; the tests import their own."""

UNARY: dict[str, Callable[..., Any]] = {
    "__getattr__": getattr,
    "__setattr__": setattr,
    "__call__": lambda function, /, *args, **kwargs: function(*args, **kwargs),
    "__iter__": iter,
    "__next__": next,
    "__len__": len,
    "__reversed__": reversed,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
    "__bool__": bool,
    "__int__": int,
    "__float__": float,
    "__index__": operator.index,
    "__str__": str,
    "__repr__": repr,
    "__hash__": hash,
    "__instancecheck__": lambda cls, value: isinstance(value, cls),
}
"""What the tests may do with an object of the solution."""
BINARY: dict[str, Callable[..., Any]] = {
    f"__{name}__": getattr(operator, name) for name in ("eq", "lt", "le", "gt", "ge", "add", "sub", "mul")
}
"""
What they may do with two objects of the solution. With a value of the tests, these are not forwarded: an object whose
`__eq__` is always true equals no expected value, and the solution never sees one.
"""
OPERATIONS = UNARY | BINARY
TOO_DEEP = "unsupported value: nested too deeply"
Result = TypeVar("Result")


class UnsupportedError(Exception):
    """A value that cannot cross between the processes."""


class SharedValues:
    """Containers that cross in one call and its answer, numbered in the same order by both processes."""

    def __init__(self) -> None:
        self.containers: list[Any] = []
        self.numbers: dict[int, int] = {}

    def add(self, container: Any) -> None:
        self.numbers[id(container)] = len(self.containers)
        self.containers.append(container)


class Peer:
    """One end of the two pipes: sends calls, serves calls, and keeps the objects that the other end refers to."""

    def __init__(self, source: int, target: int) -> None:
        self.source, self.target = source, target
        self.read, self.write, self.dumps, self.loads = os.read, os.write, json.dumps, json.loads  # code may patch them
        self.exported: list[Any] = []
        self.exported_numbers: dict[int, int] = {}
        self.proxies: dict[int, Any] = {}
        self.proxy_numbers: dict[int, int] = {}
        self.num_calls = 0
        self.lock = RLock()

    def operation(self, name: str, target: Any) -> Callable[..., Any]:
        """What the other end may do with an object of this end."""
        raise NotImplementedError

    def proxy(self, number: int) -> Any:
        """Make what stands here for an object of the other end."""
        raise NotImplementedError

    def receive(self) -> list[Any]:
        message = self.loads(receive(self.source, MAX_MESSAGE_BYTES, self.read))
        if not isinstance(message, list):
            raise ValueError("a message that is no list")
        return message

    def send(self, message: list[Any]) -> None:
        data = self.dumps(message).encode()
        if len(data) > MAX_MESSAGE_BYTES:
            raise UnsupportedError(f"unsupported value: {len(data)} bytes, and at most {MAX_MESSAGE_BYTES} can cross")
        left = memoryview(len(data).to_bytes(4, "big") + data)
        while left:
            left = left[self.write(self.target, left) :]

    def request(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Let the other end do an operation. Raises what that raised."""
        with self.lock:
            result, error = self.exchange(name, args, kwargs)
        if error is not None:
            raise error
        return result

    def exchange(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, BaseException | None]:
        self.num_calls += 1
        number, values = self.num_calls, SharedValues()
        self.send(["call", number, name, self.encode(args, values), self.encode(kwargs, values)])
        while (message := self.receive())[0] == "call":
            self.serve(*message[1:])
        kind, answered, changed, result, facts = message
        if kind not in ("return", "raise") or answered != number:
            raise ValueError(f"message {kind!r} {answered!r} instead of an answer to call {number}")
        for index, contents in changed:
            self.fill(values.containers[index], contents, values)
        result, facts = self.decode(result, values), self.decode(facts, values)
        return result, exception(result, facts) if kind == "raise" else None

    def serve(self, number: int, name: str, packed_args: Any, packed_kwargs: Any) -> None:
        """Do what the other end asks for, and answer with the result and the containers that changed."""
        values = SharedValues()
        args, kwargs = self.decode(packed_args, values), self.decode(packed_kwargs, values)
        before = [self.contents(container, values) for container in values.containers]
        kind, result, facts = "return", None, None
        try:
            try:
                result = self.operation(name, args[0])(*args, **kwargs)
            finally:
                if sys.stdout is not None:
                    sys.stdout.flush()
        except BaseException as error:
            kind, result = "raise", [cls.__name__ for cls in type(error).__mro__]
            facts = error.args if hasattr(builtins, type(error).__name__) else (str(error),)
        changed = []
        for index, contents in enumerate(before):
            if (now := self.contents(values.containers[index], values)) != contents:
                changed.append([index, now])
        self.send([kind, number, changed, self.encode(result, values), self.encode(facts, values)])

    def encode(self, value: Any, values: SharedValues) -> Any:
        """As JSON: None, bool, int, float and str as they are, the rest as a list that begins with a tag."""
        kind = type(value)  # not isinstance, which believes the `__class__` of an object
        if value is None or kind in (bool, float, str):
            return value
        if issubclass(kind, int):
            number = int.__index__(value)
            return number if -(2**63) < number < 2**63 else ["int", hex(number)]
        if issubclass(kind, float):
            return float.__float__(value)
        if issubclass(kind, str):
            return str.__str__(value)
        if issubclass(kind, complex):
            return ["complex", value.real, value.imag]
        if kind is range:
            return ["range", *(self.encode(part, values) for part in (value.start, value.stop, value.step))]
        if isinstance(value, type) and CLASSES.get(value.__name__) is value:
            return ["class", value.__name__]
        for tag, cls in ITEMS.items():
            if issubclass(kind, cls):
                if id(value) in values.numbers:
                    return ["same", values.numbers[id(value)]]
                values.add(value)
                return [tag, *self.contents(value, values)]
        for tag, cls in VALUES.items():
            if issubclass(kind, cls):
                return [tag, *self.contents(value, values)]
        if issubclass(kind, type(sys)):
            return ["module", value.__name__]
        if id(value) in self.proxy_numbers:
            return ["yours", self.proxy_numbers[id(value)]]
        return ["mine", self.export(value)]

    def contents(self, value: Any, values: SharedValues) -> list[Any]:
        if isinstance(value, bytes | bytearray):
            return [value.hex()]
        if isinstance(value, dict):
            return [self.encode(part, values) for item in dict.items(value) for part in item]
        iterate = next(cls.__iter__ for cls in (list, tuple, set, frozenset) if isinstance(value, cls))
        return [self.encode(item, values) for item in iterate(value)]

    def export(self, value: Any) -> int:
        if id(value) not in self.exported_numbers:
            self.exported_numbers[id(value)] = len(self.exported)
            self.exported.append(value)
        return self.exported_numbers[id(value)]

    def decode(self, data: Any, values: SharedValues) -> Any:
        """Raises ValueError, TypeError, KeyError or IndexError where `data` is none that `encode` made."""
        if not isinstance(data, list):
            if isinstance(data, dict):
                raise ValueError("a JSON object")
            return data
        tag, *parts = data
        if tag in ITEMS:
            container = ITEMS[tag]()
            values.add(container)
            self.fill(container, parts, values)
            return container
        if tag == "bytes":
            return bytes.fromhex(parts[0])
        if tag in VALUES:
            return VALUES[tag]([self.decode(part, values) for part in parts])
        if tag in ("complex", "range"):
            return (complex if tag == "complex" else range)(*(self.decode(part, values) for part in parts))
        (payload,) = parts
        if tag == "int":
            return int(payload, 16)
        if tag == "class":
            return CLASSES[payload]
        if tag == "module":
            if payload not in MODULES:
                raise UnsupportedError(f"unsupported value: the module {payload}")
            return importlib.import_module(payload)
        if not isinstance(payload, int) or payload < 0:
            raise ValueError(f"{payload!r} is no number of an object")
        if tag == "same":
            return values.containers[payload]
        if tag == "yours":
            return self.exported[payload]
        if tag != "mine":
            raise ValueError(f"unknown tag {tag!r}")
        return self.proxy_of(payload)

    def proxy_of(self, number: int) -> Any:
        if number not in self.proxies:
            self.proxies[number] = self.proxy(number)
            self.proxy_numbers[id(self.proxies[number])] = number
        return self.proxies[number]

    def fill(self, container: Any, parts: list[Any], values: SharedValues) -> None:
        if isinstance(container, bytearray):
            container[:] = bytes.fromhex(parts[0])
            return
        items = [self.decode(part, values) for part in parts]
        if isinstance(container, list):
            container[:] = items
            return
        container.clear()
        container.update(zip(items[::2], items[1::2], strict=True) if isinstance(container, dict) else items)


def exception(names: list[str], args: list[Any]) -> BaseException:
    """The nearest builtin class of an exception that was raised at the other end, with its arguments."""
    for name in names:
        cls = getattr(builtins, name, None)
        if isinstance(cls, type) and issubclass(cls, BaseException) and not issubclass(cls, BaseExceptionGroup):
            return cls(*args)
    raise ValueError(f"{names} names no exception")


def receive(source: int, max_bytes: int, read: Callable[[int, int], bytes] = os.read) -> bytes:
    """One frame: its length in four bytes, and its content. Raises EOFError where the other end has closed."""

    def exactly(num_bytes: int) -> bytes:
        data = bytearray()
        while len(data) < num_bytes:
            chunk = read(source, min(num_bytes - len(data), 2**16))
            if not chunk:
                raise EOFError("the other end has closed")
            data += chunk
        return bytes(data)

    length = int.from_bytes(exactly(4), "big")
    if length > max_bytes:
        raise UnsupportedError(f"unsupported value: {length} bytes, and at most {max_bytes} can cross")
    return exactly(length)


# --- the solution --------------------------------------------------------------------------------------------------


class Solution(Peer):
    """The end of the solution: the tests may do all OPERATIONS with its objects. It ends when they do."""

    leave = staticmethod(os._exit)

    def receive(self) -> list[Any]:
        try:
            return super().receive()
        except EOFError:
            self.leave(0)

    def send(self, message: list[Any]) -> None:
        try:
            super().send(message)
        except BrokenPipeError:
            self.leave(0)

    def operation(self, name: str, target: Any) -> Callable[..., Any]:
        return OPERATIONS[name]

    def proxy(self, number: int) -> Any:
        def callback(*args: Any, **kwargs: Any) -> Any:
            return self.request("__call__", callback, *args, **kwargs)

        return callback

    def serve(self, number: int, name: str, packed_args: Any, packed_kwargs: Any) -> None:
        try:
            super().serve(number, name, packed_args, packed_kwargs)
        except RecursionError:
            self.send(["refuse", TOO_DEEP])
        except UnsupportedError as error:
            self.send(["refuse", str(error)])


def run_solution(code: str, peer: Solution) -> NoReturn:
    """Run the code, and answer what the tests ask for. A fork of it that comes here ends."""
    own, process = os.getpid(), os.getpid  # code may take it out of os
    module = type(sys)("__main__")
    peer.export(module)
    sys.argv = ["solution.py"]
    exec(compile(code, "solution.py", "exec"), module.__dict__)  # the sandbox's one purpose
    if sys.stdout is not None:
        sys.stdout.flush()
    if process() != own:
        peer.leave(0)
    peer.send(["ready"])
    while True:
        peer.serve(*peer.receive()[1:])


# --- the tests -----------------------------------------------------------------------------------------------------


class Tests(Peer):
    """The end of the tests. They fail at once where a value cannot cross, or a message is none of the protocol."""

    def __init__(self, source: int, target: int, solution: int) -> None:
        super().__init__(source, target)
        self.solution = solution
        methods = {name: self.forwarded(name) for name in UNARY} | {name: self.between(name) for name in BINARY}
        self.handle: type = type("Handle", (), methods)

    def forwarded(self, name: str) -> Callable[..., Any]:
        return lambda handle, /, *args, **kwargs: self.request(name, handle, *args, **kwargs)

    def between(self, name: str) -> Callable[[Any, Any], Any]:
        return lambda handle, other: self.request(name, handle, other) if type(other) is self.handle else NotImplemented

    def proxy(self, number: int) -> Any:
        return self.handle()

    def operation(self, name: str, target: Any) -> Callable[..., Any]:
        if name != "__call__" or id(target) not in self.exported_numbers:
            raise ValueError(f"{name!r} of an object that the tests did not pass")
        return UNARY[name]

    def export(self, value: Any) -> int:
        if not callable(value):
            raise UnsupportedError(f"unsupported value: an object of the class {type(value).__name__}")
        return super().export(value)

    def receive(self) -> list[Any]:
        message = super().receive()
        if message[0] == "refuse":
            raise UnsupportedError(str(message[1]))
        return message

    def exchange(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, BaseException | None]:
        with_solution: Callable[..., tuple[Any, BaseException | None]] = super().exchange
        return self.guard(with_solution, name, args, kwargs)

    def guard(self, step: Callable[..., Result], *args: Any) -> Result:
        """Read messages of the solution. Where that fails, the process ends, so no `except` of the tests hides it."""
        try:
            return step(*args)
        except (EOFError, BrokenPipeError):
            self.ended(os.waitpid(self.solution, 0)[1])
        except RecursionError:
            fail(TOO_DEEP)
        except UnsupportedError as error:
            fail(str(error))
        except (ValueError, TypeError, LookupError, OverflowError, MemoryError, AttributeError) as error:
            fail(f"malformed message of the solution: {type(error).__name__}: {error}")

    def wait_until_ready(self) -> None:
        if (message := self.receive()) != ["ready"]:
            raise ValueError(f"message {str(message[0])[:20]!r} before the solution was ready")

    def reap(self, *_: object) -> None:
        """As process 1: reap whatever has ended. Where the solution has, the tests end."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if process == 0:
                return
            if process == self.solution:
                self.ended(status)

    def ended(self, status: int) -> NoReturn:
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            os._exit(128 - code)
        fail("the solution ended before the tests did")


class GlobalNames(dict[str, Any]):
    """The global names of the tests: their own, then the builtins, then the solution's, which is asked each time."""

    def __init__(self, solution: Any) -> None:
        super().__init__(__name__="__main__")
        self.solution = solution

    def __missing__(self, name: str) -> Any:
        if not hasattr(builtins, name):
            try:
                return getattr(self.solution, name)
            except AttributeError:
                pass
        raise KeyError(name)


def run_tests(code: str, peer: Tests) -> NoReturn:
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which process 1 ignores
    signal.signal(signal.SIGCHLD, peer.reap)
    peer.reap()
    try:
        peer.guard(peer.wait_until_ready)
        exec(compile(code, "tests.py", "exec"), GlobalNames(peer.proxy_of(0)))  # the sandbox's other purpose
        sys.stdout.flush()
    except BaseException as error:
        sys.stdout.flush()
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()
        os._exit(FAILED)
    os._exit(PASSED)


def fail(reason: str) -> NoReturn:
    """Without a flush: a signal may have interrupted a print."""
    os.write(2, f"failed: {reason[:500]}\n".encode("utf-8", "replace"))
    os._exit(FAILED)


# --- the processes -------------------------------------------------------------------------------------------------


def isolate(asked: dict[str, Any], missing: list[str], user: int) -> None:
    guarded(missing, asked, lambda: limit(asked["limits"]))
    if "namespaces" not in missing:
        guarded(missing, asked, lambda: drop(user))
    libc.prctl(SET_DUMPABLE, 0, 0, 0, 0)
    libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    guarded(missing, asked, filter_calls)
    os.environ.clear()
    os.environ.update({"PATH": "/usr/bin:/bin", "HOME": os.getcwd(), "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"})


def run_both(solution: str, missing: list[str]) -> NoReturn:
    """Fork the process of the solution; this one goes on to read and run the tests."""
    (heard, answers), (asked, questions) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if "namespaces" not in missing:
            os.setsid()  # or signals to its group would reach the outer process
        read_nothing()
        os.close(heard)
        os.close(questions)
        run_solution(solution, Solution(asked, answers))
    os.close(asked)
    os.close(answers)
    tests = receive(0, MAX_TEXT_BYTES).decode()
    read_nothing()
    run_tests(tests, Tests(heard, questions, child))


def read_nothing() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def main() -> None:
    asked = json.loads(receive(0, MAX_TEXT_BYTES))
    solution = receive(0, MAX_TEXT_BYTES).decode()
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
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if "namespaces" not in missing:
        try:
            enter(home)
        except (MissingError, OSError) as error:
            refuse(str(error))
        os.chdir("/work")
    isolate(asked, missing, user)
    run_both(solution, missing)


if __name__ == "__main__":
    main()
