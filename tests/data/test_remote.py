"""Datasets on an S3 server on loopback, which also fails, is slow and goes away."""

import contextlib
import http.client
import http.server
import socketserver
import threading
import time

import numpy as np
import pytest

from data.flat_tokens import FlatTokens, FlatTokensError, Writer
from tests.data.test_loader import open_loader


class Proxy(http.server.BaseHTTPRequestHandler):
    """Passes requests on to the server, or answers as `trouble` says: a function of a request's
    method and path to a status, or None."""

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
        server = http.client.HTTPConnection(*Proxy.target)
        try:
            server.request(self.command, self.path, body, dict(self.headers))
        except ConnectionError:  # of a request that nobody waits for, at the tests' end
            return
        found = server.getresponse()
        content = found.read()
        self.send_response(found.status)
        for name, value in found.getheaders():
            if name.lower() not in ("transfer-encoding", "content-length", "connection"):
                self.send_header(name, value)
        size = found.getheader("content-length") if self.command == "HEAD" else len(content)
        self.send_header("content-length", str(size))
        self.end_headers()
        self.wfile.write(content)
        server.close()

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer

    def log_message(self, *_):
        pass


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True


@pytest.fixture(scope="module")
def bucket():
    """An S3 server behind the proxy; the address of a bucket there."""
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
        patch.setenv("AWS_MAX_ATTEMPTS", "2")  # of 5, each later than the one before
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.server_port}")
        with contextlib.closing(boto3.client("s3")) as client:
            client.create_bucket(Bucket="bucket")
        yield "s3://bucket"
    proxy.shutdown()
    proxy.server_close()
    server.stop()


@pytest.fixture
def path(bucket):
    """100 packed rows, whose tokens count up."""
    Proxy.trouble = staticmethod(lambda method, path: None)
    path = f"{bucket}/{time.time_ns()}.zarr"
    with Writer(path, "train") as writer:
        for i in range(10):
            writer.append(np.arange(40 * i, 40 * i + 40) + 1)
    return path


def some_rows(path):
    opened = open_loader(path, streams=2)
    return np.concatenate([opened.rows(step, 0, 8)[0] for step in range(3)])


def test_a_dataset_is_written_and_read_there_as_on_disk(path, tmp_path):
    local = str(tmp_path / "x.zarr")
    with Writer(local, "train") as writer:
        for i in range(10):
            writer.append(np.arange(40 * i, 40 * i + 40) + 1)
    FlatTokens(path, "train").validate()
    np.testing.assert_array_equal(some_rows(path), some_rows(local))


def test_answers_that_fail_or_are_late_are_asked_for_again(path):
    wanted, asked = some_rows(path), set()

    def trouble(method, path):
        """Each request fails the first time, or is late."""
        first = (method, path) not in asked
        asked.add((method, path))
        if first and len(asked) % 3 == 0:
            time.sleep(0.5)
        elif first:
            return 503 if len(asked) % 3 == 1 else 500
        return None

    Proxy.trouble = staticmethod(trouble)
    np.testing.assert_array_equal(some_rows(path), wanted)
    assert len(asked) > 5


def test_a_server_that_fails_for_good_gets_one_message(path):
    opened = open_loader(path)
    Proxy.trouble = staticmethod(lambda method, path: 503)
    with pytest.raises(FlatTokensError, match=r"encoded_tokens: chunk 0 can't be read: "):
        opened.rows(0, 0, 8)
    with pytest.raises(FlatTokensError, match=r"can't be opened: "):
        FlatTokens(path, "train")


def test_what_is_not_there(bucket):
    Proxy.trouble = staticmethod(lambda method, path: None)
    with pytest.raises(FlatTokensError, match=r"s3://bucket/no.zarr is not there"):
        FlatTokens(f"{bucket}/no.zarr", "train")
