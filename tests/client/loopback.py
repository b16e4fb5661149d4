"""An HTTP server on a port of loopback that the system chooses."""

import http.server
import sys
import threading


class Loopback(http.server.ThreadingHTTPServer):
    """Serves at once, in threads of its own, until `close`."""

    daemon_threads = True

    def __init__(self, answer):
        super().__init__(("127.0.0.1", 0), answer)
        self.origin = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def close(self):
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        # Whoever connected may leave without a word.
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(*_)
