"""HTTP servers that follow the documented wire formats of vLLM and SGLang, with a small model behind them."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mrlm_pl.concurrency.event_loop import EventLoopThread

Answer = tuple[int, Any]
_reading = threading.Lock()  # ``from_pretrained`` changes ``transformers`` for all threads meanwhile


class FakeServer:
    """A server in this process, with the standard library's sockets.

    Attributes:
        faults: answers to the next sampling requests instead of samples, possibly as bytes; None breaks the connection,
            and an ellipsis leaves the sample.
        header: line that all answers have.
        log: method, path, headers and body of each request.
        delay: seconds before each sample.
        awake: samples wait until it is set.
        busy: concurrent sampling requests.
        peak: their maximum number.
    """

    samples = ""
    header = b"Server: fake"

    def __init__(self, model: Any, port: int = 0, name: str = "served", window: int = 64) -> None:
        self.model, self.name, self.window = model, name, window
        self.faults: list[Answer | EllipsisType | None] = []
        self.log: list[tuple[str, str, dict[str, str], Any]] = []
        self.delay, self.peak, self.busy = 0.0, 0, 0
        self.awake = asyncio.Event()
        self.awake.set()
        self.scaled, self.eos, self.version = False, None, "default"
        self._loop = EventLoopThread()
        self._server = self._loop.submit(asyncio.start_server(self._serve, "127.0.0.1", port)).result(60)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._writers: set[asyncio.StreamWriter] = set()

    def stop(self) -> None:
        async def end() -> None:
            self._server.close()
            for writer in self._writers:
                writer.transport.abort()

        if self._server is not None:
            self._loop.submit(end()).result(60)
            self._loop.close()
            self._server = None

    def wake(self) -> None:
        """Release the samples that wait."""

        async def wake() -> None:
            self.awake.set()

        self._loop.submit(wake()).result(60)

    def asked(self, path: str) -> list[Any]:
        """Return the bodies of the requests to a path."""
        return [body for _, found, _, body in self.log if found.partition("?")[0] == path]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split(" ", 2)
                headers = {}
                while header := (await reader.readline()).decode().strip():
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                text = await reader.readexactly(int(headers.get("content-length", 0)))
                answer = await self._answer(method, path, headers, json.loads(text) if text else None)
                if answer is None:
                    writer.transport.abort()
                    return
                body = answer[1] if isinstance(answer[1], bytes) else json.dumps(answer[1]).encode()
                writer.write(b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\n" % answer[0])
                writer.write(self.header + b"\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, UnicodeDecodeError):
            return  # the client went away, or is that of another server, which had this port before
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, method: str, path: str, headers: dict[str, str], body: Any) -> Answer | None:
        self.log.append((method, path, headers, body))
        if path == self.samples:
            self.busy += 1
            self.peak = max(self.peak, self.busy)
            try:
                await asyncio.sleep(self.delay)
                await self.awake.wait()
                fault = self.faults.pop(0) if self.faults else ...
                return self.sample(body) if fault is ... else fault
            finally:
                self.busy -= 1
        if path == "/v1/models":
            entry = {"id": self.name, "object": "model", "max_model_len": self.window}
            return 200, {"object": "list", "data": [entry]}
        return self.other(path, body)

    def sample(self, body: Any) -> Answer:
        raise NotImplementedError

    def other(self, path: str, body: Any) -> Answer:
        return 404, {"detail": "Not Found"}

    def reload(self, folder: str) -> None:
        with _reading:
            self.model = AutoModelForCausalLM.from_pretrained(folder).eval()

    @torch.no_grad()
    def draw(
        self, context: Sequence[int], count: int, temperature: float, top_k: int, seed: int, stops: Sequence[int]
    ) -> tuple[list[int], list[float], list[list[tuple[float, int]]], str]:
        """Return tokens, their log-probabilities, the two best at each position, and the finish reason."""
        generator = torch.Generator().manual_seed(seed)
        row, logprobs, best, ended = list(context), [], [], "length"
        for _ in range(count):
            logits = self.model(torch.tensor([row])).logits[0, -1]
            scaled = logits / (temperature or 1.0)
            kept = scaled
            if temperature == 0 or top_k > 0:
                lowest = scaled.topk(1 if temperature == 0 else top_k).values[-1]
                kept = torch.where(scaled >= lowest, scaled, -torch.inf)
            token = int(torch.multinomial(kept.softmax(-1), 1, generator=generator))
            shown = self.shown(logits, scaled, kept, temperature)
            top = shown.topk(2)
            row.append(token)
            logprobs.append(float(shown[token]))
            best.append([(float(value), int(index)) for value, index in zip(*top, strict=True)])
            if token in stops:
                ended = "stop"
                break
        return row[len(context) :], logprobs, best, ended

    def shown(self, logits: Any, scaled: Any, kept: Any, temperature: float) -> Any:
        """Return the reported log-probabilities."""
        return (scaled if self.scaled else logits).log_softmax(-1)


class FakeVllm(FakeServer):
    """``/v1/completions`` with token ids, and the routes of the development mode.

    ``scaled`` is ``--logprobs-mode processed_logprobs``; ``old`` is a version without ``return_token_ids``. As
    vLLM 0.33 does, it rejects requests while it is paused, and stays paused when it cannot load weights.
    """

    samples = "/v1/completions"
    old = development = paused = False

    def shown(self, logits: Any, scaled: Any, kept: Any, temperature: float) -> Any:
        if not self.scaled:
            return logits.log_softmax(-1)
        return (scaled if temperature == 0 else kept).log_softmax(-1)

    def sample(self, body: Any) -> Answer:
        if self.paused:
            return 503, {"error": {"message": "Generation is paused. Please retry after it resumes.", "code": 503}}
        if body["model"] != self.name:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist.", "code": 404}}
        if len(body["prompt"]) + body["max_tokens"] > self.window:
            return 400, {"error": {"message": f"This model's maximum context length is {self.window} tokens."}}
        stops = [*body["stop_token_ids"], *([] if body["ignore_eos"] or self.eos is None else [self.eos])]
        tokens, logprobs, best, ended = self.draw(
            body["prompt"], body["max_tokens"], body["temperature"], max(body["top_k"], 0), body["seed"], stops
        )
        names = [[f"token_id:{token}" for _, token in row] for row in best]
        told = {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": logprobs,
            "top_logprobs": [
                {name: value for name, (value, _) in zip(*pair, strict=True)} for pair in zip(names, best, strict=True)
            ],
        }
        choice = {"index": 0, "text": "", "logprobs": told, "finish_reason": ended, "stop_reason": None}
        if not self.old:
            choice |= {"token_ids": tokens, "prompt_token_ids": body["prompt"]}
        return 200, {"object": "text_completion", "model": self.name, "choices": [choice], "usage": {}}

    def other(self, path: str, body: Any) -> Answer:
        if not self.development:
            return 404, {"detail": "Not Found"}
        if path == "/collective_rpc" and body["method"] == "reload_weights":
            try:
                self.reload(body["kwargs"]["weights_path"])
            except OSError as error:
                return 500, {"error": {"message": f"Call to collective_rpc method failed: {error}", "code": 500}}
            return 200, {"results": [None]}
        if path == "/pause?mode=wait":
            self.paused = True
            return 200, {"status": "paused"}
        if path == "/resume":
            self.paused = False
            return 200, {"status": "resumed"}
        return 404, {"detail": "Not Found"}


class FakeSglang(FakeServer):
    """``/generate`` and ``/update_weights_from_disk``; log-probabilities are those before top-k and top-p."""

    samples = "/generate"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.scaled = True

    def sample(self, body: Any) -> Answer:
        how = body["sampling_params"]
        if len(body["input_ids"]) >= self.window - 6:
            return 400, {"error": {"message": f"Input length exceeds the maximum allowed length ({self.window - 6})."}}
        top_k = 1 if how["temperature"] == 0 else max(how["top_k"], 0)
        stops = [*how["stop_token_ids"], *([] if self.eos is None else [self.eos])]
        tokens, logprobs, best, ended = self.draw(
            body["input_ids"],
            how["max_new_tokens"],
            how["temperature"] or 1.0,
            top_k,
            how["sampling_seed"],
            stops,
        )
        reason = {"type": ended, "matched": tokens[-1]} if ended == "stop" else {"type": ended, "length": len(tokens)}
        told = {
            "finish_reason": reason,
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(tokens),
            "weight_version": self.version,
            "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, tokens, strict=True)],
        }
        if body.get("top_logprobs_num"):
            told["output_top_logprobs"] = [[[value, token, None] for value, token in row] for row in best]
        return 200, {"text": "", "output_ids": tokens, "meta_info": told}

    def other(self, path: str, body: Any) -> Answer:
        if path != "/update_weights_from_disk":
            return 404, {"detail": "Not Found"}
        self.reload(body["model_path"])
        self.version = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded to update model weights."}
