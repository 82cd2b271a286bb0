"""Recipes: mergekit's keys read as mergekit reads them, and everything else rejected by name and
line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from regauge.data.sources import DataSource
from regauge.errors import RecipeError
from regauge.merging.layout import find_stacks
from regauge.merging.recipe_yaml import parse_recipe, read_recipe
from regauge.merging.recipes import AlignConfig

TIES = """\
models:
  - model: one
    parameters:
      density: [1, 0.7, 0.1] # density gradient
      weight: 1.0
  - model: two
    parameters:
      density: 0.33
      weight:
        - filter: mlp
          value: [0, 1]
        - value: 0.25
merge_method: ties
base_model: root
parameters:
  normalize: true
  int8_mask: true
dtype: float16
"""


def test_a_recipe_of_mergekit() -> None:
    recipe = parse_recipe(TIES)
    assert (recipe.method, recipe.base, recipe.dtype, recipe.out_dtype, recipe.is_sliced) == (
        "ties",
        "root",
        "float16",
        None,
        False,
    )
    assert recipe.models == ("root", "one", "two")
    part = recipe.slices[0]
    one, two = part.sources

    def at(name: str, source: Any, tensor: str, t: float) -> object:
        return recipe.resolve_parameter(name, part, source, tensor, t, None)

    assert [at("density", one, "x", t) for t in (0, 0.25, 0.5, 0.75, 1)] == pytest.approx(
        [1, 0.85, 0.7, 0.4, 0.1]
    )
    assert at("weight", two, "layers.0.mlp.up", 0.3) == pytest.approx(0.3)
    assert at("weight", two, "layers.0.attn.q", 0.3) == 0.25
    assert at("normalize", None, "x", 0) is True
    assert at("lambda", None, "x", 0) is None  # the default that was given


def test_the_nearest_parameter_counts() -> None:
    recipe = parse_recipe(
        "merge_method: linear\nparameters: {weight: 3}\nslices:\n- sources:\n  - {model: a, "
        "layer_range: [0, 2], "
        "parameters: {weight: {filter: q, value: 1}}}\n"
        "  - {model: b, layer_range: [2, 4]}\n  parameters: {weight: 2}\n- sources:\n  - "
        "{model: a, layer_range: [2, 3]}\n"
    )
    first, second = recipe.slices
    found = [
        recipe.resolve_parameter("weight", first, s, n, 0, None)
        for s in first.sources
        for n in ("q", "k")
    ]
    assert found == [1, 2, 2, 2]  # the source's own where its filter fits, else the slice's
    assert (
        recipe.resolve_parameter("weight", second, second.sources[0], "q", 0, None) == 3
    )  # else the recipe's
    assert first.sources[1].layers == (2, 4)


def test_tokenizer_and_align() -> None:
    head = "merge_method: linear\nmodels: [{model: a, parameters: {weight: 1}}]\n"
    assert parse_recipe(head).tokens is None
    tokens = parse_recipe(head + "tokenizer_source: union").tokens
    assert tokens is not None
    assert tokens.source == "union"
    tokens = parse_recipe(head + "tokenizer: {source: base, pad_to_multiple_of: 64}").tokens
    assert tokens is not None
    assert (tokens.source, tokens.pad_multiple) == ("base", 64)
    assert parse_recipe(head + "align: true").align == AlignConfig()
    assert parse_recipe(head + "align: false").align is None
    refined = parse_recipe(head + "align: {refine: {uri: self, samples: 8}, refine_steps: 5}").align
    assert refined == AlignConfig(
        refine=DataSource("self", samples=8, split="test"), refine_steps=5
    )
    assert parse_recipe(head + "align: {refine: null}").align == AlignConfig()
    how = parse_recipe(
        head + "align: {to: a, spaces: [ffn, qk], group: orthogonal, fold: true, sweeps: 2}"
    ).align
    assert how == AlignConfig(
        "a", "auto", {"spaces": ["ffn", "qk"], "within": "orthogonal", "sweeps": 2}
    )
    for text, stream in (
        ("{fold: false}", "permutation"),
        ("{stream: permutation}", "permutation"),
        ("{stream: auto}", "auto"),
    ):
        assert parse_recipe(f"{head}align: {text}").align == AlignConfig(stream=stream)
    with pytest.raises(RecipeError, match="stream must be one of auto, permutation"):
        parse_recipe(head + "align: {stream: fixed}")


def test_a_parameter_of_another_method_is_reported_and_ignored() -> None:
    recipe = parse_recipe(
        "merge_method: slerp\nbase_model: a\nmodels: [{model: a}, {model: b}]\nparameters:\n  "
        "t: 0.5\n  int8_mask: true\n"
    )
    assert recipe.notes == ('line 6: slerp has no parameter "int8_mask": it is ignored',)


LINEAR = (
    "merge_method: linear\nmodels:\n- model: a\n  parameters: {weight: 1}\n- model: b\n  "
    "parameters: {weight: 1}\n"
)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 0, "must not be empty"),
        ("- a\n- b", 1, "a recipe must be a mapping"),
        ("merge_method: [", 1, "not valid YAML"),
        ("models: [{model: a}]", 1, "merge_method: is missing"),
        (LINEAR.replace("merge_method", "merge_methd"), 1, 'has no "merge_methd"'),
        (LINEAR.replace("linear", "liner"), 1, 'known method, got "liner"'),
        (LINEAR.replace("linear", "multislerp"), 1, '"multislerp" of mergekit is not supported'),
        (LINEAR + "out_dtyp: float16", 7, 'has no "out_dtyp"'),
        (LINEAR + "dtype: int8", 7, 'float64, got "int8"'),
        (LINEAR + "modules: {}", 7, '"modules" is not supported'),
        (LINEAR + "chat_template: [a]", 7, "chat_template must be one value"),
        (LINEAR + "slices: []", 1, "either models: or slices:"),
        (LINEAR + "dtype: float16\ndtype: float32", 8, '"dtype" must not be repeated'),
        (LINEAR.replace("{weight: 1}", "{wieght: 1}", 1), 4, 'has no "wieght"'),
        (
            LINEAR.replace("{weight: 1}", "{weight: heavy}", 1),
            4,
            "a number is required, got 'heavy'",
        ),
        (LINEAR.replace("{weight: 1}", "{weight: .nan}", 1), 4, "a number is required"),
        (LINEAR.replace("{weight: 1}", "{weight: []}", 1), 4, "must not be an empty list"),
        (LINEAR.replace("{weight: 1}", "{weight: [{filter: mlp}]}", 1), 4, "must have a value:"),
        (
            LINEAR.replace("{weight: 1}", "{weight: [{value: [{value: 1}]}]}", 1),
            4,
            "a number, or a list of numbers",
        ),
        (LINEAR.replace("- model: b", "- model: a"), 5, "a is listed twice"),
        (LINEAR.replace("model: b", "modell: b"), 5, 'has no "modell"'),
        (LINEAR + "base_model: c", 1, "needs a weight in a linear merge"),
        (LINEAR + "parameters: {normalize: 3}", 7, "must be true or false"),
        (LINEAR + "align: perhaps", 7, "align must be true, false or a mapping"),
        (LINEAR + "align: {froup: full}", 7, 'align has no "froup"'),
        (LINEAR + "align: {group: all}", 7, ', got "all"'),
        (LINEAR + "align: {fold: perhaps}", 7, "fold must be true or false, got 'perhaps'"),
        (LINEAR + "align: {nearest: [true]}", 7, "nearest must be one value"),
        (LINEAR + "align: {sweeps: 2.5}", 7, "sweeps must be an integer >= 0, got 2.5"),
        (LINEAR + "align: {refine_steps: 0}", 7, "refine_steps must be an integer >= 1, got 0"),
        (LINEAR + "align: {refine: {samples: 3}}", 7, "refine: must have uri:"),
        (LINEAR + "align: {layers: [0, -1]}", 7, "a layer must be an integer >= 0, got -1"),
        (
            LINEAR + "tokenizer: {pad_to_multiple_of: 0.5}",
            7,
            "pad_to_multiple_of must be an integer >= 1",
        ),
        (LINEAR + "tokenizer: {source: base, tokens: {}}", 7, '"tokens" is not supported'),
        (LINEAR.replace("linear", "ties"), 1, "ties needs a base model"),
        (LINEAR.replace("linear", "passthrough"), 3, "one model in each slice, got 2"),
        (LINEAR.replace("linear", "slerp") + "base_model: c", 1, "got 2 others"),
        (
            (
                "merge_method: ties\nbase_model: a\nmodels:\n- model: b\n  parameters:\n    "
                "density: 1.5"
            ),
            6,
            "from 0 to 1",
        ),
        (
            "merge_method: passthrough\nslices:\n- sources:\n  - model: a",
            4,
            "layer_range: is missing",
        ),
        (
            "merge_method: passthrough\nslices:\n- sources:\n  - model: a\n    layer_range: [3, 3]",
            5,
            "two integers",
        ),
        (
            (
                "merge_method: linear\nslices:\n- sources:\n  - {model: a, layer_range: [0, 3]}\n  "
                "- {model: b, layer_range: [0, 2]}"
            ),
            3,
            "the same number of layers, got [2, 3]",
        ),
    ],
)
def test_errors_name_the_key_and_the_line(text: str, line: int, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "r.yaml")
    assert words in str(caught.value)
    assert (f"r.yaml, line {line}:" if line else "r.yaml") in str(caught.value)


def test_hints_say_what_was_meant(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(LINEAR.replace("merge_method", "merge_metod"))
    assert caught.value.hint == 'did you mean "merge_method"?'
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="must be UTF-8 text"):
        read_recipe(tmp_path / "r.yaml")


def test_layers_are_identified_by_names() -> None:
    llama = [f"model.layers.{i}.{x}.weight" for i in range(3) for x in "qkvo"] + [
        "model.norm.weight",
        "classifier.0.weight",
        "classifier.1.weight",
    ]
    assert find_stacks(llama) == {"model.layers.": 3}
    both = [
        f"{side}.block.{i}.layer.{j}.{x}"
        for side in ("encoder", "decoder")
        for i in range(2)
        for j in range(2)
        for x in "ab"
    ]
    assert find_stacks(both) == {"encoder.block.": 2, "decoder.block.": 2}
    assert find_stacks([f"h.{i}.{x}" for i in (0, 2) for x in "abcd"]) == {}  # a layer is missing


def test_aliases_within_aliases(tmp_path: Path) -> None:
    """10 kB would become 125 million numbers."""
    weights = ", ".join(["0"] * 500)
    sources = ", ".join(["*m"] * 500)
    slices = ", ".join(["*s"] * 500)
    text = (
        "merge_method: linear\n"
        "slices: [&s "
        f"{{sources: [&m {{model: one, layer_range: [0, 1], parameters: {{weight: [{weights}]}}}}, "
        f"{sources}]}}, {slices}]\n"
    )
    with pytest.raises(RecipeError, match="must have at most 100,000 values") as caught:
        parse_recipe(text)
    assert "aliases" in str(caught.value.hint)
    once = (
        "merge_method: linear\nmodels: "
        f"[{{model: one, parameters: &p {{weight: [{weights}]}}}}, "
        f"{{model: two, parameters: *p}}]\n"
    )
    assert len(parse_recipe(once).slices[0].sources) == 2


def test_an_alias_of_itself() -> None:
    for value in ("&a {value: *a}", "&a [{value: *a}]", "&a [*a]"):
        with pytest.raises(RecipeError):
            parse_recipe(
                "merge_method: linear\nmodels: "
                f"[{{model: one, parameters: {{weight: {value}}}}}, {{model: two}}]\n"
            )
