import pytest
import ray

from slime.observability import otlp
from slime.ray import session
from slime.ray.cluster import ClusterTooSmall
from slime.ray.ending import cause, exit_status
from slime.ray.waiting import ProcessDied, wait_all
from tests.engines import free_port
from tests.run_args import config_with


@pytest.mark.parametrize(
    ("error", "status"),
    [
        *[(None, 0), (KeyboardInterrupt(), 130), (SystemExit(), 0), (SystemExit("text"), 1), (OSError(), 1)],
        (SystemExit(3), 3),
    ],
)
def test_the_status_of_an_end(error, status):
    assert exit_status(error) == status


LOW = (
    "2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 127.0.0.1) "
    "was 4.06GB used / 23.54GB limit (0.172551)"
)


def test_a_process_that_ray_kills_before_the_kernel_would_is_named(monkeypatch):
    """With the words of Ray's memory monitor, as one whose threshold was 0.02 said them of a run."""

    def get(ref):
        raise ray.exceptions.OutOfMemoryError(f"{LOW}\nRay killed 2 worker(s) based on the killing policy")

    monkeypatch.setattr(ray, "wait", lambda refs, **how: (refs[1:], refs[:1]))
    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(ProcessDied) as error:
        wait_all(["first", "second"], "actor: train", timeout=1.0)
    assert cause(error.value) == f"actor: train: the process of rank 1 was killed by Ray: {LOW}"


TOO_SMALL = ClusterTooSmall("the cluster is too small: the run needs 10 GPUs, found 8 on 1 node(s)")
"""What a placement says of the cluster that it finds."""


@pytest.mark.parametrize(("error", "traces"), [(TOO_SMALL, False), (ZeroDivisionError("a fault"), True)])
def test_a_cluster_that_is_too_small_is_one_line_and_a_fault_has_its_traceback(
    error: Exception, traces: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(*_: object) -> None:
        raise error

    monkeypatch.setattr(session, "_session", start)
    assert session._run(config_with(), start, lambda: None) == 1
    found = capsys.readouterr().err
    assert ("Traceback" in found) is traces
    assert found.strip().splitlines()[-1] == f"error: {cause(error)}"
    if not traces:
        assert len(found.strip().splitlines()) == 1


def test_a_collector_that_is_not_there_is_one_line_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(otlp, "_START_TIMEOUT_S", 0.2)
    config = config_with(otlp_endpoint=f"http://127.0.0.1:{free_port()}")
    assert session._run(config, pytest.fail, pytest.fail) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(f"error: --otlp-endpoint {config.debug.otlp_endpoint}: ")
