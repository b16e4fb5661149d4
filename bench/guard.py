#!/usr/bin/python3
"""Counts the instructions that the server takes for a fixed run of calls, and compares them with a budget.

    bench/guard.py [--write] PROGRAM BENCH

PROGRAM is a release build of `portcullis`, BENCH one of `portcullis-bench`. The server runs under valgrind's cachegrind, which
counts the instructions of the process that it runs and not of helpers: so of what each call passes through. Unlike a time, the count
is the same on a busy machine; it moves with the compiler, the C library and what the processor offers, hence the tolerance. `--write`
writes what was counted as the new budget. The status is 1 if a row takes more than it may, or so much less that the budget says
nothing any more.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

BUDGET = pathlib.Path(__file__).with_name("budget.json")
# A row of the benchmarks, and how many calls a quarter of its rounds come to.
PERCENT = "25"
ROWS = {
    "getMetadata": 101,
    "readFile 1 KiB, read-only policy": 101,
    "readFile 64 KiB": 26,
    "readFile 8 MiB": 3,
    "writeFile 1 KiB, workspace-write": 11,
    "writeFile 1 MiB": 8,
    "true, start to exited": 16,
}
# What no row has in its name: the server starts and ends.
NO_ROW = "(none)"
TOLERANCE = 0.15
# Of a whole run: valgrind makes everything some thirty times slower.
LONGEST = 180


def count(program, bench, row):
    """The instructions of a server from its start to its end, with this row in between."""
    with tempfile.TemporaryDirectory() as place:
        log = pathlib.Path(place, "log")
        command = [
            "valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null", f"--log-file={log}",
            program, "serve", "--insecure-no-auth", "--listen", "ws://127.0.0.1:0",
        ]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            url = re.search(r"ws://\S+", server.stdout.readline())
            if url is None:
                raise SystemExit(f"the server did not say a URL: {log.read_text()}")
            measured = [bench, "--server", f"counted={url[0]}", "--only", row, "--percent", PERCENT]
            ran = subprocess.run(measured, capture_output=True, text=True, timeout=LONGEST)
            if ran.returncode != 0 or (row != NO_ROW and row not in ran.stdout):
                raise SystemExit(f"{row}: {ran.stdout}{ran.stderr}")
            server.terminate()
            server.wait(LONGEST)
        finally:
            server.kill()
            server.wait()
        refs = re.search(r"I\s+refs:\s+([\d,]+)", log.read_text())
        return int(refs[1].replace(",", ""))


def main():
    arguments = sys.argv[1:]
    writes = "--write" in arguments
    program, bench = [argument for argument in arguments if argument != "--write"]
    base = count(program, bench, NO_ROW)
    found = {row: (count(program, bench, row) - base) // calls for row, calls in ROWS.items()}
    if writes:
        BUDGET.write_text(json.dumps(found, indent=2) + "\n")
    budget = json.loads(BUDGET.read_text())
    is_over = set(budget) != set(found)
    print(f"{'instructions of the server for one call':<42}{'counted':>12}{'budget':>12}{'':>8}")
    for row, counted in found.items():
        part = counted / budget.get(row, 1) - 1
        is_over |= abs(part) > TOLERANCE
        print(f"{row:<42}{counted:>12,}{budget.get(row, 0):>12,}{part:>+8.1%}{'  OUT OF BOUNDS' if abs(part) > TOLERANCE else ''}")
    if is_over:
        print(f"more than {TOLERANCE:.0%} away from {BUDGET.name}: find out why, or write what is right with --write and say why")
    return 1 if is_over else 0


if __name__ == "__main__":
    sys.exit(main())
