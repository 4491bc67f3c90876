"""Sets up JAX for the tests: 8 simulated CPU devices, or the GPU for `make test-gpu`. The
environment variables must be set before JAX is first used."""

import atexit
import os
import shutil
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:  # pytest-xdist's main process sets it
    # Many tests compile the same programs: all processes of this session share a cache.
    shared = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jax_cache_")
    atexit.register(shutil.rmtree, shared, ignore_errors=True)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
os.environ["HF_HUB_OFFLINE"] = "1"  # a missing file is an error at once, without a download

import jax
import pytest

import train
from runtime import devices
from shardlib.types import computing_in
from tests.bucket import bucket, server  # noqa: F401

os.environ["XLA_FLAGS"] = f"{devices.COUNT_FLAG}=8 {devices.QUICK_COMPILES}"
devices.have_threads(8)


@pytest.fixture
def own_metadata():
    """Makes compiled programs carry the lines and names of their own source, not those of an equal
    program that another test has compiled."""
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
    yield
    jax.config.update("jax_compilation_cache_include_metadata_in_key", False)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The working folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def in_f32():
    """train.py, computing in f32, so that meshes differ only by rounding."""
    with computing_in("f32"):
        yield train


@pytest.fixture
def one_device():
    with jax.set_mesh(devices.make_mesh(dict.fromkeys("rsct", 1))):
        yield


@pytest.fixture
def ended(capsys, monkeypatch):
    """A function that runs a program in this process. It returns what was printed to standard
    output and error, and the exit code, or the message in its place."""

    def run(program, *arguments):
        monkeypatch.setattr("sys.argv", ["train", *map(str, arguments)])
        code = 0
        try:
            program()
        except SystemExit as stop:
            code = stop.code or 0
        return *capsys.readouterr(), code

    return run


@pytest.fixture
def train_here(ended):
    """A function that runs train.py, or another program, in this process. It returns what was
    printed and the exit message, or ""."""

    def run(*arguments, program=train.main):
        out, _, code = ended(program, *arguments)
        return out, str(code or "")

    return run
