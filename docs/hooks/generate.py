"""The generated parts of the documentation: commands, policies, job fields, decisions, and tables read from CSV files.

MkDocs calls `on_page_markdown` for every page. A line such as `<!-- generated: commands -->` is replaced by what the
code says, so that no option or policy is written down twice. An unknown marker is a warning, which fails the build.
"""

import csv
import json
import logging
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import click.testing

from carpool import job_schema
from carpool.cli import SECTIONS, cli

MARKER = re.compile(r"^( *)<!-- generated: ([\w-]+)(?: ([\w./-]+))? -->$", re.MULTILINE)
log = logging.getLogger("mkdocs.hooks.generate")


def on_config(config: Any) -> Any:
    """Put every decision into the navigation, so that a new one needs no line in mkdocs.yml."""
    folder = Path(config["docs_dir"]) / "decisions"
    for section in config["nav"]:
        if "Decisions" in section:
            section["Decisions"] += [f"decisions/{page.name}" for page in _decision_pages(folder)]
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace every marker of a page."""
    folder = Path(page.file.abs_src_path).parent

    def replaced(match: re.Match[str]) -> str:
        indent, kind, argument = match.groups()
        if kind == "commands":
            lines = _commands()
        elif kind == "policies":
            lines = _policies()
        elif kind == "decisions":
            lines = _decisions(folder)
        elif kind == "job-fields":
            lines = iter([job_schema.field_table()])
        elif kind == "columns":
            lines = _columns()
        elif kind == "table":
            lines = _table(folder / argument)
        else:
            log.warning("%s: unknown marker %r", page.file.src_uri, match[0])
            lines = iter([match[0]])
        return textwrap.indent("\n".join(lines), indent)

    return MARKER.sub(replaced, markdown)


def _decision_pages(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]*.md"))


def _decisions(folder: Path) -> Iterator[str]:
    yield "| number | decision |\n| --- | --- |"
    for page in _decision_pages(folder):
        number, _, title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ").partition(". ")
        yield f"| {number} | [{title}]({page.name}) |"


def _commands() -> Iterator[str]:
    root = click.Context(cli, info_name="carpool", **cli.context_settings)
    for title, names in SECTIONS.items():
        yield f"## {title}\n"
        for name in names:
            command = cli.get_command(root, name)
            assert command is not None
            yield from _command(command, click.Context(command, parent=root, info_name=name), 3)


def _command(command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    path = context.command_path
    yield f"{'#' * level} {path} {{#{path.replace(' ', '-')}}}\n"
    usage = command.get_usage(context).removeprefix("Usage: ")
    yield f"```text\n{usage}\n```\n"
    yield from _prose(command.help or "")
    records = [parameter.get_help_record(context) for parameter in command.get_params(context)]
    rows = [record for record in records if record and record[1]]
    if rows:
        yield "| option | meaning |\n| --- | --- |"
        yield from (f"| `{names}` | {_escaped(text)} |" for names, text in rows)
        yield ""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            yield from _command(child, click.Context(child, parent=context, info_name=name), level + 1)


def _prose(text: str) -> Iterator[str]:
    """The help of a command; paragraphs that click must not wrap (marked with a backspace) are kept as they are."""
    for paragraph in re.split(r"\n\s*\n", text.strip().partition("\f")[0]):
        if paragraph.startswith("\b"):
            yield "```text\n" + paragraph.removeprefix("\b").strip("\n") + "\n```\n"
        else:
            yield _escaped(" ".join(paragraph.split())) + "\n"


def _policies() -> Iterator[str]:
    listed = click.testing.CliRunner().invoke(cli, ["policies", "--json"], catch_exceptions=False)
    for name, facts in json.loads(listed.output).items():
        yield f"## {name} {{#{name}}}\n"
        yield f"{_escaped(facts['summary'])}\n"
        if facts["options"]:
            yield "| option | default | meaning |\n| --- | --- | --- |"
            for option, about in facts["options"].items():
                yield f"| `{option}` | `{_shown(about['default'])}` | {_escaped(about['help'])} |"
            yield ""


def _columns() -> Iterator[str]:
    yield "| column | value | default | meaning |\n| --- | --- | --- | --- |"
    for column in job_schema.COLUMNS:
        default = "required" if column.column_required else column.shown_default
        yield f"| `{column.name}` | {_escaped(column.type.wanted)} | {_escaped(default)} | {_escaped(column.help)} |"


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _table(path: Path) -> Iterator[str]:
    with path.open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    for line in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(map(_escaped, line))} |"


def _escaped(text: str) -> str:
    """Plain text for Markdown: `code` stays code; angle brackets and asterisks are shown, not interpreted."""

    def plain(part: str) -> str:
        return re.sub(r"([*_|\[\]])", r"\\\1", part.replace("<", "&lt;").replace(">", "&gt;"))

    return "".join(part if part.startswith("`") else plain(part) for part in re.split(r"(`[^`]*`)", text))
