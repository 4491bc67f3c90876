"""Tests that a check which has passed is not run again."""

import sys
import types

import pytest

from runtime.cache import unless_passed_before
from tests.helpers import small_config


def test_a_check_runs_once_for_a_config_and_a_source(tmp_path, monkeypatch):
    calls = []

    def run(*overrides):
        before = len(calls)
        config = small_config(*overrides, f"paths.root_working_dir={tmp_path}")
        unless_passed_before(config, lambda: calls.append(1))
        return len(calls) > before

    assert run() and not run()
    assert not run("paths.model_name=other"), "another run of the same"
    assert run("model.layers=3") and not run("model.layers=3")
    file = tmp_path / "mine.py"
    file.write_text("WIDTH = 1\n")
    monkeypatch.setitem(sys.modules, "mine", module := types.ModuleType("mine"))
    module.__file__ = str(file)
    assert run() and not run()
    file.write_text("WIDTH = 2\n")
    assert run() and not run()


def test_what_does_not_pass_is_checked_again(tmp_path):
    def refuse():
        raise ValueError("no")

    config = small_config(f"paths.root_working_dir={tmp_path}")
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            unless_passed_before(config, refuse)
