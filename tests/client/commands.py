"""Commands: what they print, how they end, and those that are written to while they run."""

from model import call
from scenario import exited, holds, lacks, session_of


def a_command_runs_at_the_server(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="echo out; echo err >&2; pwd; echo $SUITE_SIDE; exit 3")]
        said = exited(output, 3)
        for part in ("out\n", "err\n", f"{scenario.workspace}\n"):
            holds(said, part)
        (output,) = yield [call("exec_command", cmd="printf 'äöü %s' ✓")]
        assert exited(output, 0) == "äöü ✓", output

    scenario.turn(script())
    assert len(scenario.sent("process/start")) == 2
    lasts = [message["params"]["exitCode"] for message in scenario.told("process/exited")]
    assert lasts == [3, 0], lasts


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


def commands_run_side_by_side(scenario):
    # Each waits for the other, so one after the other would never end.
    meet = "echo x > {mine}; until [ -e {other} ]; do :; done; echo met {mine}"

    def script():
        first, second = yield [call("exec_command", cmd=meet.format(mine="a", other="b"), yield_time_ms=20_000),
                               call("exec_command", cmd=meet.format(mine="b", other="a"), yield_time_ms=20_000)]
        assert exited(first, 0) == "met a\n", first
        assert exited(second, 0) == "met b\n", second

    scenario.turn(script())


def all_output_arrives_in_order(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="seq 1 5000", max_output_tokens=50_000, yield_time_ms=20_000)]
        expected = "".join(f"{number}\n" for number in range(1, 5001))
        assert exited(output, 0) == expected, f"{len(output)} characters"
        # Far more than the client keeps: the beginning and the end are there, and the command ends.
        (output,) = yield [call("exec_command", cmd="seq 1 400000; echo the end", yield_time_ms=30_000)]
        holds(exited(output, 0), "the end\n")

    scenario.turn(script())


def a_terminal_answers(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="test -t 0 && test -t 1 && read -p 'name? ' name && echo \"hello $name\"",
                                tty=True, yield_time_ms=500)]
        (output,) = yield [call("write_stdin", session_id=session_of(output), chars="world\n", yield_time_ms=5_000)]
        holds(exited(output, 0), "hello world")

    scenario.turn(script())
    assert scenario.sent("process/start")[0]["params"]["tty"] is True
    assert len(scenario.sent("process/write")) == 1


def a_shell_is_talked_to(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="PS1='> ' bash --norc --noprofile", tty=True, yield_time_ms=500)]
        session = session_of(output)
        (output,) = yield [call("write_stdin", session_id=session, chars="x=40\n", yield_time_ms=500)]
        assert session_of(output) == session
        (output,) = yield [call("write_stdin", session_id=session, chars="echo $((x + 2))\n", yield_time_ms=500)]
        holds(output, "42")
        (output,) = yield [call("write_stdin", session_id=session, chars="exit 7\n", yield_time_ms=5_000)]
        exited(output, 7)

    scenario.turn(script())


def ctrl_c_ends_a_command(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="exec sleep 300", tty=True, yield_time_ms=500)]
        (output,) = yield [call("write_stdin", session_id=session_of(output), chars="\x03", yield_time_ms=5_000)]
        exited(output, 130)

    scenario.turn(script())


def a_command_in_the_background_is_polled(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="until [ -e go ]; do sleep 0.02; done; echo gone", yield_time_ms=300)]
        session = session_of(output)
        yield [call("exec_command", cmd="touch go")]
        (output,) = yield [call("write_stdin", session_id=session, chars="", yield_time_ms=5_000)]
        holds(exited(output, 0), "gone")

    scenario.turn(script())


def what_still_runs_ends_with_the_client(scenario):
    def script():
        (output,) = yield [call("exec_command", cmd="echo $$ > pid; exec sleep 300", yield_time_ms=300)]
        session_of(output)

    scenario.turn(script())
    assert scenario.sent("process/terminate"), "the client ends what it leaves"
    answers = [message for sender, message in scenario.exchange() if message.get("answers") == "process/terminate"]
    assert any(answer.get("result", {}).get("running") for answer in answers), answers


SCENARIOS = [
    a_command_runs_at_the_server,
    commands_choose_directory_and_login,
    commands_run_side_by_side,
    all_output_arrives_in_order,
    a_terminal_answers,
    a_shell_is_talked_to,
    ctrl_c_ends_a_command,
    a_command_in_the_background_is_polled,
    what_still_runs_ends_with_the_client,
]
