"""MCP servers that the client runs, or reaches, through the exec-server."""

import pathlib

import mcp_server
from model import call_in
from scenario import holds, runs, text_of

PROGRAM = pathlib.Path(mcp_server.__file__).resolve()


@runs
def an_mcp_server_is_run(scenario):
    def script():
        (output,) = yield [call_in("mcp__sums", "add", a=40, b=2)]
        holds(text_of(output), "sum: 42")
        (output,) = yield [call_in("mcp__sums", "side")]
        holds(text_of(output), "setting yes, ")
        holds(text_of(output), f"directory {scenario.workspace}")
        # More than a pipe holds at once, and more than the client shows.
        (output,) = yield [call_in("mcp__sums", "repeat", times=300_000)]
        holds(text_of(output), "xxxx")

    scenario.turn(script(), config=run_by_command(scenario))
    if scenario.reads_messages:
        starts = [message["params"] for message in scenario.sent("process/start")]
        assert [start["argv"] for start in starts] == [["python3", str(PROGRAM)]], starts
        assert starts[0]["pipeStdin"] is True
        assert scenario.sent("process/terminate"), "it ends with the client"


@runs
def an_mcp_server_is_reached_over_http(scenario):
    server = serve(scenario)

    def script():
        (output,) = yield [call_in("mcp__web", "add", a=40, b=2)]
        holds(text_of(output), "sum: 42")
        (output,) = yield [call_in("mcp__web", "repeat", times=300_000)]
        holds(text_of(output), "xxxx")

    scenario.turn(script(), config=reached_at(server))
    asked = [method for method, _ in server.seen]
    assert asked[:2] == ["initialize", "notifications/initialized"], asked
    assert asked.count("tools/call") == 2, asked
    sessions = {headers.get("mcp-session-id") for method, headers in server.seen if method == "tools/call"}
    assert sessions == {"one"}, sessions
    assert not scenario.reads_messages or len(scenario.sent("http/request")) >= 5


@runs
def both_kinds_serve_one_turn(scenario):
    server = serve(scenario)

    def script():
        outputs = yield [call_in("mcp__sums", "add", a=1, b=2), call_in("mcp__web", "add", a=3, b=4)]
        holds(text_of(outputs[0]), "sum: 3")
        holds(text_of(outputs[1]), "sum: 7")

    scenario.turn(script(), sandbox="read-only", config=run_by_command(scenario) + reached_at(server))


def run_by_command(scenario):
    """The client's configuration for a server on standard input and output."""
    return f"""
[mcp_servers.sums]
command = "python3"
args = ["{PROGRAM}"]
cwd = "{scenario.workspace}"
environment_id = "remote"
env = {{ SETTING = "yes" }}
"""


def reached_at(server):
    """The client's configuration for a server over streamable HTTP."""
    return f"""
[mcp_servers.web]
url = "{server.origin}/mcp"
environment_id = "remote"
"""


def serve(scenario):
    """An MCP server over HTTP until the scenario's end."""
    server = mcp_server.serve_http()
    scenario.at_end(server.close)
    return server
