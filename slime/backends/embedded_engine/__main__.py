"""``python -m slime.backends.embedded_engine --model-path DIR --port PORT``."""

import asyncio
import contextlib
import faulthandler
import logging
import os
import socket
import sys

import torch
import torch.distributed as dist
import uvicorn

from slime.arguments.groups.embedded_engine import EmbeddedServerArgs
from slime.backends.embedded_engine.build import build_server
from slime.backends.embedded_engine.engine import Engine
from slime.backends.embedded_engine.http.app import create_app

_DRAIN_SECONDS = 5
_SWITCH_SECONDS = 0.0005


def main() -> None:
    args = EmbeddedServerArgs.from_cli()
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    # a crash in native code would otherwise leave nothing in the log
    faulthandler.enable()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    # the event loop and the engine thread share one interpreter: neither may keep it for long
    sys.setswitchinterval(_SWITCH_SECONDS)
    torch.set_grad_enabled(False)
    # SGLang's engines always have a default group, and so can be told apart by no trainer
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        asyncio.run(_serve(args))
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


class _DrainingServer(uvicorn.Server):
    """Lets running requests finish for a while; those that a pause holds would never."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self._engine = engine

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._engine.paused or self._engine.released or self._engine.updating:
            # in the middle of an update the engine may be waiting for a trainer that is gone
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._engine.run(self._engine.abort_to_shut_down), _DRAIN_SECONDS)
        await super().shutdown(sockets)


async def _serve(args: EmbeddedServerArgs) -> None:
    state = build_server(args)
    state.engine.start(asyncio.get_running_loop())
    config = uvicorn.Config(
        create_app(state),
        host=args.host,
        port=args.port,
        log_level=args.log_level,
        access_log=False,
        timeout_keep_alive=600,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
    )
    try:
        await _DrainingServer(config, state.engine).serve()
    finally:
        state.engine.stop()
        if state.grammars is not None:
            state.grammars.close()


if __name__ == "__main__":
    main()
