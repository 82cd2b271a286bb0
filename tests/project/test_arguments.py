"""Wrong arguments of public functions are RegaugeErrors; right ones are accepted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import regauge
from regauge import audit, jigsaw, split
from regauge.audit import GradientOptions, LockOptions, SplitOptions
from regauge.audit.gradient_audit.attempts import Budget
from regauge.core.options import require_at_least, require_device, require_type, resolve_options
from regauge.data.sources import DataSource
from regauge.errors import (
    AuditError,
    DataError,
    DeviceError,
    DiscoveryError,
    ElementError,
    JigsawError,
    KeyFileError,
    MatchError,
    PathError,
    RegaugeError,
    SplitError,
    TrainingError,
)
from regauge.jigsaw import JigsawOptions
from regauge.matching.barrier_report import BarrierOptions
from regauge.split import TrainOptions
from support.picos import build, spec_of
from support.updates import examples, vit

Call = Callable[[], Any]
ANY: Any = object()


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a locked one and the key file."""
    root = tmp_path_factory.mktemp("locked")
    build("gpt2").save_pretrained(root / "plain")
    key = regauge.generate_key()
    regauge.save_key(key, root / "my.key")
    regauge.lock(root / "plain", key).save(root / "locked")
    return root


@pytest.mark.parametrize("kind", [str, Path, lambda file: regauge.load_key(file, "lock")])
def test_audit_of_a_lock_takes_a_key_or_its_file(locked: Path, kind: Callable[..., Any]) -> None:
    options = LockOptions(attacks=["public base"])
    report = audit.lock(
        locked / "locked", key=kind(locked / "my.key"), base=locked / "plain", options=options
    )
    assert report.results.facts["scored by the key"] is True


@pytest.mark.parametrize("key", [b"x" * 32, 7, {}])
def test_a_key_of_a_wrong_type_is_a_key_file_error(locked: Path, key: Any) -> None:
    model = locked / "locked"
    calls: list[Call] = [
        lambda: audit.lock(model, key=key),
        lambda: regauge.unlock(model, key),
        lambda: regauge.authorize(model, key),
        lambda: split.connect(model, "127.0.0.1:1", key=key),
    ]
    for call in calls:
        with pytest.raises(KeyFileError, match=r"a key must be a Key or the path of a key file"):
            call()


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: regauge.MatchOptions(within=ANY), MatchError, "within must be one of"),
        (lambda: regauge.MatchOptions(sweeps=-1), MatchError, "sweeps must be >= 0, got -1"),
        (lambda: regauge.MatchOptions(samples=0), MatchError, "samples must be >= 1, got 0"),
        (lambda: BarrierOptions(samples=-3), PathError, "samples must be >= 1, got -3"),
        (lambda: BarrierOptions(batch_size=0), PathError, "batch_size must be >= 1, got 0"),
        (lambda: GradientOptions(samples=-2), AuditError, "samples must be >= 1, got -2"),
        (lambda: GradientOptions(batch_size=0), AuditError, "batch_size must be >= 1, got 0"),
        (lambda: SplitOptions(samples=0), AuditError, "samples must be >= 1, got 0"),
        (lambda: LockOptions(samples=0), AuditError, "samples must be >= 1, got 0"),
        (lambda: TrainOptions(steps=-1), TrainingError, "steps must be >= 1, got -1"),
        (lambda: TrainOptions(batch_size=0), TrainingError, "batch_size must be >= 1, got 0"),
        (lambda: JigsawOptions(epochs=-1), JigsawError, "epochs must be >= 1, got -1"),
        (lambda: JigsawOptions(batch_size=-1), JigsawError, "batch_size must be >= 1, got -1"),
        (lambda: DataSource("digits", samples=0), DataError, "samples must be >= 1, got 0"),
    ],
)
def test_values_out_of_bounds_are_rejected(
    make: Call, error: type[RegaugeError], text: str
) -> None:
    with pytest.raises(error, match=text):
        make()


def test_bounds_are_accepted() -> None:
    regauge.MatchOptions(within="orthogonal", sweeps=0, samples=1)
    BarrierOptions(samples=None, batch_size=1, points=3)
    TrainOptions(steps=1, batch_size=1)
    require_at_least(AuditError, 1, samples=1, steps=None)


def test_all_faults_are_listed_at_once() -> None:
    with pytest.raises(AuditError, match=r"(?s)a must be >= 1, got 0.*b must be >= 1, got 'x'"):
        require_at_least(AuditError, 1, a=0, b="x", c=2)


@pytest.mark.parametrize(
    "call",
    [
        lambda: regauge.match("a", "b", options=ANY),
        lambda: regauge.compare("a", "b", options=ANY),
        lambda: regauge.merge(["a", "b"], options=ANY),
        lambda: regauge.barrier("a", "b", "c", options=ANY),
        lambda: audit.lock("a", options=ANY),
        lambda: audit.split("a", "b", options=ANY),
        lambda: audit.gradients("a", "b", options=ANY),
        lambda: jigsaw.train("a", "b", options=ANY),
        lambda: split.serve("a", options=ANY),
        lambda: split.train("a", "b", "c", options=ANY),
        lambda: split.predict("a", "b", "c", connection=ANY),
    ],
)
def test_options_of_another_class_are_rejected(call: Call) -> None:
    with pytest.raises(RegaugeError, match=r"options must be of type .*Options, got object"):
        call()


def test_options_are_resolved() -> None:
    assert resolve_options(None, LockOptions(samples=3)).samples == 3
    assert resolve_options(LockOptions(samples=4), LockOptions()).samples == 4
    require_type("a", (int, str), "name")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", 1.5])
def test_unknown_devices_are_rejected_before_loading(device: Any) -> None:
    calls: list[Call] = [
        lambda: jigsaw.train("a", "b", device=device),
        lambda: jigsaw.evaluate("a", "b", device=device),
        lambda: jigsaw.study("a", "b", device=device),
        lambda: regauge.verify("a", device=device),
        lambda: regauge.barrier("a", "b", "c", options=BarrierOptions(device=device)),
        lambda: audit.split("a", "b", options=SplitOptions(device=device)),
        lambda: audit.gradients("a", "b", options=GradientOptions(device=device)),
        lambda: split.connect("a", "b", device=device),
        lambda: split.serve("a", options=split.ServerOptions(device=device)),
        lambda: regauge.federated.run("a", "b", clients=2, rounds=1, device=device),
    ]
    for call in calls:
        with pytest.raises(DeviceError, match=r"cannot compute on the device"):
            call()
    require_device("cpu")
    require_device(torch.device("cpu"))


def test_jigsaw_rejects_wrong_arguments() -> None:
    wrong: Any = "x"
    calls: list[tuple[Call, str]] = [
        (lambda: jigsaw.train("a", "b", ratio=wrong), "ratio must be in .* got 'x'"),
        (lambda: jigsaw.evaluate("a", "b", ratios=wrong), "ratio must be in .* got 'x'"),
        (lambda: jigsaw.evaluate([], "b"), "models must not be empty"),
        (lambda: jigsaw.evaluate("a", "b", batch_size=0), "batch_size must be >= 1, got 0"),
        (lambda: jigsaw.study("a", "b", batch_size=-1), "batch_size must be >= 1, got -1"),
    ]
    for call, text in calls:
        with pytest.raises(JigsawError, match=text):
            call()


def test_jigsaw_evaluates_a_training_and_one_ratio() -> None:
    trained = jigsaw.train(vit(), examples(40), 0.5)
    whole = jigsaw.evaluate(trained, examples(40), ratios=0.5)
    wrapped = jigsaw.evaluate([trained.wrapped], examples(40), ratios=[0.5])
    (mine,), (expected,) = whole.evaluations.values(), wrapped.evaluations.values()
    assert mine == expected


@pytest.mark.parametrize("server", [1234, None, "VIT"])
def test_a_server_must_be_an_address_or_a_transport(server: Any) -> None:
    with pytest.raises(SplitError):
        split.connect(vit(), server)


@pytest.mark.parametrize("size", [0, -1])
def test_split_prediction_rejects_sizes(size: int) -> None:
    for options in ({"batch_size": size}, {"samples": size}):
        with pytest.raises(SplitError, match=f"must be >= 1, got {size}"):
            split.predict("a", "b", "c", **options)  # raises before the model is opened


def test_wrong_types_are_rejected() -> None:
    wrong: list[Any] = [3, "locked"]
    with pytest.raises(RegaugeError, match=r"inputs must be of type .*, got int"):
        regauge.verify("a", wrong[0])
    with pytest.raises(RegaugeError, match=r"model must be of type Module, got str"):
        regauge.deauthorize(wrong[1])


def test_move_rejects_foreign_elements_and_unknown_parts() -> None:
    body: Any = "body"
    model = build("gpt2")
    with pytest.raises(ElementError, match=r"belongs to another model"):
        regauge.move(model, regauge.element(spec_of(build("llama")), 0))
    with pytest.raises(ElementError, match=r'part must be one of embed, .*got "body"'):
        regauge.move(model, part=body)
    own = regauge.element(spec_of(model), 0, within="permutation", spaces=["stream"])
    assert regauge.move(model, own, part="head").element.members == own.members


def test_no_defences_are_only_the_baseline() -> None:
    options = GradientOptions(
        attacks=["least squares"], updates=2, batches=(), budget=Budget(practice=10)
    )
    report = audit.gradients(vit(), examples(40), [], options=options)
    assert {f.id.split("/")[-2] for f in report.results.findings} == {"none"}
    named = audit.gradients(vit(), examples(40), ["noise=1"], options=options)
    assert {f.id.split("/")[-2] for f in named.results.findings} == {"none", "noise=1"}


def test_a_failed_discovery_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(DiscoveryError, match=r"cannot trace Linear"):
        regauge.discover(torch.nn.Linear(3, 4), torch.zeros(2, 5))
    assert capfd.readouterr().err == ""
