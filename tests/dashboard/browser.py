"""A headless Chromium, spoken to over its DevTools protocol: pages as a person meets them."""

import asyncio
import base64
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
_PATIENT = 120.0  # seconds; bounds hangs only
_KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "Escape": 27, "Tab": 9, "Enter": 13}


class Browser:
    """One page of one browser.

    Attributes:
        problems: exceptions of scripts, and what the browser complains about, as of a broken policy.
    """

    def __init__(self, address: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.problems: list[str] = []
        self._number = 0
        self._loop.run_until_complete(self._connect(address))

    async def _connect(self, address: str) -> None:
        self._client = aiohttp.ClientSession()
        self._socket = await self._client.ws_connect(address, max_msg_size=0)
        target = await self._ask("Target.createTarget", {"url": "about:blank"}, None)
        attached = {"targetId": target["targetId"], "flatten": True}
        self._session = (await self._ask("Target.attachToTarget", attached, None))["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self._ask(f"{domain}.enable", {}, self._session)

    async def _ask(self, method: str, params: dict[str, Any], session: str | None) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        await self._socket.send_json(message | ({"sessionId": session} if session else {}))
        while True:
            answer = json.loads(await self._socket.receive_str(timeout=_PATIENT))
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(event["params"]["exceptionDetails"])[:500])
        elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.problems.append(event["params"]["entry"]["text"])

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._loop.run_until_complete(self._ask(method, params, self._session))

    def open(self, url: str) -> None:
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        asked = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.send("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What a person reads there; empty where it is not, or not shown."""
        return self.evaluate(f"document.querySelector({selector!r})?.innerText ?? ''")

    def until(self, expression: str) -> None:
        """Returns once a script's expression is true."""
        deadline = time.monotonic() + _PATIENT
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, (expression, self.problems, self.text("body")[:2000])
            time.sleep(0.02)

    def press(self, key: str) -> None:
        text = {"text": key} if len(key) == 1 else {}
        code = {"windowsVirtualKeyCode": _KEYS[key]} if key in _KEYS else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    def look(self, width: int, height: int = 900, scheme: str = "light") -> None:
        """Makes the window as wide, and the person's wish for light or dark."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.send("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def close(self) -> None:
        self._loop.run_until_complete(self._socket.close())
        self._loop.run_until_complete(self._client.close())
        self._loop.close()


@contextmanager
def chromium(directory: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, of which no process is left afterwards."""
    directory.mkdir(exist_ok=True)
    log = directory / "browser.log"
    command = [
        str(CHROMIUM),
        *_FLAGS,
        f"--user-data-dir={directory}",
        "--remote-debugging-port=0",
        "about:blank",
    ]
    with log.open("w") as file:  # a pipe that nobody reads would stop it when it is full
        process = subprocess.Popen(command, stderr=file, start_new_session=True)
    try:
        browser = Browser(_address(log, process))
        yield browser
        browser.close()
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _address(log: Path, process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + _PATIENT
    while not (found := re.search(r"listening on (ws://\S+)\n", log.read_text())):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.02)
    return found[1]
