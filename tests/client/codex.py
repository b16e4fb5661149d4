"""Runs the client: where it is found, how it is told of the model and of the server, and how one turn goes."""

import hashlib
import os
import pathlib
import platform
import shutil
import subprocess

PACKAGE = "@openai/codex@0.169.0"
# Of its program, for each machine on which that was seen.
SHA256 = {"x86_64": "b452ca20f838a8855a88a41050ee4a694033fff4ea3ecdad5633e6e0e8d13f2b"}

# 150 MB over a slow line.
LONGEST_FETCH = 600

# Slow machines included: a turn takes a second or two.
LONGEST_TURN = 50


def fetch(folder):
    """Installs the client as `folder`, unless it is there, and says where its program is."""
    folder = pathlib.Path(folder).resolve()
    if find(folder) is None:
        # A name of its own until it is whole, so that one that was interrupted is not taken for installed.
        new = folder.with_name(f"{folder.name}.{os.getpid()}")
        try:
            npm = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(new), PACKAGE]
            subprocess.run(npm, check=True, stdout=subprocess.DEVNULL, timeout=LONGEST_FETCH)
            new.rename(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    # One that was there before too: whoever may write there could have changed it.
    verify(find(folder))
    return find(folder)


def find(folder):
    """The program of an installed package; the script beside it needs Node and starts the same."""
    found = sorted(folder.glob("node_modules/@openai/codex*/vendor/*/bin/codex"))
    return found[0] if found else None


def verify(program):
    """Refuses what is not the program that this suite was written with."""
    if program is None:
        raise SystemExit(f"{PACKAGE} was installed, but it has no program vendor/*/bin/codex for this machine")
    expected = SHA256.get(platform.machine())
    with open(program, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if expected is None:
        print(f"note: the client for {platform.machine()} has no known digest; it has {found}")
    elif found != expected:
        raise SystemExit(f"the client in {program} has SHA-256 {found}, not {expected}: it is not run")


class Home:
    """What the client knows before a turn: its own directory, with a configuration that names nothing but loopback."""

    def __init__(self, folder, model_url):
        self.folder = folder
        self.folder.mkdir(parents=True)
        self._text = f"""
model = "gpt-5.5"
model_provider = "script"
approval_policy = "never"
check_for_update_on_startup = false
project_doc_max_bytes = 65536

[model_providers.script]
name = "script"
base_url = "{model_url}"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
supports_websockets = false

[analytics]
enabled = false

[feedback]
enabled = false

[otel]
exporter = "none"

[history]
persistence = "none"
"""

    def write(self, more="", top="", environments=None):
        """The configuration of one turn, with what it needs besides: `top` before all tables, and `environments`, which stands
        in for the server's URL."""
        for old in self.folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        (self.folder / "config.toml").write_text(top + self._text + more)
        if environments is not None:
            (self.folder / "environments.toml").write_text(environments)


class Turn:
    """One run of the client: `status`, `said` (its last message) and `stderr`."""

    def __init__(self, program, home, workspace, server, sandbox, prompt, timeout=LONGEST_TURN, options=()):
        last = home.folder / "last-message"
        command = [str(program), "exec", "--skip-git-repo-check", "--color", "never", "-C", str(workspace), "-o", str(last)]
        command += ["--sandbox", sandbox] if sandbox else []
        command += [*options, prompt]
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home.folder),
            "CODEX_HOME": str(home.folder),
            "LANG": "C.UTF-8",
        }
        # The variables that name the server.
        environment |= server
        client = subprocess.Popen(command, cwd=home.folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
        try:
            self.stdout, self.stderr = client.communicate(timeout=timeout)
            self.status = client.returncode
        except subprocess.TimeoutExpired:
            client.kill()
            self.stdout, self.stderr = client.communicate()
            self.status = None
        finally:
            # Also when the scenario's time is over.
            if client.poll() is None:
                client.kill()
                client.wait()
        self.said = last.read_text() if last.exists() else ""
