from dataclasses import replace

import pytest
from pt214.doctor.diagnose import SWITCHES, Severity, diagnose
from pt214.doctor.facts import Device, Facts

HEALTHY = Facts(
    python="3.12.4",
    system="Linux",
    machine="x86_64",
    torch="2.14.1+cu130",
    torch_error=None,
    triton="3.8.0",
    cxx="/usr/bin/g++",
    parts={"mps": "0.1.0", "inductor": "0.1.0", "elastic": "0.1.0", "dcp": "0.1.0"},
    devices=(Device("cpu", 8, "x86_64"), Device("cuda", 1, "NVIDIA H200")),
)


def problems(facts: Facts) -> list[str]:
    found = [f for f in diagnose(facts) if f.severity is Severity.PROBLEM]
    assert all(f.remedy for f in found)
    return [f"{f.subject}: {f.text}" for f in found]


def test_a_healthy_machine_has_nothing_to_find() -> None:
    assert diagnose(HEALTHY) == []


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"python": "3.10.13"}, "python: Python 3.10.13"),
        ({"torch": None}, "torch: torch is not installed"),
        ({"torch": "2.9.1"}, "torch: torch 2.9.1; the parts need 2.11"),
        ({"torch_error": "OSError: libcudart"}, "does not import: OSError: libcudart"),
        ({"cxx": None}, "compiler: no C++ compiler"),
        ({"triton": None}, "triton: CUDA is there, triton is not"),
        ({"parts": HEALTHY.parts | {"dcp": "0.2.0"}}, "parts: the parts have different versions"),
    ],
)
def test_each_problem_is_found_alone(change: dict[str, object], wanted: str) -> None:
    (found,) = problems(replace(HEALTHY, **change))  # type: ignore[arg-type]
    assert wanted in found


@pytest.mark.parametrize("switch", SWITCHES, ids=lambda switch: switch.name)
def test_each_switch_that_holds_back_is_a_problem_only_when_on(switch: object) -> None:
    name, bad = switch.name, (switch.bad or ("anything",))[0]  # type: ignore[attr-defined]
    assert len(problems(replace(HEALTHY, environment={name: bad}))) == 1
    off = replace(HEALTHY, environment={name: "" if not switch.bad else "harmless"})  # type: ignore[attr-defined]
    assert problems(off) == []


def test_a_missing_part_is_a_note_with_its_command_not_a_problem() -> None:
    found = diagnose(replace(HEALTHY, parts=HEALTHY.parts | {"elastic": None}))
    assert [(f.severity, f.remedy) for f in found] == [
        (Severity.NOTE, "pip install 'pt214[elastic]'")
    ]


def test_an_older_torch_that_still_serves_is_a_note() -> None:
    (found,) = diagnose(replace(HEALTHY, torch="2.11.0"))
    assert found.severity is Severity.NOTE


def test_problems_come_before_notes() -> None:
    facts = replace(HEALTHY, parts=HEALTHY.parts | {"mps": None}, cxx=None)
    assert [f.severity for f in diagnose(facts)] == [Severity.PROBLEM, Severity.NOTE]
