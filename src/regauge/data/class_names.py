"""Classes of images by the names of their folders: the number that a model has for each.

A folder of images is numbered by its sorted class folders. That is the numbering of a model that
was trained on the same classes, and of no other: ImageNet-A has 200 of ImageNet's 1,000.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from regauge.errors import DataError, Hint

_GENERIC = re.compile(r"LABEL_[0-9]+")  # what transformers calls a class without a name
_WNID = re.compile(r"n[0-9]{8}")  # a synset of WordNet, as ImageNet's folders are called


def labels_of(module: Any) -> list[str]:
    """Return the names of a model's classes in their order; none if it has no names."""
    found = getattr(getattr(module, "config", None), "id2label", None) or {}
    names = [str(found[i]) for i in sorted(found)]
    return [] if all(_GENERIC.fullmatch(name) for name in names) else names


def number_folders(
    folders: Sequence[str],
    classes: int,
    labels: Sequence[str] = (),
    like: Sequence[str] = (),
    source: str = "the data",
) -> dict[str, int] | None:
    """Return the number of each class folder.

    Args:
        folders: The names of the folders.
        classes: The number of classes of the model.
        labels: The names of its classes. Spellings with spaces or underscores are equal, and so are
            the synonyms in "tench, Tinca tinca".
        like: The class folders of data with all classes of the model, in order.
        source: The name of the data in errors.

    Returns:
        The numbers; None if the folders are all classes of the model, in its order.

    Raises:
        DataError: A folder is not a class of the model, or of several.
    """
    names = sorted(set(folders))
    are_wnids = all(_WNID.fullmatch(name) for name in names)
    ordered = len(names) == classes and (are_wnids or not labels)
    tables = [labels, like if len(like) == classes else ()]
    if are_wnids and not ordered:
        tables.append(_synsets(classes))
    for table in tables:
        numbers = _numbers(table)
        found = {name: numbers.get(_normal(name), []) for name in names}
        if all(len(at) == 1 for at in found.values()):
            return {name: at[0] for name, at in found.items()}
        several = next((name for name, at in found.items() if len(at) > 1), None)
        if several is not None:
            raise DataError(
                f'the folder "{several}" of {source} is the name of {len(found[several])} classes',
                hint=f"they are {' and '.join(map(str, found[several]))}; rename the folder to "
                "its WordNet id or to the model's full label",
            )
    if ordered:
        return None
    if labels and all(name.isdecimal() and int(name) < classes for name in names):
        return {name: int(name) for name in names}
    known = next((set(_numbers(table)) for table in tables if table), set())
    strange = [name for name in names if _normal(name) not in known]
    what = f'the folder "{strange[0]}" of {source} is not a class of the model'
    if not labels and not are_wnids:
        what = (
            f"{source} must have a folder for each of the model's {classes} classes, got "
            f"{len(names)}: the model has no names for its classes"
        )
    hint = "name the folders by the labels of the model (id2label in config.json)"
    if are_wnids:
        hint = "install timm, which has the WordNet ids of ImageNet, or " + hint
    example = f", such as {labels[0]!r}" if labels else ""
    raise DataError(what, hint=Hint(hint + example))


def _numbers(table: Sequence[str]) -> dict[str, list[int]]:
    """Return the classes that a name stands for: by its full label, or else by a synonym."""
    full: dict[str, list[int]] = {}
    parts: dict[str, list[int]] = {}
    for number, text in enumerate(table):
        full.setdefault(_normal(text), []).append(number)
        for part in {_normal(part) for part in text.split(",")}:
            parts.setdefault(part, []).append(number)
    return {**parts, **full}


def _normal(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()


def _synsets(classes: int) -> Sequence[str]:
    """Return the WordNet ids of ImageNet's classes, which timm has; none without it."""
    if classes == 1000 and find_spec("timm") is not None:
        with contextlib.suppress(Exception):  # of a version that has it elsewhere
            from timm.data import ImageNetInfo

            return list(ImageNetInfo("imagenet-1k").label_names())
    return ()


def renumber(
    labels: Any, folders: Sequence[str], classes: int, numbers: Mapping[str, int] | None = None
) -> Any:
    """Return labels that number class folders as numbers of the model's classes.

    Args:
        labels: The labels.
        folders: The class folders, in order.
        classes: The number of classes of the model.
        numbers: The number of each folder, from `number_folders`; None: as they are.

    Raises:
        DataError: A folder has no number, or without numbers there are not as many as classes.
    """
    if numbers is None and len(folders) != classes:
        raise DataError(
            f"the images must have a folder for each of {classes} classes, got {len(folders)}",
            hint="the folders are numbered in their order; add the missing ones",
        )
    missing = sorted(set(folders) - numbers.keys()) if numbers is not None else []
    if numbers is not None and missing:
        raise DataError(
            f'the folder "{missing[0]}" must be one of {", ".join(list(numbers)[:8])}',
            hint="the task was prepared for other data",
        )
    table = range(classes) if numbers is None else [numbers[name] for name in folders]
    return np.array(table, np.int64)[labels]
