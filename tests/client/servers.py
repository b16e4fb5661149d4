"""The exec-server under test and the way to it: one that listens, somebody else's, or one behind a rendezvous."""

import secrets
import selectors
import subprocess
from urllib.parse import urlsplit

# What a program tells its address within.
START = 20

ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}


class Program:
    """A program that runs until `end`, with its log."""

    def __init__(self, command, home, variables=()):
        home.mkdir()
        self._name, self._log = command[0], home.parent / f"{home.name}.log"
        environment = ENVIRONMENT | {"HOME": str(home), "CODEX_HOME": str(home)} | dict(variables)
        with open(self._log, "wb") as log:
            try:
                self._process = subprocess.Popen([str(part) for part in command], env=environment, stdin=subprocess.DEVNULL,
                                                 stdout=subprocess.PIPE, stderr=log, cwd=home)
            except OSError as error:
                raise SystemExit(f"start {command[0]}: {error}; build it (cargo build -p portcullis) or name it by --server")

    def line(self):
        """The first line that it says."""
        with selectors.DefaultSelector() as ready:
            ready.register(self._process.stdout, selectors.EVENT_READ)
            line = self._process.stdout.readline().decode().strip() if ready.select(START) else ""
        if not line:
            self.end()
            raise SystemExit(f"{self._name} told no address within {START} s:\n{self.log()}")
        return line

    def size(self):
        return self._log.stat().st_size

    def log(self, begin=0):
        return self._log.read_bytes()[begin:].decode(errors="replace")

    def end(self):
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process.stdout.close()


class Server:
    """What runs for the scenarios: `variables` name it to the client, and `proxy` is told where it is."""

    # What passes the proxy can be read.
    reads_messages = True
    # What serves one client on its standard input and output.
    on_stdio = None

    def __init__(self):
        self._programs, self._from, self.variables = [], [], {}
        self.name = "another's server"

    def start(self, *arguments):
        self._programs.append(Program(*arguments))
        return self._programs[-1]

    def mark(self):
        """What is logged from here on belongs to the next scenario."""
        self._from = [program.size() for program in self._programs]

    def log(self):
        logs = [program.log(begin) for program, begin in zip(self._programs, self._from)]
        return "".join(logs) if logs else "(it is not ours)"

    def end(self):
        for program in reversed(self._programs):
            program.end()


class Direct(Server):
    """One that listens."""

    def __init__(self, options, base, proxy):
        super().__init__()
        if not options.url:
            self.name = "its own server" if options.reference else "ours"
        url = options.url or self._start(options, base)
        parts = urlsplit(url)
        if parts.scheme != "ws" or parts.hostname is None or parts.port is None:
            self.end()
            raise SystemExit(f"{url} is no ws://HOST:PORT")
        proxy.target = parts.hostname, parts.port
        self.variables = {"CODEX_EXEC_SERVER_URL": proxy.url}

    def _start(self, options, base):
        if options.reference:
            program = str(options.codex)
            command = [program, "exec-server", "--listen", "ws://127.0.0.1:0"]
            self.on_stdio = [program, "exec-server", "--listen", "stdio"]
        else:
            program = str(options.server.resolve())
            command = [program, "serve", "--insecure-no-auth"]
            self.on_stdio = [program, "serve", "--listen", "stdio"]
        return self.start(command, base / "server", {"SUITE_SIDE": "server"}).line()


class Relayed(Server):
    """An executor behind our rendezvous; the proxy carries the WebSockets of both ends."""

    reads_messages = False
    ENVIRONMENT = "box"

    def __init__(self, options, base, proxy, reference):
        super().__init__()
        self.name = "its own executor" if reference else "our executor"
        self.harness_token, executor_token = (secrets.token_urlsafe() for _ in range(2))
        files = []
        for kind, token in ("harness", self.harness_token), ("executor", executor_token):
            file = base / f"{kind}.token"
            file.touch(mode=0o600)
            file.write_text(token)
            files += [f"--{kind}-token-file", file]
        self.portcullis = portcullis = options.server.resolve()
        self.interop = portcullis.with_name("portcullis-interop")
        rendezvous = self.start([portcullis, "rendezvous", "--public-url", proxy.url, *files], base / "rendezvous")
        self.url = rendezvous.line()
        parts = urlsplit(self.url)
        proxy.target = parts.hostname, parts.port
        command = [options.codex, "exec-server"] if reference else [portcullis, "serve"]
        command += ["--remote", self.url, "--environment-id", self.ENVIRONMENT]
        executor = self.start(command, base / "executor", {"SUITE_SIDE": "server", "CODEX_API_KEY": executor_token})
        self.variables = {
            "CODEX_EXEC_SERVER_NOISE_REGISTRY_URL": self.url,
            "CODEX_EXEC_SERVER_NOISE_ENVIRONMENT_ID": self.ENVIRONMENT,
            "CODEX_EXEC_SERVER_NOISE_AUTH_TOKEN": self.harness_token,
        }
        # Not every executor says so.
        if not proxy.wait_for_executor(START):
            self.end()
            raise SystemExit(f"no executor came to the rendezvous within {START} s:\n{executor.log()}")
