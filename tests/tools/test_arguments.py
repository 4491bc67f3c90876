"""Command lines of programs that take no config."""

import pytest

from tools import arguments, checkpoint_info, huggingface_weights
from tools.generate import __main__ as generate


def test_a_leading_tilde_is_the_home_folder_in_paths_alone(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    parser = arguments.parser("tools.x", None)
    command = parser.add_subparsers().add_parser("make")
    for name, options in ("path", {}), ("--to", {}), ("--text", {"type": str}):
        command.add_argument(name, **options)
    given = parser.parse_args(["make", "a/~", "--to=~/b", "--text=~/c"])
    assert (given.path, given.to, given.text) == ("a/~", "/home/me/b", "~/c")


PROGRAMS = {
    checkpoint_info.main: ["~/x"],
    generate.main: ["~/x"],
    huggingface_weights.main: ["export", "~/x", "~/y"],
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda main: main.__module__)
def test_the_programs_read_there(program, here, train_here, monkeypatch):
    monkeypatch.setenv("HOME", str(here))
    out, message = train_here(*PROGRAMS[program], program=program)
    assert f"{here}/x" in out + message and not (here / "~").exists()
