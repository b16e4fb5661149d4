#!/usr/bin/env python3
"""An MCP server with three tools; `side` says where it runs. On standard input and output when it is started; with
`serve_http` over streamable HTTP, which answers calls as streams of events."""

import http.server
import json
import os
import sys

sys.dont_write_bytecode = True

from loopback import Loopback

TOOLS = [
    {"name": "add", "description": "Adds two numbers.", "annotations": {"readOnlyHint": True},
     "inputSchema": {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}},
    {"name": "side", "description": "Says where the server runs.", "annotations": {"readOnlyHint": True},
     "inputSchema": {"type": "object", "properties": {}}},
    {"name": "repeat", "description": "Says a letter many times.", "annotations": {"readOnlyHint": True},
     "inputSchema": {"type": "object", "properties": {"times": {"type": "number"}}, "required": ["times"]}},
]


def answer(message):
    """The answer to a request, None to a notification."""
    if "id" not in message:
        return None
    method, params = message.get("method"), message.get("params") or {}
    if method == "initialize":
        result = {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}},
                  "serverInfo": {"name": "sums", "version": "1"}}
    elif method == "tools/list":
        result = {"tools": TOOLS}
    elif method == "tools/call":
        result = {"content": [{"type": "text", "text": called(params["name"], params.get("arguments") or {})}], "isError": False}
    elif method == "ping":
        result = {}
    else:
        return {"jsonrpc": "2.0", "id": message["id"], "error": {"code": -32601, "message": f"no method {method}"}}
    return {"jsonrpc": "2.0", "id": message["id"], "result": result}


def called(tool, arguments):
    if tool == "add":
        return f"sum: {arguments['a'] + arguments['b']}"
    if tool == "repeat":
        return "x" * int(arguments["times"])
    return f"pid {os.getpid()}, setting {os.environ.get('SETTING')}, directory {os.getcwd()}"


def serve_stdio():
    for line in sys.stdin:
        reply = answer(json.loads(line))
        if reply is not None:
            print(json.dumps(reply), flush=True)


def serve_http():
    """Serves on loopback until `close`; `seen` has what was asked, with the headers."""

    class Answer(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            message = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.server.seen.append((message.get("method"), dict(self.headers)))
            reply = answer(message)
            if reply is None:
                self.send_response(202)
                self.send_header("content-length", "0")
                return self.end_headers()
            self.send_response(200)
            self.send_header("mcp-session-id", "one")
            if message["method"] == "tools/call":
                # In pieces of unknown length, as servers send events.
                self.send_header("content-type", "text/event-stream")
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for piece in (b": soon\n\n", f"event: message\ndata: {json.dumps(reply)}\n\n".encode(), b""):
                    self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                    self.wfile.flush()
            else:
                body = json.dumps(reply).encode()
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def do_GET(self):
            self._empty(405)

        def do_DELETE(self):
            self._empty(200)

        def _empty(self, status):
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = Loopback(Answer)
    server.seen = []
    return server


if __name__ == "__main__":
    serve_stdio()
