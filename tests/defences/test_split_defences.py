"""What a client does to what leaves it: each defence by itself, in the stated order, and through
the link, forward and back.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from regauge.defences.parser import parse_from_table, split_combination
from regauge.defences.split import (
    DEFENCES,
    BatchShuffle,
    Bottleneck,
    Clip,
    KeyedRandom,
    LowPass,
    Noise,
    PixelNoise,
    Private,
    Round,
    Rows,
    apply_defences,
    clip_samples,
    parse_defences,
)
from regauge.errors import CutError, DefenceError
from regauge.models.cut import Crossing, cut
from regauge.split import Host, InProcess, OptimizerConfig, connect
from regauge.testing import strict_float64
from support.split_pairs import (
    ADAMW,
    batch,
    columns,
    lock_backbone,
    make_model,
    optimizer_of,
    train,
)

SECRET = bytes(range(32))


def parse_defence(text: str) -> Any:
    return parse_from_table(text, DEFENCES)


def crossing_of(name: str = "vit", count: int = 4) -> Crossing:
    model = make_model(name)
    data = {
        k: torch.cat([batch(name, i)[k] for i in range(count // 2)])
        for k in batch(name, 0)
        if k != "labels"
    }
    return cut(model).embed(**data)


def images(count: int = 3, side: int = 16) -> torch.Tensor:
    return torch.randn(
        count, 3, side, side, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def test_the_order_of_defences_is_fixed() -> None:
    named = [
        "rows=sample,keep_cls",
        "private=1,norm=2",
        "batch-shuffle",
        "low-pass=0.2,disc",
        "clip=3",
        "pixel-noise=0.1",
        "noise=0.5",
    ]
    named += ["round=2", "bottleneck=4"]
    names = [type(d).__name__ for d in parse_defences(named)]
    assert names == [
        "LowPass",
        "PixelNoise",
        "Bottleneck",
        "Clip",
        "Private",
        "Noise",
        "Round",
        "BatchShuffle",
        "Rows",
    ]
    assert {type(d) for d in parse_defences(named)} == set(DEFENCES.values())
    with pytest.raises(DefenceError, match="twice"):
        parse_defences(["noise=1", Noise(2.0)])


def test_named_as_on_the_command_line() -> None:
    assert parse_defence("noise=0.5") == Noise(0.5)
    assert parse_defence("low-pass=0.05") == LowPass(0.05, "square")
    assert parse_defence("low-pass=0.05,disc") == LowPass(0.05, "disc")
    assert parse_defence("rows=sample,keep_cls") == Rows("sample", True)
    assert parse_defence("private=1.5,norm=8") == Private(1.5, 8.0)
    assert parse_defence("batch-shuffle=0.5,keep_cls=false") == BatchShuffle(0.5, False)
    assert parse_defence("bottleneck=4") == Bottleneck(4)
    assert parse_defence("round=2") == Round(2)


def test_a_text_may_be_several_as_audits_print_them() -> None:
    assert split_combination("noise=0.5+rows") == ["noise=0.5", "rows"]
    assert split_combination("noise=1e+1") == ["noise=1e+1"]
    assert parse_defences(["rows+noise=0.5", "clip=1e+1"]) == (Clip(10.0), Noise(0.5), Rows())
    with pytest.raises(DefenceError, match="twice"):
        parse_defences(["noise=0.5+rows", "rows=sample"])
    with pytest.raises(DefenceError, match='unknown defence "fog"'):
        parse_defences(["noise=0.5+fog"])


def test_a_hint_is_a_whole_sentence() -> None:
    with pytest.raises(DefenceError) as error:
        parse_defence("bottleneck=few")
    assert (
        error.value.hint
        == "A stream of which only the first `channels` of each token are sent; the others are zero"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("noise=-1", "noise must be positive and finite, got -1"),
        ("noise=0", "got 0"),
        ("noise=nan", "got nan"),
        ("noise", "missing"),
        ("noise=loud", '"loud" is not a number'),
        ("low-pass=0", "radius must be in .*got 0"),
        ("low-pass=0.6", "got 0.6"),
        ("low-pass=0.1,star", "star"),
        ("clip=-3", "norm must be positive.*got -3"),
        ("batch-shuffle=1.5", "share must be in .*got 1.5"),
        ("rows=column", "column"),
        ("private=0", "noise multiplier and the norm must be positive"),
        ("bottleneck=0", "channels of a bottleneck must be an integer, got 0"),
        ("bottleneck=2.5", "got 2.5"),
        ("bottleneck=inf", "got inf"),
        ("bottleneck=nan", "got nan"),
        ("round=0", "bits of round must be an integer, got 0"),
        ("round=nan", "got nan"),
        ("round=9", "got 9"),
        ("fog=1", 'unknown defence "fog"'),
        ("noise=1,2,3", "cannot be parsed"),
    ],
)
def test_invalid_input_raises_an_error_that_names_it(text: str, message: str) -> None:
    with pytest.raises(DefenceError, match=message) as error:
        parse_defence(text)
    assert error.value.hint


def test_low_pass_keeps_low_frequencies_alone() -> None:
    side, draw = 16, KeyedRandom(SECRET, "1")
    line = torch.arange(side, dtype=torch.float64) * 2 * math.pi / side
    for shape in ("square", "disc"):
        low, high = (
            (torch.cos(k * line)[:, None] * torch.ones(side)).expand(1, 1, -1, -1) for k in (2, 4)
        )
        passed = LowPass(0.2, shape).apply_to_images(low + high, draw)  # type: ignore[arg-type]
        torch.testing.assert_close(passed, low + 0 * high)
    # On the diagonal the square keeps what the disc does not.
    corner = (torch.cos(3 * line)[:, None] * torch.cos(3 * line)[None]).expand(1, 1, -1, -1)
    torch.testing.assert_close(LowPass(0.2).apply_to_images(corner, draw), corner)
    torch.testing.assert_close(LowPass(0.2, "disc").apply_to_images(corner, draw), 0 * corner)
    torch.testing.assert_close(LowPass(0.5).apply_to_images(images(), draw), images())
    twice = LowPass(0.1).apply_to_images(LowPass(0.1).apply_to_images(images(), draw), draw)
    torch.testing.assert_close(twice, LowPass(0.1).apply_to_images(images(), draw))


def test_noise_has_the_size_that_it_says() -> None:
    x = images(8, 64)
    added = PixelNoise(0.3).apply_to_images(x, KeyedRandom(SECRET, "1")) - x
    assert added.std().item() == pytest.approx(0.3, rel=0.02)
    assert abs(added.mean().item()) < 0.01
    crossing = crossing_of()
    z = crossing.stream
    there, back = Noise(0.5).apply_to_crossing(crossing, KeyedRandom(SECRET, "1"))
    added = there.stream - z
    assert added.std().item() == pytest.approx(0.5 * z.std().item(), rel=0.1)
    assert back(z) is z


def test_noise_depends_on_the_secret_and_the_request() -> None:
    x = images()
    once, again, later, other = (
        PixelNoise(1.0).apply_to_images(x, KeyedRandom(s, n))
        for s, n in ((SECRET, "1"), (SECRET, "1"), (SECRET, "2"), (bytes(32), "1"))
    )
    assert torch.equal(once, again)
    assert not torch.equal(once, later)
    assert not torch.equal(once, other)


def test_clipped_to_a_norm() -> None:
    x = torch.stack([torch.full((5, 4), 10.0), torch.full((5, 4), 0.01)])
    y = clip_samples(x, 2.0)
    assert y[0].norm().item() == pytest.approx(2.0)
    assert torch.equal(y[1], x[1])
    torch.testing.assert_close(y[0] / y[0].norm(), x[0] / x[0].norm())
    there, _ = Clip(1.0).apply_to_crossing(crossing_of(), KeyedRandom(SECRET, "1"))
    assert there.stream.flatten(1).norm(dim=1).max().item() <= 1 + 1e-9


def test_a_bottleneck_lets_few_channels_through_and_noise_stays_in_them() -> None:
    crossing = crossing_of()
    z = crossing.stream.detach().clone().requires_grad_()
    there, back = Bottleneck(3).apply_to_crossing(
        crossing.with_inputs(hidden_states=z), KeyedRandom(SECRET, "1")
    )
    assert torch.equal(there.stream[..., :3], z[..., :3])
    assert not there.stream[..., 3:].any()
    (grad,) = torch.autograd.grad(there.stream.sum(), z)
    assert grad[..., :3].all(), "what leaves is what learns"
    assert not grad[..., 3:].any()
    assert back(z) is z
    noisy, _ = Noise(0.5).apply_to_crossing(there, KeyedRandom(SECRET, "1"))
    assert not noisy.stream[..., 3:].any()
    added = (noisy.stream - there.stream)[..., :3]
    assert added.std().item() == pytest.approx(0.5 * z[..., :3].std().item(), rel=0.3)
    with pytest.raises(DefenceError, match="narrower than the stream"):
        Bottleneck(z.shape[-1]).apply_to_crossing(crossing, KeyedRandom(SECRET, "1"))


def test_rounding_leaves_few_values_and_the_same_ones_in_every_pass() -> None:
    crossing = crossing_of()
    z = crossing.stream.detach().clone().requires_grad_()
    for bits in (1, 2, 4):
        there, _ = Round(bits).apply_to_crossing(
            crossing.with_inputs(hidden_states=z), KeyedRandom(SECRET, "1")
        )
        again, _ = Round(bits).apply_to_crossing(
            crossing.with_inputs(hidden_states=z), KeyedRandom(bytes(32), "2")
        )
        assert torch.equal(there.stream, again.stream), (
            "nothing is drawn, so that nothing averages out"
        )
        assert len(there.stream.detach().mul(1e6).round().unique()) <= 2**bits
        (grad,) = torch.autograd.grad((there.stream * z.detach()).sum(), z)
        torch.testing.assert_close(grad, z.detach())
    distance = [
        float(
            (Round(b).apply_to_crossing(crossing, KeyedRandom(SECRET, "1"))[0].stream - z)
            .detach()
            .square()
            .mean()
        )
        for b in (1, 2, 4, 6)
    ]
    assert distance == sorted(distance, reverse=True)
    signs = Round(1).apply_to_crossing(crossing, KeyedRandom(SECRET, "1"))[0].stream
    assert torch.equal(signs > 0, z >= 0)
    few, _ = apply_defences(
        parse_defences(["bottleneck=3", "round=1"]), crossing, KeyedRandom(SECRET, "1")
    )
    assert not few.stream[..., 3:].any(), "what was left out stays out"


def test_batch_shuffle_mixes_samples_and_goes_back() -> None:
    crossing = crossing_of(count=4)
    z = crossing.stream
    there, back = BatchShuffle().apply_to_crossing(crossing, KeyedRandom(SECRET, "1"))
    y = there.stream
    assert torch.equal(back(y), z)
    assert torch.equal(y[:, 0], z[:, 0]), "the first token stays"
    origin = torch.cdist(y[:, 1:].flatten(0, 1), z[:, 1:].flatten(0, 1)).argmin(1)
    assert sorted(origin.tolist()) == list(range(len(origin))), "the same tokens, in another order"
    n = z.shape[1] - 1
    assert any(int(o) // n != i // n for i, o in enumerate(origin)), (
        "some are in another sample now"
    )
    half, _ = BatchShuffle(0.5).apply_to_crossing(crossing, KeyedRandom(SECRET, "1"))
    stayed = (half.stream == z).all(-1).float()[:, 1:].mean().item()
    assert 0.4 < stayed < 0.9
    first, _ = BatchShuffle(keep_cls=False).apply_to_crossing(crossing, KeyedRandom(SECRET, "1"))
    assert not torch.equal(first.stream[:, 0], z[:, 0])


def test_batch_shuffle_refuses_what_it_does_not_fit() -> None:
    one = cut(make_model("vit")).embed(pixel_values=batch("vit", 0)["pixel_values"][:1])
    with pytest.raises(DefenceError, match="batch of one"):
        BatchShuffle().apply_to_crossing(one, KeyedRandom(SECRET, "1"))
    with pytest.raises(DefenceError, match="belongs to each token"):
        BatchShuffle().apply_to_crossing(crossing_of("bert-classifier"), KeyedRandom(SECRET, "1"))


def test_all_of_them_compose_and_go_back() -> None:
    crossing = crossing_of()
    chosen = parse_defences([Rows("sample"), BatchShuffle(), Clip(1e9)])
    there, home = apply_defences(chosen, crossing, KeyedRandom(SECRET, "7"))
    assert not torch.equal(there.stream, crossing.stream)
    assert torch.equal(home(there.stream), crossing.stream)


def connect_model(
    name: str, defences: list[Any], training: OptimizerConfig | None = ADAMW, **more: Any
) -> tuple[torch.nn.Module, Any]:
    model = make_model(name)
    g = columns(model)
    host = Host(lock_backbone(model, g), training)
    return model, connect(
        model, InProcess(host), element=g, secret=SECRET, defences=defences, **more
    )


def test_noise_through_the_link_is_noise_on_the_stream() -> None:
    """The client's model with noise on its stream, here and over the link: the same losses and
    gradients.
    """
    model, link = connect_model("vit", ["noise=0.3", "rows=sample"], None)
    data = batch("vit", 0)
    with strict_float64():
        loss = model(**data).loss
        loss.backward()
    remote_grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    link.close()
    plain = make_model("vit")

    def noisy(c: Crossing) -> torch.Tensor:
        return Noise(0.3).apply_to_crossing(c, KeyedRandom(SECRET, "1"))[0].run()

    with strict_float64(), cut(plain).route(noisy):
        wanted = plain(**data).loss
        wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-12)
    grads = dict(plain.named_parameters())
    for name, grad in remote_grads.items():
        torch.testing.assert_close(grad, grads[name].grad)
    assert remote_grads


def test_images_are_defended_before_the_embedding() -> None:
    model, link = connect_model("vit", ["pixel-noise=0.5", "low-pass=0.2"], None)
    data = batch("vit", 0)
    with torch.no_grad():
        model.eval()
        clear = make_model("vit").eval()(**data).logits
        assert not torch.allclose(model(**data).logits, clear)
        assert not torch.allclose(model(data["pixel_values"]).logits, clear), "by place as by name"
        link.close()
        torch.testing.assert_close(model(**data).logits, clear)


def test_images_alone_are_images() -> None:
    model, _ = connect_model("gpt2", ["pixel-noise=0.5"], None)
    with pytest.raises(DefenceError, match="needs one batch of images"):
        model(**batch("gpt2", 0))


def test_rows_that_cannot_move_are_refused() -> None:
    with pytest.raises(CutError, match="cannot be permuted"):
        connect_model("swin", ["batch-shuffle"], None)


def test_a_run_is_repeatable() -> None:
    """Noise, shuffles and all: two runs with one secret are the same, bit for bit; with another
    secret they are not.
    """
    found = []
    for secret in (SECRET, SECRET, bytes(32)):
        model = make_model("vit")
        host = Host(lock_backbone(model, None), ADAMW)
        link = connect(
            model,
            InProcess(host),
            secret=secret,
            defences=["noise=0.2", "batch-shuffle", "rows=batch", "pixel-noise=0.1"],
        )
        losses = train("vit", model, optimizer_of(model), range(3))
        found.append((losses, host.backbone()))
        link.close()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(t, found[1][1][n]) for n, t in found[0][1].items())
    assert found[0][0] != found[2][0]


def test_private_features_and_gradients() -> None:
    """What the server gets of either is within the norm, but for the noise: seen through a host
    that writes down what it gets.
    """
    recorded: dict[str, list[torch.Tensor]] = {"FORWARD": [], "BACKWARD": []}

    class RecordingHost(Host):
        def _dispatch(self, frame: Any, peer: str) -> bytes:
            if frame.kind.name in recorded:
                recorded[frame.kind.name].append(next(iter(frame.tensors.values())).clone())
            return super()._dispatch(frame, peer)

    model = make_model("vit")
    host = RecordingHost(lock_backbone(model, None), ADAMW)
    connect(model, InProcess(host), secret=SECRET, defences=[Private(1e-9, norm=0.01)])
    model(**batch("vit", 0)).loss.mul(1e6).backward()
    for kind in recorded:
        norms = recorded[kind][0].flatten(1).norm(dim=1)
        assert norms.tolist() == pytest.approx([0.01, 0.01], rel=1e-4), kind
    clean = recorded["BACKWARD"][0]
    model = make_model("vit")
    connect(
        model,
        InProcess(RecordingHost(lock_backbone(model, None), ADAMW)),
        secret=SECRET,
        defences=[Private(50.0, norm=0.01)],
    )
    model(**batch("vit", 0)).loss.mul(1e6).backward()
    for kind in recorded:
        noise = recorded[kind][1] if kind == "FORWARD" else recorded[kind][1] - clean
        assert noise.std().item() == pytest.approx(50 * 2 * 0.01, rel=0.05), kind


def test_epsilon_is_the_gaussian_mechanism_s() -> None:
    """Against the closed form of the Renyi divergence of Gaussians, minimised over orders: a bound
    that the accountant may only beat.
    """
    private = Private(2.0)
    for passes in (1, 10):
        releases = 2 * passes
        orders = torch.arange(2, 512, dtype=torch.float64)
        bound = (releases * orders / (2 * 2.0**2) + math.log(1e5) / (orders - 1)).min().item()
        epsilon = private.epsilon(passes, delta=1e-5)
        assert 0.5 * bound < epsilon <= bound * 1.001
    assert (
        private.epsilon(10)
        > private.epsilon(10, backward=False)
        > private.epsilon(1, backward=False)
        > private.epsilon(0)
        == 0.0
    )
    assert Private(4.0).epsilon(10) < private.epsilon(10)
