"""Connections that are reset in the middle of each kind of work: the client comes back, and the turn ends all the same."""

import mcp
from files import first_input, png
from model import call, call_in, patch
from proxy import output_of
from scenario import exited, holds, runs, session_of, text_of


def answers(method):
    """The server's answer to a method."""
    return lambda message: message.get("answers") == method


def calls(method):
    """The client's call of a method."""
    return lambda message: message.get("method") == method


@runs
def a_cut_in_output_loses_nothing(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="seq 1 5000", max_output_tokens=50_000, yield_time_ms=20_000)]
        expected = "".join(f"{number}\n" for number in range(1, 5001))
        assert exited(output, 0) == expected, f"{len(output)} characters"

    # A start without an answer is another case: see below.
    scenario.cut("server", lambda message: output_of(message) and scenario.answered("process/start"))
    scenario.turn(script(), cuts=1)
    assert len(scenario.sent("process/start")) == 1 and scenario.sent("process/read")


@runs
def cuts_again_and_again_lose_nothing(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="read -r go; for n in 1 2 3; do echo part $n; read -r go; done; echo end",
                                tty=True, yield_time_ms=250)]
        session, seen = session_of(output), output
        for part in (b"part 1", b"part 2", b"part 3"):
            scenario.cut("server", lambda message, part=part: part in output_of(message))
            (output,) = yield [call("write_stdin", session_id=session, chars="go\n", yield_time_ms=250)]
            scenario.await_cuts()
            seen += output
        (output,) = yield [call("write_stdin", session_id=session, chars="go\n", yield_time_ms=20_000)]
        seen += output
        exited(output, 0)
        for part in ("part 1", "part 2", "part 3", "end"):
            assert seen.count(part) == 1, seen

    scenario.turn(script(), cuts=3)


@runs
def what_runs_while_the_client_is_away_is_kept(scenario):
    scenario.gate()

    def script():
        (output,) = yield [call("exec_command", cmd="echo begun; read -r go < gate; seq 1 5000; exit 4", yield_time_ms=250)]
        session = session_of(output)
        # It is away until it has tried twenty times, which takes two seconds; the command needs a few milliseconds.
        scenario.await_cuts()
        scenario.open_gate()
        (rest,) = yield [call("write_stdin", session_id=session, chars="", max_output_tokens=50_000, yield_time_ms=20_000)]
        expected = "".join(f"{number}\n" for number in range(1, 5001))
        assert exited(rest, 4).removeprefix("begun\n") == expected, f"{len(rest)} characters"

    scenario.refuse(20)
    scenario.cut("server", lambda message: b"begun" in output_of(message) and scenario.answered("process/start"))
    scenario.turn(script(), cuts=1)


@runs
def a_cut_at_the_end_of_a_command(scenario):
    scenario.gate()

    def script(what):
        (output,) = yield [call("exec_command", cmd="read -r go < gate; echo said; exit 5", yield_time_ms=250)]
        session = session_of(output)
        scenario.cut("server", calls(what))
        scenario.open_gate()
        (output,) = yield [call("write_stdin", session_id=session, chars="", yield_time_ms=20_000)]
        assert exited(output, 5) == "said\n", output

    scenario.turn(script("process/exited"), cuts=1)
    scenario.turn(script("process/closed"), cuts=1)


@runs
def a_cut_start_is_told_and_the_next_works(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="exec sleep 300", yield_time_ms=20_000)]
        holds(output, "exec_command failed")
        (output,) = yield [call("exec_command", cmd="echo still here", yield_time_ms=20_000)]
        assert exited(output, 0) == "still here\n", output

    scenario.cut("server", answers("process/start"))
    scenario.turn(script(), cuts=1)
    # The client never starts it again, and ends what may run.
    first, second = [message["params"]["processId"] for message in scenario.sent("process/start")]
    ended = [message["params"]["processId"] for message in scenario.sent("process/terminate")]
    assert first in ended, ended


@runs
def a_cut_write_is_written_once(scenario):
    def script(cut):
        (output,) = yield [call("exec_command", cmd="stty -echo; while read -r line; do echo got $line; done", tty=True,
                                yield_time_ms=250)]
        session = session_of(output)
        cut()
        (output,) = yield [call("write_stdin", session_id=session, chars="one\n", yield_time_ms=250)]
        scenario.await_cuts()
        seen = output
        (output,) = yield [call("write_stdin", session_id=session, chars="two\n\x04", yield_time_ms=20_000)]
        seen += output
        exited(output, 0)
        assert seen.count("got one") == 1 and seen.count("got two") == 1, seen

    # Lost before it is written, and written without an answer.
    scenario.turn(script(lambda: scenario.cut("client", calls("process/write"))), cuts=1)
    scenario.turn(script(lambda: scenario.cut("server", answers("process/write"))), cuts=1)


@runs
def a_cut_leaves_the_sandbox_on(scenario):
    scenario.gate()
    made = scenario.outside / "made"

    def script(status):
        (output,) = yield [call("exec_command", cmd=f"echo begun; read -r go < gate; echo out > {made}", yield_time_ms=250)]
        session = session_of(output)
        scenario.await_cuts()
        scenario.open_gate()
        (output,) = yield [call("write_stdin", session_id=session, chars="", yield_time_ms=20_000)]
        exited(output, status)
        (output,) = yield [call("exec_command", cmd=f"echo out > {made}", yield_time_ms=20_000)]
        exited(output, status)

    for sandbox in ("read-only", "workspace-write", "danger-full-access"):
        is_free = sandbox == "danger-full-access"
        scenario.cut("server", lambda message: b"begun" in output_of(message) and scenario.answered("process/start"))
        scenario.turn(script(0 if is_free else 1), sandbox=sandbox, cuts=1)
        assert made.exists() == is_free, sandbox


@runs
def a_cut_patch_is_told_and_the_next_works(scenario):
    first, second, third = (scenario.workspace / name for name in ("first", "second", "third"))

    def script():
        (output,) = yield [patch("*** Add File: first\n+1\n*** Add File: second\n+2")]
        holds(output, "Failed to write file")
        (output,) = yield [patch("*** Add File: third\n+3")]
        holds(output, "Success")

    scenario.cut("client", calls("fs/writeFile"))
    scenario.turn(script(), cuts=1)
    assert not first.exists() and not second.exists() and third.exists()
    third.unlink()
    # Written, but the client is not told: it does not write again, and says that it failed.
    scenario.cut("server", answers("fs/writeFile"))
    scenario.turn(script(), cuts=1)
    assert first.read_text() == "1\n" and not second.exists() and third.exists()


@runs
def a_cut_image_is_told_and_the_next_is_seen(scenario):
    (scenario.workspace / "dot.png").write_bytes(png(3, 2, b"\xff\x00\x00"))
    view = call("view_image", path=str(scenario.workspace / "dot.png"))

    def script():
        (output,) = yield [view]
        holds(text_of(output), "unable to read image")
        (output,) = yield [view | {"call_id": "again"}]
        assert [part["type"] for part in output] == ["input_image"], output

    scenario.cut("server", answers("fs/readFile"))
    scenario.turn(script(), cuts=1)


@runs
def a_cut_discovery_ends_no_turn(scenario):
    (scenario.workspace / "AGENTS.md").write_text("Say ahoy, always.\n")

    def script():
        (output,) = yield [call("exec_command", cmd="echo still here")]
        assert exited(output, 0) == "still here\n", output

    scenario.cut("server", answers("initialize"))
    scenario.turn(script(), cuts=1)
    holds(first_input(scenario), "Say ahoy, always.")
    # What the client had asked is lost, and it does without.
    for method in ("fs/getMetadata", "fs/readFile"):
        scenario.cut("server", answers(method))
        scenario.turn(script(), cuts=1)


@runs
def a_cut_mcp_server_goes_on(scenario):
    def script():
        (output,) = yield [call_in("mcp__sums", "add", a=40, b=2)]
        holds(text_of(output), "sum: 42")
        (output,) = yield [call_in("mcp__sums", "add", a=1, b=2)]
        holds(text_of(output), "sum: 3")

    for part in (b"serverInfo", b"sum: 42"):
        scenario.cut("server", lambda message: part in output_of(message))
        scenario.turn(script(), config=mcp.run_by_command(scenario), cuts=1)
        assert len(scenario.sent("process/start")) == 1


@runs
def a_cut_mcp_call_over_http_is_told_and_the_next_works(scenario):
    server = mcp.serve(scenario)

    def script():
        scenario.cut("server", calls("http/request/bodyDelta"))
        (output,) = yield [call_in("mcp__web", "add", a=40, b=2)]
        holds(text_of(output), "Transport closed")
        (output,) = yield [call_in("mcp__web", "add", a=1, b=2)]
        holds(text_of(output), "sum: 3")

    scenario.turn(script(), config=mcp.reached_at(server), cuts=1)
