"""A filter of system calls, by libseccomp where the machine has it."""

import ctypes
import errno

from slime.agent.jail.kernel import CLONE_NEWUSER

_ALLOW = 0x7FFF0000
_REFUSE = 0x00050000 | errno.EPERM
_MISSING = 0x00050000 | errno.ENOSYS
_NOT_EQUAL, _GREATER, _MASKED_EQUAL = 1, 6, 7
NO_SOCKETS, LOCAL_SOCKETS, ALL_USUAL_SOCKETS = 0, 1, 10
"""The highest family of sockets left: none, AF_UNIX, AF_INET6."""
_REFUSED = (
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd"),
    *("unshare", "setns", "mount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen"),
    *("fsmount", "fspick", "mount_setattr", "name_to_handle_at", "open_by_handle_at", "swapon", "swapoff"),
    *("bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("add_key", "request_key", "keyctl", "init_module", "finit_module", "delete_module", "kexec_load"),
    *("kexec_file_load", "reboot", "syslog", "acct", "quotactl", "settimeofday", "clock_settime", "adjtimex"),
)
_LASTING = ("shmget", "semget", "msgget", "mq_open")
"""What these make stays until somebody removes it, in the machine's namespace or in that of the jail."""


class _Comparison(ctypes.Structure):
    _fields_ = [
        ("argument", ctypes.c_uint),
        ("operator", ctypes.c_int),
        ("value", ctypes.c_uint64),
        ("other", ctypes.c_uint64),
    ]


def refuse_dangerous_calls(sockets: int, lasting: bool = True) -> None:
    """Refuse what reaches other processes, mounts, namespaces and rare parts of the kernel, for good.

    Args:
        sockets: the highest family of sockets that can still be made.
        lasting: whether memory, semaphores and queues that outlive their maker can be.

    Raises:
        OSError: there is no libseccomp, or the kernel refuses the filter.
    """
    library = ctypes.CDLL("libseccomp.so.2")
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(ctypes.c_uint32(_ALLOW)))
    if not rules:
        raise OSError("seccomp_init failed")
    for call in _REFUSED if lasting else (*_REFUSED, *_LASTING):
        _add(library, rules, _REFUSE, call)
    # Its flags are in memory, which a filter cannot read; without it the C library takes clone.
    _add(library, rules, _MISSING, "clone3")
    # A namespace of users would bring capabilities inside it.
    new_user = _Comparison(0, _MASKED_EQUAL, CLONE_NEWUSER, CLONE_NEWUSER)
    _add(library, rules, _REFUSE, "clone", new_user)
    # Limits of another process, its processor time for one.
    _add(library, rules, _REFUSE, "prlimit64", _Comparison(0, _NOT_EQUAL, 0, 0))
    _add(library, rules, _REFUSE, "socket", _Comparison(0, _GREATER, sockets, 0))
    if (code := library.seccomp_load(rules)) < 0:
        raise OSError(-code, "seccomp_load failed")
    library.seccomp_release(rules)


def _add(
    library: ctypes.CDLL, rules: ctypes.c_void_p, action: int, call: str, *conditions: _Comparison
) -> None:
    number = library.seccomp_syscall_resolve_name(call.encode())
    if number < 0:  # not one of this machine's
        return
    array = (_Comparison * max(1, len(conditions)))(*conditions)
    code = library.seccomp_rule_add_array(rules, ctypes.c_uint32(action), number, len(conditions), array)
    if code < 0:
        raise OSError(-code, f"seccomp_rule_add {call} failed")
