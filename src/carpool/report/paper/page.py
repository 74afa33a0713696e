"""The report as one HTML file that opens from disk: styles and pictures are embedded, nothing is fetched.

The claims with their verdicts come first, then every table and figure, with the paper's numbers in their own columns.
"""

import re
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path

from carpool.report.paper.cells import CLOSE, FAR, ReportTable, TableCell
from carpool.report.paper.claim import Claim
from carpool.report.paper.verdicts import ClaimVerdict

MARKS = {ClaimVerdict.REPRODUCED: "✓", ClaimVerdict.PARTLY: "≈", ClaimVerdict.NOT: "✗", ClaimVerdict.UNTESTED: "–"}
CLASSES = {
    ClaimVerdict.REPRODUCED: "yes",
    ClaimVerdict.PARTLY: "partly",
    ClaimVerdict.NOT: "no",
    ClaimVerdict.UNTESTED: "untested",
}

MANY_COLUMNS = 9
WIDEST_PT = 720.0
"""Width in points of a picture that fills the page."""
LEGEND = (
    "<p class='legend'>The paper's own numbers have <span class='paper'>this background</span>. Every other number was "
    "computed for this report, or measured. The colour of a deviation from the paper says how large it is: "
    f"<span class='yes'>up to {CLOSE:g} %</span>, <span class='partly'>up to {FAR:g} %</span> or "
    "<span class='no'>more</span>.</p>"
)


@dataclass(frozen=True)
class Picture:
    """A picture with its caption."""

    name: str
    """Name of its files, without the suffix."""
    caption: str


@dataclass(frozen=True)
class Section:
    """A heading, an introduction, and pictures and tables."""

    title: str
    text: str
    items: Sequence[Picture | ReportTable]


@dataclass(frozen=True)
class PaperReport:
    """Everything that the page shows."""

    title: str
    lead: str
    facts: Sequence[tuple[str, str]]
    """Facts about what was run, as pairs of name and value."""
    claims: Sequence[Claim]
    rules: str
    sections: Sequence[Section]
    configuration: str


def write_page(path: Path, folder: Path, report: PaperReport) -> None:
    """Write the report as HTML. `folder` holds the SVG files of the pictures."""
    style = (resources.files(__package__) / "page.css").read_text("utf-8")
    body = [_top(report), _claims(report), *(_section(section, folder) for section in report.sections)]
    body.append(f"<section><h2>Configuration</h2><pre>{escape(report.configuration)}</pre></section>")
    path.write_text(
        "<!doctype html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{style}</style></head>\n"
        f"<body><main>{''.join(body)}</main></body></html>\n",
        encoding="utf-8",
    )


def _top(report: PaperReport) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.facts)
    contents = "".join(f'<li><a href="#{_anchor(s.title)}">{escape(s.title)}</a></li>' for s in report.sections)
    return (
        f"<header><h1>{escape(report.title)}</h1><p class='lead'>{escape(report.lead)}</p>{LEGEND}<dl>{facts}</dl>"
        f"<nav><ul>{contents}</ul></nav></header>"
    )


def _claims(report: PaperReport) -> str:
    counts = Counter(claim.verdict for claim in report.claims)
    tiles = "".join(
        f"<li class='{CLASSES[verdict]}'><b>{counts[verdict]}</b><span>{MARKS[verdict]} {verdict}</span></li>"
        for verdict in ClaimVerdict
        if counts[verdict]
    )
    rows = "".join(
        f"<tr><td class='verdict {CLASSES[claim.verdict]}'><b>{MARKS[claim.verdict]}</b> {claim.verdict}</td>"
        f"<td>{escape(claim.text)}<small>{escape(claim.where)}</small></td><td class='paper'>{escape(claim.paper)}</td>"
        f"<td>{escape(claim.ours)}</td><td class='reason'>{escape(claim.reason)}</td></tr>"
        for claim in report.claims
    )
    return (
        f"<section id='claims'><h2>Claims</h2><ul class='tiles'>{tiles}</ul><p>{escape(report.rules)}</p>"
        "<div class='wide'><table class='claims'><thead><tr><th>verdict</th><th>claim</th><th class='paper'>paper</th>"
        f"<th>ours</th><th>reason</th></tr></thead><tbody>{rows}</tbody></table></div></section>"
    )


def _section(section: Section, folder: Path) -> str:
    parts = [f"<section id='{_anchor(section.title)}'><h2>{escape(section.title)}</h2>"]
    parts += [f"<p>{escape(paragraph)}</p>" for paragraph in section.text.split("\n\n") if paragraph]
    for item in section.items:
        parts.append(_picture(item, folder) if isinstance(item, Picture) else table_html(item))
    return "".join(parts) + "</section>"


def _picture(picture: Picture, folder: Path) -> str:
    drawn = (folder / f"{picture.name}.svg").read_bytes()
    data = b64encode(drawn).decode()
    inches = re.search(rb'<svg[^>]* width="([0-9.]+)pt"', drawn)
    # the width is relative to the widest picture, so that letters are equally large in all pictures
    width = min(100.0, float(inches[1]) / WIDEST_PT * 100.0) if inches else 100.0
    caption = escape(picture.caption)
    return (
        f"<figure><img style='width: {width:.0f}%' src='data:image/svg+xml;base64,{data}' alt='{caption}'>"
        f"<figcaption>{caption} <span class='files'>{picture.name}.png, {picture.name}.svg</span></figcaption></figure>"
    )


def table_html(sheet: ReportTable) -> str:
    """Return a table as HTML."""
    groups = "".join(f"<th colspan='{span}'>{escape(text)}</th>" for text, span in sheet.groups)
    head = f"<tr class='groups'>{groups}</tr>" if sheet.groups else ""
    head += "<tr>" + "".join(f"<th>{escape(text)}</th>" for text in sheet.header) + "</tr>"
    starts = _starts(sheet)
    rows = "".join(
        "<tr>" + "".join(_cell(cell, number, number in starts) for number, cell in enumerate(row)) + "</tr>"
        for row in sheet.rows
    )
    dense = " class='dense'" if len(sheet.header) > MANY_COLUMNS else ""
    note = f"<p class='note'>{escape(sheet.note)}</p>" if sheet.note else ""
    return (
        f"<div class='wide'><table{dense}>"
        f"<caption>{escape(sheet.title)} <span class='files'>{sheet.name}.csv</span></caption>"
        f"<thead>{head}</thead><tbody>{rows}</tbody></table></div>{note}"
    )


def _starts(sheet: ReportTable) -> set[int]:
    """Return the columns with which a group begins."""
    found, column = set(), 0
    for _, span in sheet.groups:
        found.add(column)
        column += span
    return found - {0}


def _cell(cell: TableCell, number: int, starts: bool) -> str:
    tag = "td" if number else "th scope='row'"
    kinds = " ".join(filter(None, (cell.kind, "starts" if starts else "")))
    small = f"<small>{escape(cell.small)}</small>" if cell.small else ""
    return f"<{tag}{f' class={chr(39)}{kinds}{chr(39)}' if kinds else ''}>{escape(cell.text)}{small}</{tag.split()[0]}>"


def _anchor(title: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in title.lower())
