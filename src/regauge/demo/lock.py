"""A chapter on a lock: a model that is useless without its key, and runs and learns with it; and
what the lock is worth against whoever tries.
"""

from __future__ import annotations

import copy

from regauge.demo.digits import accuracy, load_images, make_vit, train
from regauge.demo.merge import SPLIT
from regauge.demo.output import save_model
from regauge.demo.stage import DemoContext
from regauge.errors import need
from regauge.results.findings import Finding, Results, Table

LABELS, STEPS = (200,), 100  # labelled images of the attacker; steps of its training


def show_lock(stage: DemoContext) -> Results:
    """A ViT that is locked by a key: at chance without it, as good as ever with it. And then it is
    attacked.
    """
    need("transformers", "experiments")
    need("sklearn", "experiments")
    from regauge import apply, authorize, generate_key, lock, spec_of
    from regauge.attacks.theft import Budget
    from regauge.audit.lock import LockCase, audit_lock
    from regauge.data.tasks import Examples
    from regauge.locking.lock import FIELD, LOCKS, locked_element
    from regauge.models.summary import format_columns

    images, labels = load_images()
    images = images.float()
    base = make_vit(stage.seed + 20).float()
    with stage.bar("train the base") as tick:
        train(base, images[: SPLIT // 2], labels[: SPLIT // 2], stage.seed + 20, tick)
    owners = copy.deepcopy(base)
    with stage.bar("fine-tune it") as tick:
        train(
            owners,
            images[SPLIT // 2 : SPLIT],
            labels[SPLIT // 2 : SPLIT],
            stage.seed + 21,
            tick,
            epochs=3,
        )
    for name, model in (("BASE", base), ("MODEL", owners)):
        save_model(stage.folder / name, model)
    test, answers = images[SPLIT:], labels[SPLIT:]
    spec, plain, key = (
        spec_of(owners),
        {n: v.clone() for n, v in owners.state_dict().items()},
        generate_key(),
    )
    done = lock(spec, plain, key)
    model = copy.deepcopy(owners)
    model.load_state_dict(done.state)
    setattr(model.config, FIELD, done.record.to_dict())
    found = {"the model": accuracy(owners, test, answers), "locked": accuracy(model, test, answers)}
    with_key = authorize(copy.deepcopy(model), key)
    found["locked, authorised by its key"] = accuracy(with_key, test, answers)
    states = []
    for name, one in (("plain", owners), ("authorised", with_key)):
        with stage.bar(f"go on training, {name}") as tick:
            train(one, images[:SPLIT], labels[:SPLIT], stage.seed + 22, tick, epochs=1)
        states.append(one.state_dict())
    found["trained on, plain"], found["trained on, locked and authorised"] = (
        accuracy(m, test, answers) for m in (owners, with_key)
    )
    g = locked_element(spec, done.record, key)
    back = apply(~g, states[1], "backbone")
    apart = max(
        float((back[n] - states[0][n]).norm() / states[0][n].norm())
        for n in plain
        if "k_proj.bias" not in n and "key.bias" not in n
    )
    stage.echo(
        format_columns(
            [
                ("digits", "accuracy"),
                *((name, f"{100 * value:.1f} %") for name, value in found.items()),
            ],
            right=(1,),
        )
    )
    chance = max(float((answers == k).float().mean()) for k in range(10))
    examples = Examples(SPLIT, 10, lambda i: ({"pixel_values": images[i]}, labels[i]))
    tested = Examples(len(test), 10, lambda i: ({"pixel_values": test[i]}, answers[i]))
    case = LockCase(
        spec,
        done.state,
        LOCKS[done.record.group].within,
        g,
        base.state_dict(),
        model=model,
        train=examples,
        test=tested,
    )
    with stage.bar("audit") as tick:
        audit = audit_lock(
            case,
            labels=LABELS,
            budget=Budget(steps=STEPS, lrs=(3e-3,), seed=stage.seed),
            seed=stage.seed,
            progress=tick,
        )
    rows = [("attack", "floor", "value", "ceiling")]
    for f in audit.findings:
        floor, value, ceiling = (
            "" if v is None else f"{v:.3f}" for v in (f.floor, f.value, f.ceiling)
        )
        rows.append((f.id.removeprefix("lock/"), floor, value, ceiling))
    stage.echo("\n" + format_columns(rows, right=(1, 2, 3)) + "\n")
    for line in audit.facts["verdict"]:
        stage.echo(line)
    findings = (
        Finding(
            "locked/chance",
            "Without the key a locked model reads no better than a guess.",
            found["locked"] < chance + 0.1,
            found["locked"],
            chance,
            found["the model"],
            f"{100 * found['locked']:.1f} % right; a guess {100 * chance:.1f} %",
            "000 sec. 5.3",
            measure="accuracy",
        ),
        Finding(
            "locked/authorised",
            "With its key it reads as the plain model does.",
            found["locked, authorised by its key"] == found["the model"],
            found["locked, authorised by its key"],
            chance,
            found["the model"],
            "the same digits are read right",
            "000 sec. 5.3",
            measure="accuracy",
        ),
        Finding(
            "locked/trained",
            "Trained while locked, its weights are those of the plain training, moved.",
            apart < 0.05,
            apart,
            0.05,
            1.0,
            f"weights differ by {apart:.0e} after training, which amplifies the rounding of "
            "float32",
            "000 Alg. 1",
        ),
    )
    note = (
        "A base, fine-tuned on other digits and then locked; one seed. Obfuscation, not encryption."
    )
    table = Table("A locked ViT", ("", "accuracy"), tuple(found.items()), note)
    worth = {"what the lock is worth": audit.facts["verdict"]}
    return Results(
        "locked", (*findings, *audit.findings), (table, *audit.tables), (), worth, audit.unchecked
    )
