"""Drives a headless Chromium over its debugging pipe: real widths, real keys, and every request that it makes."""

import json
import os
import select
import shutil
import subprocess
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PATIENCE_S = 120
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--no-first-run", "--remote-debugging-pipe",
)  # fmt: skip
KEYS = {
    "Tab": 9, "Enter": 13, " ": 32, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
}  # fmt: skip


class Chromium:
    """One page. `complaints` holds what went to the console as warning or error, `requests` every URL asked for."""

    def __init__(self, profile: Path) -> None:
        read_commands, self._out = os.pipe()
        self._in, write_answers = os.pipe()

        def hand_over() -> None:
            os.dup2(os.dup(read_commands), 3)
            os.dup2(os.dup(write_answers), 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            preexec_fn=hand_over, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(read_commands)
        os.close(write_answers)
        self._buffer, self._number, self._session = b"", 0, None
        self._loaded = 0
        self.complaints: list[str] = []
        self.requests: list[str] = []
        pages = [target for target in self.send("Target.getTargets")["targetInfos"] if target["type"] == "page"]
        attached = self.send("Target.attachToTarget", targetId=pages[0]["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        os.write(
            self._out, json.dumps({"id": self._number, "method": method, "params": params} | session).encode() + b"\0"
        )
        while (answer := self._read()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def open(self, page: Path, width: int, dark: bool = False) -> None:
        """Load a page at a width in CSS pixels and wait until its charts are drawn."""
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.complaints, self.requests = [], []
        self._load("Page.navigate", url=page.as_uri())

    def reload(self) -> None:
        """Load the same page once more."""
        self._load("Page.reload")

    def _load(self, command: str, **params: Any) -> None:
        self._loaded = 0
        self.send(command, **params)
        while not self._loaded:
            self._note(self._read())
        self.settle()

    def settle(self) -> None:
        """Wait until the tasks that the page has queued are done, and two frames are drawn."""
        frame = "new Promise(done => setTimeout(() => requestAnimationFrame(() => requestAnimationFrame(done)), 60))"
        self.run(frame)

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page, promises awaited."""
        result = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key: str, times: int = 1) -> None:
        """Press a key as a person does."""
        text = {"text": key} if key == " " else {"text": "\r"} if key == "Enter" else {}
        code = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        for _ in range(times):
            self.send("Input.dispatchKeyEvent", type="keyDown", **code, **text)
            self.send("Input.dispatchKeyEvent", type="keyUp", **code)
        self.settle()

    def close(self) -> None:
        self.send("Browser.close")
        self._process.wait(timeout=30)
        os.close(self._out)
        os.close(self._in)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], PATIENCE_S)
            assert ready, f"Chromium said nothing for {PATIENCE_S} s"
            more = os.read(self._in, 1 << 20)
            assert more, "Chromium ended"
            self._buffer += more
        one, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(one)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded += 1
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith("data:"):  # a heat map is an image that the page has made itself
                self.requests.append(url)
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("warning", "error"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("warning", "error", "assert"):
            self.complaints.append(str(params["args"]))
