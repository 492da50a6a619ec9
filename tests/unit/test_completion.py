"""What shells complete: the script, and names of commands, models, machines, presets, passes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from click.shell_completion import ShellComplete

from stagec.driver.cli import COMPLETE, cli, entry
from stagec.models import library, presets


def completed(*words: str) -> Sequence[str]:
    """What may stand in the place of the last word."""
    actual = ShellComplete(cli, {}, "stagec", COMPLETE).get_completions([*words[:-1]], words[-1])
    return [item.value for item in actual if item.type == "plain"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(COMPLETE, f"{shell}_source")
    with pytest.raises(SystemExit) as ended:
        entry()
    assert ended.value.code == 0
    assert f"{COMPLETE}={shell}_complete" in capsys.readouterr().out


def test_names_are_completed() -> None:
    assert completed("se") == ["serve", "search"]
    assert completed("time", "llama3-") == [n for n in library() if n.startswith("llama3-")]
    assert completed("search", "llama") == [n for n in library() if n.startswith("llama")]
    assert "h100-sxm" in completed("time", "x", "--machine", "h100")
    assert "h100-sxm,h200" in completed("search", "x", "--machine", "h100-sxm,h2")
    assert completed("compile", "--preset", "") == [*presets()]
    assert completed("time", "x", "--schedule", "dual") == ["dualpipe", "dualpipev"]
    assert completed("schedule", "zb") == ["zb-h1", "zbv"]
    assert completed("ops", "stg.rms") == ["stg.rmsnorm", "stg.rmsnorm_grad"]
    assert "train,clean" in completed("opt", "-p", "train,cl")
