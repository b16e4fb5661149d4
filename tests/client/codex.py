"""Runs the client: where it is found, how it is told of the model and of the server, and how one turn goes."""

import os
import pathlib
import shutil
import signal
import subprocess

PACKAGE = "@openai/codex@0.169.0"

# Slow machines included: a turn takes a second or two.
LONGEST_TURN = 50


def fetch(folder):
    """Installs the client below `folder`, unless it is there, and says where its program is."""
    folder = pathlib.Path(folder)
    if find(folder) is None:
        npm = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(folder), PACKAGE]
        subprocess.run(npm, check=True, stdout=subprocess.DEVNULL, timeout=600)
    program = find(folder)
    if program is None:
        raise SystemExit(f"{PACKAGE} was installed in {folder}, but there is no program vendor/*/bin/codex below it")
    return program


def find(folder):
    """The program of an installed package; the script beside it needs Node and starts the same."""
    found = sorted(folder.glob("node_modules/@openai/codex*/vendor/*/bin/codex"))
    return found[0] if found else None


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

    def write(self, more="", top=""):
        """The configuration of one scenario, with what it needs besides, `top` before all tables."""
        for old in self.folder.iterdir():
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        (self.folder / "config.toml").write_text(top + self._text + more)


class Turn:
    """One run of the client: `status`, `said` (its last message) and `stderr`."""

    def __init__(self, program, home, workspace, server_url, sandbox, prompt, timeout=LONGEST_TURN, options=()):
        last = home.folder / "last-message"
        command = [str(program), "exec", "--skip-git-repo-check", "--color", "never", "-C", str(workspace), "-o", str(last)]
        command += ["--sandbox", sandbox] if sandbox else []
        command += [*options, prompt]
        environment = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": str(home.folder),
            "CODEX_HOME": str(home.folder),
            "CODEX_EXEC_SERVER_URL": server_url,
            "LANG": os.environ.get("LANG", "C.UTF-8"),
        }
        client = subprocess.Popen(command, cwd=home.folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
        try:
            self.stdout, self.stderr = client.communicate(timeout=timeout)
            self.status = client.returncode
        except subprocess.TimeoutExpired:
            client.send_signal(signal.SIGKILL)
            self.stdout, self.stderr = client.communicate()
            self.status = None
        self.said = last.read_text() if last.exists() else ""
