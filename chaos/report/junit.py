"""The report as JUnit XML, which CI systems show. What is broken or never recovered is a failure there."""

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from chaos.verdict import Outcome, Verdict, counts

# All that XML 1.0 does not allow, however it is escaped.
_NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(*, title: str, command: str, seed: int, verdicts: Sequence[Verdict]) -> str:
    """One suite with a test case for each verdict."""
    found = counts(verdicts)
    suite = ElementTree.Element(
        "testsuite",
        name=_text(title),
        tests=str(len(verdicts)),
        failures=str(found[Outcome.BROKEN] + found[Outcome.UNRECOVERED]),
        errors="0",
        skipped=str(found[Outcome.SKIPPED]),
        time=_seconds(sum(verdict.seconds for verdict in verdicts)),
    )
    properties = ElementTree.SubElement(suite, "properties")
    for name, value in (("seed", str(seed)), ("command", command)):
        ElementTree.SubElement(properties, "property", name=name, value=_text(value))
    for verdict in verdicts:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_text(title), name=_text(verdict.name), time=_seconds(verdict.seconds)
        )
        first_line = _text(verdict.detail.partition("\n")[0])
        if verdict.outcome is Outcome.SKIPPED:
            ElementTree.SubElement(case, "skipped", message=first_line)
        elif verdict.outcome is not Outcome.HELD:
            failure = ElementTree.SubElement(case, "failure", type=verdict.outcome.value, message=first_line)
            failure.text = _text(verdict.detail)
        if verdict.replay:
            ElementTree.SubElement(case, "system-out").text = _text(f"again with: {verdict.replay}")
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=False) + "\n"


def _text(value: str) -> str:
    return _NOT_XML.sub("\ufffd", value)


def _seconds(value: float) -> str:
    return f"{value:.3f}"
