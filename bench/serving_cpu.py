"""Host side of serving, no GPU: CPU time per streamed token and time to the first byte, model time taken out.

python -m bench.serving_cpu            writes bench/results/<date>-cpu-serving.md

The server is the real one with the real scheduler; only the model is replaced by a runner that waits a fixed time per
step, so that what is measured is everything around the model.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.kernels.environment import ROOT
from engine.text.chat_output import THINK_HOLD
from tests.server.process import ServerProcess

STREAMS = (1, 16, 64)
ROUTES = {
    "completions": ("/v1/completions", {"prompt": "a prompt of some words"}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a prompt of some words"}]}),
}
# what an event with a token holds; the role event of a chat has `"content":""` and does not match
TOKEN_MARKS = (b'"text":"', b'"reasoning_content":"')


@dataclass
class Stream:
    """What one client saw; seconds since it began to send its request."""

    headers: float = 0.0
    first_token: float = 0.0
    num_events: int = 0
    num_bytes: int = 0


async def read_stream(host: str, port: int, path: str, body: dict) -> Stream:
    """One streamed request over a bare socket, so that the client costs as little as can be."""
    reader, writer = await asyncio.open_connection(host, port)
    data = json.dumps({**body, "stream": True, "ignore_eos": True}).encode()
    begin = time.perf_counter()
    writer.write(f"POST {path} HTTP/1.1\r\nHost: bench\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
    seen = Stream()
    while True:
        piece = await reader.read(1 << 16)
        now = time.perf_counter() - begin
        if not piece:
            raise RuntimeError("a stream ended early")
        seen.headers = seen.headers or now
        seen.num_bytes += len(piece)
        seen.num_events += piece.count(b"data: {")
        if not seen.first_token and any(mark in piece for mark in TOKEN_MARKS):
            seen.first_token = now
        if b"data: [DONE]" in piece:
            break
    writer.close()
    return seen


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def measure(server: ServerProcess, route: str, num_streams: int, num_tokens: int) -> dict[str, float]:
    path, body = ROUTES[route]
    host, port = server.url.removeprefix("http://").split(":")
    (engine,) = [p.pid for p in psutil.Process(server.process.pid).children() if "spawn_main" in " ".join(p.cmdline())]

    async def all_streams() -> list[Stream]:
        tasks = [
            read_stream(host, int(port), path, {**body, "max_tokens": num_tokens, "seed": i})
            for i in range(num_streams)
        ]
        return await asyncio.gather(*tasks)

    before = cpu_seconds(server.process.pid), cpu_seconds(engine)
    begin = time.perf_counter()
    streams = asyncio.run(all_streams())
    wall = time.perf_counter() - begin
    server_s, engine_s = cpu_seconds(server.process.pid) - before[0], cpu_seconds(engine) - before[1]
    tokens = num_streams * num_tokens
    return {
        "streams": num_streams,
        "server us/token": 1e6 * server_s / tokens,
        "engine process us/token": 1e6 * engine_s / tokens,
        "first byte ms": 1e3 * statistics.median(s.headers for s in streams),
        "first token ms": 1e3 * statistics.median(s.first_token for s in streams),
        "tokens/s": tokens / wall,
        "events/token": sum(s.num_events for s in streams) / tokens,
        "bytes/token": sum(s.num_bytes for s in streams) / tokens,
    }


def table(rows: list[dict[str, float]]) -> str:
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    lines += [
        "| " + " | ".join(f"{row[n]:.0f}" if n == "streams" else f"{row[n]:.2f}" for n in names) + " |" for row in rows
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=500, help="tokens of each stream")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of one step of the stand-in model")
    parser.add_argument(
        "--out", type=Path, default=None, help="file to write; default: bench/results/<date>-cpu-serving.md"
    )
    args = parser.parse_args()
    sections = []
    with tempfile.TemporaryDirectory() as model:
        (Path(model) / "tokenizer").touch()
        server = ServerProcess(
            ["tests.server.fake_server"],
            model,
            "--disable-uvicorn-access-log",
            env={"FAKE_STEP_S": str(args.step_ms / 1000), "FAKE_CHECK": "0"},
        )
        try:
            for route in ROUTES:
                measure(server, route, 4, 50)  # warm
                rows = [measure(server, route, n, args.tokens) for n in STREAMS]
                sections.append(f"## {route}\n\n{table(rows)}\n")
        finally:
            server.stop()
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    changed = subprocess.run(
        ["git", "status", "--porcelain", "-uno", "engine/server", "engine/text"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    date = datetime.date.today().isoformat()
    report = f"""# Host cost of serving, {date}

commit {commit.strip()}{" with local changes" if changed.stdout.strip() else ""}; {cpu_name()}, {os.cpu_count()} cores,
load average {os.getloadavg()[0]:.1f} at the end; Python {platform.python_version()}; uvicorn with its pure-Python h11.

Settings: {args.tokens} tokens a stream, one byte a token, a stand-in model of {args.step_ms:g} ms a step, one event a
token wanted. CPU time is user + system of each process; "server" is the HTTP process, "engine process" holds scheduler
and stand-in model. First byte and first token are medians over the streams, from the moment of sending; all start
at once.
The first token of a chat includes the {THINK_HOLD} characters (here tokens) of reasoning that the parser holds back.

{chr(10).join(sections)}"""
    out = args.out or ROOT / "bench" / "results" / f"{date}-cpu-serving.md"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(report)
    print(report)
    return 0


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


if __name__ == "__main__":
    sys.exit(main())
