"""A headless Chromium, driven over a pipe by its own protocol: nothing to install but the browser.

    with Browser() as page:
        page.open(url)
        page.until("document.body.dataset.looks > 2")
        assert page.errors == []

`apt-get install chromium` is all it needs; `find()` is None where there is none.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
HOW_TO = "no Chromium here: apt-get install chromium"
WAIT_S = 120.0
"""Only how long a broken test takes to fail."""


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    def __init__(self, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        self.errors: list[str] = []
        """What the console and the page complained of."""
        self._folder = tempfile.TemporaryDirectory(prefix="quire-browser-")
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        program = find()
        assert program is not None, HOW_TO
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options += ["--no-first-run", "--disable-extensions", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={self._folder.name}", "about:blank"]

        def connect() -> None:
            os.dup2(to_read, 3)
            os.dup2(to_write, 4)

        self._process = subprocess.Popen(
            [program, *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(3, 4),
            preexec_fn=connect,  # noqa: PLW1509
        )
        os.close(to_read)
        os.close(to_write)
        self._answers: Queue[dict[str, Any]] = Queue()
        self._number = 0
        threading.Thread(target=self._listen, daemon=True).start()
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", {"features": scheme})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        with contextlib.suppress(OSError):
            self._folder.cleanup()

    def open(self, url: str) -> None:
        self.call("Page.navigate", {"url": url})

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", size)

    def run(self, script: str) -> Any:
        answer = self.call(
            "Runtime.evaluate",
            {"expression": script, "returnByValue": True, "awaitPromise": True},
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def until(self, script: str) -> None:
        deadline = time.monotonic() + WAIT_S
        guarded = f"(() => {{ try {{ return {script} }} catch {{ return false }} }})()"
        while not self.run(guarded):  # the page may not be there yet
            assert time.monotonic() < deadline, f"never: {script}"
            time.sleep(0.05)

    def picture(self, file: Path) -> None:
        data = self.call("Page.captureScreenshot", {"format": "png"})["data"]
        file.write_bytes(base64.b64decode(data))

    def call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._call(method, params, self._session)

    # ---- inside ---------------------------------------------------------------------------------

    def _call(
        self, method: str, params: dict[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params or {}}
        if session is not None:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                answer = self._answers.get(timeout=max(0.01, deadline - time.monotonic()))
            except Empty:
                raise AssertionError(f"the browser did not answer {method}") from None
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    def _listen(self) -> None:
        rest = b""
        with open(self._read, "rb", buffering=0) as pipe:
            while data := pipe.read(1 << 16):
                *messages, rest = (rest + data).split(b"\0")
                for message in messages:
                    self._take(json.loads(message))

    def _take(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case None:
                self._answers.put(message)
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:500])
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"] + " " + params["entry"].get("url", ""))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "assert"):
                self.errors.append(json.dumps(params["args"])[:500])
