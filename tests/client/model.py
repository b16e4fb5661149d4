"""A model that plays a script: the Responses API on loopback, one script a scenario.

A script is a generator. It yields what the model says next, a list of items made by `call`, `patch` and `say`, and is given what
came back for them: the tools' outputs in order. What it is not given it finds in `Model.requests`.
"""

import http.server
import itertools
import json
import threading

from loopback import Loopback

# No request of a scenario comes near it; more is a defect.
LARGEST_REQUEST = 64 << 20


class Model:
    """The API's server. `play` says which script answers from now on."""

    def __init__(self):
        # What the client sent, the first failed check, and what was asked besides.
        self.requests, self.failure, self.unexpected = [], None, []
        self.ended = False
        self._script, self._is_new = None, True
        self._lock = threading.Lock()
        model = self

        class Answer(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                length = int(self.headers.get("content-length", 0))
                assert length <= LARGEST_REQUEST, f"the client sent a request of {length} bytes"
                body = self.rfile.read(length)
                if not self.path.endswith("/responses"):
                    model.unexpected.append(f"POST {self.path}")
                    return self._answer(404, "application/json", b"{}")
                self._answer(200, "text/event-stream", model._turn(json.loads(body)))

            def do_GET(self):
                # The client works without a list of models too; it knows those it was built with.
                self._answer(404, "application/json", b"{}")

            def _answer(self, status, kind, body):
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self._server = Loopback(Answer)
        self.url = f"{self._server.origin}/v1"

    def play(self, script):
        """Begins a script; what was recorded of the last one is forgotten."""
        with self._lock:
            self.requests, self.failure, self.unexpected = [], None, []
            self._script, self._is_new = script, True
            self.ended = False

    def close(self):
        self._server.close()

    def _turn(self, request):
        with self._lock:
            self.requests.append(request)
            try:
                if self.ended or self._script is None:
                    raise AssertionError("the client asked the model once more after the script's end")
                items = next(self._script) if self._is_new else self._script.send(outputs(request))
                self._is_new = False
            except StopIteration:
                self.ended = True
                items = [say("done")]
            except Exception as failure:  # told by the scenario, in its own thread
                self.failure = self.failure or failure
                self.ended = True
                items = [say("the script failed")]
            return stream(items)


_numbers = itertools.count(1)


def call(tool, **arguments):
    """The model calls a tool."""
    number = next(_numbers)
    return {"type": "function_call", "id": f"fc_{number}", "call_id": f"call_{number}", "name": tool,
            "arguments": json.dumps(arguments)}


def call_in(namespace, tool, **arguments):
    """The model calls a tool that is in a group, as those of MCP servers are."""
    return call(tool, **arguments) | {"namespace": namespace}


def patch(text):
    """The model changes files."""
    number = next(_numbers)
    return {"type": "custom_tool_call", "id": f"ctc_{number}", "call_id": f"call_{number}", "name": "apply_patch",
            "input": f"*** Begin Patch\n{text.strip()}\n*** End Patch"}


def say(text):
    """The model speaks, and the turn ends if it does nothing else."""
    return {"type": "message", "role": "assistant", "id": f"msg_{next(_numbers)}",
            "content": [{"type": "output_text", "text": text}]}


def outputs(request):
    """What came back for the newest calls, in their order: texts, or lists of parts where there are images."""
    newest = []
    for item in reversed(request["input"]):
        if item.get("type") in ("function_call_output", "custom_tool_call_output"):
            newest.append(item["output"])
        elif newest:
            break
    return newest[::-1]


def stream(items):
    """The events of a response with these items."""
    number = next(_numbers)
    usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
    events = [{"type": "response.created", "response": {"id": f"resp_{number}"}}]
    events += [{"type": "response.output_item.done", "output_index": at, "item": item} for at, item in enumerate(items)]
    events += [{"type": "response.completed", "response": {"id": f"resp_{number}", "usage": usage}}]
    return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events).encode()
