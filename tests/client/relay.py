"""Connections to a rendezvous that are reset: the client's and the executor's, in the middle of work.

What passes is encrypted, so a cut is placed by the kind of frame and by what the scenario did just before.
"""

from model import call
from scenario import exited, holds, runs, session_of


def record(frame):
    """A part of a message."""
    return frame["body"] == "data"


def long_record(frame):
    """One of much output, of which a message has up to 8 KiB, encoded."""
    return record(frame) and frame["length"] > 8 << 10


def is_answer(frame):
    """The handshake's second message."""
    return frame["body"] == "handshake"


@runs
def a_cut_record_of_output_is_not_lost(scenario):
    scenario.gate()

    def script():
        (output,) = yield [call("exec_command", cmd="read -r go < gate; seq 1 5000; exit 4", yield_time_ms=250)]
        session = session_of(output)
        scenario.cut("server", record)
        scenario.open_gate()
        (rest,) = yield [call("write_stdin", session_id=session, chars="", max_output_tokens=50_000, yield_time_ms=20_000)]
        expected = "".join(f"{number}\n" for number in range(1, 5001))
        assert exited(rest, 4) == expected, f"{len(rest)} characters"

    scenario.turn(script(), cuts=1)
    # It is away while the command runs: behind a rendezvous it waits twice as long before each try.
    scenario.refuse(2)
    scenario.turn(script(), cuts=1)


@runs
def a_cut_in_much_output_ends_no_command(scenario):
    # Less than 1 MiB: after a cut the client puts no more than that in order, and gives a command up that wrote more meanwhile.
    scenario.gate()

    def script(sender):
        (output,) = yield [call("exec_command", cmd="read -r go < gate; seq 1 120000; echo the end", yield_time_ms=250)]
        session = session_of(output)
        scenario.cut(sender, long_record)
        scenario.open_gate()
        (output,) = yield [call("write_stdin", session_id=session, chars="", yield_time_ms=30_000)]
        holds(exited(output, 0), "the end\n")

    for sender in ("server", "executor"):
        scenario.turn(script(sender), cuts=1)


@runs
def a_cut_record_of_input_is_written_once(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="stty -echo; while read -r line; do echo got $line; done", tty=True,
                                yield_time_ms=250)]
        session, seen = session_of(output), output
        # On its way to the rendezvous, and from there to the executor.
        for sender, line in (("client", "one"), ("rendezvous", "two")):
            scenario.cut(sender, record)
            (output,) = yield [call("write_stdin", session_id=session, chars=f"{line}\n", yield_time_ms=1000)]
            scenario.await_cuts()
            seen += output
        (output,) = yield [call("write_stdin", session_id=session, chars="three\n\x04", yield_time_ms=20_000)]
        seen += output
        exited(output, 0)
        for line in ("one", "two", "three"):
            assert seen.count(f"got {line}") == 1, seen

    scenario.turn(script(), cuts=2)


@runs
def a_cut_leaves_the_sandbox_on_behind_a_rendezvous(scenario):
    scenario.gate()
    made = scenario.outside / "made"

    def script(status):
        (output,) = yield [call("exec_command", cmd=f"read -r go < gate; echo out > {made}", yield_time_ms=250)]
        session = session_of(output)
        scenario.cut("server", record)
        scenario.open_gate()
        (output,) = yield [call("write_stdin", session_id=session, chars="", yield_time_ms=20_000)]
        exited(output, status)
        (output,) = yield [call("exec_command", cmd=f"echo out > {made}", yield_time_ms=20_000)]
        exited(output, status)

    for sandbox in ("read-only", "workspace-write", "danger-full-access"):
        is_free = sandbox == "danger-full-access"
        scenario.turn(script(0 if is_free else 1), sandbox=sandbox, cuts=1)
        assert made.exists() == is_free, sandbox


@runs
def a_cut_handshake_is_told_or_tried_again(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="echo still here")]
        assert exited(output, 0) == "still here\n", output

    scenario.cut("server", is_answer)
    scenario.turn(script(), cuts=1)
