"""The routes, and errors in one shape."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException

from engine.server.body import read_json
from engine.server.chat import ChatAnswer
from engine.server.completion import CompletionAnswer
from engine.server.errors import ApiError, error_bytes
from engine.server.guard import Guard
from engine.server.state import ServerState
from engine.server.stream import ClientGone, EventStream, to_json, until_disconnect
from engine.server.tokenize import detokenize, tokenize, tokenizer_info
from engine.types import ParameterError
from engine.version import VERSION

logger = logging.getLogger(__name__)


def build_app(state: ServerState, *, root_path: str = "", allowed_origins: list[str] | None = None) -> FastAPI:
    """The application over a running engine."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, root_path=root_path)
    _add_errors(app)
    _add_generation(app, state)
    _add_information(app, state)
    app.add_middleware(Guard, api_keys=state.api_keys)
    if allowed_origins:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(CORSMiddleware, allow_origins=allowed_origins, allow_methods=["*"], allow_headers=["*"])
    return app


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(value), status, media_type="application/json", headers=dict(headers or {}))


def error_response(error: ApiError) -> Response:
    body = error_bytes(error.status, error.message, error.param)
    return Response(body, error.status, media_type="application/json", headers=error.headers)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(ParameterError)
    async def parameter_error(request: Request, error: ParameterError) -> Response:
        return error_response(ApiError(400, str(error), param=error.param))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        texts = {404: f"there is no route {request.url.path[:200]}", 405: f"{request.method} is not allowed here"}
        text = texts.get(error.status_code, str(error.detail))
        return error_response(ApiError(error.status_code, text, headers=error.headers))

    @app.exception_handler(RecursionError)
    async def recursion_error(request: Request, error: RecursionError) -> Response:
        return error_response(ApiError(400, "the body is nested too deeply", param="body"))

    @app.exception_handler(Exception)
    async def internal_error(request: Request, error: Exception) -> Response:
        return error_response(ApiError(500, "internal error"))


def _add_generation(app: FastAPI, state: ServerState) -> None:
    async def generate(request: Request, kind: type[CompletionAnswer] | type[ChatAnswer]) -> Response:
        state.check_serving()
        body = await read_json(request.headers, request.receive)
        answer = await kind.start(state, body, request.headers.get("x-request-id"))
        if answer.is_stream:
            return EventStream(answer.stream(), answer.job.close)
        try:
            return json_response(await until_disconnect(request.receive, answer.whole()))
        except ClientGone:
            return Response(status_code=499)  # nobody reads it
        finally:
            answer.job.close()

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await generate(request, CompletionAnswer)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await generate(request, ChatAnswer)

    @app.post("/tokenize")
    async def post_tokenize(request: Request) -> Response:
        return json_response(await tokenize(state, await read_json(request.headers, request.receive)))

    @app.post("/detokenize")
    async def post_detokenize(request: Request) -> Response:
        return json_response(detokenize(state, await read_json(request.headers, request.receive)))


def _add_information(app: FastAPI, state: ServerState) -> None:
    @app.get("/v1/models")
    async def models() -> Response:
        state.check_serving()
        common = {"object": "model", "created": state.created, "owned_by": "kimi-engine", "root": state.model_root}
        entries = [
            {"id": name, **common, "parent": None, "max_model_len": state.limits.max_model_len}
            for name in state.model_names
        ]
        return json_response({"object": "list", "data": entries})

    async def health() -> Response:
        state.check_serving()
        return Response()

    app.api_route("/health", methods=["GET", "HEAD"])(health)
    app.api_route("/ping", methods=["GET", "HEAD", "POST"])(health)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(state.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": VERSION})

    @app.get("/load")
    async def load() -> Response:
        return json_response({"server_load": state.engine.num_unfinished})

    @app.get("/tokenizer_info")
    async def get_tokenizer_info() -> Response:
        return json_response(tokenizer_info(state))
