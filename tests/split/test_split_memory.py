"""Memory budgets of a split server: admission before unpacking, estimates against measurements, and
what is charged to whom.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from regauge.errors import BudgetError, FrameError, RefusedError
from regauge.split import Host, InProcess, OptimizerConfig, connect
from regauge.split.client.journal import MemoryJournal
from regauge.split.protocol import frames as frames_module
from regauge.split.protocol.frames import Frame, Kind, Limits, decode, encode
from regauge.split.protocol.transport import deliver
from regauge.split.server.costs import Estimator
from regauge.split.server.memory import Budget, Cost, _cgroup_memory, read_size
from regauge.split.server.metrics import render_metrics
from support.cli_runs import Run
from support.split_pairs import ADAMW, batch, make_model, same

MB = 1 << 20


def bits(elements: int, **values: Any) -> bytes:
    """A frame whose mask has one bit per entry, and eight bytes per entry when it is unpacked."""
    mask = torch.zeros(1, dtype=torch.float64).expand(elements).contiguous()
    return b"".join(encode(Frame(Kind.FORWARD, 1, values, {"x": mask}), exact=("x",)))


def wide(rows: int, tokens: int = 16) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 30, (rows, tokens), generator=torch.Generator().manual_seed(rows))
    return {"input_ids": ids, "labels": ids}


@pytest.fixture
def record_unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all tensors that are unpacked."""
    recorded: list[int] = []
    real = frames_module._unpack_tensor

    def watched(data: memoryview, dtype: str, shape: tuple[int, ...], codec: str) -> torch.Tensor:
        found = real(data, dtype, shape, codec)
        recorded.append(found.numel() * found.element_size())
        return found

    monkeypatch.setattr(frames_module, "_unpack_tensor", watched)
    return recorded


# Before anything is unpacked


def test_tensors_are_unpacked_when_they_are_looked_up(record_unpacked: list[int]) -> None:
    frame = decode(bits(1000))
    assert list(frame.tensors) == ["x"]
    assert not record_unpacked
    assert frames_module.nbytes(frame) == 8000
    assert frame.tensors["x"].shape == (1000,)
    assert frame.tensors["x"] is frame.tensors["x"]
    assert record_unpacked == [8000]


def test_a_frame_without_a_session_is_not_unpacked(record_unpacked: list[int]) -> None:
    host = Host(make_model("gpt2"))
    reply = decode(deliver(host, [bits(1 << 16, session="0" * 32)]))
    assert reply.values["code"] == "session"
    assert not record_unpacked


@pytest.mark.parametrize("kind", [Kind.STEP, Kind.BACKWARD, Kind.BYE, Kind.FORWARD])
def test_tensors_that_a_request_does_not_use_are_not_unpacked(
    kind: Kind, record_unpacked: list[int]
) -> None:
    host, model = (
        Host(make_model("gpt2"), ADAMW, memory=8 * MB, limits=Limits()),
        make_model("gpt2"),
    )
    with connect(model, InProcess(host)) as link:
        values = {"session": link.log.journal.session, "of": 1, "training": True}
        x = torch.zeros(1 << 21, dtype=torch.float64)
        deliver(host, [b"".join(encode(Frame(kind, 1, values, {"stream": x}), exact=("stream",)))])
    assert 8 << 21 not in record_unpacked


def test_a_gradient_larger_than_its_pass_is_not_unpacked(record_unpacked: list[int]) -> None:
    host, model = (
        Host(make_model("gpt2"), ADAMW, memory=16 * MB, limits=Limits()),
        make_model("gpt2"),
    )
    with connect(model, InProcess(host)) as link:
        loss = model(**batch("gpt2", 0)).loss
        x = torch.zeros(1 << 21, dtype=torch.float64)
        frame = Frame(
            Kind.BACKWARD,
            2,
            {"session": link.log.journal.session, "of": 1, "step": True},
            {"stream": x},
        )
        assert (
            decode(deliver(host, [b"".join(encode(frame, exact=("stream",)))])).values["code"]
            == "memory"
        )
        assert 8 << 21 not in record_unpacked
        loss.backward()  # the pass is still open


# What is admitted


def test_a_pass_over_the_budget_is_refused_with_both_numbers_and_changes_nothing() -> None:
    host, model = Host(make_model("gpt2"), ADAMW, memory=8 * MB), make_model("gpt2")
    before = host.backbone()
    with connect(model, InProcess(host)) as link:
        with pytest.raises(
            RefusedError,
            match=r"this pass needs about [\d.]+ MB, and the memory budget of a client is 8.4 MB",
        ) as refused:
            model(**wide(256))
        assert refused.value.code == "memory"
        assert "--memory" in str(refused.value.hint)
        assert host.sessions[link.log.journal.session].done == 0
        assert same(host.backbone(), before)
        model(**wide(4)).loss.backward()  # control: a small one is answered
        assert host.step == 1


def test_open_passes_are_bounded_by_bytes_and_free_them() -> None:
    host, model = Host(make_model("gpt2"), ADAMW, memory=1 << 30), make_model("gpt2")
    with connect(model, InProcess(host)):
        first = model(**wide(16)).loss
        (cost,) = [c for _, c in host.charges() if c.working]
        host.budget = Budget(*[int(3.5 * cost.held) + cost.working + 4 * MB // 2] * 2)
        losses = [first]
        with pytest.raises(RefusedError, match=r"beside .* held by open passes") as refused:
            losses += [model(**wide(16)).loss for _ in range(12)]
        assert refused.value.code == "memory"
        del losses[1:]  # released with the next request
        model(**wide(16)).loss.backward()
        first.backward()  # a pass that was admitted can always be finished
    assert not any(c.working for _, c in host.charges())


def test_a_client_is_bounded_by_its_own_budget_and_all_by_the_servers() -> None:
    host = Host(make_model("gpt2"), ADAMW, memory=1 << 30, client_memory=1 << 29)
    ann, ben = make_model("gpt2"), make_model("gpt2")
    with (
        connect(ann, InProcess(host, "ann"), patience=0.05),
        connect(ben, InProcess(host, "ben"), patience=0.05),
    ):
        loss = ann(**wide(16)).loss
        cost = max(c.held + c.working for _, c in host.charges())
        host.budget = Budget(int(1.5 * cost), int(1.2 * cost))
        with pytest.raises(RefusedError, match="the memory budget of a client") as refused:
            ann(**wide(16))
        assert "--client-memory" in (refused.value.hint or "")
        with pytest.raises(
            Exception, match=r"no reply within .* clients hold .* of the server's memory budget"
        ):
            ben(**wide(16))  # on "busy" it retries until its patience ends
        loss.backward()
        ben(**wide(16)).loss.backward()
    assert host.requests["forward", "busy"] >= 1


def test_predictions_are_admitted_by_their_peak() -> None:
    host, model = (
        Host(make_model("gpt2"), memory=8 * MB, limits=Limits()),
        make_model("gpt2").eval(),
    )
    with connect(model, InProcess(host)), torch.no_grad():
        with pytest.raises(RefusedError, match="this pass needs about"):
            model(**wide(1024), use_cache=False)
        model(**wide(16), use_cache=False)
    assert host.requests["forward", "memory"] == 1


def test_caches_of_generated_texts_are_charged() -> None:
    host, model = Host(make_model("gpt2"), memory=64 * MB, max_caches=20), make_model("gpt2").eval()
    with connect(model, InProcess(host)), torch.no_grad():
        first = model(input_ids=wide(256, 8)["input_ids"], use_cache=True).past_key_values
        (charged,) = [c.held for _, c in host.charges() if c.held]
        (session,) = host.sessions.values()
        (cache,) = session.caches.values()
        measured = sum(
            t.numel() * t.element_size()
            for layer in cache.value.layers
            for t in (layer.keys, layer.values)
        )
        assert measured + len(cache.reply) * 0.9 <= charged <= 1.5 * (measured + len(cache.reply))
        host.budget = Budget(charged * 8, charged * 8)
        model(input_ids=wide(256, 8)["input_ids"][:, :1], past_key_values=first, use_cache=True)
        with pytest.raises(RefusedError, match="this turn of a generated text needs"):
            [
                model(input_ids=wide(256, 8)["input_ids"], use_cache=True).past_key_values
                for _ in range(12)
            ]


def test_beams_cannot_multiply_a_cache_past_the_budget() -> None:
    host, model = Host(make_model("gpt2"), memory=4 * MB), make_model("gpt2").eval()
    with connect(model, InProcess(host)) as link, torch.no_grad():
        model(input_ids=wide(1, 12)["input_ids"], use_cache=True)
        (session,) = host.sessions.values()
        ((name, cache),) = session.caches.items()
        frames: list[Frame] = []
        real = link.log.predict

        def recorded(frame: Frame, exact: Any = ()) -> Any:
            frames.append(frame)
            return real(frame, exact)

        link.log.predict = recorded  # type: ignore[method-assign]
        model(input_ids=torch.full((400, 1), 5), use_cache=True)
        rows = {**frames[0].values, "cache": name, "turn": cache.turn + 1, "rows": [0] * 400}
        with pytest.raises(RefusedError, match="this turn of a generated text needs"):
            real(Frame(Kind.FORWARD, 0, rows, frames[0].tensors))


def test_copies_that_are_averaged_are_charged() -> None:
    host = Host(make_model("gpt2"), ADAMW, average=2, memory=1 << 30)
    copy, model, other = host.copy_bytes, make_model("gpt2"), make_model("gpt2")
    with connect(model, InProcess(host, "ann")), connect(other, InProcess(host, "ann")):
        model(**batch("gpt2", 0)).loss.backward()
        assert max(c.held for _, c in host.charges()) >= copy
        next(iter(host.sessions.values())).reply = bytes(MB)  # the rest of the budget
        host.budget = Budget(MB + copy, MB + copy)
        with pytest.raises(
            RefusedError, match="a copy of the backbone for this session needs about"
        ) as refused:
            other(**batch("gpt2", 0))
        assert refused.value.code == "memory"
        host.budget = Budget(1 << 30, 1 << 30)
        other(**batch("gpt2", 0)).loss.backward()  # control
    assert sum(s.backbone is not None for s in host.sessions.values()) == 2


def test_a_pass_out_of_a_checkpoint_is_admitted_when_it_is_run_again(tmp_path: Path) -> None:
    model, journal = make_model("gpt2"), MemoryJournal()
    host = Host(make_model("gpt2"), ADAMW, folder=tmp_path, memory=1 << 30)
    network = InProcess(host)
    link = connect(model, network, journal=journal)
    loss = model(**batch("gpt2", 0)).loss
    host.save()
    network.host = Host(make_model("gpt2"), ADAMW, folder=tmp_path, memory=1 << 30)
    (passed,) = next(iter(network.host.sessions.values())).pending.values()
    assert passed.cost is None
    loss.backward()
    assert network.host.step == 1
    link.close()


# Estimates against measurements


def saved_bytes(host: Host, frame: Frame) -> int:
    """Measure what a graph saves, and its output: storages that are not the weights' or the
    request's.
    """
    own = {
        t.untyped_storage().data_ptr()
        for t in (*host.main.state().values(), *frame.tensors.values())
    }
    sizes: dict[int, int] = {}
    tensors: list[torch.Tensor] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        place = t.untyped_storage().data_ptr()
        if place not in own:
            tensors.append(t)
            sizes[place] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        passed = host.executor.forward(host.main, frame)
    assert passed.output is not None
    sizes[passed.output.untyped_storage().data_ptr()] = passed.output.untyped_storage().nbytes()
    return sum(sizes.values())


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("name", ["gpt2", "bert-classifier", "vit", "llama"])
def test_the_estimate_is_what_a_graph_saves(
    name: str, dropout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    host, model = (
        Host(make_model(name, dropout=dropout), OptimizerConfig("sgd", lr=0.0)),
        make_model(name),
    )
    requests: list[Frame] = []
    real = Estimator.estimate_pass
    monkeypatch.setattr(
        Estimator,
        "estimate_pass",
        lambda self, frame, *, with_backward: (
            requests.append(frame),
            real(self, frame, with_backward=with_backward),
        )[1],
    )
    parts: list[Any] = []
    simulated = Estimator._simulate
    monkeypatch.setattr(
        Estimator,
        "_simulate",
        lambda self, crossing, *, with_backward: (
            parts.extend(simulated(self, crossing, with_backward=with_backward)) or parts
        ),
    )
    with connect(model, InProcess(host)):
        inputs = batch(name, 0)
        loss = model(**{k: v.repeat(8, *[1] * (v.dim() - 1)) for k, v in inputs.items()}).loss
        estimate = host.costs.estimate_pass(requests[0], with_backward=True)
        measured = saved_bytes(host, requests[0]) + frames_module.nbytes(requests[0])
        loss.backward()
    assert len(parts) == len(host.blocks)  # counted on fake tensors, not bounded
    assert 0.95 * measured <= estimate.held <= 1.4 * measured


@pytest.mark.parametrize("name", ["gpt2", "bert-classifier", "llama"])
def test_the_bound_for_blocks_that_cannot_be_simulated_is_not_less(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, costs = make_model(name), []
    requests: list[Frame] = []
    real = Estimator.estimate_pass
    monkeypatch.setattr(
        Estimator,
        "estimate_pass",
        lambda self, frame, *, with_backward: (
            requests.append(frame),
            real(self, frame, with_backward=with_backward),
        )[1],
    )
    for fails in (False, True):
        if fails:
            monkeypatch.setattr(Estimator, "_simulate", lambda *args, **kwargs: 1 / 0)
        host = Host(make_model(name), OptimizerConfig("sgd", lr=0.0), memory=1 << 30)
        with connect(model, InProcess(host)):
            model(**batch(name, 0)).loss.backward()
        costs.append(host.costs.estimate_pass(requests[-1], with_backward=True))
    assert costs[0].held <= costs[1].held <= 6 * costs[0].held


def test_estimates_are_reused_for_shapes_that_are_a_little_smaller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host, model, count = Host(make_model("gpt2"), ADAMW, memory=1 << 30), make_model("gpt2"), []
    real = Estimator._simulate
    monkeypatch.setattr(
        Estimator,
        "_simulate",
        lambda self, crossing, *, with_backward: (
            count.append(1),
            real(self, crossing, with_backward=with_backward),
        )[1],
    )
    with connect(model, InProcess(host)):
        for rows in (16, 15, 16, 14):
            model(**wide(rows)).loss.backward()
        assert len(count) == 1
        model(**wide(32)).loss.backward()
        assert len(count) == 2


def test_the_result_is_the_same_with_a_budget() -> None:
    weights = []
    for memory in (None, 64 * MB):
        host, model = (
            Host(make_model("gpt2", dropout=0.1), ADAMW, memory=memory),
            make_model("gpt2"),
        )
        journal = MemoryJournal()
        journal.session = "0" * 32  # dropout is sampled from the session's name
        with connect(model, InProcess(host), journal=journal, secret=1):
            for step in range(2):
                model(**batch("gpt2", step)).loss.backward()
        weights.append(host.backbone())
    assert same(*weights)


# Budgets


def test_budgets() -> None:
    assert Budget.with_defaults(8 * MB) == Budget(8 * MB, 4 * MB)
    assert Budget.with_defaults(8 * MB, 2 * MB).share("ann") == 2 * MB
    assert Budget.with_defaults(8 * MB, 2 * MB).share("") == 8 * MB
    default = Budget.with_defaults()
    assert MB <= default.client <= default.total
    assert Budget.with_defaults(reserved=1 << 60).total == MB
    for total, client in ((100, 100), (8 * MB, 9 * MB), (8 * MB, 10)):
        with pytest.raises(BudgetError, match=r"memory budgets must be at least 1\.0 MB"):
            Budget(total, client)
    Budget(MB, MB).require("", Cost(MB // 2, MB // 2), [], "this")
    with pytest.raises(FrameError, match="this needs about"):
        Budget(MB, MB).require("", Cost(MB // 2, MB // 2), [("", Cost(1))], "this")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500M", 500_000_000),
        ("8g", 8 * 10**9),
        ("8GiB", 8 << 30),
        ("1.5k", 1500),
        ("100", 100),
        ("2 MB", 2 * 10**6),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "1e9", "8 giga", "8i", "nan"])
def test_sizes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(BudgetError, match="a size must be a number of bytes"):
        read_size(text)


def test_the_limit_of_a_cgroup_counts(tmp_path: Path) -> None:
    listed, root = tmp_path / "cgroup", tmp_path / "fs"
    (root / "a" / "b").mkdir(parents=True)
    for folder, limit, used in (
        (root / "a", "1000000", "200000"),
        (root / "a" / "b", "max", "100000"),
    ):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
    listed.write_text("0::/a/b\n")
    assert min(_cgroup_memory(listed, root)) == 800_000
    (root / "memory" / "c").mkdir(parents=True)
    (root / "memory" / "c" / "memory.limit_in_bytes").write_text("500\n")
    (root / "memory" / "c" / "memory.usage_in_bytes").write_text("900\n")
    listed.write_text("4:cpu:/x\n3:memory:/c\n")
    assert min(_cgroup_memory(listed, root)) == 0
    listed.write_text("0::/elsewhere\n")
    assert min(_cgroup_memory(listed, root)) == 1 << 62
    assert min(_cgroup_memory(tmp_path / "none", root)) == 1 << 62


def test_frames_are_bounded_by_the_budget_and_metrics_show_it() -> None:
    from prometheus_client import parser

    host = Host(make_model("gpt2"), memory=8 * MB, client_memory=4 * MB)
    assert host.limits.payload == MB
    assert decode(deliver(host, [bits(1 << 18)])).values["code"] == "limit"
    families = parser.text_string_to_metric_families(render_metrics(host))
    values = {s.name: s.value for family in families for s in family.samples}
    assert values["regauge_split_memory_budget_bytes"] == 8 * MB
    assert values["regauge_split_memory_client_budget_bytes"] == 4 * MB
    assert values["regauge_split_memory_reserved_bytes"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "much"], "a size must be a number of bytes with a unit, got 'much'"),
        (
            ["--memory", "2G", "--client-memory", "3G"],
            "memory budgets must be at least 1.0 MB, and a client's at most the server's",
        ),
    ],
)
def test_budgets_on_the_command_line(
    options: list[str], message: str, run: Run, tmp_path: Path
) -> None:
    make_model("gpt2").save_pretrained(tmp_path / "model")
    result = run(
        "split",
        "serve",
        tmp_path / "model",
        "--listen",
        "127.0.0.1:0",
        "--dtype",
        "float64",
        *options,
    )
    assert result.code == 1
    assert message in result.err
    assert "hint:" in result.err
