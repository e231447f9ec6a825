"""Findings as text, as JSON (design: a list of objects), as SARIF 2.1.0, and as workflow commands of GitHub."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import PurePath
from urllib.parse import quote

from .. import __version__
from .findings import Finding
from .run import SITE, Checked, all_rules

SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
LEVELS = {"hang": "error", "wrong-result": "error", "lost-work": "error", "slow": "warning", "placebo": "warning"}
COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def level_of(finding: Finding) -> str:
    """How bad a finding is, in the words of SARIF."""
    return LEVELS.get(finding.severity, "note")


def as_text(checked: Checked) -> list[str]:
    """Three lines for each finding, and a last one that counts them."""
    lines = []
    for one in checked.findings:
        cell = f" (cell {one.cell})" if one.cell else ""
        lines.append(f"{one.file}:{one.line}:{one.column}:{cell} {one.rule} [{one.severity}] {one.message}")
        lines.append(f"    fix: {one.fix}")
    return [*lines, summary(checked)]


def summary(checked: Checked) -> str:
    """`12 findings in 40 files: 3 hang, 9 placebo`."""
    count = len(checked.findings)
    by_severity = Counter[str](one.severity for one in checked.findings)
    parts = ", ".join(f"{by_severity[name]} {name}" for name in (*LEVELS, "hygiene") if by_severity[name])
    files = f"{len(checked.files)} file{'s' * (len(checked.files) != 1)}"
    return f"{count or 'no'} finding{'s' * (count != 1)} in {files}{f': {parts}' if parts else ''}"


def as_json(checked: Checked) -> list[dict[str, object]]:
    """A list of objects; `cell` only for notebooks."""
    return [{name: value for name, value in asdict(one).items() if name != "cell" or value} for one in checked.findings]


def as_github(checked: Checked) -> list[str]:
    """Annotations for a workflow of GitHub: `::error file=...,line=...::message`."""
    lines = []
    for one in checked.findings:
        where = ",".join(
            f"{name}={_property(str(value))}"
            for name, value in {
                "file": one.file,
                "line": one.line,
                "col": one.column,
                "title": f"{one.rule} {one.severity}",
            }.items()
        )
        text = f"{one.message} {one.fix}".replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        lines.append(f"::{COMMANDS[level_of(one)]} {where}::{text}")
    return lines


def _property(text: str) -> str:
    return text.replace("%", "%25").replace("\n", "%0A").replace(":", "%3A").replace(",", "%2C")


def as_sarif(checked: Checked) -> dict[str, object]:
    """One run, with all rules that have findings."""
    used = [one for one in all_rules() if any(found.rule == one.rule.id for found in checked.findings)]
    number = {one.rule.id: at for at, one in enumerate(used)}
    rules = [
        {
            "id": one.rule.id,
            "name": one.rule.name,
            "shortDescription": {"text": one.what},
            "fullDescription": {"text": f"{one.what}: {one.why}"},
            "help": {"text": f"{one.what}: {one.why}. {SITE}docs/check.md#{one.rule.id.lower()}"},
            "helpUri": f"{SITE}docs/check.md#{one.rule.id.lower()}",
            "properties": {"severity": one.rule.severity},
        }
        for one in used
    ]
    driver = {
        "name": "ddp-scaffold check",
        "version": __version__,
        "informationUri": f"{SITE}docs/check.md",
        "rules": rules,
    }
    results = [_result(one, number[one.rule]) for one in checked.findings]
    return {"$schema": SARIF_SCHEMA, "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}


def _result(finding: Finding, index: int) -> dict[str, object]:
    place = {
        "artifactLocation": {"uri": quote(PurePath(finding.file).as_posix())},
        "region": {"startLine": finding.line, "startColumn": finding.column},
    }
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": level_of(finding),
        "message": {"text": f"{finding.message} {finding.fix}"},
        "locations": [{"physicalLocation": place}],
    }
