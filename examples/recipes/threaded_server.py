"""A server with several threads: Python's own http.server in front of one served model, every request in a thread of its own.

A web framework would hand requests to a pool of threads in the same way. The changed line is `model = hotfuse.jit(model)`.
"""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.request import Request, urlopen

import torch
from torch import nn

import hotfuse
from examples.recipes.common import Outcome, compared


def serving(model: Any) -> ThreadingHTTPServer:
    """A server that answers rows of numbers with the model's."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            rows = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with torch.inference_mode():
                answer = json.dumps(model(torch.tensor(rows)).tolist()).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def main(tiny: bool = False) -> Outcome:
    """Before and after."""
    torch.manual_seed(0)
    width = 32 if tiny else 768
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width)).eval()
    fast = hotfuse.jit(model)
    servers = serving(model), serving(fast)
    rows = json.dumps(torch.randn(8, width).tolist()).encode()

    def ask(server: ThreadingHTTPServer) -> torch.Tensor:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        with ThreadPoolExecutor(4) as pool:
            answers = pool.map(lambda _: json.loads(urlopen(Request(url, rows), timeout=60).read()), range(8))
            return torch.tensor(list(answers))

    try:
        return compared("threaded server, 8 requests on 4 threads", lambda: ask(servers[0]), lambda: ask(servers[1]), fast,
                        lambda a, b: torch.allclose(a, b, rtol=1e-3, atol=1e-4), 0.0 if tiny else 15.0)  # fmt: skip
    finally:
        for server in servers:
            server.shutdown()
            server.server_close()


if __name__ == "__main__":
    main("--tiny" in sys.argv)
