import pytest
import ray

from slime.ray.local_start import start_ray
from slime.ray.session import cause

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module", autouse=True)
def cluster():
    options = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False}
    start_ray(300.0, lambda: ray.init(address="local", **options))
    yield
    ray.shutdown()


@ray.remote
def broken() -> None:
    raise RuntimeError("engine 0 ended: killed by SIGKILL\nlast lines of its log")


@ray.remote
def outer() -> None:
    ray.get(broken.remote())


@pytest.mark.parametrize("task", [broken, outer])
def test_the_cause_of_a_remote_failure_is_its_first_line(task) -> None:
    with pytest.raises(RuntimeError) as error:
        ray.get(task.remote())
    assert cause(error.value) == "engine 0 ended: killed by SIGKILL"


def test_other_errors_are_named_by_type() -> None:
    assert cause(KeyError("label")) == "KeyError: 'label'"
    assert cause(ValueError()) == "ValueError"
