"""Parser of recipes: mergekit's YAML, and `align:` and `data:`.

Unknown keys raise an error with the name and the line; none is ignored.

    merge_method: ties
    base_model: base
    models:
      - model: one
        parameters: {weight: [0, 0.5, 1], density: 0.5}         # from the first layer to the last
      - model: other
        parameters: {weight: [{filter: mlp, value: 0.5}, {value: 0}]}   # the first filter that fits
    dtype: float32
    out_dtype: bfloat16
    align: true
    data: {uri: dev.tsv, samples: 256}       # for fisher, regmean and ot_acts; per model or for all
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
from regauge.data.sources import DataSource
from regauge.errors import Hint, RecipeError
from regauge.matching.pairs import STREAMS, Stream
from regauge.merging.methods import METHODS, UNSUPPORTED, parameter_names
from regauge.merging.recipes import (
    AlignConfig,
    Condition,
    Recipe,
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
    "chat_template",
    "align",
    "data",
)
_UNSUPPORTED = {
    "modules": "merge the modules of a model one by one",
    "residual_weight": "leave it out: mergekit does not read it either",
    "tokens": "only source and pad_to_multiple_of are read",
}
_ALIGN_KEYS = (
    "to",
    "spaces",
    "layers",
    "stream",
    "group",
    "fold",
    "sweeps",
    "nearest",
    "refine",
    "refine_steps",
)
_DATA_KEYS = ("uri", "samples", "fields", "split", "tokenizer", "length", "mean", "std", "labels")
_MAX_CHARS = 10_000  # in one value
_MAX_NODES = 100_000  # values, including those that aliases (*name) repeat
_BOOLEANS = (
    "normalize",
    "keep_norms",
    "products",
    "rescale",
    "int8_mask",
    "filter_wise",
    "nuslerp_flatten",
    "nuslerp_row_wise",
)


def read_recipe(path: Path) -> Recipe:
    """Read a recipe from a file."""
    try:
        return parse_recipe(read_document(path, RECIPE_BYTES, RecipeError).decode(), str(path))
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{path} must be UTF-8 text: {error}", hint="a recipe is YAML in UTF-8"
        ) from error


def parse_recipe(text: str, origin: str = "the recipe") -> Recipe:
    """Parse a recipe.

    Args:
        text: the YAML.
        origin: the file, for error messages.

    Raises:
        RecipeError: with the line of the first error.
    """
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
            f"{origin}{line}: not valid YAML: {error.problem}",
            hint="check indentation, colons and quotes there",
        ) from error
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise RecipeError(
            f"{origin} is not valid YAML: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}",
            hint="a recipe is YAML in UTF-8",
        ) from error
    if node is None:
        raise RecipeError(
            f"{origin} must not be empty", hint="a recipe has merge_method: and models:"
        )
    return _Parser(origin, text).recipe(node)


class _Parser:
    """The parser of one recipe. It visits YAML nodes, so that every error has its line."""

    def __init__(self, origin: str, text: str) -> None:
        self.origin, self.text, self.method = origin, text, ""
        self.notes: list[str] = []
        self.nodes_left = _MAX_NODES

    def count_node(self, node: Any) -> None:
        """Count a node: nested aliases repeat a short text a billion times."""
        self.nodes_left -= 1
        if self.nodes_left < 0:
            raise self.error(
                node,
                f"a recipe must have at most {_MAX_NODES:,} values",
                "write out what its aliases (*name) repeat",
            )

    def error(self, node: Any, message: str, hint: str | None = None) -> RecipeError:
        """Return an error with the line of a node."""
        return RecipeError(f"{self.origin}, line {_line(node)}: {message}", hint=hint)

    def recipe(self, node: Any) -> Recipe:
        """Parse the whole recipe."""
        keys = self.mapping(node, _RECIPE_KEYS, "a recipe")
        if "merge_method" not in keys:
            raise self.error(node, "merge_method: is missing", f"choose from {', '.join(METHODS)}")
        self.method = self.method_name(keys["merge_method"])
        if ("models" in keys) == ("slices" in keys):
            raise self.error(node, "a recipe must have either models: or slices:")
        parameters = self.settings(keys.get("parameters"))
        base = (
            self.model(keys["base_model"])
            if "base_model" in keys and not _is_null(keys["base_model"])
            else None
        )
        if "slices" in keys:
            slices = tuple(self.slice(n) for n in self.sequence(keys["slices"], "slices"))
        else:
            entries = self.sequence(keys["models"], "models")
            slices = (
                Slice(
                    tuple(self.source(n, sliced=False) for n in entries),
                    None,
                    {},
                    _line(keys["models"]),
                ),
            )
        data = self.data(keys.get("data"))
        if not slices or not all(part.sources for part in slices):
            raise self.error(
                node,
                "a recipe must have at least one model",
                "list at least one under models:, or under the sources: of each slice",
            )
        recipe = Recipe(
            self.method,
            slices,
            "slices" in keys,
            base,
            parameters,
            self.dtype(keys.get("dtype")),
            self.dtype(keys.get("out_dtype")),
            self.tokens(keys),
            self.align(keys.get("align")),
            self.text,
            self.origin,
            tuple(self.notes),
            data,
            None
            if _is_absent(keys.get("chat_template"))
            else str(self.scalar(keys["chat_template"], "chat_template")),
        )
        self.check_models(recipe, node)
        return recipe

    def check_models(self, recipe: Recipe, node: Any) -> None:
        """Raise unless the models fit the method: a base, a number of models, data."""
        for part in recipe.slices:
            names = [s.model for s in part.sources]
            base = part.base or recipe.base
            first = {s.model: s for s in reversed(part.sources)}
            duplicate = next((s for s in part.sources if first[s.model] is not s), None)
            if duplicate is not None:
                raise RecipeError(
                    f"{self.origin}, line {duplicate.line}: {duplicate.model} is listed twice",
                    hint="list each model once, with the sum of its weights",
                )
            if METHODS[recipe.method].needs_base and base is None:
                raise self.error(
                    node,
                    f"{recipe.method} needs a base model",
                    "write base_model: MODEL (on the command line: --base)",
                )
            if (
                METHODS[recipe.method].uses_base
                and recipe.is_sliced
                and base is not None
                and base not in names
            ):
                raise RecipeError(
                    f"{self.origin}, line {part.line}: the sources of a slice must include the "
                    f"base {base}",
                    hint="list the base's layers among its sources",
                )
            if recipe.method == "passthrough" and len(names) > 1:
                raise RecipeError(
                    f"{self.origin}, line {part.line}: passthrough takes one model in each slice, "
                    f"got {len(names)}",
                    hint="give each slice one source, or use linear",
                )
            others = len(set(names) - {base})
            if recipe.method == "slerp" and others != 1:
                raise self.error(
                    node,
                    f"slerp takes the base and one other model, got {others} others",
                    "list the base and one more under models:",
                )
            if recipe.method == "nuslerp" and others != 2:
                raise self.error(
                    node,
                    f"nuslerp takes two models besides the base, got {others}",
                    "list two models under models:, and base_model: if there is one",
                )
            method = METHODS[recipe.method]
            if (
                not method.uses_base
                and "weight" in method.per_model
                and base is not None
                and base not in names
                and not recipe.is_sliced
            ):
                raise self.error(
                    node,
                    f"the base {base} needs a weight in a {recipe.method} merge",
                    "list it under models:, or leave base_model: out",
                )
            if method.is_transport and recipe.is_sliced:
                raise RecipeError(
                    f"{self.origin}, line {part.line}: {recipe.method} transports whole models, "
                    "not slices",
                    hint="list the models under models:",
                )
            without_data = next(
                (s for s in part.sources if method.statistic and recipe.data_for(s.model) is None),
                None,
            )
            if without_data is not None:
                raise RecipeError(
                    f"{self.origin}, line {without_data.line}: {recipe.method} needs data for "
                    f"{without_data.model}",
                    hint=Hint(
                        "write data: FILE into the recipe, pass data=, or use a "
                        "method without data",
                        cli="write data: FILE into the recipe, pass --data FILE, or "
                        "use a method without data",
                    ),
                )

    def method_name(self, node: Any) -> str:
        """Parse the merge method."""
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
                f'merge_method must be a known method, got "{name}"',
                _suggest(name, METHODS) or f"choose from {', '.join(METHODS)}",
            )
        return name

    def slice(self, node: Any) -> Slice:
        """Parse a slice."""
        keys = self.mapping(node, ("sources", "base_model", "parameters"), "a slice")
        if "sources" not in keys:
            raise self.error(node, "a slice must have sources:")
        sources = tuple(
            self.source(n, sliced=True) for n in self.sequence(keys["sources"], "sources")
        )
        lengths = {b - a for a, b in (s.layers for s in sources if s.layers)}
        if len(lengths) > 1:
            raise self.error(
                node,
                "the sources of one slice must have the same number of layers, got "
                f"{sorted(lengths)}",
                "use the same length in each layer_range",
            )
        base = self.model(keys["base_model"]) if "base_model" in keys else None
        return Slice(sources, base, self.settings(keys.get("parameters")), _line(node))

    def source(self, node: Any, *, sliced: bool) -> Source:
        """Parse a model of the recipe or of a slice."""
        allowed = (
            ("model", "layer_range", "parameters", "data")
            if sliced
            else ("model", "parameters", "data")
        )
        keys = self.mapping(node, allowed, "a model")
        if "model" not in keys:
            raise self.error(node, "model: is missing here")
        layers = None
        if sliced:
            if "layer_range" not in keys:
                raise self.error(
                    node, "layer_range: is missing here", "write layer_range: [first, last + 1]"
                )
            bounds = [self.number(n) for n in self.sequence(keys["layer_range"], "layer_range")]
            if (
                len(bounds) != 2
                or any(n != int(n) for n in bounds)
                or not 0 <= bounds[0] < bounds[1]
            ):
                raise self.error(
                    keys["layer_range"],
                    "layer_range must be [first, last + 1], two integers",
                    "for example layer_range: [0, 16]",
                )
            layers = (int(bounds[0]), int(bounds[1]))
        return Source(
            self.model(keys["model"]),
            layers,
            self.settings(keys.get("parameters")),
            _line(node),
            self.data(keys.get("data")),
        )

    def model(self, node: Any) -> str:
        """Parse the path or hub id of a model."""
        if isinstance(node, yaml.MappingNode):
            raise self.error(
                node, "a model must be a path or a hub id", "with an adapter: model+adapter"
            )
        return str(self.scalar(node, "a model"))

    def settings(self, node: Any) -> Settings:
        """Parse parameters by name."""
        if node is None or _is_null(node):
            return {}
        keys = self.mapping(node, tuple(sorted(parameter_names())), "parameters")
        settings = {}
        for name, value in keys.items():
            method = METHODS[self.method]
            if name not in method.shared and name not in method.per_model:
                self.notes.append(
                    f'line {_line(value)}: {self.method} has no parameter "{name}": it is ignored'
                )
            settings[name] = Setting(self.setting(name, value), _line(value))
        return settings

    def setting(self, name: str, node: Any) -> Any:
        """Parse the value of a parameter: a number, a list along the layers, or conditions."""
        if isinstance(node, yaml.MappingNode):
            return (self.condition(name, node),)
        if not isinstance(node, yaml.SequenceNode):
            return self.value(name, node)
        if not node.value:
            raise self.error(node, f'"{name}" must not be an empty list')
        if any(isinstance(n, yaml.MappingNode) for n in node.value):
            return tuple(self.condition(name, n) for n in node.value)
        return tuple(self.value(name, n) for n in node.value)

    def condition(self, name: str, node: Any) -> Condition:
        """Parse a value with a filter."""
        keys = self.mapping(node, ("filter", "value"), f'a condition of "{name}"')
        if "value" not in keys:
            raise self.error(node, f'a condition of "{name}" must have a value:')
        value = keys["value"]
        values = value.value if isinstance(value, yaml.SequenceNode) else [value]
        if any(not isinstance(n, yaml.ScalarNode) for n in values):
            raise self.error(value, f'the value of "{name}" must be a number, or a list of numbers')
        pattern = (
            None
            if "filter" not in keys or _is_null(keys["filter"])
            else str(self.scalar(keys["filter"], "filter"))
        )
        return Condition(None if pattern == "*" else pattern, self.setting(name, value))

    def value(self, name: str, node: Any) -> Any:
        """Parse one number or boolean of a parameter."""
        if name in _BOOLEANS:
            return self.boolean(node, name)
        number = self.number(node)
        if name == "density" and not 0 <= number <= 1:
            raise self.error(node, f"density must be from 0 to 1, got {number:g}")
        return number

    def number(self, node: Any) -> float:
        """Parse a finite number."""
        value = self.scalar(node, "a number")
        try:
            number = float(value)  # YAML parses 1e-5 as text
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if isinstance(value, bool) or not math.isfinite(number):
            raise self.error(node, f"a number is required, got {value!r}")
        return number

    def integer(self, node: Any, what: str, least: int) -> int:
        """Parse an integer of at least `least`."""
        number = self.number(node)
        if number < least or number != int(number):
            raise self.error(node, f"{what} must be an integer >= {least}, got {number:g}")
        return int(number)

    def boolean(self, node: Any, what: str) -> bool:
        """Parse true or false."""
        value = self.scalar(node, what)
        if not isinstance(value, bool) and value not in (0, 1):
            raise self.error(node, f"{what} must be true or false, got {value!r}")
        return bool(value)

    def dtype(self, node: Any) -> str | None:
        """Parse a dtype."""
        if node is None or _is_null(node):
            return None
        name = str(self.scalar(node, "dtype")).removeprefix("torch.")
        if name not in DTYPES:
            raise self.error(node, f'dtype must be one of {", ".join(DTYPES)}, got "{name}"')
        return name

    def tokens(self, keys: Mapping[str, Any]) -> TokenizerConfig | None:
        """Parse tokenizer: or tokenizer_source:."""
        if "tokenizer_source" in keys and "tokenizer" in keys:
            raise self.error(
                keys["tokenizer"], "a recipe must not have both tokenizer: and tokenizer_source:"
            )
        if "tokenizer_source" in keys:
            node = keys["tokenizer_source"]
            return None if _is_null(node) else TokenizerConfig(self.model(node), None, _line(node))
        if "tokenizer" not in keys or _is_null(keys["tokenizer"]):
            return None
        node = keys["tokenizer"]
        inner = self.mapping(node, ("source", "pad_to_multiple_of"), "tokenizer")
        pad_multiple = None
        if "pad_to_multiple_of" in inner and not _is_null(inner["pad_to_multiple_of"]):
            pad_multiple = self.integer(inner["pad_to_multiple_of"], "pad_to_multiple_of", 1)
        return TokenizerConfig(
            self.model(inner["source"]) if "source" in inner else "union", pad_multiple, _line(node)
        )

    def align(self, node: Any) -> AlignConfig | None:
        """Parse align:."""
        if node is None or _is_null(node):
            return None
        if not isinstance(node, yaml.MappingNode):
            value = self.scalar(node, "align")
            if not isinstance(value, bool):
                raise self.error(
                    node,
                    f"align must be true, false or a mapping, got {value!r}",
                    f"it may hold {', '.join(_ALIGN_KEYS)}",
                )
            return AlignConfig() if value else None
        keys = self.mapping(node, _ALIGN_KEYS, "align")
        options: dict[str, Any] = {}
        if "spaces" in keys:
            options["spaces"] = [
                str(self.scalar(n, "a space")) for n in self.sequence(keys["spaces"], "spaces")
            ]
        if "layers" in keys:
            options["layers"] = [
                self.integer(n, "a layer", 0) for n in self.sequence(keys["layers"], "layers")
            ]
        if "group" in keys:
            options["within"] = str(self.scalar(keys["group"], "group"))
            if options["within"] not in get_args(Kind):
                raise self.error(
                    keys["group"],
                    f'group must be one of {", ".join(get_args(Kind))}, got "{options["within"]}"',
                )
        if "sweeps" in keys:
            options["sweeps"] = self.integer(keys["sweeps"], "sweeps", 0)
        if "nearest" in keys:
            options["nearest"] = self.boolean(keys["nearest"], "nearest")
        refine = keys.get("refine")
        steps: dict[str, int] = {}
        if "refine_steps" in keys:
            steps["refine_steps"] = self.integer(keys["refine_steps"], "refine_steps", 1)
        return AlignConfig(
            self.model(keys["to"]) if "to" in keys else None,
            self.stream(keys),
            options,
            None if refine is None or _is_null(refine) else self.dataset(refine, "refine"),
            **steps,
        )

    def stream(self, keys: Mapping[str, Any]) -> Stream:
        """Parse stream: of align:, or fold: as it was called before."""
        if "stream" in keys:
            value = str(self.scalar(keys["stream"], "stream"))
            found = next((stream for stream in STREAMS if stream == value), None)
            if found is None:
                raise self.error(
                    keys["stream"], f'stream must be one of {", ".join(STREAMS)}, got "{value}"'
                )
            return found
        is_folded = "fold" not in keys or self.boolean(keys["fold"], "fold")
        return "auto" if is_folded else "permutation"

    def data(self, node: Any) -> DataSource | None:
        """Parse data:."""
        if node is None or _is_null(node):
            return None
        if not METHODS[self.method].statistic:
            self.notes.append(
                f"line {_line(node)}: {self.method} needs no data: data: only measures the result"
            )
        return self.dataset(node, "data")

    def dataset(self, node: Any, name: str) -> DataSource:
        """Parse a dataset: its name, or a mapping."""
        if isinstance(node, yaml.ScalarNode):
            return DataSource(str(self.scalar(node, name)), split="test")
        keys = self.mapping(node, _DATA_KEYS, name)
        if "uri" not in keys:
            raise self.error(
                node,
                f"{name}: must have uri:",
                f"write {name}: FILE, or {name}: {{uri: FILE, samples: 256}}",
            )
        fields: dict[str, Any] = {"split": "test"}
        fields |= {
            name: str(self.scalar(keys[name], name))
            for name in ("uri", "split", "tokenizer")
            if name in keys
        }
        fields |= {
            name: self.integer(keys[name], name, 1)
            for name in ("samples", "length")
            if name in keys
        }
        for name in ("mean", "std"):
            if name in keys:
                values = (
                    keys[name].value if isinstance(keys[name], yaml.SequenceNode) else [keys[name]]
                )
                fields[name] = tuple(self.number(n) for n in values)
        if "fields" in keys:
            if not isinstance(keys["fields"], yaml.MappingNode):
                raise self.error(
                    keys["fields"],
                    "fields must map text, image or label to their names in the data",
                )
            fields["fields"] = tuple(
                (str(k.value), str(self.scalar(v, "a field"))) for k, v in keys["fields"].value
            )
        if "labels" in keys:
            fields["labels"] = self.boolean(keys["labels"], "labels")
        return DataSource(**fields)

    def mapping(self, node: Any, keys: Sequence[str], what: str) -> dict[str, Any]:
        """Return the values of a mapping by key; all keys must be known and unique."""
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, f"{what} must be a mapping with {', '.join(keys)}")
        self.count_node(node)
        values: dict[str, Any] = {}
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
            if name in values:
                raise self.error(key, f'"{name}" must not be repeated')
            values[name] = value
        return values

    def sequence(self, node: Any, what: str) -> list[Any]:
        """Return the nodes of a list."""
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(node, f"{what} must be a list")
        self.count_node(node)
        return list(node.value)

    def scalar(self, node: Any, what: str) -> Any:
        """Return a single value."""
        if not isinstance(node, yaml.ScalarNode):
            raise self.error(node, f"{what} must be one value, not a list or a mapping")
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
    """Return the line of a node, counted from 1."""
    return int(node.start_mark.line) + 1


def _is_null(node: Any) -> bool:
    """Return whether a node is null."""
    return bool(node.tag == "tag:yaml.org,2002:null")


def _is_absent(node: Any) -> bool:
    """Return whether a key is missing, or null."""
    return node is None or _is_null(node)


def _suggest(name: str, known: Any) -> str | None:
    """Return a hint with the closest known name, if any."""
    matches = difflib.get_close_matches(name, list(known), 1)
    return f'did you mean "{matches[0]}"?' if matches else None
