"""An S3 server on loopback that can be made to fail."""

import contextlib
import http.client
import http.server
import logging
import os
import socket
import socketserver
import struct
import threading

import pytest


class Proxy(http.server.BaseHTTPRequestHandler):
    """Forwards requests to the server, unless `trouble`, a function of a request's method and path,
    returns an error status to answer with, or one of these:

    - reset: the connection breaks before the server sees the request,
    - silence: no answer comes until the client gives up,
    - cut: the answer ends in the middle, without an end of the headers if it has no body,
    - lost: the connection breaks after the server has done what was asked.
    """

    protocol_version = "HTTP/1.1"
    trouble = staticmethod(lambda method, path: None)
    target = ("", 0)

    def answer(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        fault = Proxy.trouble(self.command, self.path)
        if isinstance(fault, int):
            self.send_response(fault)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        if fault == "silence":
            self.connection.recv(1)  # returns when the client closes the connection
        if fault in ("reset", "silence"):
            return self.reset()
        with contextlib.closing(http.client.HTTPConnection(*Proxy.target)) as server:
            server.request(self.command, self.path, body, dict(self.headers))
            response = server.getresponse()
            content = response.read()
        if fault == "lost":
            return self.reset()
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


@pytest.fixture(scope="session")
def server():
    """Starts an S3 server behind the proxy. Its clients try only twice."""
    moto = pytest.importorskip("moto.server")
    moto_server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # moto's, a line per request
    moto_server.start()
    Proxy.target = moto_server.get_host_and_port()
    proxy = Server(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        for name in "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY":
            patch.setenv(name, "any")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_MAX_ATTEMPTS", "2")  # not 5, with growing delays
        patch.setattr("s3fs.S3FileSystem.retries", 2)
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
        yield
    proxy.shutdown()
    proxy.server_close()
    moto_server.stop()


@pytest.fixture
def bucket(server, request):
    """The address of a new bucket, all of whose requests succeed until Proxy.trouble is set."""
    import boto3

    name = f"bucket-{abs(hash(request.node.nodeid))}"
    with contextlib.closing(boto3.client("s3")) as client:
        client.create_bucket(Bucket=name)
    yield f"s3://{name}"
    Proxy.trouble = staticmethod(lambda method, path: None)
