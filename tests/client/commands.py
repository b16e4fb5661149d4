"""Commands: what they print, how they end, and those that are written to while they run."""

import fcntl
import json

from model import call, patch
from scenario import Skipped, exited, holds, lacks, runs, session_of


@runs
def a_command_runs_at_the_server(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="echo out; echo err >&2; pwd; echo $SUITE_SIDE; exit 3")]
        said = exited(output, 3)
        for part in ("out\n", "err\n", f"{scenario.workspace}\n"):
            holds(said, part)
        (output,) = yield [call("exec_command", cmd="printf 'äöü %s' ✓")]
        assert exited(output, 0) == "äöü ✓", output

    scenario.turn(script())
    if scenario.reads_messages:
        assert len(scenario.sent("process/start")) == 2
        lasts = [message["params"]["exitCode"] for message in scenario.told("process/exited")]
        assert lasts == [3, 0], lasts


@runs
def commands_choose_directory_and_login(scenario):
    (scenario.workspace / "below").mkdir()

    def script():
        (output,) = yield [call("exec_command", cmd="pwd", workdir=str(scenario.workspace / "below"))]
        assert exited(output, 0).strip() == str(scenario.workspace / "below"), output
        (output,) = yield [call("exec_command", cmd="shopt -q login_shell && echo login || echo plain", login=False)]
        assert exited(output, 0) == "plain\n", output
        (output,) = yield [call("exec_command", cmd="pwd", workdir=str(scenario.workspace / "missing"))]
        lacks(output, "exited with code 0")

    scenario.turn(script())


@runs
def commands_run_side_by_side(scenario):
    # Each waits for the other, so one after the other would never end.
    meet = "echo x > {mine}; until [ -e {other} ]; do :; done; echo met {mine}"

    def script():
        first, second = yield [call("exec_command", cmd=meet.format(mine="a", other="b"), yield_time_ms=20_000),
                               call("exec_command", cmd=meet.format(mine="b", other="a"), yield_time_ms=20_000)]
        assert exited(first, 0) == "met a\n", first
        assert exited(second, 0) == "met b\n", second

    scenario.turn(script())


@runs
def all_output_arrives_in_order(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="seq 1 5000", max_output_tokens=50_000, yield_time_ms=20_000)]
        expected = "".join(f"{number}\n" for number in range(1, 5001))
        assert exited(output, 0) == expected, f"{len(output)} characters"
        # Far more than the client keeps: the beginning and the end are there, and the command ends.
        (output,) = yield [call("exec_command", cmd="seq 1 400000; echo the end", yield_time_ms=30_000)]
        holds(exited(output, 0), "the end\n")

    scenario.turn(script())


@runs
def a_terminal_answers(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="test -t 0 && test -t 1 && read -p 'name? ' name && echo \"hello $name\"",
                                tty=True, yield_time_ms=250)]
        (output,) = yield [call("write_stdin", session_id=session_of(output), chars="world\n", yield_time_ms=20_000)]
        holds(exited(output, 0), "hello world")

    scenario.turn(script())
    if scenario.reads_messages:
        assert scenario.sent("process/start")[0]["params"]["tty"] is True
        assert len(scenario.sent("process/write")) == 1


@runs
def a_shell_is_talked_to(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="PS1='> ' bash --norc --noprofile", tty=True, yield_time_ms=250)]
        session, seen = session_of(output), output
        for line in ("x=40", "echo $((x + 2))"):
            (output,) = yield [call("write_stdin", session_id=session, chars=f"{line}\n", yield_time_ms=250)]
            assert session_of(output) == session
            seen += output
        (output,) = yield [call("write_stdin", session_id=session, chars="exit 7\n", yield_time_ms=20_000)]
        exited(output, 7)
        holds(seen + output, "42")

    scenario.turn(script())
    if scenario.reads_messages:
        written = [message["params"]["writeId"] for message in scenario.sent("process/write")]
        assert written == ["1", "2", "3"], written


@runs
def ctrl_c_ends_a_command(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="exec sleep 300", tty=True, yield_time_ms=250)]
        (output,) = yield [call("write_stdin", session_id=session_of(output), chars="\x03", yield_time_ms=20_000)]
        exited(output, 130)

    scenario.turn(script())


@runs
def a_command_in_the_background_is_polled(scenario):
    scenario.gate()

    def script():
        (output,) = yield [call("exec_command", cmd="read -r go < gate; echo gone", yield_time_ms=250)]
        session = session_of(output)
        (output,) = yield [call("exec_command", cmd="echo meanwhile")]
        assert exited(output, 0) == "meanwhile\n", output
        scenario.open_gate()
        (output,) = yield [call("write_stdin", session_id=session, chars="", yield_time_ms=20_000)]
        assert exited(output, 0) == "gone\n", output

    scenario.turn(script())


@runs
def what_still_runs_ends_with_the_client(scenario):
    scenario.gate()
    lock = open(scenario.workspace / "lock", "w")
    scenario.at_end(lock.close)

    def script():
        command = "exec 9> lock; flock 9; read -r go < gate; exec sleep 300"
        (output,) = yield [call("exec_command", cmd=command, yield_time_ms=250)]
        session_of(output)
        # It has the lock now.
        scenario.open_gate()

    scenario.turn(script())
    # The client says so and leaves without waiting for the answer.
    assert not scenario.reads_messages or scenario.sent("process/terminate")
    # It is given once the command has ended, which is long before its session does.
    fcntl.flock(lock, fcntl.LOCK_EX)


@runs
def an_environments_file_names_the_server(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="pwd")]
        assert exited(output, 0) == f"{scenario.workspace}\n", output

    scenario.turn(script(), environments='default = "box"\ninclude_local = false\n[[environments]]\nid = "box"\nurl = "{url}"\n')
    assert len(scenario.sent("process/start")) == 1


@runs
def the_client_starts_a_server_on_standard_streams(scenario):
    if scenario.on_stdio is None:
        raise Skipped("no program is known that serves on standard streams")
    program, *arguments = scenario.on_stdio

    def script():
        (output,) = yield [call("exec_command", cmd="echo $SUITE_SIDE; exit 3")]
        assert exited(output, 3) == "standard streams\n", output
        (output,) = yield [patch("*** Add File: added\n+x")]
        holds(output, "Success")
        (output,) = yield [call("exec_command", cmd=f"echo out > {scenario.outside}/made")]
        holds(output, "Read-only file system")

    scenario.turn(script(), environments=f"""
default = "box"
include_local = false

[[environments]]
id = "box"
program = {json.dumps(program)}
args = {json.dumps(arguments)}
env = {{ SUITE_SIDE = "standard streams" }}
""")
    assert (scenario.workspace / "added").read_text() == "x\n"
