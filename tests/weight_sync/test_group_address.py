"""Where trainer and engines meet for a weight update."""

import pytest

from slime.weight_sync import agreement
from slime.weight_sync.agreement import group_address

HERE, THERE = "http://127.0.0.1:3", "http://10.0.0.5:3"


@pytest.mark.parametrize(
    ("met", "urls", "address"),
    [
        ("127.0.0.1", [HERE], "127.0.0.1"),
        ("127.0.0.1", [HERE, THERE], "10.0.0.9"),
        ("10.0.0.1", [THERE], "10.0.0.1"),
        ("10.0.0.1", [HERE], "10.0.0.1"),
    ],
)
def test_engines_elsewhere_cannot_come_to_loopback(
    monkeypatch: pytest.MonkeyPatch, met: str, urls: list[str], address: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", met)
    monkeypatch.setattr(agreement, "get_host_info", lambda: ("host", "10.0.0.9"))
    assert group_address(urls) == address
