"""What a chaos run leaves for people and machines: report.json, junit.xml and report.html, from the same verdicts."""

from chaos.report.from_ledger import run_timeline
from chaos.report.timeline import Lane, Mark, MarkKind, Span, SpanKind, Timeline
from chaos.report.write import HTML_FILE, JSON_FILE, JUNIT_FILE, report_dir, write_report

__all__ = [
    "HTML_FILE",
    "JSON_FILE",
    "JUNIT_FILE",
    "Lane",
    "Mark",
    "MarkKind",
    "Span",
    "SpanKind",
    "Timeline",
    "report_dir",
    "run_timeline",
    "write_report",
]
