"""Which tests see a GPU, and which of them start Ray.

The suite is about CPUs. On a machine with a GPU the GPU is hidden from it, and the tests that start whole
runs are left out, since Ray would not declare logical GPUs there. ``pytest -m gpu`` runs those that need one.
"""

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

pytest_plugins = [
    "tests.plugins.records",  # which others import
    "tests.plugins.logs",
    "tests.plugins.order",
    "tests.plugins.progress",
    "tests.plugins.tiers",
]
HAS_GPU = Path("/dev/nvidia0").exists()

# torch then asks the driver's management library whether there is a GPU. Asking the CUDA runtime, as it does
# otherwise, makes the GPU unusable in every process that is forked from the one that asked: ranks, engines.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

# As in a run, where every process computes with one thread: with more the last bits of sums differ.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Property tests try the same examples in each run, however long one takes: what fails was changed, and is not
# a matter of chance or of how busy the machine is. ``--hypothesis-profile=default`` looks for new examples.
settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.pop("PYTEST_ADDOPTS", None)  # options of this run, not of those that tests start
    if HAS_GPU and "gpu" not in (config.option.markexpr or ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("e2e") is not None:
            item.add_marker("cluster")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Lets the garbage collector pass over what is imported and collected: most of what it would look at."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        if os.environ.get("CUDA_VISIBLE_DEVICES", HAS_GPU) in ("", False):
            pytest.skip("needs a CUDA GPU, and pytest -m gpu")
    elif HAS_GPU and item.get_closest_marker("e2e") is not None:
        pytest.skip("needs a machine without a GPU")
