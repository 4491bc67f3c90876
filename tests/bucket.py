"""An S3 server on loopback that can be made to fail or to be slow."""

import contextlib
import http.client
import http.server
import os
import socket
import socketserver
import struct
import threading
import time

import pytest

BREAKS = ("reset", "cut", "late", "lost")


class Proxy(http.server.BaseHTTPRequestHandler):
    """Forwards requests to the server, unless `trouble`, a function of a request's method and path,
    returns an error status to answer with, or one of BREAKS:

    - reset: the connection breaks before the server sees the request,
    - cut: the answer ends in the middle, without an end of the headers if it has no body,
    - late: the answer comes `delay` seconds late,
    - lost: the connection breaks after the server has done what was asked.
    """

    protocol_version = "HTTP/1.1"
    trouble = staticmethod(lambda method, path: None)
    delay = 2.5
    target = ("", 0)

    def answer(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        fault = Proxy.trouble(self.command, self.path)
        if fault and fault not in BREAKS:
            self.send_response(fault)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        if fault == "reset":
            return self.reset()
        with contextlib.closing(http.client.HTTPConnection(*Proxy.target)) as server:
            try:
                server.request(self.command, self.path, body, dict(self.headers))
                response = server.getresponse()
                content = response.read()
            except ConnectionError:  # at the end of the tests, when nobody waits for the answer
                return
        if fault == "lost":
            return self.reset()
        if fault == "late":
            time.sleep(Proxy.delay)
        with contextlib.suppress(ConnectionError):  # the client may have given up
            self.pass_on(response, content, fault == "cut")

    def pass_on(self, response, content, cut):
        self.close_connection = self.close_connection or cut
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        if cut and not content:
            self.flush_headers()
            return
        size = response.getheader("content-length") if self.command == "HEAD" else len(content)
        self.send_header("content-length", str(size))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)

    def reset(self):
        """Breaks the connection at once, so that the client gets an error and not an end."""
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        os.close(self.connection.detach())

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

    def log_message(self, *_):
        pass


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True

    def handle_error(self, *_):  # clients may break off at any time
        pass


@contextlib.contextmanager
def serving():
    """Starts an S3 server behind the proxy, and yields the address of a bucket there."""
    moto = pytest.importorskip("moto.server")
    import boto3

    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    Proxy.target = server.get_host_and_port()
    proxy = Server(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        for name in "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY":
            patch.setenv(name, "any")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_MAX_ATTEMPTS", "2")  # not 5, with growing delays
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
        with contextlib.closing(boto3.client("s3")) as client:
            client.create_bucket(Bucket="bucket")
        yield "s3://bucket"
    proxy.shutdown()
    proxy.server_close()
    server.stop()


@pytest.fixture(scope="session")  # because s3fs caches its clients
def bucket():
    with serving() as address:
        yield address
