"""Tests which errors end a program with one line, and which keep their traceback. For several
hosts see tests/test_hosts.py."""

import pytest

from runtime.errors import user_errors
from shardlib.errors import UserError


@pytest.mark.parametrize("mistake", [UserError("no steps"), OSError("no steps")])
def test_a_users_mistake_is_one_line(mistake):
    with pytest.raises(SystemExit, match=r"^error: no steps$"), user_errors():
        raise mistake


@pytest.mark.parametrize("kind", [ValueError, AssertionError, TypeError, KeyboardInterrupt])
def test_a_bug_keeps_its_traceback(kind):
    with pytest.raises(kind), user_errors():
        raise kind
