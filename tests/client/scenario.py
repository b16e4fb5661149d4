"""What a scenario works with: a workspace, a place outside of it, the client, the model, and the link to the server."""

import json
import os
import re

import codex

# The size up to which a message is shown with a failure.
SHOWN = 300
# In seconds, for what takes milliseconds.
LONGEST_WAIT = 20


# All of them, in the order in which they run: that of the files.
SCENARIOS = []


def runs(function):
    """Marks a scenario: a function that fails by an exception."""
    SCENARIOS.append(function)
    return function


class Skipped(Exception):
    """This scenario says nothing about this server, and why."""


class Scenario:
    def __init__(self, program, folder, model, proxy, server):
        self._program, self._model, self._proxy, self.server = program, model, proxy, server
        # What serves one client on its standard input and output, program and arguments; None if nobody knows.
        self.on_stdio = server.on_stdio
        # Otherwise they are encrypted, and `sent`, `told` and `answered` know nothing.
        self.reads_messages = server.reads_messages
        folder.mkdir()
        self.workspace, self.outside = folder / "workspace", folder / "outside"
        self.workspace.mkdir()
        self.outside.mkdir()
        # Where discovery begins; git need not be there for it.
        (self.workspace / ".git").mkdir()
        (self.workspace / ".git/HEAD").write_text("ref: refs/heads/main\n")
        self._home = codex.Home(folder / "home", model.url)
        self._closers = []
        self.connections, self.stderr = 0, ""
        proxy.forget()
        proxy.uncut_all()

    def turn(self, script, sandbox="workspace-write", config="", top="", cuts=0, options=(), environments=None):
        """One run of the client to its end, with what must hold of every one: the script was played to its end without a failed
        check, and the client opened one connection, and one more for each of our cuts: a message from the server that the client
        does not understand makes it connect again and say nothing of it. With `environments` the client is told of its server by
        these, `{url}` being the link that counts; without that it may open none."""
        server = self.server.variables
        if environments is not None and not self.reads_messages:
            raise Skipped("a file of environments names no rendezvous")
        if environments is not None:
            due = cuts + ("{url}" in environments)
            environments, server = environments.replace("{url}", self._proxy.url), {}
        else:
            due = cuts + 1
        self._home.write(config, top, environments)
        self._proxy.forget()
        self._model.play(script)
        turn = codex.Turn(self._program, self._home, self.workspace, server, sandbox, "go", options=options)
        self.stderr = turn.stderr
        assert self._proxy.wait_until_over(LONGEST_WAIT), "the server keeps connections that the client ended"
        self.connections = self._proxy.connections
        if self._model.failure:
            raise self._model.failure
        assert turn.status is not None, "the client did not end"
        assert turn.status == 0, f"the client ended with status {turn.status}"
        assert self._model.ended, "the client ended before the script"
        assert not self._model.unexpected, self._model.unexpected
        assert not self._proxy.broken, self._proxy.broken
        assert self._proxy.uncut() == 0, "what was to be cut was never sent"
        assert self.connections == due, f"{self.connections} connections, {due} were due"
        return turn

    def cut(self, sender, matches, is_lost=True):
        """Resets the connection at the next message of `sender` ("client" or "server") that `matches`, which is lost or arrives
        just before. Through a rendezvous these are frames (see `frames.py`), and there are two connections: "executor" and
        "rendezvous" send on the other one."""
        self._proxy.cut(sender, matches, is_lost)

    def refuse(self, times):
        """After the next cut the client finds nobody for so many tries."""
        self._proxy.refuse_after_cut(times)

    def await_cuts(self):
        """Waits until what was to be cut was."""
        assert self._proxy.wait_until_cut(LONGEST_WAIT), "what was to be cut was never sent"

    def gate(self):
        """A pipe in the workspace, where a command waits (`read -r go < gate`) until `open_gate`."""
        os.mkfifo(self.workspace / "gate")

    def open_gate(self):
        """Lets the command go on, once it waits."""
        (self.workspace / "gate").write_text("go\n")

    def requests(self):
        """What the client sent to the model."""
        return self._model.requests

    def sent(self, method):
        """What the client sent of a method in the last turn."""
        return self._proxy.sent(method)

    def told(self, method):
        """What the server told by notifications of this name in the last turn."""
        return self._proxy.told(method)

    def answered(self, method):
        """The server's answers to a method in the last turn."""
        return self._proxy.answered(method)

    def opened(self):
        """How many connections the client opened."""
        return self._proxy.connections

    def at_end(self, close):
        self._closers.append(close)

    def end(self):
        for close in reversed(self._closers):
            close()

    def messages(self):
        lines = []
        for sender, message in self._proxy.messages:
            text = json.dumps(message)
            lines.append(f"{sender}: {text if len(text) <= SHOWN else text[:SHOWN] + '…'}")
        return "\n".join(lines)


def holds(text, part):
    """Fails unless the text has the part."""
    assert part in text, f"{part!r} is not in {text!r}"


def lacks(text, part):
    assert part not in text, f"{part!r} is in {text!r}"


def text_of(output):
    """The words of a tool's output, which may come in parts."""
    return output if isinstance(output, str) else "".join(part.get("text", "") for part in output)


def exited(output, status):
    """Fails unless a command ended with the status; what it printed."""
    holds(output, f"Process exited with code {status}\n")
    return output.split("Output:\n", 1)[1]


def session_of(output):
    """The number by which a command that still runs is written to."""
    found = re.search(r"Process running with session ID (\d+)", output)
    assert found, f"no running session in {output!r}"
    return int(found[1])
