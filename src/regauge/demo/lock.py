"""The third chapter: a lock, with its key, without it, and against an attacker with the base."""

from __future__ import annotations

import copy

from regauge.demo.context import DemoContext
from regauge.demo.digits import SPLIT, accuracy, guess_rate, load_images, train
from regauge.demo.output import save_model
from regauge.results.findings import Claim, Figure, Finding, Results, Table

LABELS, STEPS = (200,), 100  # labelled images of the attacker; steps of its training
TUNING_EPOCHS, FURTHER = 2, 500  # epochs of the fine-tuning; digits of the training under the lock


def show_lock(context: DemoContext) -> Results:
    """Lock a ViT by a key, use and train it with the key, and attack the lock."""
    from regauge import apply, authorize, generate_key, spec_of
    from regauge.attacks.theft import Budget
    from regauge.audit.lock_audit import LockCase, audit_lock
    from regauge.checkpoints.reader import LOCK_FIELD
    from regauge.locking.lock import LOCKS, lock_state, locked_element

    images, labels = load_images()
    images, labels = images[:SPLIT].float(), labels[:SPLIT]
    base = context.models[0]
    tuned = copy.deepcopy(base)
    with context.bar("fine-tune") as progress:
        train(tuned, images, labels, context.seed + 21, progress, epochs=TUNING_EPOCHS)
    for name, model in (("BASE", base), ("MODEL", tuned)):
        save_model(context.folder / name, model)
    spec, key = spec_of(tuned), generate_key()
    plain = {n: v.clone() for n, v in tuned.state_dict().items()}
    locked = lock_state(spec, plain, key)
    model = copy.deepcopy(tuned)
    model.load_state_dict(locked.state)
    setattr(model.config, LOCK_FIELD, locked.record.to_dict())
    g = locked_element(spec, locked.record, key)
    case = LockCase(
        spec,
        locked.state,
        LOCKS[locked.record.group].within,
        g,
        base.state_dict(),
        model=model,
        train=context.train,
        test=context.test,
    )
    with context.bar("attack the lock") as progress:
        audit = audit_lock(
            case,
            labels=LABELS,
            budget=Budget(steps=STEPS, lrs=(3e-3,), seed=context.seed),
            seed=context.seed,
            progress=progress,
        )
    by_id = {f.id.removeprefix("lock/"): f for f in audit.findings}
    with_key = authorize(copy.deepcopy(model), key)
    accuracies = {
        "owner, with the key": accuracy(with_key, context.test),
        "anyone, without the key": accuracy(model, context.test),
        "attacker with the base": by_id["public base, used"].value or 0.0,
    }
    thieves = [f.value for name, f in by_id.items() if f.value and name.startswith("theft/")]
    accuracies[f"attacker with {LABELS[0]} labels"] = max(thieves)
    accuracies["a guess"] = guess_rate(context.test)
    plain_accuracy, chance = accuracy(tuned, context.test), accuracies["a guess"]
    trained = []
    for name, variant in (("plain", tuned), ("locked, with the key", with_key)):
        with context.bar(f"train on, {name}") as progress:
            train(variant, images[:FURTHER], labels[:FURTHER], context.seed + 22, progress, 1)
        trained.append(variant.state_dict())
    restored = apply(~g, trained[1], "backbone")
    error = max(
        float((restored[n] - trained[0][n]).norm() / trained[0][n].norm())
        for n in plain
        if "k_proj.bias" not in n and "key.bias" not in n
    )
    without, authorized = accuracies["anyone, without the key"], accuracies["owner, with the key"]
    findings = (
        Finding(
            "locked/chance",
            "Without the key a locked model is no better than a guess.",
            without < chance + 0.1,
            without,
            chance,
            plain_accuracy,
            f"accuracy {without:.1%}; a guess has {chance:.1%}",
            measure="accuracy",
        ),
        Finding(
            "locked/authorised",
            "With its key it is as accurate as the plain model.",
            authorized == plain_accuracy,
            authorized,
            chance,
            plain_accuracy,
            "the same number of digits is classified correctly",
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
            "permutation equivariance, Alg. 1",
        ),
    )
    figure = Figure(
        "Accuracy of the locked model",
        "bars",
        {
            "labels": list(accuracies),
            "y": {"accuracy": list(accuracies.values())},
            "ylabel": "accuracy",
            "percent": True,
        },
        "The base is the public model from which the locked one was fine-tuned.",
    )
    note = "A base, fine-tuned for two epochs and then locked; one seed."
    table = Table("A locked ViT", ("", "accuracy"), tuple(accuracies.items()), note)
    return Results(
        "A locked model",
        (*findings, *audit.findings),
        (table, *audit.tables),
        (figure,),
        {"verdict": audit.facts["verdict"]},
        audit.unchecked,
        _conclude(accuracies, by_id["public base"]),
    )


def _conclude(accuracies: dict[str, float], base: Finding) -> Claim:
    is_undone = (base.value or 0.0) >= 0.99
    without, authorized = accuracies["anyone, without the key"], accuracies["owner, with the key"]
    return Claim(
        "A lock is worth nothing against an attacker with the base model"
        if is_undone
        else "A lock weakens a model for everyone without its key",
        "bad" if is_undone else "mixed",
        f"{base.value or 0.0:.0%}",
        "of the key recovered by comparing the locked weights with the public base",
        f"The key decides the basis of the weights: the model is {authorized:.0%} correct with it, "
        f"{without:.0%} without. Locking is obfuscation; to protect a file, encrypt it "
        "(regauge seal).",
        "regauge keygen -o KEY\nregauge lock MODEL -k KEY -o LOCKED\n"
        "regauge audit lock LOCKED -k KEY --against BASE --report lock.html",
    )
