"""Recipes: mergekit's YAML, and `align:` and `data:`. What is not understood is refused by name and
line, never ignored.

merge_method: ties
base_model: base
models:
  - model: one
    parameters: {weight: [0, 0.5, 1], density: 0.5}                        # from the first layer to
    the last
  - model: other
    parameters: {weight: [{filter: mlp, value: 0.5}, {value: 0}]}          # the first filter that
    is in the tensor's name
dtype: float32 out_dtype: bfloat16 align: true data: {uri: dev.tsv, samples: 256}
# for fisher, regmean and ot_acts; a model may have its own
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml

from regauge.checkpoints.documents import RECIPE_BYTES, read_document
from regauge.core.groups import Kind
from regauge.merging.methods import METHODS, UNSUPPORTED, parameter_names
from regauge.merging.recipes import (
    AlignConfig,
    Condition,
    DataConfig,
    Recipe,
    RecipeError,
    Setting,
    Settings,
    Slice,
    Source,
    TokenizerConfig,
)

DTYPES = ("float32", "float16", "bfloat16", "float64")
_RECIPE_KEYS = (
    "merge_method",
    "models",
    "slices",
    "base_model",
    "parameters",
    "dtype",
    "out_dtype",
    "tokenizer_source",
    "tokenizer",
    "align",
    "data",
)
_UNSUPPORTED = {
    "modules": "merge the modules of a model one by one",
    "chat_template": "write the template into the output's tokenizer_config.json",
    "residual_weight": "leave it out: mergekit does not read it either",
    "tokens": "only source and pad_to_multiple_of are read",
}
_ALIGN_KEYS = ("to", "spaces", "layers", "group", "fold", "sweeps", "nearest")
_DATA_KEYS = ("uri", "samples", "fields", "split", "tokenizer", "length", "mean", "std", "labels")
_MAX_CHARS = 10_000  # characters of one value
_MAX_NODES = 100_000  # values of a recipe, with those that aliases (*name) repeat
_BOOLEANS = ("normalize", "rescale", "int8_mask", "filter_wise")


def read_recipe(path: Path) -> Recipe:
    """The recipe in a file."""
    try:
        return parse_recipe(read_document(path, RECIPE_BYTES, RecipeError).decode(), str(path))
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path} is no text: {error}", hint="a recipe is YAML in UTF-8"
        ) from error


def parse_recipe(text: str, origin: str = "the recipe") -> Recipe:
    """The recipe in a text."""
    if len(text) > RECIPE_BYTES:
        raise RecipeError(
            f"{origin} must have at most {RECIPE_BYTES:,} characters, got {len(text):,}",
            hint="is it the right file?",
        )
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise RecipeError(
            f"{origin}{line}: this is no YAML: {error.problem}",
            hint="check indentation, colons and quotes there",
        ) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise RecipeError(
            f"{origin} is no YAML: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint="a recipe is YAML in UTF-8",
        ) from error
    if node is None:
        raise RecipeError(f"{origin} is empty", hint="a recipe has merge_method: and models:")
    return _Parser(origin, text).recipe(node)


class _Parser:
    """One recipe, read node by node, so that every error has its line."""

    def __init__(self, origin: str, text: str) -> None:
        self.origin, self.text, self.method = origin, text, ""
        self.notes: list[str] = []
        self.nodes_left = _MAX_NODES

    def count_node(self, node: Any) -> None:
        """Count a node: aliases within aliases repeat a short text a billion times."""
        self.nodes_left -= 1
        if self.nodes_left < 0:
            raise self.error(
                node,
                f"a recipe must have at most {_MAX_NODES:,} values",
                "write out what its aliases (*name) repeat",
            )

    def error(self, node: Any, what: str, hint: str | None = None) -> RecipeError:
        return RecipeError(f"{self.origin}, line {_line(node)}: {what}", hint=hint)

    def recipe(self, node: Any) -> Recipe:
        top = self.mapping(node, _RECIPE_KEYS, "a recipe")
        if "merge_method" not in top:
            raise self.error(node, "there is no merge_method:", f"choose from {', '.join(METHODS)}")
        self.method = self.method_name(top["merge_method"])
        if ("models" in top) == ("slices" in top):
            raise self.error(node, "a recipe has either models: or slices:")
        parameters = self.settings(top.get("parameters"))
        base = (
            self.model(top["base_model"])
            if "base_model" in top and not _is_null(top["base_model"])
            else None
        )
        if "slices" in top:
            slices = tuple(self.slice(n) for n in self.sequence(top["slices"], "slices"))
        else:
            entries = self.sequence(top["models"], "models")
            slices = (
                Slice(
                    tuple(self.source(n, sliced=False) for n in entries),
                    None,
                    {},
                    _line(top["models"]),
                ),
            )
        data = self.data(top.get("data"))
        if not slices or not all(part.sources for part in slices):
            raise self.error(
                node,
                "there is no model to merge",
                "list at least one under models:, or under the sources: of each slice",
            )
        out = Recipe(
            self.method,
            slices,
            "slices" in top,
            base,
            parameters,
            self.dtype(top.get("dtype")),
            self.dtype(top.get("out_dtype")),
            self.tokens(top),
            self.align(top.get("align")),
            self.text,
            self.origin,
            tuple(self.notes),
            data,
        )
        self.check_models(out, node)
        return out

    def check_models(self, recipe: Recipe, node: Any) -> None:
        """What a method asks of the models: a base, or a number of them."""
        for part in recipe.slices:
            names = [s.model for s in part.sources]
            base = part.base or recipe.base
            first = {s.model: s for s in reversed(part.sources)}
            twice = next((s for s in part.sources if first[s.model] is not s), None)
            if twice is not None:
                raise RecipeError(
                    f"{self.origin}, line {twice.line}: {twice.model} is listed twice",
                    hint="list each model once, with the sum of its weights",
                )
            if METHODS[recipe.method].needs_base and base is None:
                raise self.error(
                    node,
                    f"{recipe.method} needs a base model",
                    "write base_model: MODEL (on the command line: --base)",
                )
            if METHODS[recipe.method].needs_base and recipe.is_sliced and base not in names:
                raise RecipeError(
                    f"{self.origin}, line {part.line}: no source of this slice is of the base "
                    f"{base}",
                    hint="list the base's layers among its sources",
                )
            if recipe.method == "passthrough" and len(names) > 1:
                raise RecipeError(
                    f"{self.origin}, line {part.line}: passthrough takes one model in each "
                    f"place, and here are {len(names)}",
                    hint="give each slice one source, or use linear",
                )
            others = len(set(names) - {base})
            if recipe.method == "slerp" and others != 1:
                raise self.error(
                    node,
                    f"slerp is between the base and one other model, and here {others} others "
                    "are listed",
                    "list the base and one more under models:",
                )
            method = METHODS[recipe.method]
            if (
                not method.needs_base
                and "weight" in method.per_model
                and base is not None
                and base not in names
                and not recipe.is_sliced
            ):
                raise self.error(
                    node,
                    f"the base {base} has no weight in a {recipe.method} merge",
                    "list it under models:, or leave base_model: out",
                )
            if method.is_transport and recipe.is_sliced:
                raise RecipeError(
                    f"{self.origin}, line {part.line}: {recipe.method} transports whole models, "
                    "and no slices of them",
                    hint="list the models under models:",
                )
            blind = next(
                (s for s in part.sources if method.statistic and recipe.data_for(s.model) is None),
                None,
            )
            if blind is not None:
                raise RecipeError(
                    f"{self.origin}, line {blind.line}: {recipe.method} looks at what "
                    f"{blind.model} does on data, and there are none",
                    hint="write data: FILE into the recipe (on the command line: --data FILE), "
                    "or take a method without data",
                )

    def method_name(self, node: Any) -> str:
        name = str(self.scalar(node, "merge_method"))
        if name in UNSUPPORTED:
            raise self.error(
                node,
                f'the method "{name}" of mergekit is not supported',
                f"choose from {', '.join(METHODS)}",
            )
        if name not in METHODS:
            raise self.error(
                node,
                f'there is no method "{name}"',
                _suggest(name, METHODS) or f"choose from {', '.join(METHODS)}",
            )
        return name

    def slice(self, node: Any) -> Slice:
        top = self.mapping(node, ("sources", "base_model", "parameters"), "a slice")
        if "sources" not in top:
            raise self.error(node, "a slice has sources:")
        sources = tuple(
            self.source(n, sliced=True) for n in self.sequence(top["sources"], "sources")
        )
        lengths = {b - a for a, b in (s.layers for s in sources if s.layers)}
        if len(lengths) > 1:
            raise self.error(
                node,
                "the sources of one slice have different numbers of layers",
                "give each the same length in layer_range",
            )
        base = self.model(top["base_model"]) if "base_model" in top else None
        return Slice(sources, base, self.settings(top.get("parameters")), _line(node))

    def source(self, node: Any, *, sliced: bool) -> Source:
        known = (
            ("model", "layer_range", "parameters", "data")
            if sliced
            else ("model", "parameters", "data")
        )
        top = self.mapping(node, known, "a model")
        if "model" not in top:
            raise self.error(node, "model: is missing here")
        layers = None
        if sliced:
            if "layer_range" not in top:
                raise self.error(
                    node, "layer_range: is missing here", "write layer_range: [first, last + 1]"
                )
            found = [self.number(n) for n in self.sequence(top["layer_range"], "layer_range")]
            if len(found) != 2 or any(n != int(n) for n in found) or not 0 <= found[0] < found[1]:
                raise self.error(
                    top["layer_range"],
                    "layer_range is [first, last + 1], two whole numbers",
                    "as in layer_range: [0, 16]",
                )
            layers = (int(found[0]), int(found[1]))
        return Source(
            self.model(top["model"]),
            layers,
            self.settings(top.get("parameters")),
            _line(node),
            self.data(top.get("data")),
        )

    def model(self, node: Any) -> str:
        if isinstance(node, yaml.MappingNode):
            raise self.error(
                node, "a model is a path or a hub id", "with an adapter: model+adapter"
            )
        return str(self.scalar(node, "a model"))

    def settings(self, node: Any) -> Settings:
        if node is None or _is_null(node):
            return {}
        top = self.mapping(node, tuple(sorted(parameter_names())), "parameters")
        out = {}
        for name, value in top.items():
            method = METHODS[self.method]
            if name not in method.shared and name not in method.per_model:
                self.notes.append(
                    f'line {_line(value)}: {self.method} has no parameter "{name}", which '
                    "changes nothing"
                )
            out[name] = Setting(self.setting(name, value), _line(value))
        return out

    def setting(self, name: str, node: Any) -> Any:
        if isinstance(node, yaml.MappingNode):
            return (self.condition(name, node),)
        if not isinstance(node, yaml.SequenceNode):
            return self.value(name, node)
        if not node.value:
            raise self.error(node, f'"{name}" is an empty list')
        if any(isinstance(n, yaml.MappingNode) for n in node.value):
            return tuple(self.condition(name, n) for n in node.value)
        return tuple(self.value(name, n) for n in node.value)

    def condition(self, name: str, node: Any) -> Condition:
        top = self.mapping(node, ("filter", "value"), f'a condition of "{name}"')
        if "value" not in top:
            raise self.error(node, f'a condition of "{name}" has no value:')
        value = top["value"]
        values = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if any(not isinstance(n, yaml.ScalarNode) for n in values):
            raise self.error(value, f'the value of "{name}" is a number, or a list of numbers')
        asked = (
            None
            if "filter" not in top or _is_null(top["filter"])
            else str(self.scalar(top["filter"], "filter"))
        )
        return Condition(None if asked == "*" else asked, self.setting(name, value))

    def value(self, name: str, node: Any) -> Any:
        if name in _BOOLEANS:
            return self.boolean(node, name)
        number = self.number(node)
        if name == "density" and not 0 <= number <= 1:
            raise self.error(node, f"a density is from 0 to 1, not {number:g}")
        return number

    def number(self, node: Any) -> float:
        found = self.scalar(node, "a number")
        try:
            number = float(found)  # YAML takes 1e-5 for a text
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if isinstance(found, bool) or not math.isfinite(number):
            raise self.error(node, f"{found!r} is no number")
        return number

    def integer(self, node: Any, what: str, least: int) -> int:
        number = self.number(node)
        if number < least or number != int(number):
            raise self.error(node, f"{what} is a whole number from {least} on, not {number:g}")
        return int(number)

    def boolean(self, node: Any, what: str) -> bool:
        found = self.scalar(node, what)
        if not isinstance(found, bool) and found not in (0, 1):
            raise self.error(node, f"{what} is true or false, not {found!r}")
        return bool(found)

    def dtype(self, node: Any) -> str | None:
        if node is None or _is_null(node):
            return None
        name = str(self.scalar(node, "dtype")).removeprefix("torch.")
        if name not in DTYPES:
            raise self.error(
                node, f'there is no dtype "{name}" here', f"choose from {', '.join(DTYPES)}"
            )
        return name

    def tokens(self, top: Mapping[str, Any]) -> TokenizerConfig | None:
        if "tokenizer_source" in top and "tokenizer" in top:
            raise self.error(
                top["tokenizer"], "a recipe has either tokenizer: or tokenizer_source:"
            )
        if "tokenizer_source" in top:
            node = top["tokenizer_source"]
            return None if _is_null(node) else TokenizerConfig(self.model(node), None, _line(node))
        if "tokenizer" not in top or _is_null(top["tokenizer"]):
            return None
        node = top["tokenizer"]
        inner = self.mapping(node, ("source", "pad_to_multiple_of"), "tokenizer")
        multiple = None
        if "pad_to_multiple_of" in inner and not _is_null(inner["pad_to_multiple_of"]):
            multiple = self.integer(inner["pad_to_multiple_of"], "pad_to_multiple_of", 1)
        return TokenizerConfig(
            self.model(inner["source"]) if "source" in inner else "union", multiple, _line(node)
        )

    def align(self, node: Any) -> AlignConfig | None:
        if node is None or _is_null(node):
            return None
        if not isinstance(node, yaml.MappingNode):
            found = self.scalar(node, "align")
            if not isinstance(found, bool):
                raise self.error(
                    node,
                    f"align is true, false or a mapping, not {found!r}",
                    f"it may hold {', '.join(_ALIGN_KEYS)}",
                )
            return AlignConfig() if found else None
        top = self.mapping(node, _ALIGN_KEYS, "align")
        options: dict[str, Any] = {}
        if "spaces" in top:
            options["spaces"] = [
                str(self.scalar(n, "a space")) for n in self.sequence(top["spaces"], "spaces")
            ]
        if "layers" in top:
            options["layers"] = [
                self.integer(n, "a layer", 0) for n in self.sequence(top["layers"], "layers")
            ]
        if "group" in top:
            options["within"] = str(self.scalar(top["group"], "group"))
            if options["within"] not in get_args(Kind):
                raise self.error(
                    top["group"],
                    f'there is no group "{options["within"]}"',
                    f"choose from {', '.join(get_args(Kind))}",
                )
        if "sweeps" in top:
            options["sweeps"] = self.integer(top["sweeps"], "sweeps", 0)
        if "nearest" in top:
            options["nearest"] = self.boolean(top["nearest"], "nearest")
        return AlignConfig(
            self.model(top["to"]) if "to" in top else None,
            "fold" in top and self.boolean(top["fold"], "fold"),
            options,
        )

    def data(self, node: Any) -> DataConfig | None:
        if node is None or _is_null(node):
            return None
        if not METHODS[self.method].statistic:
            self.notes.append(
                f"line {_line(node)}: {self.method} looks at no data, so that data: changes nothing"
            )
        if isinstance(node, yaml.ScalarNode):
            return DataConfig(str(self.scalar(node, "data")))
        top = self.mapping(node, _DATA_KEYS, "data")
        if "uri" not in top:
            raise self.error(
                node, "data: has no uri:", "write data: FILE, or data: {uri: FILE, samples: 256}"
            )
        given: dict[str, Any] = {
            name: str(self.scalar(top[name], name))
            for name in ("uri", "split", "tokenizer")
            if name in top
        }
        given |= {
            name: self.integer(top[name], name, 1) for name in ("samples", "length") if name in top
        }
        for name in ("mean", "std"):
            if name in top:
                values = (
                    top[name].value if isinstance(top[name], yaml.SequenceNode) else [top[name]]
                )
                given[name] = tuple(self.number(n) for n in values)
        if "fields" in top:
            if not isinstance(top["fields"], yaml.MappingNode):
                raise self.error(
                    top["fields"],
                    "fields is a mapping of text, image or label to their names in the data",
                )
            given["fields"] = tuple(
                (str(k.value), str(self.scalar(v, "a field"))) for k, v in top["fields"].value
            )
        if "labels" in top:
            given["labels"] = self.boolean(top["labels"], "labels")
        return DataConfig(**given)

    def mapping(self, node: Any, keys: Sequence[str], what: str) -> dict[str, Any]:
        """The values of a mapping by their keys, which must all be known, each once."""
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, f"{what} is a mapping with {', '.join(keys)}")
        self.count_node(node)
        out: dict[str, Any] = {}
        for key, value in node.value:
            name = str(key.value)
            if name in _UNSUPPORTED and name not in keys:
                raise self.error(key, f'"{name}" is not supported', _UNSUPPORTED[name])
            if name not in keys:
                raise self.error(
                    key,
                    f'{what} has no "{name}"',
                    _suggest(name, keys) or f"known here: {', '.join(keys)}",
                )
            if name in out:
                raise self.error(key, f'"{name}" is there twice')
            out[name] = value
        return out

    def sequence(self, node: Any, what: str) -> list[Any]:
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(node, f"{what} is a list")
        self.count_node(node)
        return list(node.value)

    def scalar(self, node: Any, what: str) -> Any:
        if not isinstance(node, yaml.ScalarNode):
            raise self.error(node, f"{what} is one value, not a list or a mapping")
        if len(node.value) > _MAX_CHARS:
            raise self.error(
                node, f"{what} must have at most {_MAX_CHARS:,} characters, got {len(node.value):,}"
            )
        self.count_node(node)
        loader = yaml.SafeLoader("")
        try:
            return loader.construct_object(node)
        except (yaml.YAMLError, ValueError, LookupError) as error:
            raise self.error(node, f"{what} cannot be read: {node.value!r:.60}") from error
        finally:
            loader.dispose()


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _is_null(node: Any) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def _suggest(name: str, known: Any) -> str | None:
    found = difflib.get_close_matches(name, list(known), 1)
    return f'did you mean "{found[0]}"?' if found else None
