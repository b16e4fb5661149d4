"""Our client, through our rendezvous to its own executor, which repeats no frame: what a cut loses the session brings back."""

import os
import subprocess

from relay import record
from scenario import holds, runs

# In seconds; a cut takes one or two.
LONGEST_RUN = 50


def interop(scenario, step, cuts=(), status=0):
    """Runs the client that the tests bring, placing before each of its parts the cut that is due: (part, sender)."""
    command = [scenario.server.interop, scenario.server.url, scenario.server.ENVIRONMENT, scenario.workspace, step]
    waiting = list(cuts)
    with start(scenario, command) as client:
        try:
            for line in client.stdout:
                if line == "done\n":
                    break
                if waiting and waiting[0][0] == line.strip():
                    scenario.cut(waiting.pop(0)[1], record)
                client.stdin.write("go on\n")
                client.stdin.flush()
                if line == "started\n":
                    scenario.open_gate()
            scenario.stderr = client.stderr.read()
            assert client.wait(LONGEST_RUN) == status, f"{step} ended with status {client.returncode}"
        finally:
            client.kill()
    assert not waiting, f"no part of the client's was {waiting}"
    scenario.await_cuts()
    scenario.connections = scenario.opened()


def start(scenario, command):
    environment = {"PATH": os.environ["PATH"], "PORTCULLIS_HARNESS_TOKEN": scenario.server.harness_token}
    return subprocess.Popen([str(part) for part in command], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, errors="replace")


@runs
def our_command_runs_at_its_executor(scenario):
    at = ["--remote", scenario.server.url, "--environment-id", scenario.server.ENVIRONMENT, "--workspace", scenario.workspace]
    command = [scenario.server.portcullis, "exec", *at, "--", "sh", "-c", "echo out; echo err >&2; pwd; exit 7"]
    with start(scenario, command) as client:
        stdout, scenario.stderr = client.communicate("", timeout=LONGEST_RUN)
        assert client.returncode == 7, client.returncode
    assert stdout == f"out\n{scenario.workspace}\n", stdout
    holds(scenario.stderr, "err\n")


@runs
def our_files_pass_to_its_executor_and_back(scenario):
    interop(scenario, "files")
    assert (scenario.workspace / "five-mib").stat().st_size == 5 << 20


@runs
def our_cuts_lose_no_output_of_its_executor(scenario):
    scenario.gate()
    for sender in ("server", "executor"):
        interop(scenario, "output", [("started", sender)])


@runs
def our_cuts_repeat_no_input_at_its_executor(scenario):
    interop(scenario, "input", [("line", sender) for sender in ("client", "server", "rendezvous")])


@runs
def our_cuts_of_file_calls_are_told_as_what_they_are(scenario):
    # The executor knows no extension by which a change could be sent again, so nobody knows whether it was made.
    for part, said in (("write", "Lost {"), ("read", "Disconnected")):
        interop(scenario, "files", [(part, "client")], status=1)
        holds(scenario.stderr, said)
