"""A server process for tests: started, waited for, stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).parents[2]


class ServerProcess:
    """Runs ``python -m MODULE MODEL --port 0 ...``; ``url`` is known once it serves. Its log is kept in ``lines``."""

    def __init__(
        self, module: list[str], *options: str, env: dict[str, str] | None = None, timeout: float = 120
    ) -> None:
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
        command = [sys.executable, "-m", *module, *options, "--port", "0"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[str] = []
        self._serving = threading.Event()
        self.url = ""
        threading.Thread(target=self._read, daemon=True).start()
        deadline = time.monotonic() + timeout
        while not self._serving.wait(0.1):
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.kill()
                raise RuntimeError("the server did not start:\n" + "".join(self.lines))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            found = re.search(r"serving on (http\S+)$", line)
            if found:
                self.url = found[1]
                self._serving.set()

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def gauge(self, name: str) -> float:
        text = httpx.get(self.url + "/metrics").text
        found = re.search(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        assert found, f"no {name} in:\n{text}"
        return float(found[1])

    def gauge_sum(self, name: str, label: str) -> float:
        """Sum of the series of ``name`` that carry ``label``."""
        lines = httpx.get(self.url + "/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{") and label in line)

    def wait_idle(self, timeout: float = 10) -> None:
        """Until nothing runs, waits or holds memory."""
        names = (
            "vllm:num_requests_running",
            "vllm:num_requests_waiting",
            "vllm:kv_cache_usage_perc",
            "kimi:state_slots_used",
        )
        deadline = time.monotonic() + timeout
        while any(values := {name: self.gauge(name) for name in names}.values()):
            assert time.monotonic() < deadline, f"still busy: {dict(zip(names, values, strict=True))}"
            time.sleep(0.02)

    def stop(self, timeout: float = 30) -> int:
        """SIGTERM, then the exit code; no process may be left."""
        children = subprocess.run(["pgrep", "-P", str(self.process.pid)], capture_output=True, text=True).stdout.split()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout)
        time.sleep(0.1)
        left = [pid for pid in children if Path(f"/proc/{pid}/stat").exists() and _state(pid) != "Z"]
        assert not left, f"processes left behind: {left}"
        return code


def _state(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "Z"
