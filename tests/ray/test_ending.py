import pytest

from slime.ray.ending import exit_status


@pytest.mark.parametrize(
    ("error", "status"),
    [
        *[(None, 0), (KeyboardInterrupt(), 130), (SystemExit(), 0), (SystemExit("text"), 1), (OSError(), 1)],
        (SystemExit(3), 3),
    ],
)
def test_the_status_of_an_end(error, status):
    assert exit_status(error) == status
