"""A random checkpoint, a server over it, and a chat streamed through the official client.

python examples/demo.py            needs no GPU, no network and no model: the answer is noise, the way to it is real
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import openai

ROOT = Path(__file__).resolve().parents[1]
MAX_TOKENS = 64
START_TIMEOUT_S = 180


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="kimi-demo-") as folder:
        model = Path(folder) / "tiny"
        subprocess.run([sys.executable, "-m", "engine", "make-tiny", str(model)], cwd=ROOT, check=True)
        sys.path.insert(0, str(ROOT))
        from engine.runner.operations import use_reference_where_missing

        use_reference_where_missing(model)
        server = start(model)
        try:
            return chat(wait_for_url(server))
        finally:
            stop(server)


def start(model: Path) -> subprocess.Popen[str]:
    options = ["--port", "0", "--served-model-name", "tiny-k3", "--max-model-len", "4096", "--max-num-seqs", "8"]
    return subprocess.Popen(
        [sys.executable, "-m", "engine", "serve", str(model), *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )


def wait_for_url(server: subprocess.Popen[str]) -> str:
    """The server's address, from the last line of its start-up log; the log is shown if it does not come."""
    begin = time.monotonic()
    timer = threading.Timer(START_TIMEOUT_S, server.kill)
    timer.start()
    log = []
    assert server.stdout is not None
    for line in server.stdout:
        log.append(line)
        if "serving on http" in line:
            timer.cancel()
            # the pipe must stay empty, or the server would block on a full one
            threading.Thread(target=server.stdout.read, daemon=True).start()
            print(f"server ready after {time.monotonic() - begin:.1f} s")
            return line.split("serving on ")[1].strip()
    timer.cancel()
    raise SystemExit("the server did not start:\n" + "".join(log))


def chat(url: str) -> int:
    client = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    question = "Which is larger, 9.11 or 9.9?"
    print(f"> {question}")
    begin = time.perf_counter()
    stream = client.chat.completions.create(
        model="tiny-k3",
        messages=[{"role": "user", "content": question}],
        max_tokens=MAX_TOKENS,
        seed=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "reasoning_effort": "low", "return_token_ids": True},
    )
    first = last = 0.0
    usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta
            text = delta.content or (delta.model_extra or {}).get("reasoning_content")
            if text:
                last = time.perf_counter()
                first = first or last
                print("".join(c if c.isascii() and c.isprintable() else "." for c in text), end="", flush=True)
    print()
    if usage is None or not first:
        print("no answer came")
        return 1
    print(
        f"prompt tokens: {usage.prompt_tokens}, generated: {usage.completion_tokens} (random weights: noise is right)"
    )
    print(f"TTFT: {1000 * (first - begin):.1f} ms")
    print(f"decode: {(usage.completion_tokens - 1) / max(last - first, 1e-9):.1f} tok/s on one stream")
    return 0


def stop(server: subprocess.Popen[str]) -> None:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        code = server.wait(60)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
        raise SystemExit("the server did not stop within 60 s") from None
    print(f"server stopped (exit code {code})")


if __name__ == "__main__":
    sys.exit(main())
