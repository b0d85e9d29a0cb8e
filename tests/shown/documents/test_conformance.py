"""The page that compares our formulas with the papers' and the peers' values."""

from __future__ import annotations

import sys

import pytest

from benchmarks.robustness.conformance import page
from benchmarks.robustness.conformance.cases import Case, reduced
from mrlm_pl import algorithms, losses


def check(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["page", "--check"])
    with pytest.raises(SystemExit) as end:
        page.main()
    assert isinstance(end.value.code, bool)
    return end.value.code


def test_all_formulas_agree_and_the_page_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = check(monkeypatch)
    assert not failed, capsys.readouterr().out


def test_a_changed_formula_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    doubled = Case("sapo", "`sapo_loss`", reduced(lambda *given: 2 * losses.sapo_loss(*given)), lambda: 0.5)
    monkeypatch.setattr(page, "CASES", [doubled])
    assert check(monkeypatch)
    found = capsys.readouterr().out
    assert "sapo: ours " in found
    assert "closed form 0.50000" in found
    assert "conformance.md is old" in found


def test_every_algorithm_and_every_token_loss_has_its_formulas() -> None:
    names = [case.name for case in page.CASES]
    assert len(set(names)) == len(names)
    assert set(page.ALGORITHMS) == set(algorithms.__all__)
    assert {name for formulas in page.ALGORITHMS.values() for name in formulas} <= set(names)
    assert {name.split()[0] for name in names} >= set(losses.LOSSES)


def test_the_peers_were_called_with_these_vectors() -> None:
    """Cases of the peers' file are all compared."""
    values = page.json.loads(page.PEERS.read_text())["values"]
    assert set(values) <= {case.name for case in page.CASES}
