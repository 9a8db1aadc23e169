"""``pt214 doctor``: what is installed, what hardware is seen, and what holds the user back."""

from pt214.doctor.diagnose import Finding, Severity, diagnose
from pt214.doctor.facts import Facts, collect
from pt214.doctor.report import main

__all__ = ["Facts", "Finding", "Severity", "collect", "diagnose", "main"]
