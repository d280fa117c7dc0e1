"""What the runs against SGLang plug in."""

import itertools
import os
import signal
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from examples.calculator_tool import generate as calculator
from slime.backends.megatron_utils.hf_weights import HfWeights
from slime.utils.types import Sample

VICTIM = "SLIME_TEST_VICTIM"


def kill_a_scheduler_in_the_second_update(args: Namespace) -> None:
    """Rank 0 kills the process that computes for an engine, between two buckets; HTTP lives on a while."""
    buckets, updates = HfWeights.buckets, itertools.count()

    def killing(self: HfWeights, max_bytes: int) -> Iterator[Any]:
        update = next(updates)
        for index, bucket in enumerate(buckets(self, max_bytes)):
            if args.rank == 0 and update == 1 and index == 1:
                victim = schedulers()[0]
                Path(os.environ[VICTIM]).write_text(str(victim))
                os.kill(victim, signal.SIGKILL)
            yield bucket

    HfWeights.buckets = killing  # type: ignore[method-assign]


async def generate_with_a_tool(args: Namespace, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The calculator's generate function, whose tool answers whatever a random model says."""
    calculator.answer_call = lambda text: str(len(text))  # type: ignore[attr-defined]
    return await calculator.generate(args, sample, sampling_params)


def schedulers() -> list[int]:
    """Process ids of the schedulers of the engines that carry this test's note in their environment."""
    return [
        child.pid
        for server in psutil.process_iter()
        if _is_server(server)
        for child in server.children(recursive=True)
        if child.name().startswith("sglang::sch") or "sglang::scheduler" in " ".join(child.cmdline())
    ]


def _is_server(process: psutil.Process) -> bool:
    try:
        command = " ".join(process.cmdline())
        mine = process.environ().get(VICTIM) == os.environ[VICTIM]
    except psutil.Error:
        return False
    return mine and "sglang_utils.launch_server" in command and "supervisor" not in command
