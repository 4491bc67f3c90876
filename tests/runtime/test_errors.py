"""Tests which errors end a program with one line, and which keep their traceback. For several
hosts see tests/test_hosts.py."""

import importlib.util
import io
import sys

import pytest

from runtime.devices import CUDA_PLUGINS
from runtime.errors import user_errors
from shardlib.errors import UserError
from tests.processes import python


@pytest.mark.parametrize("mistake", [UserError("no steps"), OSError("no steps")])
def test_a_users_mistake_is_one_line(mistake):
    with pytest.raises(SystemExit, match=r"^error: no steps$"), user_errors():
        raise mistake


@pytest.mark.parametrize("kind", [ValueError, AssertionError, TypeError])
def test_a_bug_keeps_its_traceback(kind):
    with pytest.raises(kind), user_errors():
        raise kind


def test_an_interrupt_is_no_success():
    with pytest.raises(SystemExit, match=r"^130$"), user_errors():
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    "encoding, shown", [("ascii", rb"caf\xe9 \u4e2d"), ("latin-1", b"caf\xe9 \\u4e2d")]
)
def test_characters_that_a_terminal_lacks_are_escapes(encoding, shown, monkeypatch):
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding))
    with user_errors():
        print("caf\xe9 \u4e2d")
    assert out.getvalue().rstrip() == shown


DEVICES = "from runtime.errors import user_errors\nwith user_errors(): import jax; jax.devices()"


@pytest.mark.skipif(any(map(importlib.util.find_spec, CUDA_PLUGINS)), reason="CUDA may be there")
@pytest.mark.parametrize("name", ["cuda", "rocm", "nonsense"])
def test_a_platform_that_is_not_there_is_one_line(name):
    done = python("-c", DEVICES, JAX_PLATFORMS=name)
    assert done.returncode == 1 and not done.stdout
    problem = f"error: JAX_PLATFORMS={name} in the environment"
    assert done.stderr.splitlines()[-1].startswith(problem)
    assert "Traceback" not in done.stderr


def test_a_backend_that_fails_is_one_line(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    problem, cure = "Unable to initialize backend 'cuda': no driver", "JAX_PLATFORMS=cpu in the"
    with pytest.raises(SystemExit, match=f"^error: {problem}; {cure} environment"), user_errors():
        raise RuntimeError(f"{problem} (set JAX_PLATFORMS='' to choose a backend)")
