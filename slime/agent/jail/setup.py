"""Shuts a process in, as far as the machine permits, and says what holds of it."""

import contextlib
import os
import signal
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from slime.agent.jail import kernel, landlock
from slime.agent.jail.commands import set_limits
from slime.agent.jail.mounts import WORKSPACE, build_root
from slime.agent.jail.system_calls import (
    ALL_USUAL_SOCKETS,
    LOCAL_SOCKETS,
    NO_SOCKETS,
    refuse_dangerous_calls,
)

_INSIDE = 1000
_WRITABLE_DEVICES = ("/dev/null", "/dev/zero", "/dev/full")
_SPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
)


@dataclass
class Jail:
    """What is shut, by name, and why the rest is not."""

    config: dict[str, Any]
    held: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    workspace: str = ""

    def attempt(self, names: str, step: Callable[[], None]) -> bool:
        """Take a step that holds these guarantees; keep its error for all of them otherwise."""
        try:
            step()
        except OSError as error:
            self.missing |= {name: str(error) for name in names.split()}
            return False
        self.held += names.split()
        return True


def enter_namespaces(jail: Jail) -> bool:
    """Part with the parent's mounts, processes, network and users; the next fork is process 1."""
    wanted = "files processes network"
    if not jail.config["namespaces"]:
        jail.missing |= dict.fromkeys(wanted.split(), "switched off")
        return False
    if os.geteuid() == 0:
        return jail.attempt(wanted, lambda: kernel.unshare(_SPACES))

    def part_as_user() -> None:
        user, group = os.geteuid(), os.getegid()
        kernel.unshare(_SPACES | kernel.CLONE_NEWUSER)
        _map_users(user, group, _INSIDE, _INSIDE)

    return jail.attempt(wanted, part_as_user)


def shut(jail: Jail, apart: bool) -> None:
    """The rest, in the process that stays: root file system, user, rights, system calls.

    Args:
        apart: whether ``enter_namespaces`` succeeded.
    """
    jail.workspace = WORKSPACE if apart else jail.config["workspace"]
    if apart and not _build(jail):
        jail.workspace = jail.config["workspace"]
    os.umask(0o022)
    _give_up_root(jail)
    if apart:
        # Nobody inside makes a namespace in which he would have capabilities.
        with contextlib.suppress(OSError), open("/proc/sys/user/max_user_namespaces", "w") as limit:
            limit.write("0")
    os.chdir(jail.workspace)
    _drop_rights(jail, ALL_USUAL_SOCKETS if "network" in jail.held else LOCAL_SOCKETS, lasting=apart)
    _leave_nothing(jail, apart)
    kernel.set_dumpable(False)
    # In a namespace all others end with process 1; without one it has to end them first.
    kernel.die_with_parent(signal.SIGKILL if apart else signal.SIGTERM)


def _leave_nothing(jail: Jail, apart: bool) -> None:
    """What is written ends with the sandbox: it lies in its own file system, or else in its folder."""
    if apart and "files" in jail.held:
        jail.held.append("leftovers")
    elif not apart and "syscalls" not in jail.held:
        jail.missing["leftovers"] = f"System V objects stay: {jail.missing['syscalls']}"
    else:
        folder = jail.config["workspace"]
        jail.attempt("leftovers", lambda: landlock.write_only_below([folder], _WRITABLE_DEVICES))


def confine(limits: Mapping[str, int]) -> dict[str, str]:
    """Shut this process off from the network, other processes and rare system calls, for good.

    It keeps its user and its files, so that it can import what the caller imports. Call it before there are
    threads.

    Returns:
        What this machine cannot hold, by name, and why.
    """
    set_limits(limits)
    jail = Jail({})
    if os.geteuid() == 0:
        jail.attempt("network", lambda: kernel.unshare(kernel.CLONE_NEWNET))
        _drop_rights(jail, NO_SOCKETS, kept=(kernel.CAP_DAC_READ_SEARCH,))
    else:
        # In a name space of users of its own it may not look into processes outside of that.
        jail.attempt("network processes", _part_with_network)
        _drop_rights(jail, NO_SOCKETS)
    return jail.missing


def _part_with_network() -> None:
    user, group = os.geteuid(), os.getegid()
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNET)
    _map_users(user, group, user, group)


def _build(jail: Jail) -> bool:
    place, readable, disk = (jail.config[key] for key in ("workspace", "readable", "disk_bytes"))
    # A container may forbid a new /proc, where parts of its own are hidden.
    for processes_shown in (True, False):
        try:
            build_root(place, readable, disk, processes_shown)
            return True
        except OSError as error:
            failure = str(error)
            with contextlib.suppress(OSError):
                kernel.unmount(place)
            if processes_shown and "/proc" in failure:
                continue
            break
    jail.held.remove("files")
    jail.missing["files"] = failure
    return False


def _give_up_root(jail: Jail) -> None:
    if os.geteuid() != 0:
        return
    os.setgroups([])
    os.setresgid(kernel.NOBODY, kernel.NOBODY, kernel.NOBODY)
    os.setresuid(kernel.NOBODY, kernel.NOBODY, kernel.NOBODY)
    kernel.set_dumpable(True)  # which the change of user took away; without it the maps cannot be written
    with contextlib.suppress(OSError):
        kernel.unshare(kernel.CLONE_NEWUSER)
        _map_users(kernel.NOBODY, kernel.NOBODY, _INSIDE, _INSIDE)


def _map_users(user: int, group: int, user_inside: int, group_inside: int) -> None:
    for name, content in (
        ("setgroups", "deny"),
        ("uid_map", f"{user_inside} {user} 1"),
        ("gid_map", f"{group_inside} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(content)


def _drop_rights(jail: Jail, sockets: int, kept: Collection[int] = (), lasting: bool = True) -> None:
    """No capabilities but those kept, no way to win any; no dangerous calls, no sockets of other families.

    Args:
        lasting: whether memory, semaphores and queues that outlive their maker may be made.
    """

    def drop() -> None:
        kernel.drop_capabilities(kept)
        kernel.set_no_new_privileges()

    jail.attempt("privileges", drop)
    network = "network" in jail.held
    if jail.attempt("syscalls", lambda: refuse_dangerous_calls(sockets, lasting)) and not network:
        jail.held.append("network")
        jail.missing.pop("network", None)
