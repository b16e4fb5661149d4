#!/usr/bin/env python3
"""Runs the released client against an exec-server, with a scripted model, and tells what the model and the files saw.

    run.py                       against target/debug/portcullis (--server PATH: another)
    run.py --url ws://HOST:PORT  against an exec-server that runs already, with this machine's files
    run.py --reference           against the client's own exec-server
    run.py --fetch DIR           installs the client in DIR first, if it is not there (the only use of a network beyond loopback)

The client is found by --codex, CODEX_BIN or --fetch. Names of scenarios after the options run these alone. Python 3.11, standard
library only. Status 0 if all passed.
"""

import argparse
import os
import pathlib
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from urllib.parse import urlsplit

# The sources' folder stays as it is.
sys.dont_write_bytecode = True

import codex
from model import Model
from proxy import Proxy
from scenario import SCENARIOS, Scenario, Skipped

# They add themselves to the scenarios.
import commands  # noqa: F401
import files  # noqa: F401
import sandboxes  # noqa: F401
import mcp  # noqa: F401
import cuts  # noqa: F401

# A scenario takes two seconds; one that hangs must not hang the gate.
LONGEST_SCENARIO = 60
# How much of a log is shown with a failure.
SHOWN_LINES = 60

# Where the client's own exec-server does otherwise: its runs of these must fail, so that the list stays true.
REFERENCE_DIFFERS = {
    "ctrl_c_ends_a_command": "a terminal's program that a signal ended has status 1 there, not 128 and the signal",
}


def main():
    options = arguments()
    # What was started is ended also when somebody ends the suite.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # Not below /tmp, which workspace-write makes writable.
    base = pathlib.Path(tempfile.mkdtemp(prefix="client-suite-", dir=options.dir)).resolve()
    server = None
    try:
        server = Server(options, base)
        failed = run_all(options, base, server)
    finally:
        if server is not None:
            server.end()
        if options.keep:
            print(f"kept: {base}")
        else:
            shutil.rmtree(base, ignore_errors=True)
    return 1 if failed else 0


def arguments():
    root = pathlib.Path(__file__).resolve().parent.parent.parent
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="SCENARIO", help="run these only")
    parser.add_argument("--list", action="store_true", help="tell the names of the scenarios")
    parser.add_argument("--url", help="of a server that runs already and asks for no credential")
    parser.add_argument("--server", type=pathlib.Path, default=target / "debug/portcullis", help="the program to start")
    parser.add_argument("--reference", action="store_true", help="start the client's own exec-server instead")
    parser.add_argument("--codex", type=pathlib.Path, default=os.environ.get("CODEX_BIN"), help="the client's program")
    parser.add_argument("--fetch", metavar="DIR", help=f"install {codex.PACKAGE} there with npm, if it is not there")
    parser.add_argument("--dir", default="/var/tmp", help="where the suite's directory is made, not below /tmp")
    parser.add_argument("--keep", action="store_true", help="leave that directory")
    options = parser.parse_args()
    if options.list:
        print("\n".join(name(scenario) for scenario in SCENARIOS))
        raise SystemExit(0)
    unknown = set(options.names) - {name(scenario) for scenario in SCENARIOS}
    if unknown:
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}; --list tells them")
    if options.fetch:
        options.codex = codex.fetch(options.fetch)
    if options.codex is None:
        parser.error("where is the client? --codex PATH, CODEX_BIN=PATH, or --fetch DIR to install it")
    return options


def run_all(options, base, server):
    """Runs the scenarios one after another and says a line of each; how many failed."""
    model, proxy = Model(), Proxy(server.host, server.port)
    failed, passed, differ, begin = [], 0, 0, time.monotonic()
    signal.signal(signal.SIGALRM, overran)
    try:
        chosen = [scenario for scenario in SCENARIOS if not options.names or name(scenario) in options.names]
        for number, function in enumerate(chosen):
            scenario = Scenario(options.codex, base / str(number), model, proxy, server.on_stdio)
            server.mark()
            since = time.monotonic()
            try:
                signal.alarm(LONGEST_SCENARIO)
                function(scenario)
                outcome, why = "ok", ""
            except Skipped as reason:
                outcome, why = "skip", f"{reason}"
            except Exception as failure:
                outcome, why = "FAILED", traceback.format_exc()
                brief = str(failure)
            finally:
                signal.alarm(0)
                scenario.end()
            if options.reference and name(function) in REFERENCE_DIFFERS:
                if outcome == "ok":
                    outcome, why = "FAILED", "it passed, so the reference does not differ; take it from REFERENCE_DIFFERS\n"
                else:
                    outcome, why = "other", ""
            took = time.monotonic() - since
            print(f"{outcome:<6} {name(function):<52} {took:5.1f} s  {scenario.connections} connections", flush=True)
            if outcome == "other":
                differ += 1
                print(f"       {REFERENCE_DIFFERS[name(function)]}: {brief[:200]}")
            passed += outcome == "ok"
            if outcome == "skip":
                print(f"       {why}")
            if outcome == "FAILED":
                failed.append(name(function))
                explain(why, scenario, server)
    finally:
        proxy.close()
        model.close()
    took = time.monotonic() - begin
    print(f"{passed} of {len(chosen)} passed, {differ} other as known, {len(failed)} failed, in {took:.0f} s")
    print("".join(f"failed: {one}\n" for one in failed), end="")
    return len(failed)


def name(function):
    return function.__name__


def overran(*_):
    raise TimeoutError(f"the scenario was not over after {LONGEST_SCENARIO} s")


def explain(why, scenario, server):
    """What somebody needs who looks for the cause."""
    for title, text in [("why", why), ("the client's stderr", scenario.stderr), ("messages", scenario.messages()),
                        ("the server's log", server.log())]:
        lines = text.splitlines()[-SHOWN_LINES:]
        print(f"--- {title}" + "".join(f"\n    {line[:400]}" for line in lines), flush=True)


class Server:
    """The exec-server under test: one that is started and ended here, or somebody else's."""

    # What a program prints its address within.
    START = 20

    def __init__(self, options, base):
        self._process, self._log, self._from = None, None, 0
        # What serves one client on its standard input and output.
        self.on_stdio = None
        url = options.url or self._start(options, base)
        parts = urlsplit(url)
        if parts.scheme != "ws" or parts.hostname is None or parts.port is None:
            raise SystemExit(f"{url} is no ws://HOST:PORT")
        self.host, self.port = parts.hostname, parts.port

    def _start(self, options, base):
        if options.reference:
            program = str(options.codex)
            command = [program, "exec-server", "--listen", "ws://127.0.0.1:0"]
            self.on_stdio = [program, "exec-server", "--listen", "stdio"]
        else:
            program = str(options.server.resolve())
            command = [program, "serve", "--insecure-no-auth"]
            self.on_stdio = [program, "serve", "--listen", "stdio"]
        home = base / "server"
        home.mkdir()
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "CODEX_HOME": str(home), "LANG": "C.UTF-8",
                       "SUITE_SIDE": "server"}
        self._log = base / "server.log"
        with open(self._log, "wb") as log:
            try:
                self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                                 stderr=log, cwd=home)
            except OSError as error:
                raise SystemExit(f"start {command[0]}: {error}; build it (cargo build -p portcullis) or name it by --server")
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline().decode().strip() if ready.select(self.START) else ""
        if not line:
            self.end()
            raise SystemExit(f"{command[0]} told no address within {self.START} s:\n{self._log.read_text(errors='replace')}")
        return line

    def mark(self):
        """What is logged from here on belongs to the next scenario."""
        self._from = self._log.stat().st_size if self._log else 0

    def log(self):
        return self._log.read_bytes()[self._from :].decode(errors="replace") if self._log else "(it is not ours)"

    def end(self):
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


if __name__ == "__main__":
    sys.exit(main())
