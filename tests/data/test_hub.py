"""Sources on the hub and in a bucket: their files are known by their content."""

import hashlib
import http.server
import json
import threading
import urllib.parse

import fsspec
import pytest

from data.text import Source
from tests.data.test_huggingface import BYTES
from tests.processes import python


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub with the dataset some/texts."""

    protocol_version = "HTTP/1.1"
    files, commit, requests = {}, "", []

    def do_GET(self):
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.requests.append(path)
        path = path.replace("/main/", f"/{self.commit}/").removesuffix(f"/revision/{self.commit}")
        answer = self.answers().get(path, b"")
        self.send_response(200 if answer else 404)
        self.send_header("ETag", f'"{sha1(answer)}"')
        self.send_header("X-Repo-Commit", self.commit)
        if not answer:
            self.send_header("X-Error-Code", "EntryNotFound")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(answer)

    do_HEAD = do_GET

    def answers(self):
        info = {"id": "some/texts", "sha": self.commit, "tags": [], "siblings": []}
        found, listed = {"/api/datasets/some/texts": json.dumps(info).encode()}, []
        for name, content in self.files.items():
            found[f"/datasets/some/texts/resolve/{self.commit}/{name}"] = content
            about = {"size": len(content), "oid": sha1(content)}
            listed.append({"type": "file", "path": name, **about})
        tree = f"/api/datasets/some/texts/tree/{self.commit}"
        return found | {tree: json.dumps(listed).encode()}

    def log_message(self, *_):
        pass


def sha1(content):
    return hashlib.sha1(content).hexdigest()


def lines(text, count=30):
    return f'{{"text": "{text}"}}\n'.encode() * count


@pytest.fixture
def hub(tmp_path):
    """Serves the hub. Returns the environment of programs that use it."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever).start()
        here = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(tmp_path)}
        yield here | {"HF_HUB_OFFLINE": "0"}
        server.shutdown()


# Reads from a position, in a process that has seen nothing of the hub yet.
PROGRAM = """
import json, sys
from data.text import Source, TextConfig
from shardlib.errors import UserError

names = {"train_split": "train", "validation_split": None}
config = TextConfig(column="text", tokenizer="bytes_utf8", **names)
source = Source({"path": "some/texts"}, "train", config, documents=7)
source.check()
try:
    units = [(len(texts), after) for texts, after in source.read(json.loads(sys.argv[1]))]
    print(json.dumps((sum(count for count, _ in units), units[0][1])))
except UserError as error:
    print(json.dumps((str(error), None)))
"""


@pytest.mark.slow
def test_another_commit_may_go_on_if_the_files_are_the_same(hub):
    def read(position):
        Hub.commit = sha1(repr(Hub.files).encode())
        done = python("-c", PROGRAM, json.dumps(position), **hub)
        assert not done.returncode, done.stderr
        return json.loads(done.stdout)

    Hub.files = {f"train-{i}.jsonl": lines(f"text {i}") for i in range(9)}
    count, position = read({})
    assert count == 9 * 30
    Hub.requests.clear()
    Hub.files["README.md"] = b"# Texts\n"
    assert read(position)[0] == 9 * 30 - 7
    assert sum("/api/" in path for path in Hub.requests) < 9, "none for each file"
    Hub.files["train-8.jsonl"] = lines("text !")
    problem, _ = read(position)
    assert "has changed since the part before was read: names and sizes " in problem


def test_a_file_in_a_bucket_is_known_by_its_etag(bucket):
    def fingerprint_with(texts):
        for i, content in enumerate(texts):
            with fsspec.open(f"{bucket}/texts/{i}.jsonl", "wb") as file:
                file.write(lines(content))
        load = {"path": "json", "data_files": f"{bucket}/texts/*.jsonl"}
        return Source(load, "train", BYTES).check()

    first = fingerprint_with(["one", "two"])
    assert first["files"] == first["shards"] == 2
    assert fingerprint_with(["one", "two"]) == first
    other = fingerprint_with(["one", "TWO"])
    assert [key for key in first if first[key] != other[key]] == ["names and sizes"]
