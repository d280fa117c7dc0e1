"""The connections of a process are cut."""

import ctypes
import errno
import os
import socket

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def cut(pid: int) -> int:
    """Shuts down all TCP connections of a process, both ways; those of its listening sockets are others'.

    Returns:
        How many.

    Raises:
        ProcessLookupError: it is gone.
        PermissionError: the kernel gives nobody else's descriptors away.
    """
    process = os.pidfd_open(pid)
    try:
        return sum(_is_cut(process, int(name)) for name in os.listdir(f"/proc/{pid}/fd"))
    except FileNotFoundError as error:
        raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH)) from error
    finally:
        os.close(process)


def refusal() -> str | None:
    """Why nothing can be cut here, before anybody tries; None if it can."""
    process = os.pidfd_open(os.getpid())
    try:
        os.close(_descriptor(process, process))
    except OSError as error:
        return f"pidfd_getfd: {error.strerror}"
    finally:
        os.close(process)
    return None


def _is_cut(process: int, number: int) -> bool:
    try:
        taken = _descriptor(process, number)
    except PermissionError:
        raise
    except OSError:  # closed meanwhile
        return False
    try:
        with socket.socket(fileno=taken) as end:
            if end.family not in (socket.AF_INET, socket.AF_INET6) or end.type != socket.SOCK_STREAM:
                return False
            end.getpeername()
            end.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno == errno.ENOTSOCK:
            os.close(taken)
        return False
    return True


def _descriptor(process: int, number: int) -> int:
    """A descriptor of another process, as one of this.

    Args:
        process: a handle of it, as ``pidfd_open`` has it.
    """
    taken = _libc.syscall(_PIDFD_GETFD, process, number, 0)
    if taken < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int(taken)
