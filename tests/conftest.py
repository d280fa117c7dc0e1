"""Which tests see a GPU.

The suite is about CPUs, also on a machine with a GPU: there it runs with the GPU hidden. ``pytest -m gpu``
runs the tests that need one.
"""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if "gpu" not in (config.option.markexpr or ""):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    import torch

    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU, and pytest -m gpu")
