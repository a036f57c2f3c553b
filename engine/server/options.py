"""Options of ``serve``, with the spelling vLLM uses. What is not implemented is an error that says so."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from engine.engine_config import add_engine_arguments
from engine.server.protocol import MAX_LOGPROBS
from engine.text.chat import EFFORTS
from engine.types import ParameterError, SamplingParams

# Members of a generation config that are defaults of requests.
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
REASONING_FIELDS = ("both", "reasoning_content", "reasoning")
# Options of published K3 commands that name what this engine always does.
NO_OPS = ("--enable-auto-tool-choice", "--trust-remote-code", "--language-model-only", "--enforce-eager")
# option -> values that ask for nothing this engine lacks
ONLY = {
    "tensor_parallel_size": (1,),
    "data_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "decode_context_parallel_size": (1,),
    "enable_expert_parallel": (False,),
    "kv_cache_dtype": ("auto",),
    "kv_cache_memory_bytes": (None,),
    "enable_prefix_caching": (None, False),
    "enable_chunked_prefill": (None, True),
    "cudagraph_capture_sizes": (None,),
    "speculative_config": (None,),
    "config": (None,),
}


class OptionError(ValueError):
    """An option whose value cannot be served."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All options of ``serve MODEL``."""
    parser.add_argument("model", metavar="MODEL", help="directory of the checkpoint")
    _server(parser.add_argument_group("server"))
    add_engine_arguments(parser)
    _model(parser.add_argument_group("model"))
    _chat(parser.add_argument_group("chat"))
    _elsewhere(parser.add_argument_group("not implemented yet: only the value that changes nothing is taken"))


def _server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    group.add_argument("--port", type=int, default=8000, help="port, 0: any free one (default %(default)s)")
    group.add_argument("--served-model-name", nargs="+", default=None, help="names clients may use; default: MODEL")
    group.add_argument("--api-key", nargs="+", default=None, help="keys of which /v1 needs one")
    group.add_argument(
        "--uvicorn-log-level", default="warning", choices=("debug", "info", "warning", "error", "critical")
    )
    group.add_argument("--disable-uvicorn-access-log", action="store_true", help="no line for each HTTP request")
    group.add_argument("--enable-log-requests", action="store_true", help="log parameters (never prompts) and aborts")
    group.add_argument("--max-log-len", type=int, default=None, help="most characters of a logged parameter line")
    group.add_argument("--root-path", default="", help="path prefix that a proxy strips")
    group.add_argument("--allowed-origins", type=_json_list, default=None, help="JSON list of origins for CORS")
    group.add_argument("--stream-interval", type=int, default=1, help="tokens of a sequence per streamed chunk")
    for name in ("keyfile", "certfile", "ca-certs"):
        group.add_argument(f"--ssl-{name}", default=None, metavar="FILE")
    group.add_argument("--ssl-cert-reqs", type=int, default=0, help="as ssl.CERT_NONE and so on")


def _model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tokenizer", default=None, metavar="DIR", help="directory of the tokenizer; default: MODEL")
    group.add_argument("--load-format", choices=("auto", "safetensors", "fastsafetensors"), default="auto")
    group.add_argument("--generation-config", default="auto", help="auto: MODEL's file; none: no file; or a directory")
    group.add_argument("--override-generation-config", type=_json_object, default={}, metavar="JSON")
    group.add_argument("--max-logprobs", type=int, default=MAX_LOGPROBS, help="most logprobs a request may ask for")


def _chat(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--reasoning-field", choices=REASONING_FIELDS, default="both", help="name of reasoning in answers"
    )
    group.add_argument("--default-chat-template-kwargs", type=_json_object, default={}, metavar="JSON")
    group.add_argument("--reasoning-parser", choices=("kimi_k3",), help="accepted; K3's parser is always used")
    group.add_argument("--tool-call-parser", choices=("kimi_k3",), help="accepted; K3's parser is always used")
    group.add_argument("--limit-mm-per-prompt", type=_json_object, help="accepted; text only", metavar="JSON")
    for name in NO_OPS:
        group.add_argument(name, action="store_true", help="accepted, changes nothing")


def _elsewhere(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tensor-parallel-size", "-tp", type=int, default=1)
    group.add_argument("--pipeline-parallel-size", "-pp", type=int, default=1)
    group.add_argument("--data-parallel-size", type=int, default=1)
    group.add_argument("--decode-context-parallel-size", type=int, default=1)
    group.add_argument("--enable-expert-parallel", action="store_true")
    group.add_argument("--kv-cache-dtype", default="auto")
    group.add_argument("--kv-cache-memory-bytes", type=int, default=None)
    group.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=None)
    group.add_argument("--enable-chunked-prefill", action=argparse.BooleanOptionalAction, default=None)
    group.add_argument("--cudagraph-capture-sizes", type=int, nargs="+", default=None)
    group.add_argument("--speculative-config", type=_json_object, default=None, metavar="JSON")
    group.add_argument("--config", default=None, metavar="FILE.yaml")


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot run. Raises OptionError naming the option."""
    for name, allowed in ONLY.items():
        value = getattr(args, name)
        if value not in allowed:
            raise OptionError(f"--{name.replace('_', '-')} {value} is not implemented in this version")
    if not Path(args.model).is_dir():
        raise OptionError(f"MODEL {args.model!r} is not a directory; download the checkpoint first")
    if not 0 <= args.port <= 65535:
        raise OptionError(f"--port must be between 0 and 65535, got {args.port}")
    if args.stream_interval < 1:
        raise OptionError(f"--stream-interval must be at least 1, got {args.stream_interval}")
    if not 0 <= args.max_logprobs <= MAX_LOGPROBS:
        raise OptionError(f"--max-logprobs must be between 0 and {MAX_LOGPROBS}, got {args.max_logprobs}")
    if args.api_key and not all(args.api_key):
        raise OptionError("--api-key must not be empty")
    if args.tokenizer is not None and not Path(args.tokenizer).is_dir():
        raise OptionError(f"--tokenizer {args.tokenizer!r} is not a directory")
    if args.ssl_keyfile and not args.ssl_certfile:
        raise OptionError("--ssl-keyfile needs --ssl-certfile")
    for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs"):
        path = getattr(args, name)
        if path is not None and not Path(path).is_file():
            raise OptionError(f"--{name.replace('_', '-')} {path!r} is not a file")
    _check_request_defaults(args)


def _check_request_defaults(args: argparse.Namespace) -> None:
    """A wrong default would otherwise turn every request that leaves the member out into a 400."""
    for name in args.override_generation_config:
        if name not in SAMPLING_DEFAULTS:
            raise OptionError(f"--override-generation-config takes {', '.join(SAMPLING_DEFAULTS)}, got {name!r}")
    try:
        SamplingParams(**args.override_generation_config)
    except ParameterError as error:
        raise OptionError(f"--override-generation-config: {error}") from None
    for name, value in args.default_chat_template_kwargs.items():
        if name == "thinking_effort":
            if value is not None and value not in EFFORTS:
                raise OptionError(
                    f"--default-chat-template-kwargs: thinking_effort must be one of "
                    f"{', '.join(EFFORTS)}, got {value!r}"
                )
        elif name not in ("thinking", "enable_thinking"):
            raise OptionError(
                f"--default-chat-template-kwargs takes thinking, enable_thinking and thinking_effort, got {name!r}"
            )
        elif not isinstance(value, bool):
            raise OptionError(f"--default-chat-template-kwargs: {name} must be true or false, got {value!r}")


def non_default(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, Any]:
    """The options that were set, for the start-up log; keys are not shown."""
    defaults = vars(parser.parse_args([args.model]))
    chosen = {name: value for name, value in vars(args).items() if name in defaults and value != defaults[name]}
    if "api_key" in chosen:
        chosen["api_key"] = f"{len(args.api_key)} keys"
    return chosen


def _json_object(text: str) -> dict[str, Any]:
    return _json(text, dict, "object")  # type: ignore[no-any-return]


def _json_list(text: str) -> list[Any]:
    return _json(text, list, "list")  # type: ignore[no-any-return]


def _json(text: str, kind: type, name: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, kind):
        raise argparse.ArgumentTypeError(f"expected a JSON {name}, got {text[:80]!r}")
    return value
