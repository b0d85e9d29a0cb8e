"""A hub on loopback that takes repositories and commits as the Hugging Face Hub does."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + 34 * "x"


@dataclass
class Hub:
    """The repositories and requests that the hub has received.

    Args:
        url: URL of the hub.
        created: bodies of the requests that made repositories.
        private: whether each repository is private, by name.
        files: content by repository and path.
        uploads: large files by their SHA-256.
        log: method and path of each request.
    """

    url: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[tuple[str, str], bytes] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)


@contextmanager
def fake_hub() -> Iterator[Hub]:
    """Yield a hub that accepts :data:`TOKEN`; weights are uploaded apart from the commit (git LFS)."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Print nothing."""

        def answer(self, status: int, body: Any) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            hub.log.append(f"GET {self.path}")
            name = self.path.removeprefix("/api/models/")
            if name in hub.private:
                self.answer(200, {"id": name, "private": hub.private[name]})
            else:
                self.answer(404, {"error": "not found"})

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_PUT(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            hub.log.append(f"PUT {self.path}")
            hub.uploads[hashlib.sha256(body).hexdigest()] = body
            self.answer(200, {})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            hub.log.append(f"POST {self.path}")
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                self.answer(401, {"error": "Invalid username or password."})
            elif self.path == "/api/repos/create":
                hub.created.append(json.loads(body))
                named = f"{hub.created[-1].get('organization', 'me')}/{hub.created[-1]['name']}"
                hub.private.setdefault(named, hub.created[-1].get("visibility") == "private")
                self.answer(200, {"url": f"{hub.url}/{named}", "id": named})
            elif self.path == "/api/validate-yaml":
                self.answer(200, {"errors": [], "warnings": []})
            elif "/preupload/" in self.path:
                files = json.loads(body)["files"]
                modes = [
                    {"path": path, "uploadMode": "lfs" if path.endswith(".safetensors") else "regular"}
                    for path in (item["path"] for item in files)
                ]
                self.answer(200, {"files": [{**mode, "shouldIgnore": False} for mode in modes]})
            elif self.path.endswith("/info/lfs/objects/batch"):
                objects = json.loads(body)["objects"]
                actions = [{"upload": {"href": f"{hub.url}/upload/{item['oid']}"}} for item in objects]
                pairs = zip(objects, actions, strict=True)
                self.answer(200, {"transfer": "basic", "objects": [{**item, "actions": to} for item, to in pairs]})
            elif match := re.search(r"/api/models/(.+)/commit/", self.path):
                for line in body.decode().splitlines():
                    item = json.loads(line)
                    if item["key"] == "file":
                        content = base64.b64decode(item["value"]["content"])
                        hub.files[match[1], item["value"]["path"]] = content
                    elif item["key"] == "lfsFile":
                        hub.files[match[1], item["value"]["path"]] = hub.uploads[item["value"]["oid"]]
                page = f"{hub.url}/{match[1]}/commit/{40 * 'a'}"
                self.answer(200, {"commitUrl": page, "commitOid": 40 * "a", "success": True})
            else:
                self.answer(404, {"error": f"no {self.path}"})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
