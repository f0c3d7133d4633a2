"""A web server that also misbehaves as real ones do."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, bytes, int | None]  # status, body, and the length that the server names: None is that of the body


class Server(ThreadingHTTPServer):
    """Serves `files`. A request for a name in `answers` gets the next answer there, any other one the file from the
    byte on that it asks for. An answer is a function of the file and this byte. A length of -1 is not named."""

    def __init__(self, files: dict[str, bytes]):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.answers, self.requests = files, {}, []
        self.url = f"http://127.0.0.1:{self.server_port}/main"
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def __exit__(self, *error) -> None:
        self.shutdown()
        super().__exit__(*error)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name, server = self.path.rpartition("/")[2], self.server
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        server.requests.append((name, start))
        answer = server.answers[name].pop(0) if server.answers.get(name) else rest
        status, body, length = answer(server.files[name], start)
        self.send_response(status)
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{start + len(body)}")
        if length != -1:
            self.send_header("Content-Length", str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args) -> None:
        pass


def rest(whole: bytes, start: int) -> Answer:
    return (416, b"", None) if start >= len(whole) else (206 if start else 200, whole[start:], None)
