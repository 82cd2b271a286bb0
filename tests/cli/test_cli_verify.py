"""`regauge verify`, `report` and `demo` as their users see them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from regauge.checkpoints.spec_files import dump_spec
from regauge.cli import main
from regauge.errors import RegaugeWarning
from regauge.models.load import load_model
from regauge.results.findings import load_results
from support.picos import build, spec_of


@pytest.fixture
def vit(tmp_path: Path) -> Path:
    build("vit").float().save_pretrained(tmp_path / "vit")
    return tmp_path / "vit"


def test_a_model_that_keeps_the_laws(
    vit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(
            [
                "verify",
                str(vit),
                "--json",
                str(tmp_path / "r.json"),
                "--report",
                str(tmp_path / "page.html"),
            ]
        )
        == 0
    )
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == "ViTForImageClassification: rows and columns"
    assert lines[2].split() == ["check", "error", "allowed", "control"]
    assert lines[4].split()[:2] == ["holds", "row/forward"]
    assert "38 general checks (-v lists them)" in captured.out
    assert lines[-1] == "58 of 58 checks hold"
    assert "regauge: verify 1/11: row forward\n" in captured.err
    results = load_results(tmp_path / "r.json")
    assert results.facts["dtype"] == "float32"
    assert results.facts["versions"]["torch"] == torch.__version__
    headline = "Permuting tokens and channels changes nothing: 58 of 58 checks pass"
    assert results.headline == results.claim
    assert (results.claim.text, results.claim.tone) == (headline, "good")
    assert f"</span> {headline}</h1>" in (tmp_path / "page.html").read_text()


def test_a_law_that_fails_is_exit_code_3(
    vit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A spec that forgets that the second layer of an FFN reads its neurons."""
    spec = tmp_path / "wrong.toml"
    text = dump_spec(spec_of(build("vit")))
    spec.write_text(
        text.replace(
            '"vit.layers.1.mlp.fc2.weight" = "stream ffn.1*"',
            '"vit.layers.1.mlp.fc2.weight" = "stream _"',
        )
    )
    assert spec.read_text() != text
    assert main(["verify", str(vit), "--spec", str(spec), "--steps", "0", "--no-general"]) == 3
    output = capsys.readouterr().out
    assert "FAILS  column/forward" in output
    assert "it goes wrong in vit.layers.1.mlp" in output
    assert "holds  row/forward" in output
    assert output.splitlines()[-1].endswith("FAILED")
    assert (
        main(
            ["verify", str(vit), "--spec", str(spec), "--steps", "0", "--no-general", "--json", "-"]
        )
        == 3
    )
    assert json.loads(capsys.readouterr().out)["regauge"] == "results"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"architectures": ["NoSuchClass"]},
            "names the class NoSuchClass, which the transformers library does not have",
        ),
        ({"architectures": None}, "names no class"),
        ({"architectures": "ViTModel"}, "names no class"),
        (
            {"architectures": ["LlamaForCausalLM"]},
            'which must be "llama"',
        ),
        (
            {"architectures": ["ViTForMaskedImageModeling"]},
            'as a ViTForMaskedImageModeling, {vit} has no "decoder.0.bias" and 2 more',
        ),
        (
            {"hidden_size": 24},
            (
                "as a ViTForImageClassification, {vit} has a different shape for "
                '"classifier.weight": [5, 12], expected [5, 24] and '
            ),
        ),
        ({"num_hidden_layers": 1}, 'has an unexpected tensor "vit.layers.1.'),
    ],
)
def test_checkpoints_that_are_not_their_class(
    vit: Path, change: dict, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = vit / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    assert main(["verify", str(vit)]) == 1
    assert says.format(vit=vit) in capsys.readouterr().err


@pytest.mark.parametrize("name", ["BertModel", "RobertaModel", "ViTModel"])
def test_an_optional_part_may_be_missing(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sentence encoders come without a pooler. What is missing is printed; a weight that matters is
    still an error.
    """
    import transformers

    kind = getattr(transformers, name)
    sizes = {
        "hidden_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 3,
        "intermediate_size": 20,
        "image_size": 8,
        "patch_size": 4,
    }
    model = kind(
        kind.config_class(**sizes, vocab_size=30, max_position_embeddings=16, pad_token_id=0)
    )
    model.save_pretrained(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    save_file(
        {n: t for n, t in whole.items() if not n.startswith("pooler.")},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    assert main(["verify", str(tmp_path), "--steps", "0", "--no-general"]) == 0
    assert (
        f'note: {tmp_path} has no "pooler.dense.bias" and 1 more: the {name} is built without'
        in capsys.readouterr().err
    )
    with pytest.warns(RegaugeWarning, match="add_pooling_layer=False"):
        loaded = load_model(tmp_path)
    assert loaded.pooler is None
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in loaded.state_dict().items())
    lost = next(n for n in whole if n.endswith("output.dense.weight"))
    save_file(
        {n: t for n, t in whole.items() if not n.startswith("pooler.") and n != lost},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    assert main(["verify", str(tmp_path), "--steps", "0", "--no-general"]) == 1
    output = capsys.readouterr().err
    assert re.search(
        rf'error: as a {name}, {tmp_path} has no "[\w.]*layers?\.0[\w.]*"\nregauge: hint: '
        r"download the weights again",
        output,
    )


def test_weights_without_a_config(vit: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (vit / "config.json").unlink()
    assert main(["verify", str(vit)]) == 1
    assert "hint: put config.json beside it" in capsys.readouterr().err


def test_weights_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build("vit").float()
    with torch.no_grad():
        model.classifier.weight[0, 0] = torch.inf
    model.save_pretrained(tmp_path / "vit")
    assert main(["verify", str(tmp_path / "vit")]) == 1
    assert '"classifier.weight" must be finite, got NaN or Inf' in capsys.readouterr().err


def test_a_page_that_cannot_be_written(
    vit: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Found out before the work, not after it."""
    assert main(["verify", str(vit), "--report", str(tmp_path / "no" / "page.html")]) == 1
    captured = capsys.readouterr()
    assert "page.html cannot be written" in captured.err
    assert "verify 1/11" not in captured.err


@pytest.mark.parametrize("option", ["--json", "--report"])
def test_a_device_is_not_replaced(
    vit: Path, tmp_path: Path, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert main(["verify", str(vit), option, str(pipe)]) == 1
    assert "is not a regular file" in capsys.readouterr().err
    assert pipe.is_fifo()
    assert main(["verify", str(vit), "--report", "-"]) == 2
    assert (
        main(["verify", str(vit), "--report", str(tmp_path / "x"), "--json", str(tmp_path / "x")])
        == 2
    )


@pytest.mark.parametrize(
    ("device", "code"), [("cpu", 0), ("cpu:0", 0), ("meta", 1), ("nonsense", 1), ("cuda:99", 1)]
)
def test_where_it_is_computed(
    vit: Path, device: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(vit), "--steps", "0", "--no-general", "--device", device]) == code
    output = capsys.readouterr().err
    assert (f'cannot compute on the device "{device}"' in output) == bool(code)
    assert "this is a bug in regauge" not in output


def test_a_timm_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import timm
    from safetensors.torch import save_file

    arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=5, **arguments)
    (tmp_path / "timm").mkdir()
    save_file(model.state_dict(), tmp_path / "timm" / "model.safetensors")
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 5, "model_args": arguments}
    (tmp_path / "timm" / "config.json").write_text(json.dumps(config))
    assert main(["verify", str(tmp_path / "timm"), "--steps", "1", "--no-general"]) == 0
    assert "VisionTransformer: rows and columns" in capsys.readouterr().out
