import errno
import socket
from datetime import timedelta

import pytest

from slime.utils.distributed_utils import meeting_store
from slime.utils.reserved_ports import listening_at, reserve_port


def test_nobody_else_gets_a_port_between_its_choice_and_its_use():
    port = reserve_port("127.0.0.1")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with pytest.raises(OSError) as error:
            other.bind(("127.0.0.1", port))
    assert error.value.errno == errno.EADDRINUSE
    store = meeting_store("127.0.0.1", port, 1, 0, timedelta(seconds=120))
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_the_listener_is_handed_over_once():
    port = reserve_port("LOCALHOST")
    listener = listening_at("localhost", port)
    assert listener is not None and listener.getsockname() == ("127.0.0.1", port)
    with pytest.raises(OSError, match="in use"):
        listening_at("localhost", port)
    listener.close()


def test_a_port_at_an_address_of_another_machine_is_a_guess(caplog):
    port = reserve_port("192.0.2.1")
    assert listening_at("192.0.2.1", port) is None
    assert f"192.0.2.1 is not an address of this machine: port {port}" in caplog.text
