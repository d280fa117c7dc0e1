"""Engine servers, which speak SGLang's HTTP protocol, and the router in front of them.

Every token that an engine makes is the number of the training state whose weights it was computed with, so
that whoever trains on it can tell whether its version is true.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from slime.backends.sglang_utils.server_engine import EngineStartError
from slime.utils.types import EngineEndpoint
from tests.simulation.actors import Handle
from tests.simulation.kernel import Waiters
from tests.simulation.network import Done

CONTROL = 0.01  # seconds on average that a control request takes
JOINING = 0.5  # and that it takes to join a group
FIRST_WEIGHTS = -1
"""The training state of the checkpoint that engines load."""


@dataclass
class Request:
    """One that is computed, or waits for that."""

    number: int
    body: dict[str, Any]
    done: Done
    wanted: int
    tokens: list[int] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    due: int = 0  # the number of its next token's timer: others are of before a pause


class EngineServer:
    """An engine's process.

    Attributes:
        hung: it answers nothing, and computes nothing.
        has_hung: it did once, so that it may be taken for dead later.
        ready_at: when it began to serve HTTP.
        listed: a router has been told of it.
        flushed: it has computed nothing since its cache was dropped.
        pieces: training state by part of the model.
        version: what it says that its weights are.
    """

    def __init__(self, sim: Any, url: str, rank: int, ready_after: float) -> None:
        self.sim, self.world, self.url, self.rank = sim, sim.world, url, rank
        self.alive, self.hung, self.ready = True, False, False
        self.has_hung = self.flushed = self.listed = False
        self.end: str | None = None
        self.ended_at = self.ready_at = 0.0
        self.group = ""
        self.pieces = [FIRST_WEIGHTS] * sim.plan.pieces
        self.version = "default"
        self.paused = self.in_session = False
        self.requests: dict[int, Request] = {}
        self._numbers = itertools.count()
        self._held: list[tuple[Any, ...]] = []
        self.bell = Waiters()
        self.world.after(ready_after, self._become_ready)

    def __repr__(self) -> str:
        return f"engine {self.rank} at {self.url}"

    @property
    def whole(self) -> bool:
        return len(set(self.pieces)) == 1 and not self.in_session

    def _become_ready(self) -> None:
        if self.alive:
            self.ready, self.ready_at = True, self.world.now
            self.world.wake_all(self.bell)

    def die(self, how: str) -> None:
        if self.alive:
            self.alive, self.end, self.ended_at = False, how, self.world.now
            self.world.note(f"{self!r} {how}")
            self.requests = {}
            self.sim.network.break_off(self)
            self.world.wake_all(self.bell)

    def hang(self, seconds: float) -> None:
        """Stands still for a while; what came in meanwhile is answered then."""
        if self.alive and not self.hung:
            self.hung = self.has_hung = True
            self.world.note(f"{self!r} hangs for {seconds:.1f} s")
            self.world.after(seconds, self._wake_up)

    def _wake_up(self) -> None:
        if self.alive:
            self.hung = False
            held, self._held = self._held, []
            for call in held:
                self.handle(*call)
            for request in list(self.requests.values()):
                self._later(request)

    def handle(self, method: str, path: str, body: Any, done: Done) -> None:
        if self.hung:
            self._held.append((method, path, body, done))
            return
        if path == "/generate":
            self._generate(body, done)
            return
        name = path.strip("/").replace("/", "_")
        # A control plane does one thing after the other; what it takes is short beside what is computed.
        mean = JOINING if name == "init_weights_update_group" else CONTROL
        self.world.after(self.world.rng.expovariate(1 / mean), self._control, name, body, done)

    def _control(self, name: str, body: Any, done: Done) -> None:
        if not self.alive:
            return
        if self.hung:
            self._held.append(("POST", f"/{name}", body, done))
            return
        self.sim.rules.control(self, name, body)
        answer = getattr(self, f"_on_{name}")(body or {})
        done(*(answer if isinstance(answer, tuple) else (200, answer)))

    def _on_ready(self, body: Any) -> Any:
        return (503, {}) if self.paused else {}

    def _on_health_generate(self, body: Any) -> Any:
        return (503, {}) if self.paused else {}

    def _on_server_info(self, body: Any) -> Any:
        return {}

    def _on_model_info(self, body: Any) -> Any:
        return {"weight_version": self.version}

    def _on_v1_loads(self, body: Any) -> Any:
        return {"loads": [{"num_running_reqs": len(self.requests), "num_waiting_reqs": 0}]}

    def _on_abort_request(self, body: Any) -> Any:
        self._abort_all()
        return {}

    def _on_take_weights(self, body: Any) -> Any:
        return 404, {}  # as SGLang's

    def _on_pause_generation(self, body: Any) -> Any:
        self.paused = True
        if body["mode"] == "abort":
            self._abort_all()
        return {}

    def _on_continue_generation(self, body: Any) -> Any:
        self.paused = False
        for request in list(self.requests.values()):
            self._later(request)
        return {}

    def _on_flush_cache(self, body: Any) -> Any:
        self.flushed = True
        return {}

    def _on_begin_weight_update(self, body: Any) -> Any:
        self.in_session = True
        return {}

    def _on_end_weight_update(self, body: Any) -> Any:
        self.in_session = False
        return {}

    def _on_init_weights_update_group(self, body: Any) -> Any:
        self.group = body["group_name"]
        return {"success": True}

    def _on_destroy_weights_update_group(self, body: Any) -> Any:
        return {"success": True} if self.group == body["group_name"] else (400, {"message": "no such group"})

    def _on_update_weights_from_distributed(self, body: Any) -> Any:
        if self.group != body["group_name"]:
            return 400, {"message": f"this process is not in the group {body['group_name']}"}
        ((piece, state),) = zip(body["names"], body["shapes"], strict=True)
        self.pieces[int(piece)] = state[0]
        if body["weight_version"] is not None:
            self.version = body["weight_version"]
        return {"success": True}

    def _abort_all(self) -> None:
        for request in list(self.requests.values()):
            self._finish(request, "abort")

    def _generate(self, body: dict[str, Any], done: Done) -> None:
        number = next(self._numbers)
        params = body["sampling_params"]
        wanted = min(1 + params["sampling_seed"] * 7 % self.sim.plan.longest_answer, params["max_new_tokens"])
        self.requests[number] = request = Request(number, body, done, wanted)
        self._later(request)

    def _later(self, request: Request) -> None:
        request.due += 1
        self.world.after(
            self.world.rng.expovariate(1 / self.sim.plan.token), self._compute, request, request.due
        )

    def _compute(self, request: Request, due: int) -> None:
        gone = not self.alive or request.number not in self.requests
        if gone or self.hung or self.paused or due != request.due:
            return
        self.sim.rules.computes(self)
        self.flushed = False
        request.tokens.append(self.pieces[0])
        request.versions.append(self.version)
        if len(request.tokens) >= request.wanted:
            self._finish(request, "stop")
        else:
            self._later(request)

    def _finish(self, request: Request, reason: str) -> None:
        self.requests.pop(request.number, None)
        tokens, versions = request.tokens, request.versions
        spans = [
            {"version": version, "start": number, "end": number + 1}
            for number, version in enumerate(versions)
        ]
        meta = {
            "finish_reason": {"type": reason},
            "weight_version": self.version,
            "weight_versions": spans,
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "prompt_tokens": len(request.body["input_ids"]),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
        }
        request.done(200, {"text": "a" * len(tokens), "meta_info": meta})


class SimEngineActor:
    """In place of `EngineActor`: starts an engine server, and answers for its life."""

    sim: Any = None

    def __init__(self, args: Any, rank: int, *arguments: Any, **options: Any) -> None:
        sim, rng = self.sim, self.sim.world.rng
        sim.rules.starts(rank)
        # A replacement gets its predecessor's address if nothing else has taken it.
        port = 15000 if rng.random() < 0.5 else 15000 + next(sim.ports)
        self.rank, url = rank, f"http://engine{rank}:{port}"
        self.server = EngineServer(sim, url, rank, rng.uniform(0.5, 30.0))
        sim.network.servers[url] = self.server
        sim.engines.append(self.server)

    def wait_ready(self, timeout: float) -> EngineEndpoint:
        server, world = self.server, self.sim.world
        deadline = world.now + timeout
        while server.alive and not server.ready:
            if not world.block(f"start of {server!r}", deadline - world.now, server.bell):
                raise EngineStartError(f"{server!r}: does not serve after {timeout:g} s")
        if not server.alive:
            raise EngineStartError(f"{server!r}: {server.end}")
        return EngineEndpoint(server.url, None, 1, None)

    def server_location(self) -> tuple[str, int]:
        return "node", self.rank

    def failure_reason(self) -> str | None:
        return self.server.end

    def shutdown(self) -> None:
        self.sim.rules.shuts_down(self.server)
        self.sim.world.sleep(self.sim.world.rng.choice((0.0, 2.0, 28.0)) * self.sim.world.rng.random())
        self.server.die("was shut down")

    def process_ended(self) -> None:
        self.server.die("was killed with its actor")


class RouterServer:
    """The router's process: hands a request to an engine, and to another one if the connection breaks."""

    def __init__(self, sim: Any) -> None:
        self.sim, self.world = sim, sim.world
        self.alive, self.hung = True, False
        self.workers: list[str] = []
        self._unheard: set[str] = set()  # those that gave no answer when they were listed
        self._turn = itertools.count()
        self._under_way: list[Callable[[], None]] = []  # gives up a request to an engine

    def handle(self, method: str, path: str, body: Any, done: Done) -> None:
        self.world.after(self.world.rng.expovariate(1 / CONTROL), self._answer, method, path, body, done)

    def die(self, how: str) -> None:
        if self.alive:
            self.alive = False
            self.world.note(f"the router {how}")
            self.sim.network.break_off(self)
            for give_up in self._under_way:
                give_up()

    def hang(self) -> None:
        """Answers nothing any more."""
        if self.alive:
            self.hung = True
            self.world.note("the router hangs")

    def _answer(self, method: str, path: str, body: Any, done: Done) -> None:
        if not self.alive or self.hung:
            return
        if path == "/generate":
            self._forward(body, done, left=4)
        elif path == "/liveness":
            done(200, {})
        elif method == "DELETE":
            url = self.workers_by_id().get(path.removeprefix("/workers/"))
            if url is not None:
                self.workers.remove(url)
            done(200, {})
        elif method == "POST":
            self._register(body["url"], done)
        else:
            listed = [
                {"id": key, "url": url, "is_healthy": self._has_answered(url)}
                for key, url in self.workers_by_id().items()
            ]
            done(200, {"workers": listed})

    def _register(self, url: str, done: Done) -> None:
        """Lists an engine, which it asks first: it refuses one that is not there."""
        engine = self.sim.network.servers[url]
        self.sim.faults.is_registered(engine)
        if not engine.alive:
            done(400, {"error": f"nobody answers at {url}"})
            return
        engine.listed = True
        if engine.hung:
            self._unheard.add(url)
        if url not in self.workers:
            self.workers.append(url)
        done(200, {})

    def _has_answered(self, url: str) -> bool:
        if url in self._unheard and not self.sim.network.servers[url].hung:
            self._unheard.discard(url)
        return url not in self._unheard

    def workers_by_id(self) -> dict[str, str]:
        return {url.removeprefix("http://").replace(":", "-"): url for url in self.workers}

    def _forward(self, body: Any, done: Done, left: int) -> None:
        if not self.alive:
            return
        if not self.workers:
            done(503, {"error": "no worker"})
            return
        url = self.workers[next(self._turn) % len(self.workers)]

        def answered(status: int | None, content: Any) -> None:
            if status == 200:
                done(200, content)
            elif left:
                self.world.after(0.1, self._forward, body, done, left - 1)
            else:
                done(502, {"error": str(content)})

        self._under_way.append(self.sim.network.call("POST", f"{url}/generate", body, answered))


class RouterHost:
    """In place of the managed process of a router."""

    def __init__(self, server: RouterServer) -> None:
        self.server = server

    def is_alive(self) -> bool:
        return self.server.alive

    def exit_reason(self) -> str | None:
        return None if self.server.alive else "the router was killed"

    failure_reason = exit_reason

    def log_tail(self) -> str:
        return ""

    def terminate(self, grace: float) -> None:
        self.server.die("was ended")


def is_actor_of(handle: Handle, server: EngineServer) -> bool:
    return getattr(handle._actor.instance, "server", None) is server
