"""An S3 server on loopback that can be made to fail or to be slow."""

import contextlib
import http.client
import http.server
import socketserver
import threading

import pytest


class Proxy(http.server.BaseHTTPRequestHandler):
    """Forwards requests to the server, unless `trouble`, a function of a request's method and path,
    returns an error status to answer with."""

    protocol_version = "HTTP/1.1"
    trouble = staticmethod(lambda method, path: None)
    target = ("", 0)

    def answer(self):
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        if status := Proxy.trouble(self.command, self.path):
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()
            return
        with contextlib.closing(http.client.HTTPConnection(*Proxy.target)) as server:
            try:
                server.request(self.command, self.path, body, dict(self.headers))
                response = server.getresponse()
                content = response.read()
            except ConnectionError:  # at the end of the tests, when nobody waits for the answer
                return
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        size = response.getheader("content-length") if self.command == "HEAD" else len(content)
        self.send_header("content-length", str(size))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

    def log_message(self, *_):
        pass


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True


@pytest.fixture(scope="session")  # because s3fs caches its clients
def bucket():
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
