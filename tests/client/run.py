#!/usr/bin/env python3
"""Runs the released client against an exec-server, with a scripted model, and tells what the model and the files saw.

    run.py                       against target/debug/portcullis (--server PATH: another)
    run.py --url ws://HOST:PORT  against an exec-server that runs already, with this machine's files
    run.py --reference           against the client's own exec-server
    run.py --through WAY         one way only: `direct`; by our `rendezvous` (with --reference to its own executor); or `ours`, our
                                 own client by our rendezvous to its executor
    run.py --fetch DIR           installs the client in DIR first, if it is not there (the only use of a network beyond loopback)

The client is found by --codex, CODEX_BIN or --fetch. Names of scenarios after the options run these alone. Python 3.11, standard
library only. Status 0 if all passed.
"""

import argparse
import os
import pathlib
import shutil
import signal
import sys
import tempfile
import time
import traceback

# The sources' folder stays as it is.
sys.dont_write_bytecode = True

import codex
from model import Model
from proxy import Proxy
from scenario import SCENARIOS, Scenario, Skipped
from servers import Direct, Relayed

# They add themselves to the scenarios.
import commands  # noqa: F401
import files  # noqa: F401
import sandboxes  # noqa: F401
import mcp  # noqa: F401
import cuts  # noqa: F401
import relay  # noqa: F401
import ours  # noqa: F401
import frames

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
    failed = 0
    try:
        for way in options.through:
            failed += run_way(way, options, base)
    finally:
        if options.keep:
            print(f"kept: {base}")
        else:
            shutil.rmtree(base, ignore_errors=True)
    return 1 if failed else 0


def run_way(way, options, base):
    """Runs what was chosen of the scenarios that make sense this way; how many failed."""
    base /= way
    base.mkdir()
    is_relayed, is_ours = way != "direct", way == "ours"
    chosen = [scenario for scenario in SCENARIOS if makes_sense(scenario, way)]
    chosen = [scenario for scenario in chosen if not options.names or name(scenario) in options.names]
    if not chosen:
        return 0
    proxy, server = (Proxy(frames.read) if is_relayed else Proxy()), None
    try:
        reference = options.reference or is_ours
        server = Relayed(options, base, proxy, reference) if is_relayed else Direct(options, base, proxy)
        client, through = "our client" if is_ours else "the client", "through a rendezvous" if is_relayed else "directly"
        print(f"{client} {through} to {server.name}", flush=True)
        return run_all(chosen, options, base, proxy, server)
    finally:
        if server is not None:
            server.end()
        proxy.close()


def makes_sense(scenario, way):
    """Cuts are placed by messages where these can be read, and by frames where they are encrypted."""
    module = scenario.__module__
    return module == "ours" if way == "ours" else module not in ("ours", "relay" if way == "direct" else "cuts")


def arguments():
    root = pathlib.Path(__file__).resolve().parent.parent.parent
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="SCENARIO", help="run these only")
    parser.add_argument("--list", action="store_true", help="tell the names of the scenarios")
    parser.add_argument("--url", help="of a server that runs already and asks for no credential")
    parser.add_argument("--server", type=pathlib.Path, default=target / "debug/portcullis", help="the program to start")
    parser.add_argument("--reference", action="store_true", help="start the client's own exec-server instead")
    parser.add_argument("--through", choices=("direct", "rendezvous", "ours"), help="one way only; else all")
    parser.add_argument("--codex", type=pathlib.Path, default=os.environ.get("CODEX_BIN"), help="the client's program")
    parser.add_argument("--fetch", metavar="DIR", help=f"install {codex.PACKAGE} there with npm, if it is not there")
    parser.add_argument("--dir", default="/var/tmp", help="where the suite's directory is made, not below /tmp")
    parser.add_argument("--keep", action="store_true", help="leave that directory")
    options = parser.parse_args()
    if options.url and options.through not in (None, "direct"):
        parser.error("--url is of a server that is reached directly")
    if options.through is None:
        options.through = ["direct"] if options.url or options.reference else ["direct", "rendezvous", "ours"]
    else:
        options.through = [options.through]
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


def run_all(chosen, options, base, proxy, server):
    """Runs scenarios one after another and says a line of each; how many failed."""
    model = Model()
    failed, passed, differ, begin = [], 0, 0, time.monotonic()
    signal.signal(signal.SIGALRM, overran)
    try:
        for number, function in enumerate(chosen):
            scenario = Scenario(options.codex, base / str(number), model, proxy, server)
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


if __name__ == "__main__":
    sys.exit(main())
