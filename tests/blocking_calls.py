"""Which calls of a module may block without a deadline, read off its syntax tree."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass

_NO_ARGUMENTS = ("wait", "join", "result", "exception", "get", "acquire")
"""Methods of events, threads, processes, futures, queues and locks: any argument is a timeout, or the method
is of another kind (``str.join``, ``dict.get``)."""
_ALWAYS = ("accept", "recv", "recv_into", "readline", "sendall")
"""They take no timeout: the socket has one, or what stands at the other end answers."""
_SUBPROCESS = ("run", "call", "check_call", "check_output")
_TIMED_BLOCKS = ("asyncio.timeout", "asyncio.wait_for")
_GROUPS = ("new_group", "init_process_group", "init_device_mesh")
"""Collectives end with the timeout of their group."""


@dataclass(frozen=True)
class BlockingCall:
    """A call that may block for ever: ``function`` is the innermost one around it."""

    function: str
    callee: str
    line: int


def _timeout(call: ast.Call) -> bool:
    """Says whether the call names a timeout other than None."""
    return any(
        (word.arg or "").startswith("timeout")
        and not (isinstance(word.value, ast.Constant) and word.value.value is None)
        for word in call.keywords
    )


def _dotted(node: ast.expr) -> str:
    return ast.unparse(node) if isinstance(node, ast.Name | ast.Attribute) else ""


def blocks(call: ast.Call) -> bool:
    """Says whether the call may block, and gives itself no deadline."""
    name = _dotted(call.func)
    room, _, method = name.rpartition(".")
    method = method or (call.func.attr if isinstance(call.func, ast.Attribute) else "")
    if _timeout(call):
        return False
    if room == "subprocess":
        return method in _SUBPROCESS
    if room in ("asyncio", "ray", "futures") and method in ("wait", "get"):
        return True
    if name in ("wait", "create_connection", "requests.get", "requests.post", "httpx.stream"):
        return True
    if method in ("select", "waitpid", "flock"):
        return not _nowhere_to_wait(method, call)
    if method in ("communicate", "urlopen") or method in _GROUPS or method in _ALWAYS or method == "barrier":
        return True
    return method in _NO_ARGUMENTS and not call.args and isinstance(call.func, ast.Attribute)


def _nowhere_to_wait(method: str, call: ast.Call) -> bool:
    """Says whether a system call returns at once, or at its last argument."""
    if method == "select":
        last = call.args[-1] if len(call.args) in (1, 4) else None
        return last is not None and not (isinstance(last, ast.Constant) and last.value is None)
    return any(word in ast.unparse(call) for word in ("LOCK_NB", "WNOHANG"))


def blocking_calls(source: str) -> Iterator[BlockingCall]:
    """Yields the calls that may block, and have no deadline of their own or of a block around them.

    Not seen are ``await`` of a future, whose maker has the deadline, and the ``with`` of a lock.
    """
    yield from _inside(ast.parse(source), "")


def _inside(node: ast.AST, function: str) -> Iterator[BlockingCall]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _inside(child, child.name)
            continue
        if isinstance(child, ast.AsyncWith) and any(_timed(item.context_expr) for item in child.items):
            continue
        if isinstance(child, ast.Call):
            if _timed(child):
                continue
            if blocks(child):
                yield BlockingCall(function or "module", ast.unparse(child.func), child.lineno)
        yield from _inside(child, function)


def _timed(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _dotted(node.func) in _TIMED_BLOCKS
