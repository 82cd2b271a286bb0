"""A chapter on a lock: a model that is useless without its key, runs and trains with it, and is
attacked.
"""

from __future__ import annotations

import copy

from regauge.demo.context import DemoContext
from regauge.demo.digits import accuracy, load_images, make_vit, train
from regauge.demo.merge import SPLIT
from regauge.demo.output import save_model
from regauge.errors import need
from regauge.results.findings import Finding, Results, Table

LABELS, STEPS = (200,), 100  # labelled images of the attacker; steps of its training


def show_lock(context: DemoContext) -> Results:
    """Lock a ViT by a key, use and train it with the key, and attack the lock."""
    need("transformers", "experiments")
    need("sklearn", "experiments")
    from regauge import apply, authorize, generate_key, spec_of
    from regauge.attacks.theft import Budget
    from regauge.audit.lock_audit import LockCase, audit_lock
    from regauge.checkpoints.reader import LOCK_FIELD
    from regauge.data.tasks import Examples
    from regauge.locking.lock import LOCKS, lock_state, locked_element
    from regauge.models.summary import format_columns

    images, labels = load_images()
    images = images.float()
    base = make_vit(context.seed + 20).float()
    with context.bar("train the base") as progress:
        train(base, images[: SPLIT // 2], labels[: SPLIT // 2], context.seed + 20, progress)
    tuned = copy.deepcopy(base)
    with context.bar("fine-tune it") as progress:
        train(
            tuned,
            images[SPLIT // 2 : SPLIT],
            labels[SPLIT // 2 : SPLIT],
            context.seed + 21,
            progress,
            epochs=3,
        )
    for name, model in (("BASE", base), ("MODEL", tuned)):
        save_model(context.folder / name, model)
    test, test_labels = images[SPLIT:], labels[SPLIT:]
    spec, plain, key = (
        spec_of(tuned),
        {n: v.clone() for n, v in tuned.state_dict().items()},
        generate_key(),
    )
    locked = lock_state(spec, plain, key)
    model = copy.deepcopy(tuned)
    model.load_state_dict(locked.state)
    setattr(model.config, LOCK_FIELD, locked.record.to_dict())
    accuracies = {
        "the model": accuracy(tuned, test, test_labels),
        "locked": accuracy(model, test, test_labels),
    }
    with_key = authorize(copy.deepcopy(model), key)
    accuracies["locked, authorised by its key"] = accuracy(with_key, test, test_labels)
    states = []
    for name, trained in (("plain", tuned), ("authorised", with_key)):
        with context.bar(f"go on training, {name}") as progress:
            train(trained, images[:SPLIT], labels[:SPLIT], context.seed + 22, progress, epochs=1)
        states.append(trained.state_dict())
    accuracies["trained on, plain"], accuracies["trained on, locked and authorised"] = (
        accuracy(m, test, test_labels) for m in (tuned, with_key)
    )
    g = locked_element(spec, locked.record, key)
    restored = apply(~g, states[1], "backbone")
    error = max(
        float((restored[n] - states[0][n]).norm() / states[0][n].norm())
        for n in plain
        if "k_proj.bias" not in n and "key.bias" not in n
    )
    context.echo(
        format_columns(
            [
                ("digits", "accuracy"),
                *((name, f"{100 * value:.1f} %") for name, value in accuracies.items()),
            ],
            right=(1,),
        )
    )
    chance = max(float((test_labels == k).float().mean()) for k in range(10))
    examples = Examples(SPLIT, 10, lambda i: ({"pixel_values": images[i]}, labels[i]))
    tested = Examples(len(test), 10, lambda i: ({"pixel_values": test[i]}, test_labels[i]))
    case = LockCase(
        spec,
        locked.state,
        LOCKS[locked.record.group].within,
        g,
        base.state_dict(),
        model=model,
        train=examples,
        test=tested,
    )
    with context.bar("audit") as progress:
        audit = audit_lock(
            case,
            labels=LABELS,
            budget=Budget(steps=STEPS, lrs=(3e-3,), seed=context.seed),
            seed=context.seed,
            progress=progress,
        )
    rows = [("attack", "floor", "value", "ceiling")]
    for f in audit.findings:
        floor, value, ceiling = (
            "" if v is None else f"{v:.3f}" for v in (f.floor, f.value, f.ceiling)
        )
        rows.append((f.id.removeprefix("lock/"), floor, value, ceiling))
    context.echo("\n" + format_columns(rows, right=(1, 2, 3)) + "\n")
    for line in audit.facts["verdict"]:
        context.echo(line)
    findings = (
        Finding(
            "locked/chance",
            "Without the key a locked model is no better than a guess.",
            accuracies["locked"] < chance + 0.1,
            accuracies["locked"],
            chance,
            accuracies["the model"],
            f"accuracy {100 * accuracies['locked']:.1f} %; a guess has {100 * chance:.1f} %",
            "000 sec. 5.3",
            measure="accuracy",
        ),
        Finding(
            "locked/authorised",
            "With its key it is as accurate as the plain model.",
            accuracies["locked, authorised by its key"] == accuracies["the model"],
            accuracies["locked, authorised by its key"],
            chance,
            accuracies["the model"],
            "the same number of digits is classified correctly",
            "000 sec. 5.3",
            measure="accuracy",
        ),
        Finding(
            "locked/trained",
            "Trained while locked, its weights are the transformed weights of plain training.",
            error < 0.05,
            error,
            0.05,
            1.0,
            f"weights differ by {error:.0e} after training, which amplifies the rounding of "
            "float32",
            "000 Alg. 1",
        ),
    )
    note = (
        "A base, fine-tuned on other digits and then locked; one seed. Obfuscation, not encryption."
    )
    table = Table("A locked ViT", ("", "accuracy"), tuple(accuracies.items()), note)
    facts = {"what the lock is worth": audit.facts["verdict"]}
    return Results(
        "locked", (*findings, *audit.findings), (table, *audit.tables), (), facts, audit.unchecked
    )
