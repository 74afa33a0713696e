"""Notices that a user asks for: at which moments of a job, and where to.

The field `notify` of a job maps moments to targets: `{end: "ntfy:https://ntfy.example/me"}`, on the command line
`--notify end=ntfy:https://ntfy.example/me`. A moment may have several: a list. `job_schema` declares the field;
`live.service.notices` sends what is asked for.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from carpool.field_types import FieldError, FieldType, shown

START, END, FAILURE, LIMIT, SLOWDOWN = "start", "end", "failure", "limit", "slowdown"
WEBHOOK, SLACK, NTFY, MAIL = "webhook", "slack", "ntfy", "mailto"
MOST = 8
"""Number of moments, and of targets of one moment."""
_MOMENT = re.compile(r"start|end|failure|limit|slowdown:\d{1,3}(\.\d{1,3})?")
_MAIL = re.compile(r"[A-Za-z0-9._%+-]{1,64}@[A-Za-z0-9.-]{1,255}")


@dataclass(frozen=True, slots=True)
class NoticeTarget:
    """Where a notice goes, and in which form."""

    form: str
    address: str
    """URL, or address of electronic mail."""

    @classmethod
    def read(cls, text: str) -> "NoticeTarget":
        """Return the target that a text names; raise `FieldError`."""
        form, _, rest = text.partition(":")
        if form == MAIL:
            if not _MAIL.fullmatch(rest):
                raise FieldError("must be an address such as mailto:me@example.org")
            return cls(MAIL, rest)
        form, url = (form, rest) if form in (SLACK, NTFY) else (WEBHOOK, text)
        try:
            parts = urlsplit(url)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            known = False
        plain = url.isascii() and url.isprintable() and " " not in url and len(url) <= 1000
        if not known or not plain or "@" in parts.netloc:
            raise FieldError("must be a URL, slack:URL, ntfy:URL or mailto:ADDRESS")
        return cls(form, url)


@dataclass(frozen=True, slots=True)
class NoticeTargets(FieldType):
    """Targets of notices by their moments."""

    metavar: ClassVar[str] = "WHEN=WHERE"
    repeatable: ClassVar[bool] = True

    @property
    def wanted(self) -> str:
        return "a mapping of start, end, failure, limit or slowdown:1.5 to a URL, slack:URL, ntfy:URL or mailto:ADDRESS"

    def check(self, value: Any) -> dict[str, tuple[str, ...]]:
        if not isinstance(value, Mapping) or not value or len(value) > MOST:
            raise self.fail(value)
        found = {}
        for moment, given in value.items():
            if not isinstance(moment, str) or not _MOMENT.fullmatch(moment):
                raise FieldError(f"{shown(moment)} must be start, end, failure, limit or a bound such as slowdown:1.5")
            targets = tuple(given) if isinstance(given, list | tuple) else (given,)
            if not targets or not all(isinstance(target, str) for target in targets):
                raise FieldError(f"{moment}: must be a target or a list of some")  # without it: it may be a secret
            found[moment] = tuple(dict.fromkeys(targets))
            if len(found[moment]) > MOST:
                raise FieldError(f"{moment}: has {len(found[moment])} targets; give at most {MOST}")
            try:
                for target in targets:
                    NoticeTarget.read(target)
            except FieldError as error:
                raise FieldError(f"{moment}: {error}") from None
        return found

    def merge(self, several: Iterable[Mapping[str, tuple[str, ...]]]) -> dict[str, tuple[str, ...]]:
        """Return all targets of several options."""
        found: dict[str, tuple[str, ...]] = {}
        for one in several:
            for moment, targets in one.items():
                found[moment] = (*found.get(moment, ()), *targets)
        return self.check(found)

    def from_option(self, text: str) -> dict[str, tuple[str, ...]]:
        moment, _, target = text.partition("=")
        return self.check({moment: target})

    def from_file(self, value: Any) -> dict[str, tuple[str, ...]]:
        return self.check(value)

    def to_json(self, value: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
        return {moment: targets[0] if len(targets) == 1 else list(targets) for moment, targets in value.items()}

    def json_schema(self) -> dict[str, Any]:
        names = {"pattern": f"^({_MOMENT.pattern})$", "maxLength": 20}
        target = {"type": "string", "minLength": 1, "maxLength": 1000}
        several = {"type": "array", "items": target, "minItems": 1, "maxItems": MOST}
        return {
            "type": "object",
            "propertyNames": names,
            "additionalProperties": {"anyOf": [target, several]},
            "minProperties": 1,
            "maxProperties": MOST,
        }


def bound_of(moment: str) -> float | None:
    """Return the bound of a notice of a slow-down; None: it is for another moment."""
    return float(moment.partition(":")[2]) if moment.startswith(SLOWDOWN) else None
