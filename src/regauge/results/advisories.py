"""Library versions with known vulnerabilities that reach regauge.

`regauge doctor` and `make audit-deps` check them, without a network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata


@dataclass(frozen=True)
class Advisory:
    """A library whose versions before `fixed` are vulnerable. pyproject.toml must exclude them."""

    library: str
    fixed: str
    identifiers: tuple[str, ...]
    why: str


ADVISORIES = (
    Advisory(
        "torch",
        "2.10",
        ("CVE-2025-32434", "CVE-2026-24747"),
        "a crafted pickle runs code or corrupts memory in spite of weights_only, which regauge "
        "convert relies on",
    ),
    Advisory(
        "cryptography",
        "46.0.5",
        ("CVE-2026-26007",),
        "public keys of peers are not checked to lie in the right subgroup",
    ),
    Advisory(
        "pillow", "12.2", ("CVE-2026-40192",), "a small image file is decompressed without bound"
    ),
    Advisory("jinja2", "3.1.6", ("CVE-2025-27516",), "a template escapes the sandbox"),
    Advisory(
        "ray",
        "2.52",
        ("CVE-2025-62593",),
        "a page in a browser runs code through Ray's dashboard, which Flower's simulation starts",
    ),
)


@dataclass(frozen=True, kw_only=True)
class VulnerableLibrary(Advisory):
    """An installed library with a known vulnerability."""

    version: str

    def __str__(self) -> str:
        identifiers = ", ".join(self.identifiers)
        return (
            f"{self.library} {self.version} is unsafe ({identifiers}): {self.why}; pip install "
            f"'{self.library}>={self.fixed}'"
        )


def find_vulnerable(installed: Iterable[tuple[str, str]] | None = None) -> list[VulnerableLibrary]:
    """Return the installed libraries that an advisory names.

    Args:
        installed: names and versions. Default: those of this environment.
    """
    if installed is None:
        installed = [
            (a.library, version)
            for a in ADVISORIES
            if (version := installed_version(a.library)) is not None
        ]
    return [
        VulnerableLibrary(**vars(a), version=version)
        for name, version in installed
        for a in ADVISORIES
        if normalize_name(name) == a.library and not satisfies(version, f">={a.fixed}")
    ]


def installed_version(library: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def normalize_name(name: str) -> str:
    """Return a distribution's name as pip compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def satisfies(version: str, wanted: str) -> bool:
    """Return whether a version lies within `>=a,<b`. Only the numbers before any letter count:
    2.13.0+cpu is 2.13.0.
    """
    for clause in filter(None, wanted.split(",")):
        number = clause.lstrip("<>=!~")
        sign = clause.removesuffix(number)
        left, right = _parse_version(version), _parse_version(number.strip())
        width = max(len(left), len(right))
        left, right = left + (0,) * (width - len(left)), right + (0,) * (width - len(right))
        if not {
            ">=": left >= right,
            "<": left < right,
            "<=": left <= right,
            ">": left > right,
            "==": left == right,
            "!=": left != right,
        }.get(sign, left >= right):
            return False
    return True


def _parse_version(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    match = re.match(r"[\d.]*", version)
    return tuple(int(n) for n in re.findall(r"\d+", match[0] if match else ""))
