"""A TCP proxy between client and server that reads the WebSocket frames on their way, counts connections and can cut them.

Between a rendezvous and its two ends it does the same for both: the executor's connection is known by its URL.
"""

import base64
import json
import socket
import struct
import threading

# What a message may hold, so that a broken length does not eat the memory.
LARGEST_MESSAGE = 64 << 20


# What an executor's URL at a rendezvous says.
OF_EXECUTOR = b"role=environment"


class Proxy:
    """Forwards to `target`, (host, port), once it is set. `connections` counts what the client opened; `messages` has what went by,
    (sender, message), as `read` makes them of the WebSockets' payloads."""

    def __init__(self, read=json.loads):
        self.target = None
        self._read = read
        # Taken again by what decides on cuts, which looks at the messages before.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._cuts = []
        self._refusals_after_cut, self._refusals = 0, 0
        self._open = set()
        self.connections = 0
        self.messages = []
        self.broken = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        self.url = f"ws://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def forget(self):
        """Before a turn: nothing was seen. What is to be cut stays."""
        with self._lock:
            self.connections, self.messages, self.broken = 0, [], []

    def uncut_all(self):
        """Before a scenario: nothing is to be cut, nobody refused."""
        with self._lock:
            self._cuts = []
            self._refusals_after_cut, self._refusals = 0, 0

    def cut(self, sender, matches, is_lost=True):
        """Resets the connection when `sender` sends a message that matches, once: "client" or "server", or on the connection of an
        executor "executor" or "rendezvous".

        It is lost with the connection, or arrives just before.
        """
        with self._lock:
            self._cuts.append(Cut(sender, matches, is_lost))

    def refuse_after_cut(self, times):
        """Once a cut has happened, ends so many connections before a byte went by; they do not count."""
        with self._lock:
            self._refusals_after_cut = times

    def uncut(self):
        """How many cuts have not happened."""
        with self._lock:
            return len(self._cuts)

    def wait_until_cut(self, timeout):
        """Waits until no cut is outstanding; whether that came to be within so many seconds."""
        with self._lock:
            return self._changed.wait_for(lambda: not self._cuts, timeout)

    def sent(self, method):
        """What the client sent of a method, oldest first."""
        with self._lock:
            return [message for sender, message in self.messages if sender == "client" and message.get("method") == method]

    def answered(self, method):
        """The server's answers to a method."""
        with self._lock:
            return [message for _, message in self.messages if message.get("answers") == method]

    def told(self, method):
        """What the server told by notifications of this name."""
        with self._lock:
            return [message for sender, message in self.messages if sender == "server" and message.get("method") == method]

    def close(self):
        self._listener.close()
        with self._lock:
            open_now = list(self._open)
        for link in open_now:
            link.reset()

    def wait_until_over(self, timeout):
        """Waits until every connection has ended and all that came by is recorded; whether that came to be within so many
        seconds."""
        with self._lock:
            return self._changed.wait_for(lambda: all(link.is_executors for link in self._open), timeout)

    def wait_for_executor(self, timeout):
        """Waits until an executor is connected; whether that came to be within so many seconds."""
        with self._lock:
            return self._changed.wait_for(lambda: any(link.is_executors for link in self._open), timeout)

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                is_refused = self._refusals > 0
                self._refusals -= is_refused
            if is_refused:
                client.close()
                continue
            try:
                server = socket.create_connection(self.target, timeout=10)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            link = Link(client, server)
            with self._lock:
                self._open.add(link)
            for sender in ("client", "server"):
                threading.Thread(target=self._forward, args=(link, sender), daemon=True).start()

    def _forward(self, link, sender):
        source, sink = (link.client, link.server) if sender == "client" else (link.server, link.client)
        reader = Reader(source, self._read)
        try:
            head = reader.head()
            if sender == "client":
                self._opened(link, OF_EXECUTOR in head.split(b"\r\n", 1)[0])
            sink.sendall(head)
            method_of = link.methods
            while True:
                raw, message = reader.frame()
                if link.is_executors:
                    sender = {"client": "executor", "server": "rendezvous"}.get(sender, sender)
                if message is not None and self._is_cut(sender, message, method_of, raw, sink):
                    link.reset()
                    return
                sink.sendall(raw)
        except (OSError, EOFError):
            # This direction is over; what is on its way in the other one still arrives.
            link.end(sink)
        except ValueError as error:
            with self._lock:
                self.broken.append(f"{sender}: {error}")
            link.reset()
        finally:
            with self._lock:
                link.directions -= 1
                if link.directions == 0:
                    link.close()
                    self._open.discard(link)
                    self._changed.notify_all()

    def _opened(self, link, is_executors):
        with self._lock:
            link.is_executors = is_executors
            self.connections += not is_executors
            self._changed.notify_all()

    def _is_cut(self, sender, message, method_of, raw, sink):
        with self._lock:
            # An answer is named by the method that it answers, so that cuts can be placed before it.
            if sender == "client" and "id" in message:
                method_of[message["id"]] = message.get("method")
            elif sender == "server" and "id" in message and "method" not in message:
                message["answers"] = method_of.get(message["id"])
            self.messages.append((sender, message))
            for cut in self._cuts:
                if cut.sender == sender and cut.matches(message):
                    self._cuts.remove(cut)
                    self._refusals, self._refusals_after_cut = self._refusals_after_cut, 0
                    self._changed.notify_all()
                    break
            else:
                return False
        if not cut.is_lost:
            sink.sendall(raw)
        return True


class Cut:
    def __init__(self, sender, matches, is_lost):
        self.sender, self.matches, self.is_lost = sender, matches, is_lost


class Link:
    """Both ends of one connection."""

    def __init__(self, client, server):
        self.client, self.server = client, server
        # Names of the calls that were not answered, by id, and how many directions are forwarded.
        self.methods, self.directions = {}, 2
        self.is_executors = False
        for end in (client, server):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def end(self, sink):
        """Tells one end that nothing follows."""
        try:
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def close(self):
        for end in (self.client, self.server):
            end.close()

    def reset(self):
        """Ends both by RST, as a network does that lost its state."""
        for end in (self.client, self.server):
            try:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                # The other thread reads from it: the read must end before a close has an effect.
                end.shutdown(socket.SHUT_RD)
            except OSError:
                pass
            end.close()


class Reader:
    """Reads an HTTP head and then frames, keeping the bytes as they came."""

    def __init__(self, source, read):
        self._source, self._read, self._rest, self._parts = source, read, b"", []

    def head(self):
        while b"\r\n\r\n" not in self._rest:
            self._more()
        head, self._rest = self._rest.split(b"\r\n\r\n", 1)
        return head + b"\r\n\r\n"

    def frame(self):
        """One frame's bytes, and the message that it completes, or None."""
        raw = self._take(2)
        length = raw[1] & 127
        if length == 126:
            raw += self._take(2)
            length = struct.unpack(">H", raw[2:4])[0]
        elif length == 127:
            raw += self._take(8)
            length = struct.unpack(">Q", raw[2:10])[0]
        if length > LARGEST_MESSAGE:
            raise ValueError(f"a frame of {length} bytes")
        mask = self._take(4) if raw[1] & 128 else b""
        payload = self._take(length)
        raw += mask + payload
        if mask and length:
            key = (mask * (length // 4 + 1))[:length]
            payload = (int.from_bytes(payload, "big") ^ int.from_bytes(key, "big")).to_bytes(length, "big")
        if raw[0] & 15 > 2:
            return raw, None
        self._parts.append(payload)
        if not raw[0] & 128:
            return raw, None
        payload, self._parts = b"".join(self._parts), []
        message = self._read(payload)
        if not isinstance(message, dict):
            raise ValueError(f"no message: {payload[:80]!r}")
        return raw, message

    def _take(self, length):
        while len(self._rest) < length:
            self._more()
        taken, self._rest = self._rest[:length], self._rest[length:]
        return taken

    def _more(self):
        more = self._source.recv(1 << 18)
        if not more:
            raise EOFError
        self._rest += more


def output_of(message):
    """The bytes that a `process/output` brings, else none."""
    if message.get("method") != "process/output":
        return b""
    return base64.b64decode(message["params"]["chunk"])
