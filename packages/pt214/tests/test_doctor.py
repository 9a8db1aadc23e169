import json

import pytest
from pt214.doctor import collect, main
from pt214.doctor.report import as_json


def test_a_switch_that_holds_back_is_printed_and_turns_the_status_to_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    assert main([]) == 1
    printed = capsys.readouterr().out
    assert "PROBLEM: PYTORCH_ENABLE_MPS_FALLBACK=1" in printed
    assert "-> unset PYTORCH_ENABLE_MPS_FALLBACK" in printed


def test_json_holds_facts_findings_and_the_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    status = main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == 1
    assert report["ok"] is False
    assert "TORCHDYNAMO_DISABLE=1" in {finding["subject"] for finding in report["findings"]}
    assert set(report["facts"]["parts"]) == {"mps", "inductor", "elastic", "dcp"}


def test_json_for_a_bug_report_keeps_secrets_of_the_environment_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CLOUD_PASSWORD", "hunter2")
    assert "hunter2" not in as_json(collect(), [])
