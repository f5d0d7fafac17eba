"""A headless Chromium, spoken to by the DevTools protocol over a pipe."""

import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
    "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip
_PATIENCE = 120.0


def find() -> str | None:
    """Where the browser is, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Tab:
    """One page: load it, ask it, look at it, and hear its complaints."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + _PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def load(self, path: Path, *, width: int, dark: bool = False, script: bool = True) -> None:
        """Show a file in a window of this width; earlier events are forgotten."""
        self.events.clear()
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def ask(self, expression: str) -> Any:
        """Value of a JavaScript expression."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Click the middle of an element."""
        for kind in ("mousePressed", "mouseReleased"):
            self._mouse(kind, selector, 0.5)

    def point(self, selector: str, share: float = 0.5) -> None:
        """Move the pointer over an element, so far from its left edge."""
        self._mouse("mouseMoved", selector, share)

    def _mouse(self, kind: str, selector: str, share: float) -> None:
        find = f"document.querySelector({json.dumps(selector)})"
        self.ask(f"{find}.scrollIntoView({{block: 'center'}})")
        x, y = self.ask(
            f"(r => [r.left + {share} * r.width, r.top + r.height / 2])({find}.getBoundingClientRect())"
        )
        button = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **button)

    @property
    def complaints(self) -> list[str]:
        """Errors and warnings of the console, exceptions included."""
        self.ask("0")  # whatever was said before this answer has arrived with it
        found = []
        for event in self.events:
            about = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown" | "Runtime.consoleAPICalled":
                    found.append(json.dumps(about))
                case "Log.entryAdded":
                    found.append(about["entry"]["text"])
        return found

    @property
    def requests(self) -> list[str]:
        """Everything that was loaded, by the beginning of its address."""
        methods = [e for e in self.events if e.get("method") == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in methods]


@contextmanager
def launched(profile: Path) -> Iterator[Tab]:
    """Start a browser with an empty profile, and end it."""
    program = find()
    assert program is not None
    command_end, commands = os.pipe()
    answers, answer_end = os.pipe()
    # The browser reads from descriptor 3 and writes to 4.
    redirect = f'exec "$@" 3<&{command_end} 4>&{answer_end}'
    process = subprocess.Popen(
        ["bash", "-c", redirect, "browser", program, *FLAGS, f"--user-data-dir={profile}"],
        pass_fds=(command_end, answer_end),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(command_end)
    os.close(answer_end)
    try:
        yield Tab(commands, answers)
    finally:
        process.kill()
        process.wait()
        os.close(commands)
        os.close(answers)
